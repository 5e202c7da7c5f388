// The live page: asks every two seconds, and keeps what it last heard when nobody answers.
const EVERY = 2000;
let version = null;

async function ask(path) {
  const answer = await fetch(path, {cache: "no-store", signal: AbortSignal.timeout(5000)});
  return await answer.json();
}

function show(run) {
  const state = run.ending?.state ?? run.state;
  document.title = `${state} · ${run.run}`;
  $("title").textContent = run.run;
  $("state").textContent = state;
  $("state").className = `state ${state}`;
  $("where").textContent = `${run.task} on ${run.nodes} ${run.nodes === 1 ? "node" : "nodes"} (${run.platform})`;
  $("straggler").textContent = run.straggler ?? "";
  $("bar").value = run.steps_planned ? run.step / run.steps_planned : 0;
  const newest = run.checkpoints?.[0];
  const cards = [
    ["step", run.steps_planned ? `${number(run.step)} of ${number(run.steps_planned)}` : number(run.step)],
    ["loss", number(run.loss)],
    ["samples/s", number(run.samples_per_second)],
    ["time left", run.ending ? "–" : seconds(run.seconds_left)],
    ["last checkpoint", newest ? `${seconds(run.time - newest.time)} ago` : "none"],
    ["restarts", number(run.restarts)],
  ];
  $("cards").replaceChildren();
  for (const [name, value] of cards) add(add($("cards"), "div", name, "card quiet"), "b", value);
  showRanks(run.ranks ?? []);
  checkpointTable($("checkpoints"), run.checkpoints, run.time);
  eventTable($("events"), run.events);
}

function showRanks(ranks) {
  const parent = $("ranks");
  parent.replaceChildren();
  add(parent, "h2", "Ranks: own time of a step, without the wait for the others");
  if (!ranks.length) { add(parent, "p", "nothing yet", "quiet"); return; }
  const most = Math.max(...ranks.map(rank => rank.own_ms));
  const heads = [["rank", "who"], ["node", ""], ["", "bar"], ["ms", "number"]];
  const lines = table(parent, heads, ranks.map(rank => [String(rank.rank), String(rank.node), "", number(rank.own_ms)]));
  lines.forEach((line, i) => {
    if (ranks[i].straggler) line.className = "straggler";
    stack(line.children[2], ranks[i].phases_ms, most, value => `${number(value)} ms`);
  });
  phaseLegend(parent);
}

function ended(run) {
  const {state, exit_code: code, reason} = run.ending;
  const at = `The run has ${state === "finished" ? "finished" : state === "stopped" ? "stopped, and is saved," : "failed"}`;
  const why = state === "failed" ? `: ${reason} (exit code ${code}).` : ".";
  return `${at} at step ${number(run.step)}${why} These are its last values; \`tandem report\` keeps them as a file.`;
}

async function refresh() {
  try {
    const run = await ask("api/run");
    if (run.error) throw new Error(run.error);
    show(run);
    if (run.history !== version) {
      const {points, version: now} = await ask("api/history");
      drawCurves($("curves"), points);
      phaseSection($("phases"), "Phases of a step", points.findLast(point => point.phases)?.phases);
      version = now;
    }
    $("note").textContent = run.ending ? ended(run) : "";
    if (run.ending) return;  // nothing more will come
  } catch (error) {
    $("note").textContent = "No answer from the run; these are its last values.";
  }
  setTimeout(refresh, EVERY);
}

drawCurves($("curves"), []);
phaseSection($("phases"), "Phases of a step", null);
refresh();
