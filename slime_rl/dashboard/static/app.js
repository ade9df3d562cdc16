// One page, five tabs; asks the server every two seconds while the run goes on.
import { COLOURS, histogram, lanes, lines, safe, short, stacked } from "/static/draw.js";

const TABS = { overview, time, data, rollouts, compare };
const FIRST = ["eval/", "rollout/reward_mean", "train/loss", "train/grad_norm", "rollout/response_length_mean",
  "train/logprob_diff_mean_abs", "perf/tokens_per_s", "rollout/staleness_max", "rollout/zero_std_groups_fraction"];
const here = { runs: [], run: 0, tab: "overview", step: null, colour: "log-prob", find: "", window: null, drawn: "" };
const main = document.getElementById("main");

async function ask(path) {
  const answer = await fetch(path);
  const content = await answer.json();
  if (!answer.ok) throw new Error(content.error || answer.statusText);
  return content;
}
const of = (part, run = here.run) => ask(`/api/runs/${run}/${part}`);

function show(html) {
  if (html === here.drawn) return; // nothing changed: keep scroll, focus and tooltips
  here.drawn = html;
  main.innerHTML = html;
}

async function overview() {
  const [run, metrics] = await Promise.all([of("overview"), of("metrics")]);
  const order = (name) => { const at = FIRST.findIndex((start) => name.startsWith(start)); return at < 0 ? FIRST.length : at; };
  const names = Object.keys(metrics).filter((name) => name.includes(here.find)).sort((a, b) => order(a) - order(b));
  const cards = names.map((name) => card(name, metrics[name].meaning, metrics[name].unit,
    [{ ...metrics[name], colour: COLOURS[0], name }]));
  const flags = run.flags.map(([flag, value]) => `<tr><td>${safe(flag)}</td><td>${safe(JSON.stringify(value))}</td></tr>`);
  show(`<p>${safe(run.folder)} · ${run.steps} of ${short(run.num_steps)} steps · ${short(run.seconds)} s</p>
    ${run.error ? `<div class="error">${safe(run.error)}</div>` : ""}
    ${run.advice.map((sentence) => `<div class="advice">${safe(sentence)}</div>`).join("")}
    <h2>Metrics <input id="find" placeholder="find" value="${safe(here.find)}"></h2>
    <div class="grid">${cards.join("")}</div>
    <h2>Command</h2><pre>${safe(run.command)}</pre>
    <h2>Flags that are not at their default</h2><table>${flags.join("")}</table>`);
}

function card(name, meaning, unit, series) {
  const last = series.length === 1 ? series[0].values[series[0].values.length - 1] : null;
  return `<div class="card" title="${safe(meaning)}"><b>${safe(name)}</b>
    <span class="now">${last === null ? "" : short(last)} ${safe(unit)}</span>${lines(series)}</div>`;
}

function phasesOf(metrics) {
  const names = Object.keys(metrics).filter((name) => /^timing_s\/[^/]+$/.test(name));
  const steps = metrics["perf/step_s"] ? metrics["perf/step_s"].steps : [];
  const at = (name) => { const m = metrics[name]; return steps.map((step) => m.values[m.steps.indexOf(step)] || 0); };
  return [steps, names.map((name, i) => ({ name: name.slice(9), values: at(name), colour: COLOURS[i % COLOURS.length] }))];
}

async function time() {
  const [metrics, timeline] = await Promise.all([of("metrics"), of("timeline")]);
  const [steps, phases] = phasesOf(metrics);
  const parts = Object.keys(metrics).filter((name) => /^timing_s\/[^/]+\/./.test(name));
  const end = timeline.seconds;
  const [from, to] = here.window || [Math.max(0, end - 60), Math.max(end, 1e-3)];
  const lanesHtml = timeline.tracks.length
    ? `<p><button data-move="-0.5">◀</button> <button data-move="0.5">▶</button> <button data-zoom="0.5">closer</button>
       <button data-zoom="2">wider</button> <span class="quiet">white between bars is waiting</span></p>
       <div id="lanes" data-from="${from}" data-to="${to}">${lanes(timeline.tracks, from, to)}</div>`
    : `<p class="quiet">run with --trace to see every worker, request and reward here</p>`;
  show(`<h2>Seconds of each step by phase of the driver</h2>${stacked(steps, phases, "s")}
    <h2>Parts, as workers measure them</h2><div class="grid">${parts.map((name) =>
      card(name.slice(9), metrics[name].meaning, "s", [{ ...metrics[name], colour: COLOURS[0], name }])).join("")}</div>
    <h2>Timeline</h2>${lanesHtml}`);
}

async function data() {
  const [metrics, samples] = await Promise.all([of("metrics"), of("samples")]);
  const pick = (names) => names.filter((name) => metrics[name])
    .map((name, i) => ({ ...metrics[name], name, colour: COLOURS[i] }));
  const states = Object.keys(metrics).filter((name) => /^buffer\/[^/]+$/.test(name));
  const steps = states.length ? metrics[states[0]].steps : [];
  const ledger = states.map((name, i) => ({ name: name.slice(7), values: metrics[name].values, colour: COLOURS[i % COLOURS.length] }));
  const all = samples.groups.flatMap((group) => group.samples);
  const ages = all.flatMap((s) => (s.weight_versions_by_token || []).filter((v) => v >= 0).map((v) => s.step - v));
  show(`<div class="grid">
    <div class="card"><b>staleness</b> (mean and oldest, in weight versions)${lines(pick(["rollout/staleness_mean", "rollout/staleness_max"]))}</div>
    <div class="card"><b>response length</b> (mean and longest)${lines(pick(["rollout/response_length_mean", "rollout/response_length_max"]))}</div>
    <div class="card"><b>reward</b> (lowest, mean, highest)${lines(pick(["rollout/reward_min", "rollout/reward_mean", "rollout/reward_max"]))}</div>
    <div class="card"><b>lengths of step ${short(samples.step)}'s logged samples</b>${histogram(all.map((s) => s.response_length), "length")}</div>
    <div class="card"><b>age of their tokens</b>${histogram(ages, "versions")}</div>
    <div class="card"><b>their rewards</b>${histogram(all.map((s) => s.reward).filter(Number.isFinite), "reward")}</div></div>
    <h2>Buffer ledger: groups by state at the end of each step</h2>${stacked(steps, ledger, "groups")}`);
}

const SHADES = { "log-prob": 1, mask: 1, version: 1, plain: 1 };
function shade(sample, i) {
  if (here.colour === "plain") return "var(--panel)";
  if (here.colour === "mask") return sample.loss_mask[i] ? "#bfe3c9" : "#e3c7c7";
  if (here.colour === "version") {
    const age = sample.step - sample.weight_versions_by_token[i];
    return sample.weight_versions_by_token[i] < 0 ? "#d5d9e0" : `hsl(${Math.max(0, 200 - 50 * age)} 75% 84%)`;
  }
  if (!sample.loss_mask[i]) return "#d5d9e0"; // text of the environment: nobody sampled it
  const surprise = Math.min(1, -sample.log_probs[i] / 6); // 6 nats: a chance of 1 in 400
  return `hsl(${120 - 120 * surprise} 70% ${92 - 20 * surprise}%)`;
}

function tokenView(sample) {
  if (!sample.tokens) return `<pre>${safe(sample.response)}</pre>`;
  return `<div class="tokens">${sample.tokens.map((text, i) => `<span class="${sample.loss_mask[i] ? "" : "env"}"
    style="background:${shade(sample, i)}" data-tip="${safe(JSON.stringify(text))}\nlog-prob ${short(sample.log_probs[i])} (${
    short(100 * Math.exp(sample.log_probs[i]))} %)\nversion ${sample.weight_versions_by_token[i]}\n${
    sample.loss_mask[i] ? "trained" : "masked"}">${safe(text)}</span>`).join("")}${sample.tokens_cut ? " …" : ""}</div>`;
}

function prompt(text) {
  if (!Array.isArray(text)) return safe(text);
  return text.map((message) => `<b>${safe(message.role)}</b> ${safe(typeof message.content === "string"
    ? message.content : JSON.stringify(message.content))}`).join("<br>");
}

async function rollouts() {
  const samples = await of(`samples${here.step === null ? "" : `?step=${here.step}`}`);
  if (!samples.steps.length) return show(`<p class="quiet">no samples were logged; --log-samples N logs N a step</p>`);
  const groups = samples.groups.map((group) => `<h2>group ${group.group_index} · mean reward of those shown ${short(group.mean)}</h2>
    <div>${prompt(group.prompt)}</div><div class="columns">${group.samples.map((sample) => `<div class="sample">
      reward <b>${short(sample.reward)}</b> (${sample.reward_minus_mean > 0 ? "+" : ""}${short(sample.reward_minus_mean)}) ·
      label ${safe(JSON.stringify(sample.label))} · ${safe(sample.status)} · ${sample.response_length} tokens
      ${tokenView(sample)}</div>`).join("")}</div>`);
  const options = samples.steps.map((step) => `<option ${step === samples.step ? "selected" : ""}>${step}</option>`);
  const shades = Object.keys(SHADES).map((name) => `<option ${name === here.colour ? "selected" : ""}>${name}</option>`);
  show(`<p>step <select id="step">${options.join("")}</select> coloured by <select id="colour">${shades.join("")}</select>
    <span class="quiet">log-prob: green is likely, red is surprising; underlined tokens are masked</span></p>${groups.join("")}`);
}

async function compare() {
  const all = await Promise.all(here.runs.map((_, i) => of("metrics", i).catch(() => ({}))));
  const names = [...new Set(all.flatMap(Object.keys))].filter((name) => name.includes(here.find));
  const legend = here.runs.map((run, i) => `<span><i style="background:${COLOURS[i % COLOURS.length]}"></i>${safe(run.name)}</span>`);
  const cards = names.map((name) => {
    const series = all.flatMap((metrics, i) => metrics[name]
      ? [{ ...metrics[name], colour: COLOURS[i % COLOURS.length], name: here.runs[i].name }] : []);
    return card(name, series[0].meaning, series[0].unit, series);
  });
  show(`<p class="legend">${legend.join("")} <input id="find" placeholder="find" value="${safe(here.find)}"></p>
    <div class="grid">${cards.join("")}</div>`);
}

async function refresh() {
  try {
    here.runs = await ask("/api/runs");
    const state = here.runs[here.run].state;
    const box = document.getElementById("state");
    if (box.textContent !== state) box.textContent = state;
    await TABS[here.tab]();
  } catch (error) {
    show(`<p class="quiet">${safe(error.message)}</p>`);
  }
}

function header() {
  document.getElementById("run").innerHTML = here.runs.map((run, i) => `<option value="${i}">${safe(run.name)}</option>`).join("");
  document.getElementById("tabs").innerHTML = Object.keys(TABS)
    .map((name) => `<button data-tab="${name}" class="${name === here.tab ? "on" : ""}">${name}</button>`).join(" ");
}

document.addEventListener("click", (event) => {
  const { tab, move, zoom } = event.target.dataset;
  if (tab) { here.tab = tab; history.replaceState(null, "", `#${tab}`); header(); document.getElementById("run").value = here.run; }
  if (move || zoom) {
    const { from, to } = document.getElementById("lanes").dataset;
    const [middle, half] = [(+from + +to) / 2 + (move || 0) * (to - from), ((to - from) / 2) * (zoom || 1)];
    here.window = [middle - half, middle + half];
  }
  if (tab || move || zoom) refresh();
});
document.addEventListener("change", (event) => {
  if (event.target.id === "run") { here.run = +event.target.value; here.step = here.window = null; }
  if (event.target.id === "step") here.step = +event.target.value;
  if (event.target.id === "colour") here.colour = event.target.value;
  if (event.target.id === "find") here.find = event.target.value;
  refresh();
});
document.addEventListener("mousemove", (event) => {
  const tip = document.getElementById("tip");
  tip.hidden = !event.target.dataset?.tip;
  if (tip.hidden) return;
  tip.textContent = event.target.dataset.tip;
  tip.style.left = `${Math.min(event.clientX + 12, innerWidth - 260)}px`;
  tip.style.top = `${event.clientY + 14}px`;
});

// Tab and step can be linked to: /#rollouts=12
const [tab, step] = location.hash.slice(1).split("=");
if (TABS[tab]) here.tab = tab;
if (step) here.step = +step;
here.runs = await ask("/api/runs");
header();
await refresh();
setInterval(() => { if (["running", "stopped"].includes(here.runs[here.run].state) && !document.hidden) refresh(); }, 2000);
