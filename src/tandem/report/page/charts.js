"use strict";
// What the live page and the report draw with. Text only ever goes in by textContent.
const PHASES = ["data", "transfer", "forward", "backward", "optimizer", "other"];
const SVG = "http://www.w3.org/2000/svg";
const $ = id => document.getElementById(id);

function add(parent, tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
}

function draw(parent, tag, attributes, text = "") {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  parent.append(element);
  return element;
}

const isNumber = value => typeof value === "number" && Number.isFinite(value);

function number(value) {
  if (value == null) return "–";
  if (!isNumber(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e4) return value.toLocaleString("en", {maximumFractionDigits: 0});
  return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 0) return "0 s";
  if (value < 1) return `${number(1000 * value)} ms`;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${+value.toPrecision(3)} ${units[at]}`;
}

const clock = time => new Date(1000 * time).toLocaleTimeString();

function extent(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
  return [low, high];
}

// series: [{name, points: [[x, y], ...]}]; a scale of powers where the values span more than a factor of 20.
function lineChart(parent, title, series, {xName = "step", fromZero = false} = {}) {
  parent.replaceChildren();
  add(parent, "h2", title);
  series = series.map(one => ({...one, points: one.points.filter(([x, y]) => isNumber(x) && isNumber(y))}))
    .filter(one => one.points.length);
  if (!series.length) { add(parent, "p", "nothing yet", "quiet"); return; }
  const width = 460, height = 180, left = 46, right = 10, top = 8, bottom = 22;
  const all = series.flatMap(one => one.points);
  let [x0, x1] = extent(all.map(point => point[0])), [y0, y1] = extent(all.map(point => point[1]));
  const powers = !fromZero && y0 > 0 && y1 / y0 > 20, scale = powers ? Math.log : value => value;
  if (fromZero) y0 = Math.min(0, y0);
  if (x1 === x0) x1 = x0 + 1;
  if (y1 === y0) { y0 -= Math.abs(y0) / 10 || 1; y1 += Math.abs(y1) / 10 || 1; }
  const [low, high] = [scale(y0), scale(y1)];
  const x = value => left + (value - x0) / (x1 - x0) * (width - left - right);
  const y = value => height - bottom - (scale(value) - low) / (high - low) * (height - top - bottom);
  const svg = draw(parent, "svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": title});
  for (let i = 0; i <= 3; i++) {
    const at = low + (high - low) * i / 3, value = powers ? Math.exp(at) : at;
    draw(svg, "line", {class: "gridline", x1: left, x2: width - right, y1: y(value), y2: y(value)});
    draw(svg, "text", {x: left - 5, y: y(value) + 4, "text-anchor": "end"}, axisNumber(value));
  }
  draw(svg, "text", {x: left, y: height - 6}, axisNumber(x0));
  draw(svg, "text", {x: width - right, y: height - 6, "text-anchor": "end"}, `${xName} ${axisNumber(x1)}`);
  series.forEach((one, index) => {
    const path = one.points.map(([a, b], i) => `${i ? "L" : "M"}${x(a).toFixed(1)} ${y(b).toFixed(1)}`);
    draw(svg, "path", {class: `curve s${index % 5}`, d: path.join("")});
    if (one.points.length < 40) for (const [a, b] of one.points)
      draw(svg, "circle", {class: `s${index % 5}`, cx: x(a), cy: y(b), r: 2.2, fill: "currentColor"});
  });
  const legend = add(parent, "div", "", "legend");
  const labels = series.map((one, index) => {
    const entry = add(legend, "div", "", `s${index % 5}`);
    add(entry, "i");
    return add(entry, "span", `${one.name} ${number(one.points.at(-1)[1])}`);
  });
  const cursor = draw(svg, "line", {class: "cursor", y1: top, y2: height - bottom, visibility: "hidden"});
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const wanted = x0 + ((event.clientX - box.left) / box.width * width - left) / (width - left - right) * (x1 - x0);
    let shown = null;
    series.forEach((one, index) => {
      const near = one.points.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a);
      shown ??= near[0];
      labels[index].textContent = `${one.name} ${number(near[1])} at ${xName} ${number(near[0])}`;
    });
    cursor.setAttribute("x1", x(shown)); cursor.setAttribute("x2", x(shown));
    cursor.setAttribute("visibility", "visible");
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    series.forEach((one, index) => { labels[index].textContent = `${one.name} ${number(one.points.at(-1)[1])}`; });
  });
}

function axisNumber(value) {
  const size = Math.abs(value);
  if (size >= 1e6) return `${+(value / 1e6).toPrecision(3)}M`;
  if (size >= 1e4) return `${+(value / 1e3).toPrecision(3)}k`;
  return size && size < 1e-3 ? value.toExponential(0) : String(+value.toPrecision(3));
}

// A bar of parts {name: amount}, as long as its sum is of `whole`.
function stack(parent, parts, whole, unit) {
  const bar = add(parent, "div", "", "stack");
  for (const name of PHASES) {
    if (!(parts[name] > 0)) continue;
    const part = add(bar, "div", "", `p-${name}`);
    part.style.width = `${100 * parts[name] / whole}%`;
    part.title = `${name} ${unit(parts[name])}`;
  }
  return bar;
}

function phaseSection(parent, title, phases) {
  parent.replaceChildren();
  add(parent, "h2", title);
  const whole = PHASES.reduce((sum, name) => sum + (phases?.[name] || 0), 0);
  if (!(whole > 0)) { add(parent, "p", "nothing yet", "quiet"); return; }
  stack(parent, phases, whole, seconds);
  phaseLegend(parent, name => ` ${(100 * (phases[name] || 0) / whole).toFixed(1)} %`);
}

function phaseLegend(parent, more = () => "") {
  const legend = add(parent, "div", "", "legend");
  for (const name of PHASES) {
    const entry = add(legend, "div", "", `p p-${name}`);
    add(entry, "i");
    add(entry, "span", name + more(name));
  }
}

function table(parent, heads, rows) {
  parent = add(parent, "div", "", "scroll");
  const body = add(parent, "table"), head = add(add(body, "thead"), "tr");
  for (const [name, className] of heads) add(head, "th", name, className);
  const lines = add(body, "tbody");
  return rows.map(cells => {
    const line = add(lines, "tr");
    cells.forEach((cell, i) => add(line, "td", cell, heads[i][1]));
    return line;
  });
}

const curve = (points, key) => points.filter(point => key in point).map(point => [point.step, point[key]]);

function drawCurves(parent, points) {
  const evaluated = points.filter(point => point.eval);
  const names = [...new Set(evaluated.flatMap(point => Object.keys(point.eval)))];
  const scores = name => evaluated.filter(point => name in point.eval).map(point => [point.step, point.eval[name]]);
  const trained = points.filter(point => point.scores);
  const own = [...new Set(trained.flatMap(point => Object.keys(point.scores)))];
  while (parent.children.length < 3) add(parent, "section");
  lineChart(parent.children[0], "Loss",
    [{name: "train", points: curve(points, "loss")}, {name: "eval", points: scores("loss")},
     ...names.filter(name => name.endsWith("/loss")).map(name => ({name, points: scores(name)}))]);
  lineChart(parent.children[1], "Scores",
    [...names.filter(name => name !== "loss" && !name.endsWith("/loss")).map(name => ({name, points: scores(name)})),
     ...own.map(name => ({name: `${name}, train`, points: trained.map(point => [point.step, point.scores[name]])}))]);
  lineChart(parent.children[2], "Throughput",
    [{name: "samples/s", points: curve(points, "samples_per_second")}], {fromZero: true});
}

function checkpointTable(parent, checkpoints, now) {
  parent.replaceChildren();
  add(parent, "h2", "Checkpoints");
  if (!checkpoints?.length) { add(parent, "p", "none yet", "quiet"); return; }
  const heads = [["step", "number"], ["age", "number"], ["size", "number"], ["state", ""]];
  const rows = checkpoints.slice(0, 10).map(one =>
    [number(one.step), seconds(now - one.time), bytes(one.bytes), one.state]);
  table(parent, heads, rows).forEach((line, i) => {
    line.lastChild.className = checkpoints[i].state === "verified" ? "ok" : checkpoints[i].state;
  });
  add(parent, "small", "written: hashed and on disk; verified: read back and the hash holds");
}

function eventTable(parent, events) {
  parent.replaceChildren();
  add(parent, "h2", "Events");
  if (!events?.length) { add(parent, "p", "none yet", "quiet"); return; }
  const told = value => typeof value === "object" ? JSON.stringify(value) : number(value);
  const rows = events.slice(0, 20).map(({time, kind, ...rest}) => [clock(time), kind.replaceAll("_", " "),
    Object.entries(rest).filter(([, value]) => value !== false && value !== null)
      .map(([name, value]) => `${name.replaceAll("_", " ")} ${told(value)}`).join(", ")]);
  table(parent, [["time", "short"], ["event", "short"], ["", ""]], rows);
}
