// The report of finished runs: one in full, or several side by side.
const {runs, made, links, up, problems} = JSON.parse($("runs").textContent);
const timed = (name, value) => name.endsWith("time") ? seconds(value) : number(value);

function header(parent, run) {
  const head = add(parent, "header");
  add(head, "h1", runs.length > 1 ? runs.map(each => each.name).join(", ") : run.name);
  if (runs.length === 1) {
    add(head, "span", run.state, `state ${run.state}`);
    add(head, "span", run.where, "quiet");
  }
  const when = runs.length === 1 && isNumber(run.ended) ? `${run.state} on ${date(run.ended)} · ` : "";
  add(head, "span", `${when}report of ${date(made)}`, "quiet");
  if (up) add(head, "a", "all runs").href = up;
  for (const problem of problems ?? []) add(parent, "p", problem, "said failed");
  if (runs.length === 1 && run.verdict) add(parent, "p", `What limits this run: ${run.verdict}`, "said");
  if (runs.length === 1 && run.reason) add(parent, "p", `The run has failed: ${run.reason}`, "said failed");
}

function comparison(parent) {
  const section = add(parent, "section", "", "wide");
  add(section, "h2", "Runs side by side");
  const values = [...new Set(runs.flatMap(run => run.cards.map(card => card[0])))];
  const lines = table(section, [["run", ""], ["state", ""], ["started", "short"], ...values.map(name => [name, "number"])], runs.map(run =>
    [run.name, run.state, date(run.about.started ?? run.began), ...values.map(name => timed(name, run.cards.find(card => card[0] === name)?.[1]))]), "Runs side by side");
  links?.forEach((link, i) => {
    lines[i].firstChild.textContent = "";
    add(lines[i].firstChild, "a", runs[i].name).href = link;
  });
  const keys = [...new Set(runs.flatMap(run => Object.keys(run.settings)))].filter(key =>
    new Set(runs.map(run => JSON.stringify(run.settings[key]))).size > 1);
  add(section, "h2", keys.length ? "Settings that differ" : "All settings are equal");
  if (keys.length) table(section, [["setting", ""], ...runs.map(run => [run.name, ""])],
    keys.map(key => [key.replaceAll("_", "-"), ...runs.map(run => JSON.stringify(run.settings[key]) ?? "–")]), "Settings that differ");
  new Board(parent).show(chartsOf(runs));
}

function full(parent, run) {
  cards(add(parent, "div", "", "cards"), run.cards.map(([name, value]) => [name, timed(name, value)]));
  new Board(parent).show(chartsOf([run]));
  const grid = add(parent, "div", "", "grid");
  phaseSection(add(grid, "section", "", "wide"), "Phases of all steps", run.phases);
  if (run.activities.length) {
    const wide = add(grid, "section", "", "wide"), whole = run.activities.reduce((sum, one) => sum + one[1], 0);
    add(wide, "h2", "Where the wall time of the last launch went");
    table(wide, [["activity", ""], ["time", "number"], ["share", "number"]], run.activities.map(([name, value]) =>
      [name, seconds(value), percent(value / whole)]), "Wall time");
  }
  if (run.time.parts.length) timeSection(add(grid, "section", "", "wide"), run.time);
  const pair = add(parent, "div", "", "pair"), left = add(pair, "div"), right = add(pair, "div");
  checkpointTable(add(left, "section"), run.checkpoints, run.ended);
  aboutSection(add(left, "section"), run.about);
  eventList(add(right, "section"), run.events);
  settingsSection(add(right, "section"), run.about.settings);
  if (!run.log) return;
  const log = unfold(parent, "The end of the log", true);
  log.className = "card";
  logSection(add(log, "div"), run.log);
}

// Two runs with the same name are distinguished by a number.
const names = runs.map(run => run.name);
runs.forEach((run, i) => {
  const same = names.slice(0, i).filter(name => name === run.name).length;
  if (same) run.name += ` (${same + 1})`;
});
header($("main"), runs[0]);
if (runs.length > 1) comparison($("main"));
else full($("main"), runs[0]);
document.title = `tandem: ${runs.map(run => run.name).join(", ")}`;
