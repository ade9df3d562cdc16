// One page. What it shows is in the address (#tab=rollouts&run=0&step=12), so that every view can be linked to; it asks
// the server every two seconds while a run goes on, and draws only what has changed.
import { amount, chartOf, forgetCharts, safe, short } from "/static/draw.js";
import { ask, here } from "/static/state.js";
import { rollouts } from "/static/rollouts.js";
import { compare, data, engines, overview, time } from "/static/views.js";

const TABS = { overview, time, data, engines, rollouts, compare };
const PERIOD_MS = 2000;
const main = document.getElementById("main");
let drawn = "", turn = 0;

function readAddress() {
  here.at = Object.fromEntries(new URLSearchParams(location.hash.slice(1)));
  if (!Object.hasOwn(TABS, here.at.tab)) here.at.tab = "overview";
  here.run = Math.max(0, Math.min(Number(here.at.run) || 0, here.runs.length - 1));
}

// Values that are null leave the address; another tab or run is a step that the browser's back button undoes.
function go(changes) {
  const next = new URLSearchParams(Object.entries({ ...here.at, ...changes }).filter(([, value]) => value !== null && value !== ""));
  const method = "tab" in changes || "run" in changes ? "pushState" : "replaceState";
  history[method](null, "", `#${next}`);
  readAddress();
  return refresh();
}

function show(html) {
  if (html === drawn) return; // nothing changed: scroll, focus and tooltips stay
  drawn = html;
  const focused = document.activeElement;
  const [id, caret] = [focused?.id, focused?.selectionStart];
  const open = new Set([...main.querySelectorAll("details[id]")].filter((d) => d.open).map((d) => d.id));
  const closed = new Set([...main.querySelectorAll("details[id]")].filter((d) => !d.open).map((d) => d.id));
  const scrolled = new Map([...main.querySelectorAll("[data-keep]")].map((box) => [box.dataset.keep, [box.scrollTop, box.scrollLeft]]));
  main.innerHTML = html;
  for (const box of main.querySelectorAll("details[id]")) box.open = open.has(box.id) || (box.open && !closed.has(box.id));
  for (const box of main.querySelectorAll("[data-keep]")) [box.scrollTop, box.scrollLeft] = scrolled.get(box.dataset.keep) ?? [0, 0];
  const again = id && main.contains(focused) === false && document.getElementById(id);
  if (again && main.contains(again)) {
    again.focus({ preventScroll: true });
    if (typeof caret === "number" && again.type === "text") again.setSelectionRange(caret, caret);
  }
}

function status(text, isLost) {
  const box = document.getElementById("when");
  box.textContent = text;
  box.className = isLost ? "lost" : "";
}

function header() {
  const options = here.runs.map((run, i) => `<option value="${i}" ${i === here.run ? "selected" : ""}>${safe(run.name)}</option>`);
  const box = document.getElementById("run");
  if (box.dataset.drawn !== options.join("")) { box.innerHTML = options.join(""); box.dataset.drawn = options.join(""); }
  box.hidden = here.at.tab === "compare";
  const run = here.runs[here.run];
  box.title = run.folder;
  const state = document.getElementById("state");
  state.textContent = run.state;
  state.className = run.state;
  state.hidden = here.at.tab === "compare";
  document.title = `${run.name} · slime_rl`;
  const tabs = Object.keys(TABS).map((name) => `<button data-tab="${name}" class="${name === here.at.tab ? "on" : ""}"
    ${name === here.at.tab ? 'aria-current="page"' : ""}>${name}</button>`).join("");
  const nav = document.getElementById("tabs");
  if (nav.dataset.drawn !== tabs) { nav.innerHTML = tabs; nav.dataset.drawn = tabs; }
}

async function refresh() {
  const mine = ++turn; // an answer that comes after the user went on is not drawn
  try {
    here.runs = await ask("/api/runs");
    if (mine !== turn) return;
    readAddress();
    header();
    forgetCharts();
    const html = await TABS[here.at.tab]();
    if (mine !== turn) return;
    show(html);
    status(here.runs[here.run].state === "running" ? `live · ${new Date().toLocaleTimeString()}` : "");
  } catch (error) {
    if (mine !== turn) return;
    if (error.answered) show(`<p class="note">${safe(error.message)}</p>`);
    else if (error.lost) status("the dashboard's server does not answer; trying again", true);
    else {
      show(`<p class="error">this view cannot be drawn: ${safe(error.message)}</p>`);
      console.error(error);
    }
  }
}

document.addEventListener("click", (event) => {
  const hit = event.target.closest("[data-tab], [data-go], [data-big]");
  if (!hit || hit.disabled) return;
  if (hit.dataset.tab) go({ tab: hit.dataset.tab });
  if (hit.dataset.go) go(JSON.parse(hit.dataset.go));
  if (hit.dataset.big) {
    here.big.has(hit.dataset.big) ? here.big.delete(hit.dataset.big) : here.big.add(hit.dataset.big);
    refresh();
  }
});

document.addEventListener("change", (event) => {
  const { id, value, dataset, checked, type } = event.target;
  if (id === "run") go({ run: value, step: null, first: null, from: null, to: null });
  else if (dataset.key) {
    const changes = { [dataset.key]: type === "checkbox" ? (checked ? "1" : null) : value };
    if (["step", "kind", "order", "find"].includes(dataset.key)) changes.first = null;
    if (dataset.key === "kind") changes.step = null;
    if (dataset.key === "step") changes.from = changes.to = null;
    go(changes);
  } else if (dataset.hide) {
    const hidden = new Set((here.at.hide || "").split(",").filter(Boolean));
    checked ? hidden.delete(dataset.hide) : hidden.add(dataset.hide);
    go({ hide: [...hidden].join(",") || null });
  }
});

let typing;
document.addEventListener("input", (event) => {
  if (event.target.id !== "find") return;
  clearTimeout(typing);
  typing = setTimeout(() => go({ find: event.target.value, first: null }), 250);
});
document.addEventListener("toggle", (event) => { // a part of the overview is drawn when it is opened
  const part = event.target.dataset?.part;
  if (part && event.target.open !== here.open.has(part)) {
    event.target.open ? here.open.add(part) : here.open.delete(part);
    refresh();
  }
}, true);

function tipOf(event) {
  const { target } = event;
  if (target.dataset?.tip) return target.dataset.tip;
  const svg = target.closest?.("svg[data-chart]");
  const chart = svg && chartOf(svg);
  if (!chart) return "";
  const box = svg.getBoundingClientRect();
  const at = ((event.clientX - box.left) / box.width) * chart.width;
  const part = Math.max(0, Math.min(1, (at - chart.from) / (chart.to - chart.from || 1)));
  const { xs } = chart;
  const wanted = xs[0] + part * (xs[xs.length - 1] - xs[0]);
  const i = chart.blocks ? Math.min(xs.length - 1, Math.floor(part * xs.length)) : nearest(xs, wanted);
  const rows = chart.rows.filter((row) => row.values.has(xs[i])).map((row) =>
    `${row.name}: ${amount(row.values.get(xs[i]), row.unit)}`);
  return rows.length ? `${chart.xName} ${short(xs[i])}\n${rows.join("\n")}` : "";
}

function nearest(xs, wanted) {
  let [low, high] = [0, xs.length - 1];
  while (high - low > 1) { const middle = (low + high) >> 1; xs[middle] < wanted ? (low = middle) : (high = middle); }
  return wanted - xs[low] < xs[high] - wanted ? low : high;
}

document.addEventListener("mousemove", (event) => {
  const tip = document.getElementById("tip");
  const text = tipOf(event);
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  tip.style.top = `${event.clientY + 18 + tip.offsetHeight > innerHeight ? event.clientY - tip.offsetHeight - 8 : event.clientY + 18}px`;
});

addEventListener("popstate", () => { readAddress(); refresh(); });
addEventListener("hashchange", () => { readAddress(); refresh(); });
await refresh();
requestAnimationFrame(() => setTimeout(() => { // it is on the screen now: for those who wait for that
  performance.mark("drawn");
  document.documentElement.dataset.ready = "1";
}));
let ticks = 0;
setInterval(() => { // a finished run may be continued, so it is looked at too, now and then
  const mayWait = here.runs[here.run]?.state === "finished" && !document.querySelector("#when.lost");
  if (!document.hidden && (!mayWait || ++ticks % 5 === 0)) refresh();
}, PERIOD_MS);
