// The live page: fetches every two seconds, and keeps the last values if there is no answer.
const EVERY = 2000;
const board = new Board($("curves"));
let isOver = false, version = null, starts = null;  // the version and start that the page shows

async function ask(path, patience = 5000) {
  const answer = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(patience)});
  return await answer.json();
}

const sentenceOfTrouble = event => `${sentence(event)} (${clock(event.time)}).`;

function spares(waiting) {
  if (!waiting) return "";
  return waiting.length ? `, waiting as ${waiting.length === 1 ? "a spare" : "spares"}: node ${waiting.join(", ")}` : ", no spare is waiting";
}

// The newest state that a restart finds in memory, the nodes that have one, and how often it is kept.
function stateInMemory(snapshots, interval) {
  const nodes = Object.keys(snapshots ?? {});
  const often = interval ? `, every ${seconds(interval)}` : interval === 0 ? ", every step" : "";
  const where = nodes.length > 6 ? `on ${nodes.length} nodes` : `on ${nodes.length > 1 ? "nodes" : "node"} ${nodes.join(", ")}`;
  return nodes.length ? [["state in memory", `step ${number(Math.max(...Object.values(snapshots)))}`, where + often]] : [];
}

// Under fsdp, the newest step of which every node has the copy that it keeps for another one.
function copiesInMemory(copies) {
  const steps = Object.values(copies ?? {});
  return steps.length ? [["copies of shards", `step ${number(Math.min(...steps))}`, "each on the next node"]] : [];
}

function show(run) {
  const state = run.ending?.state ?? run.state;
  document.title = `${state} · ${run.run}`;
  $("title").textContent = run.run;
  $("state").textContent = state;
  $("state").className = `state ${state}`;
  $("where").textContent = `${run.task} on ${counted(run.nodes, "node")} (${run.platform})${spares(run.spares)}`;
  $("straggler").textContent = run.ending ? "" : run.straggler ?? "";
  $("verdict").textContent = run.verdict ? `What limits this run: ${run.verdict}` : "";
  const trouble = run.ending?.state === "failed" ? null : run.events?.find(event => TROUBLE.includes(event.kind));
  const isIll = run.healthy === false && !run.ending && run.health;
  $("trouble").textContent = isIll ? `Not healthy: ${run.health}` : trouble ? sentenceOfTrouble(trouble) : "";
  const share = run.steps_planned ? run.step / run.steps_planned : 0;
  $("bar").value = share;
  const newest = run.checkpoints?.[0], isOver = Boolean(run.ending);
  cards($("cards"), [
    ["step", number(run.step), run.steps_planned ? `of ${number(run.steps_planned)}, ${percent(share)}` : ""],
    ["training loss", number(run.loss)],
    ...Object.entries(run.scores ?? {}).slice(0, 3).map(([name, value]) => [`${name}, evaluation`, number(value)]),
    ["samples per second", number(run.samples_per_second)],
    ["time left", isOver ? "–" : seconds(run.seconds_left), !isOver && isNumber(run.seconds_left) ? `at ${clock(run.time + run.seconds_left)}` : ""],
    ["last checkpoint", newest ? `${seconds(run.time - newest.time)} ago` : "none", newest ? `step ${number(newest.step)}` : ""],
    ...stateInMemory(run.snapshots, run.snapshot_interval),
    ...copiesInMemory(run.copies),
    ["restarts", number(run.restarts), run.planned_stops ? `and ${number(run.planned_stops)} planned stops` : ""],
  ]);
  $("inside").hidden = !run.inspection || isOver;
  showRanks(run.ranks ?? []);
  $("blocks").hidden = !run.blocks?.length;
  whenNew($("blocks"), run.blocks ?? [], blockTable);
  $("time").hidden = !run.goodput?.parts?.length;
  if (run.goodput?.parts?.length) whenNew($("time"), run.goodput, timeSection);
  checkpointTable($("checkpoints"), run.checkpoints, run.time);
  whenNew($("events"), run.events ?? [], eventList);
}

function showRanks(ranks) {
  const parent = $("ranks");
  parent.replaceChildren();
  add(parent, "h2", "Ranks: step time without waiting for other ranks");
  if (!ranks.length) { add(parent, "p", "nothing yet", "quiet"); return; }
  const most = Math.max(...ranks.map(rank => rank.own_ms));
  const heads = [["rank", "who"], ["node", ""], ["phases", "bar"], ["ms", "number"]];
  const lines = table(parent, heads, ranks.map(rank => [String(rank.rank), String(rank.node), "", number(rank.own_ms)]), "Ranks");
  lines.forEach((line, i) => {
    if (ranks[i].straggler) line.className = "straggler";
    stack(line.children[2], ranks[i].phases_ms, most, value => `${number(value)} ms`);
  });
  phaseLegend(parent);
}

// Data on object stores: what each node has read since the launch, and its cache now.
function blockTable(parent, nodes) {
  add(parent, "h2", "Data on object stores");
  const heads = [["node", "number"], ["received", "number"], ["per byte needed", "number"], ["requests", "number"], ["retried", "number"], ["failed", "number"],
    ["waited", "number"], ["blocks ahead", "number"], ["cache hits", "number"], ["cache", "number"]];
  const rows = nodes.map(each => [
    number(each.node), bytes(each.bytes), each.needed_bytes ? number(each.bytes / each.needed_bytes) : "–",
    number(each.ok), number(each.retried + each.damaged), number(each.failed), seconds(each.wait_seconds),
    number(each.ahead), number(each.hits), `${bytes(each.cache_bytes)} of ${bytes(each.cache_limit_bytes)}`]);
  table(parent, heads, rows, "Data on object stores");
  add(parent, "small", "received / needed: 1 and the tar headers, until blocks come from the cache; waited: all readers together");
}

function ended(run) {
  const {state, exit_code: code, reason} = run.ending;
  const at = `The run has ${state === "finished" ? "finished" : state === "stopped" ? "stopped and saved" : "failed"}`;
  const why = state === "failed" ? `: ${reason} (exit code ${code}).` : ".";
  return `${at} at step ${number(run.step)}${why} These are its last values; \`tandem report\` keeps them as a file.`;
}

// Data that changes only when the run starts; the page works without it.
async function askAbout() {
  const about = await ask("api/about");
  whenNew($("about"), {...about, settings: null}, aboutSection);
  whenNew($("settings"), about.settings ?? [], settingsSection);
  return isNumber(about.started);  // otherwise the start has not been recorded yet
}

async function showLog() {
  if ($("log").open && !(isOver && built.has($("lines")))) whenNew($("lines"), await ask("api/log"), logSection);
}

function showCurves({points, version: now}, name) {
  board.show(chartsOf([{name, points}]));
  phaseSection($("phases"), "Phases of a step", points.findLast(point => point.phases)?.phases);
  version = now;
}

// Show the last values; there will be no more.
function showEnd(run) {
  isOver = true;
  show(run);
  $("note").textContent = ended(run);
  $("note").className = run.ending.state;
  if (run.ending.state === "failed") $("log").open = true;
}

async function refresh() {
  if (isOver) return;
  try {
    const run = await ask("api/run");
    if (isOver) return;
    if (run.error) throw new Error(run.error);
    show(run);
    if (run.history !== version) showCurves(await ask("api/history"), run.run);
    if (starts !== run.restarts + run.planned_stops && await askAbout()) starts = run.restarts + run.planned_stops;
    if (isOver) return;
    $("note").textContent = "";
    if (run.ending) showEnd(run);
    await showLog();
  } catch (error) {
    if (!isOver) $("note").textContent = "The run does not answer; these are its last values.";
  }
  if (!isOver) setTimeout(refresh, EVERY);
}

// Keep one connection open until the run is over: the server then exits, and may not answer another request.
async function awaitEnd() {
  while (!isOver) {
    const asked = performance.now();
    try {
      const {run, history, log} = await ask("api/end", 60000);
      if (run?.ending) {
        showCurves(history, run.run);
        whenNew($("lines"), log, logSection);
        showEnd(run);
      }
    } catch (error) { /* the regular requests show that there is no answer */ }
    if (performance.now() - asked < EVERY) await new Promise(resolve => setTimeout(resolve, EVERY));
  }
}

// Ask the ranks for their stacks, memory or a profile; only readers with the token see the buttons.
const buttons = document.querySelectorAll("#inside button");
const OPTIONS = {stacks: () => "", memory: () => "?seconds=3", profile: () => `?steps=${Number($("steps").value) || 5}`};

function answerSection(parent, text) {
  const answer = add(parent, "pre", text);
  answer.tabIndex = 0;
  answer.setAttribute("role", "region");
  answer.setAttribute("aria-label", "Answers of the ranks");
}

async function inspect(action) {
  buttons.forEach(button => { button.disabled = true; });
  $("asked").textContent = action === "stacks" ? "asking the ranks…" : `recording (${action})…`;
  try {
    const answer = await fetch(`api/inspect/${action}${OPTIONS[action]()}`, {
      method: "POST", headers: {"X-Tandem": "page"}, cache: "no-store", signal: AbortSignal.timeout(660000)});
    if (!answer.ok) throw new Error(await answer.text());
    const {text, trace} = await answer.json();
    whenNew($("answer"), text, answerSection);
    $("trace").hidden = !trace;
    $("asked").textContent = `${action}, ${clock(Date.now() / 1000)}`;
  } catch (error) {
    $("asked").textContent = `not answered: ${error.message}`;
  }
  buttons.forEach(button => { button.disabled = false; });
}

buttons.forEach(button => button.addEventListener("click", () => inspect(button.dataset.action)));
board.show(chartsOf([{name: "", points: []}]));
phaseSection($("phases"), "Phases of a step", null);
$("log").addEventListener("toggle", () => showLog().catch(() => {}));
refresh();
awaitEnd();
