// The parts of both pages other than curves: phases, checkpoints, events, and facts about the run.
const PHASES = ["data", "transfer", "forward", "backward", "optimizer", "other"];
const stamp = time => isNumber(time) ? new Date(1000 * time).toISOString() : "";
const ROUTINE = ["world", "training", "checkpoint", "checkpoint_verified", "notified"];
const TROUBLE = ["rank_killed", "node_replaced", "node_left_out", "rank_failed", "hang", "nonfinite", "checkpoint_failed", "fallback", "replica_mismatch", "replay_mismatch", "failed"];

// A bar of parts {name: amount}; its length is the share of their sum in `whole`.
function stack(parent, parts, whole, unit) {
  const bar = add(parent, "div", "", "stack");
  const told = [];
  for (const name of PHASES) {
    if (!(parts[name] > 0)) continue;
    const part = add(bar, "div", "", `p-${name}`);
    part.style.width = `${100 * parts[name] / whole}%`;
    told.push(`${name} ${unit(parts[name])}`);
    part.title = told.at(-1);
  }
  bar.setAttribute("role", "img");
  bar.setAttribute("aria-label", told.join(", ") || "nothing");
  return bar;
}

function phaseLegend(parent, more = () => "") {
  const legend = add(parent, "div", "", "legend");
  for (const name of PHASES) {
    const entry = add(legend, "div", "", `p p-${name}`);
    add(entry, "i");
    add(entry, "span", name + more(name));
  }
}

function phaseSection(parent, title, phases) {
  parent.replaceChildren();
  add(parent, "h2", title);
  const whole = PHASES.reduce((sum, name) => sum + (phases?.[name] || 0), 0);
  if (!(whole > 0)) { add(parent, "p", "nothing yet", "quiet"); return; }
  stack(parent, phases, whole, seconds);
  phaseLegend(parent, name => ` ${percent((phases[name] || 0) / whole)}`);
}

// The wall time of all launches by part, and what each cause of a restart has cost; see report/goodput.py.
function timeSection(parent, {parts, causes}) {
  const whole = parts.reduce((sum, [, value]) => sum + value, 0);
  add(parent, "h2", "Where the wall time of all launches went");
  table(parent, [["part", ""], ["time", "number"], ["share", "number"]],
    parts.map(([what, value]) => [what, seconds(value), percent(value / whole)]), "Wall time of all launches");
  if (!causes.length) return;
  add(parent, "h2", "What each cause of a restart has cost");
  table(parent, [["cause", ""], ["times", "number"], ["time", "number"], ["share", "number"]],
    causes.map(([cause, times, value]) => [cause, number(times), seconds(value), percent(value / whole)]), "Cost of causes");
}

function checkpointTable(parent, checkpoints, now) {
  parent.replaceChildren();
  add(parent, "h2", "Checkpoints");
  if (!checkpoints?.length) { add(parent, "p", "none yet", "quiet"); return; }
  const heads = [["step", "number"], ["age", "number"], ["size", "number"], ["state", ""]];
  const rows = checkpoints.slice(0, 10).map(one =>
    [number(one.step), seconds(now - one.time), bytes(one.bytes), one.state]);
  table(parent, heads, rows, "Checkpoints").forEach((line, i) => {
    line.lastChild.className = checkpoints[i].state === "verified" ? "ok" : checkpoints[i].state;
  });
  add(parent, "small", "written: hashed and on disk; verified: read back and the hash matches");
}

// A sentence for a line of events.jsonl; an unknown kind is shown with its fields.
function sentence(event) {
  const {time, kind, ...rest} = event, {step, rank, node, reason} = rest;
  const at = isGiven(step) ? ` at step ${number(step)}` : "", who = `Rank ${rank} on node ${node}`;
  const told = value => typeof value === "object" ? JSON.stringify(value) : number(value);
  const cost = ` after ${seconds(rest.seconds)}${isGiven(rest.steps_lost) ? `, ${counted(rest.steps_lost, "step")} lost` : ""}`;
  const size = `${counted(rest.world_size, "rank")} on ${counted(rest.nodes, "node")}`;
  const sentences = {
    world: () => rest.number > 1 ? `Start ${number(rest.number)}: ${size} restart` : `The run starts${rest.anew ? " from scratch" : ""}: ${size}`,
    training: () => `Training begins${at}`,
    resumed: () => `Training resumed after step ${number(step)}`,
    checkpoint: () => `Checkpoint of step ${number(step)} saved: ${bytes(rest.bytes)} in ${seconds(rest.seconds)}`,
    checkpoint_verified: () => `Checkpoint of step ${number(step)} verified: its hash matches`,
    checkpoint_failed: () => `The checkpoint of step ${number(step)} could not be saved; training continues`,
    fallback: () => `The checkpoint of step ${number(step)} cannot be used (${rest.problem}); trying an older one`,
    straggler: () => `${who} is a straggler: it needs ${seconds(rest.own_seconds)} per step (median ${seconds(rest.median_seconds)}); ${rest.place ? `most of it at ${rest.place}` : `the extra time is in ${rest.phase}`}`,
    hang: () => `${who} has hung in ${rest.phase}${at} for ${seconds(rest.seconds)}; restarting all ranks`,
    rank_killed: () => `${who} was killed (${rest.signal}); training again${cost}`,
    recovered: () => `Training again${cost}${isGiven(rest.cause) ? ` (${rest.cause})` : ""}`,
    node_replaced: () => `Node ${node} ${reason}; node ${rest.by} takes its place`,
    node_left_out: () => `Node ${node} ${reason} and is left out${isGiven(rest.by) ? ` while another node can take its place; node ${rest.by} does` : ""}`,
    rank_failed: () => `A rank failed: ${reason}`,
    nonfinite: () => `${reason === "nonfinite_loss" ? "The loss is" : "Gradients are"} not finite${at} (--on-nonfinite ${rest.policy})`,
    replica_mismatch: () => `Ranks ${told(rest.ranks)} have different parameters from rank 0${at}`,
    notified: () => `Webhook notified: ${rest.event}`,
    replay_mismatch: () => `Another rank got different bits from the same micro-batch${at}: ${told(rest.ranks)}`,
    finished: () => `The run finished${at}`,
    stopped: () => `The run was stopped and saved${at}`,
    failed: () => `The run failed: ${reason} (exit code ${rest.exit_code})`,
  };
  if (Object.hasOwn(sentences, kind)) return sentences[kind]();
  const more = Object.entries(rest).filter(([, value]) => isGiven(value)).map(([name, value]) => `${name.replaceAll("_", " ")} ${told(value)}`);
  return `${String(kind).replaceAll("_", " ")}${more.length ? `: ${more.join(", ")}` : ""}`;
}

function eventLine(parent, event) {
  const line = add(parent, "li", "", TROUBLE.includes(event.kind) ? "trouble" : event.kind === "straggler" ? "warned" : "");
  add(line, "time", clock(event.time)).dateTime = stamp(event.time);
  add(line, "span", sentence(event));
}

// Newest first. Two or more routine events in a row are one line that can be expanded.
const unfolded = new Set();
function eventList(parent, events) {
  add(parent, "h2", "Events");
  if (!events?.length) { add(parent, "p", "none yet", "quiet"); return; }
  const why = events.find(event => event.kind === "failed")?.reason ?? "";  // it contains the rank's message
  events = events.filter(event => event.kind !== "rank_failed" || !why.includes(event.reason));
  const list = add(parent, "ol", "", "events");
  list.tabIndex = 0;
  list.setAttribute("aria-label", "Events, newest first");
  for (let i = 0; i < events.length;) {
    let end = i;
    while (end < events.length && ROUTINE.includes(events[end].kind)) end++;
    if (end - i < 2) { eventLine(list, events[i++]); continue; }
    const run = events.slice(i, end), oldest = run.at(-1).time, saves = run.filter(each => each.kind === "checkpoint");
    const line = add(list, "li");
    add(line, "time", clock(run[0].time)).dateTime = stamp(run[0].time);
    const details = unfold(line, saves.length ? `${counted(saves.length, "checkpoint")} saved, the newest of step ${number(saves[0].step)}${saves.length < run.length ? `; ${counted(run.length - saves.length, "routine event")} more` : ""}` : sentence(run[0]), unfolded.has(oldest));
    details.addEventListener("toggle", () => details.open ? unfolded.add(oldest) : unfolded.delete(oldest));
    const inner = add(details, "ol", "", "events");
    for (const event of run) eventLine(inner, event);
    i = end;
  }
}

// `about` is collected by report/about.py: settings, the command, versions, hardware.
function aboutSection(parent, about) {
  parent.replaceChildren();
  add(parent, "h2", "This run");
  const rows = [
    ["command", about.command], ["started", isNumber(about.started) ? date(about.started) : null], ["in", about.folder], ["run directory", about.run_dir],
    ["commit", about.commit], ["optimizer", about.optimizer],
    ["versions", Object.entries(about.versions ?? {}).map(pair => pair.join(" ")).join(", ")],
    ["hardware", (about.hardware ?? []).join("; ")],
  ].filter(row => row[1]);
  if (!rows.length) add(parent, "p", "no record of its start", "quiet");
  else {
    const list = add(parent, "dl");
    for (const [name, value] of rows) {
      add(list, "dt", name);
      add(list, "dd", value, ["command", "in", "run directory", "commit"].includes(name) ? "code" : "");
    }
  }
}

function settingsSection(parent, settings) {
  parent.replaceChildren();
  add(parent, "h2", "Settings");
  if (!settings?.length) { add(parent, "p", "not known", "quiet"); return; }
  const shown = value => value === null || value === "" ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value);
  const rows = settings.map(({name, value, default: usual}) => [name.replaceAll("_", "-"), shown(value), shown(usual)]);
  const own = rows.filter((_, i) => settings[i].differs), heads = [["setting", "short"], ["value", ""], ["default", "default"]];
  if (own.length) table(parent, heads, own, "Settings that differ from the default");
  else add(parent, "p", "all have their default values", "quiet");
  const rest = unfold(parent, `all ${rows.length} settings`);
  rest.addEventListener("toggle", () => { if (rest.open && rest.children.length === 1) table(rest, heads, rows, "All settings"); });
}

function logSection(parent, {lines, file, why}) {
  parent.replaceChildren();
  if (why) { add(parent, "p", why, "quiet"); return; }
  add(parent, "small", lines?.length ? `the last ${counted(lines.length, "line")} of ${file}` : "nothing yet");
  if (!lines?.length) return;
  const text = add(parent, "pre", lines.join("\n"));
  text.tabIndex = 0;
  text.setAttribute("role", "region");
  text.setAttribute("aria-label", "The end of the log");
  text.scrollTop = text.scrollHeight;
}
