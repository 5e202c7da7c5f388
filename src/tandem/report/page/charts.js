// Curves, drawn by uPlot: their data, their controls, and reading them without a mouse.
const COLORS = 5, HEIGHT = 190, FEW_POINTS = 40, MOST_SCORES = 12;
const DURATIONS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400, 172800, 604800];
const style = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const color = index => style(`--series-${index % COLORS}`);

function axisNumber(value, step = 0) {
  const size = Math.abs(value);
  if (size < 1e-12) return "0";
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(4)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(5)}k`;
  if (size < 1e-3 || step > 0 && step < 1e-4) return value.toExponential(2).replace(/\.?0+e/, "e");
  if (size >= 1e3) return number(value);
  const decimals = String(+step.toPrecision(3)).split(".")[1]?.length ?? 0;  // enough to distinguish two ticks
  return step > 0 ? value.toFixed(decimals) : String(+value.toPrecision(3));
}

// TensorBoard's smoothing: a running mean of weight `amount`, without the pull of its start to zero.
function smoothed(values, amount) {
  let mean = 0, weight = 0;
  return values.map(value => {
    if (value === null) return null;
    mean = amount * mean + (1 - amount) * value;
    weight = amount * weight + 1 - amount;
    return mean / weight;
  });
}

// A point of a series is [step, Unix seconds, value].
const series = (name, points, value) => ({name, points: points.map(point => [point.step, point.time, value(point)])
  .filter(([step, , known]) => isNumber(step) && isNumber(known))});

// The charts of one run, or of several side by side: the same charts, with a line for each run.
function chartsOf(runs) {
  const all = runs.flatMap(run => run.points), isOne = runs.length === 1;
  const names = [...new Set(all.flatMap(point => [...Object.keys(point.eval ?? {}), ...Object.keys(point.scores ?? {})]))];
  const losses = names.filter(name => name.endsWith("/loss"));  // one for each evaluation set
  const lines = (what, value) => runs.map(run => series(isOne ? what : run.name, run.points, value));
  const both = (train, evaluated) => [...lines("train", train), ...lines("eval", evaluated)];
  const chart = (title, group, more = {}) => {
    const known = group.filter(one => one.points.length);
    const lacking = isOne || !known.length ? [] : group.filter(one => !one.points.length).map(one => one.name);
    return {title, series: known, note: lacking.length ? `not in ${lacking.join(", ")}` : "", ...more};
  };
  const always = {always: true}, powers = {powers: true};
  const score = name => isOne ? [chart(name, both(point => point.scores?.[name], point => point.eval?.[name]))]
    : [chart(`${name}, evaluation`, lines("", point => point.eval?.[name])), chart(`${name}, training`, lines("", point => point.scores?.[name]))];
  return [
    ...(isOne ? [chart("Loss", [...both(point => point.loss, point => point.eval?.loss), ...losses.map(name => lines(name, point => point.eval?.[name])[0])],
      {...always, ...powers})]
      : [chart("Loss, training", lines("", point => point.loss), {...always, ...powers}), chart("Loss, evaluation", lines("", point => point.eval?.loss), powers)]),
    ...names.filter(name => name !== "loss" && !(isOne && losses.includes(name))).slice(0, MOST_SCORES).flatMap(score),
    chart("Samples per second", lines("samples/s", point => point.samples_per_second), {...always, fromZero: true}),
    chart("Learning rate", lines("learning rate", point => point.learning_rate), {fromZero: true}),
    chart("Gradient norm", lines("gradient norm", point => point.grad_norm)),
  ].filter(each => each.always || each.series.length);
}

// A row of controls and a grid of charts that follow it.
class Board {
  constructor(parent) {
    this.view = {x: "step", scale: "auto", smooth: 0};
    const row = add(parent, "div", "", "controls");
    this.choice(row, "Across", "x", [["step", "steps"], ["time", "time"]]);
    this.choice(row, "Scale", "scale", [["auto", "auto"], ["linear", "linear"], ["log", "log"]]);
    const label = add(row, "label", "Smoothing "), slider = add(label, "input"), told = add(label, "output", "none");
    Object.assign(slider, {type: "range", min: 0, max: 0.98, step: 0.02, value: 0, id: "smoothing"});
    slider.addEventListener("input", () => {
      this.view.smooth = Number(slider.value);
      told.textContent = this.view.smooth ? slider.value : "none";
      this.show(this.specs);
    });
    add(row, "span", "drag over a chart to zoom, double-click to see all; arrow keys read it", "quiet hint");
    this.grid = add(parent, "div", "", "grid curves");
    this.charts = new Map();
    this.specs = [];
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.charts.forEach(chart => chart.redraw()));
  }

  choice(row, text, name, options) {
    const label = add(row, "label", `${text} `), select = add(label, "select");
    select.id = `choose-${name}`;
    for (const [value, shown] of options) add(select, "option", shown).value = value;
    select.addEventListener("change", () => { this.view[name] = select.value; this.show(this.specs); });
  }

  show(specs) {
    this.specs = specs;
    for (const [title, chart] of this.charts) if (!specs.some(spec => spec.title === title)) { chart.remove(); this.charts.delete(title); }
    specs.forEach((spec, i) => {
      if (!this.charts.has(spec.title)) this.charts.set(spec.title, new Chart(this.grid, spec.title));
      const chart = this.charts.get(spec.title);
      if (this.grid.children[i] !== chart.section) this.grid.insertBefore(chart.section, this.grid.children[i]);
      chart.show(spec, this.view);
    });
  }
}

class Chart {
  constructor(parent, title) {
    this.title = title;
    this.section = add(parent, "section");
    const head = add(this.section, "h2", title);
    this.note = add(head, "small");
    this.place = add(this.section, "div", "", "plot");
    this.legend = add(this.section, "div", "", "legend");
    this.plot = null;
    this.at = null;  // the point selected with keys
    this.place.addEventListener("keydown", event => this.key(event));
    this.place.addEventListener("blur", () => this.leave());
    new ResizeObserver(() => requestAnimationFrame(() => this.fit())).observe(this.place);
  }

  remove() { this.plot?.destroy(); this.section.remove(); }
  redraw() { this.plot?.redraw(); }

  fit() {
    const width = this.place.clientWidth;
    if (this.plot && width && width !== this.plot.width) this.plot.setSize({width, height: HEIGHT});
  }

  show(spec, view) {
    this.note.textContent = spec.note ? ` ${spec.note}` : "";
    this.spec = spec;
    const known = spec.series.flatMap(one => one.points.map(point => point[2]));
    if (!known.length) {
      if (!this.plot) this.place.textContent = "nothing yet";
      return;
    }
    const low = Math.min(...known), high = Math.max(...known);
    const isWide = !spec.fromZero && low > 0 && high / low > 20 && (high > 1 || spec.powers);  // not for an accuracy
    const isLog = high > 0 && (view.scale === "log" || view.scale === "auto" && isWide);
    const drawn = JSON.stringify([view.x, view.smooth > 0, isLog, spec.series.map(one => [one.name, one.points.length < FEW_POINTS])]);
    const data = this.data(spec, view, isLog);
    this.isTime = view.x === "time";
    if (this.plot && drawn === this.drawn) {
      const {min, max} = this.plot.scales.x, before = this.plot.data[0];
      this.plot.setData(data, min <= before[0] && max >= before.at(-1));  // keep the user's zoom
    } else {
      this.plot?.destroy();
      this.drawn = drawn;
      this.build(spec, view, isLog, data);
    }
    this.tell();
  }

  // uPlot's columns: x, then for each series its values, followed by the smoothed ones if smoothing is on.
  data(spec, view, isLog) {
    const columns = spec.series.map(({points}) => {
      const began = points[0][1];
      return new Map(points.map(([step, time, value]) =>
        [view.x === "time" ? Math.round(10 * (time - began)) / 10 : step, isLog && value <= 0 ? null : value]));
    });
    const xs = [...new Set(columns.flatMap(column => [...column.keys()]))].sort((a, b) => a - b);
    const raw = columns.map(column => xs.map(x => column.get(x) ?? null));
    return [xs, ...raw, ...(view.smooth > 0 ? raw.map(values => smoothed(values, view.smooth)) : [])];
  }

  build(spec, view, isLog, data) {
    const isSmooth = view.smooth > 0;
    const line = (one, index, isFaint) => ({
      label: one.name, spanGaps: true, width: isFaint ? 1 : 2,
      stroke: () => color(index) + (isFaint ? "55" : ""),
      dash: index >= COLORS ? [6, 4] : undefined,
      points: {show: !isFaint && one.points.length < FEW_POINTS, size: 5, fill: () => color(index)},
    });
    const axis = more => ({stroke: () => style("--quiet"), grid: {stroke: () => style("--grid"), width: 1},
      ticks: {stroke: () => style("--grid"), width: 1, size: 4}, font: "11px system-ui, sans-serif", ...more});
    this.place.textContent = "";
    this.plot = new uPlot({
      width: this.place.clientWidth || 400, height: HEIGHT, legend: {show: false}, padding: [8, 12, 0, 0],
      scales: {x: {time: false}, y: isLog ? {distr: 3} : spec.fromZero ? {range: (_, low, high) => [Math.min(0, low), high > 0 ? 1.08 * high : 1]} : {}},
      axes: [
        axis({size: 26, gap: 4, space: 60, incrs: this.isTime ? DURATIONS : undefined, values: (_, at) => at.map(x => this.isTime ? seconds(x) : axisNumber(x))}),
        axis({size: 50, gap: 4, space: 28, values: (_, at, _axis, _space, step) => at.map(y => y == null ? "" : axisNumber(y, isLog ? 0 : step))}),
      ],
      series: [{}, ...spec.series.map((one, i) => line(one, i, isSmooth)), ...(isSmooth ? spec.series.map((one, i) => line(one, i, false)) : [])],
      cursor: {
        y: false, drag: {x: true, y: false}, sync: {key: "board", setSeries: false, scales: ["x", null]},
        points: {size: (_, index) => isSmooth && index <= spec.series.length ? 0 : 7},
        dataIdx: (plot, index, at) => nearest(plot.data[index], at),
      },
      hooks: {setCursor: [() => this.tell()]},
    }, data, this.place);
    const over = this.plot.over;
    over.addEventListener("pointermove", event => {
      if (event.pointerType === "mouse") return;  // uPlot handles the mouse
      const box = over.getBoundingClientRect();
      this.plot.setCursor({left: event.clientX - box.left, top: event.clientY - box.top}, true, true);
    });
    Object.entries({role: "slider", "aria-label": `${this.title}: values`, "aria-valuemin": 0}).forEach(([name, value]) => this.place.setAttribute(name, value));
    this.place.tabIndex = 0;
  }

  key(event) {
    const xs = this.plot?.data[0], last = (xs?.length ?? 0) - 1, at = this.at ?? last;
    const to = {ArrowLeft: at - 1, ArrowDown: at - 1, ArrowRight: at + 1, ArrowUp: at + 1, PageDown: at - 10, PageUp: at + 10, Home: 0, End: last}[event.key];
    if (event.key === "Escape") this.leave();
    if (to === undefined || last < 0) return;
    event.preventDefault();
    this.at = Math.max(0, Math.min(last, to));
    this.plot.setCursor({left: this.plot.valToPos(xs[this.at], "x"), top: 20}, true, true);
    this.tell(this.at);
  }

  leave() {
    this.at = null;
    this.plot?.setCursor({left: -10, top: -10}, true, true);
  }

  // The legend: the values under the cursor, else the newest; smoothed values if there are any.
  tell(chosen) {
    const plot = this.plot;
    if (!plot) return;
    const at = chosen ?? this.at ?? plot.cursor.idx, [xs, ...columns] = plot.data, count = this.spec.series.length;
    const x = at == null ? null : xs[at], shown = columns.slice(-count);
    const words = this.spec.series.map((one, i) => [one.name, number(shown[i]?.[nearest(shown[i], at ?? xs.length - 1)])]);
    const where = x == null ? "" : this.isTime ? `after ${seconds(x)}` : `step ${number(x)}`;
    this.legend.replaceChildren();
    words.forEach(([name, value], i) => {
      const entry = add(this.legend, "div", "", `s${i % COLORS}${i >= COLORS ? " dashed" : ""}`);
      add(entry, "i");
      add(entry, "span", `${name} `);
      add(entry, "b", value);
    });
    add(this.legend, "div", where || "newest", "quiet");
    this.place.setAttribute("aria-valuemax", Math.max(0, xs.length - 1));
    this.place.setAttribute("aria-valuenow", at ?? xs.length - 1);
    this.place.setAttribute("aria-valuetext", `${where || "newest"}: ${words.map(word => word.join(" ")).join(", ")}`);
  }
}

// The index of the value nearest to `at` in a column with gaps.
function nearest(column, at) {
  if (!column || at == null || column[at] != null) return at;
  for (let off = 1; off < column.length; off++) {
    if (column[at - off] != null) return at - off;
    if (column[at + off] != null) return at + off;
  }
  return at;
}
