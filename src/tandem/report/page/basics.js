"use strict";
// Helpers for writing the live page and the report. Text is only ever inserted with textContent.
const $ = id => document.getElementById(id);

function add(parent, tag, text = "", className = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  if (className) element.className = className;
  parent.append(element);
  return element;
}

const isNumber = value => typeof value === "number" && Number.isFinite(value);
const isGiven = value => value !== undefined && value !== null && value !== false;

function number(value) {
  if (value == null) return "–";
  if (!isNumber(value)) return String(value);
  const size = Math.abs(value);
  if (size >= 1e3) return value.toLocaleString("en", {maximumFractionDigits: 0});
  return size !== 0 && size < 1e-3 ? value.toExponential(2) : String(+value.toPrecision(4));
}

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 0) return "0 s";
  if (value < 1) return `${number(+(1000 * value).toPrecision(3))} ms`;
  if (value < 10) return `${+value.toFixed(1)} s`;
  if (value < 90) return `${Math.round(value)} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
}

function bytes(value) {
  if (!isNumber(value)) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let at = 0;
  for (; value >= 1024 && at < units.length - 1; at++) value /= 1024;
  return `${+value.toPrecision(3)} ${units[at]}`;
}

const percent = share => `${(100 * share).toFixed(1)} %`;
const counted = (count, what) => `${number(count)} ${what}${count === 1 ? "" : "s"}`;
const date = time => isNumber(time) ? new Date(1000 * time).toLocaleString([], {dateStyle: "medium", timeStyle: "short", hourCycle: "h23"}) : "–";

function clock(time) {
  if (!isNumber(time)) return "–";
  const then = new Date(1000 * time), isToday = then.toDateString() === new Date().toDateString();
  const more = isToday ? {} : {month: "short", day: "numeric"};
  return then.toLocaleTimeString([], {hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23", ...more});
}

// Rebuild only what has changed, so that readers keep their selection and opened parts.
const built = new WeakMap();
function whenNew(parent, value, build) {
  const told = JSON.stringify(value) ?? "";
  if (built.get(parent) === told) return;
  built.set(parent, told);
  parent.replaceChildren();
  build(parent, value);
}

function cards(parent, named) {
  parent.replaceChildren();
  for (const [name, value, more] of named) {
    const card = add(parent, "div", name, "card quiet");
    add(card, "b", value);
    if (more) add(card, "span", more);
  }
}

function table(parent, heads, rows, says = "") {
  parent = add(parent, "div", "", "scroll");
  parent.tabIndex = 0;  // makes sideways scrolling, as on a phone, possible with keys
  parent.setAttribute("role", "region");
  const body = add(parent, "table");
  if (heads.some(head => head[0])) {
    const head = add(add(body, "thead"), "tr");
    for (const [name, className] of heads) add(head, name ? "th" : "td", name, className);
  }
  parent.setAttribute("aria-label", says || "table");
  const lines = add(body, "tbody");
  return rows.map(cells => {
    const line = add(lines, "tr");
    cells.forEach((cell, i) => add(line, "td", cell, heads[i][1]));
    return line;
  });
}

function unfold(parent, title, isOpen = false) {
  const details = add(parent, "details");
  details.open = isOpen;
  add(details, "summary", title);
  return details;
}
