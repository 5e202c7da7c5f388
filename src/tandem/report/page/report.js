// The report of finished runs: the first in full, the others beside it.
const runs = JSON.parse($("runs").textContent).runs;

function header(parent, run) {
  const head = add(parent, "header");
  add(head, "h1", run.name);
  add(head, "span", run.state, `state ${run.state}`);
  add(head, "span", run.where, "quiet");
}

function summary(parent, run) {
  const cards = add(parent, "div", "", "cards");
  for (const [name, value] of run.cards) {
    const shown = name.endsWith("time") ? seconds(value) : number(value);
    add(add(cards, "div", name, "card quiet"), "b", shown);
  }
}

function comparison(parent) {
  const section = add(parent, "section", "", "wide");
  add(section, "h2", "Runs side by side");
  const names = runs[0].cards.map(card => card[0]);
  table(section, [["run", ""], ["state", ""], ...names.map(name => [name, "number"])], runs.map(run =>
    [run.name, run.state, ...names.map(name => {
      const value = run.cards.find(card => card[0] === name)?.[1];
      return name.endsWith("time") ? seconds(value) : number(value);
    })]));
  const keys = [...new Set(runs.flatMap(run => Object.keys(run.settings)))].filter(key =>
    new Set(runs.map(run => JSON.stringify(run.settings[key]))).size > 1);
  add(section, "h2", keys.length ? "Settings that differ" : "All settings are equal");
  if (keys.length) table(section, [["setting", ""], ...runs.map(run => [run.name, ""])],
    keys.map(key => [key, ...runs.map(run => JSON.stringify(run.settings[key]) ?? "–")]));
  const grid = add(parent, "div", "", "grid");
  const scores = [...new Set(runs.flatMap(run => run.points.flatMap(point => Object.keys(point.eval ?? {}))))];
  const charts = [["Loss", point => point.loss], ["Throughput, samples/s", point => point.samples_per_second],
    ...scores.map(name => [name === "loss" ? "Loss of evaluations" : `Score: ${name}`, point => point.eval?.[name]])];
  for (const [title, value] of charts) lineChart(add(grid, "section"), title,
    runs.map(run => ({name: run.name, points: run.points.map(point => [point.step, value(point)])})));
}

function full(parent, run) {
  summary(parent, run);
  drawCurves(add(parent, "div", "", "grid"), run.points);
  const grid = add(parent, "div", "", "grid");
  phaseSection(add(grid, "section", "", "wide"), "Phases of all steps", run.phases);
  const wide = add(grid, "section", "", "wide"), whole = run.activities.reduce((sum, one) => sum + one[1], 0);
  add(wide, "h2", "Where the wall time of the last launch went");
  table(wide, [["activity", ""], ["time", "number"], ["share", "number"]], run.activities.map(([name, value]) =>
    [name, seconds(value), `${(100 * value / whole).toFixed(1)} %`]));
  const pair = add(parent, "div", "", "pair");
  checkpointTable(add(pair, "section"), run.checkpoints, run.ended);
  eventTable(add(pair, "section"), run.events);
}

header($("main"), runs[0]);
if (runs.length > 1) comparison($("main"));
else full($("main"), runs[0]);
document.title = `tandem: ${runs.map(run => run.name).join(", ")}`;
