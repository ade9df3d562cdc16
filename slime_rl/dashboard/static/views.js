// Every tab but the rollouts: each reads its part of the run and gives HTML.
import { amount, COLOURS, colourOf, columns, histogram, lanes, legend, lines, nothing, safe, seconds, share, short, stacked } from "/static/draw.js";
import { here, metricsOf, of } from "/static/state.js";

const FIRST = ["rollout/reward_mean", "train/loss", "train/grad_norm", "rollout/response_length_mean",
  "train/logprob_diff_mean_abs", "perf/tokens_per_s", "perf/step_s", "rollout/staleness_max", "rollout/zero_std_groups_fraction"];
const isAccuracy = (name) => /^eval\/.*\/accuracy$/.test(name);
const rank = (name) => { const at = FIRST.indexOf(name); return isAccuracy(name) ? -1 : at < 0 ? FIRST.length : at; }; // main curves come first
const unitOf = (unit) => (unit && unit !== "-" ? unit : "");
const broken = (name) => safe(name).replace(/[/_]/g, "$&<wbr>"); // long names end their lines between words
const last = (metric) => metric?.values[metric.values.length - 1];
const colour = (i) => COLOURS[i % COLOURS.length];

function curve(metric, name, i = 0, more = {}) {
  const byTime = here.at.x === "time";
  return { xs: byTime ? metric.times : metric.steps, values: metric.values, colour: colour(i), name, unit: unitOf(metric.unit), ...more };
}
const xName = () => (here.at.x === "time" ? "seconds of running" : "step");

function card(name, metric, series, options = {}) {
  const big = here.big.has(name);
  const now = series.length === 1 ? safe(amount(last(series[0]), metric.unit)) : safe(unitOf(metric.unit));
  const size = big ? { width: 1100, height: 300 } : {};
  return `<div class="card ${big ? "big" : ""}"><div class="head" data-big="${safe(name)}" title="${safe(metric.meaning)}">
    <b>${broken(name)}</b><span class="now">${now}</span></div>${lines(series, { xName: xName(), ...size, ...options })}
    ${big ? `<div class="about">${safe(metric.meaning)}</div>` : ""}${series.length > 1 ? legend(series) : ""}</div>`;
}

const choice = (key, names, now) => `<select data-key="${key}" id="${key}">${names.map((name) =>
  `<option ${name === now ? "selected" : ""}>${safe(name)}</option>`).join("")}</select>`;
const findBox = (what) => `<input id="find" type="text" placeholder="find ${what}" value="${safe(here.at.find || "")}">`;
const xChoice = () => `<label>over ${choice("x", ["step", "time"], here.at.x || "step")}</label>`;
const tile = (value, name) => `<div class="tile"><b title="${safe(value)}">${safe(value)}</b><span>${safe(name)}</span></div>`;

// Errors, notes, and how far the run is.
function tiles(run, metrics) {
  const found = [];
  const evals = Object.keys(metrics).filter(isAccuracy);
  for (const name of evals) {
    found.push(tile(`${short(metrics[name].values[0])} → ${short(last(metrics[name]))}`, `accuracy · ${name.split("/")[1]}`));
  }
  if (metrics["rollout/reward_mean"]) found.push(tile(short(last(metrics["rollout/reward_mean"])), "mean reward of the last step"));
  if (metrics["perf/step_s"]) found.push(tile(seconds(last(metrics["perf/step_s"])), "last step"));
  if (metrics["perf/tokens_per_s"]) found.push(tile(short(last(metrics["perf/tokens_per_s"])), "tokens/s"));
  if (metrics["rollout/staleness_max"]) found.push(tile(short(last(metrics["rollout/staleness_max"])), "oldest token, in weight versions"));
  if (metrics["engines/serving"]) found.push(tile(short(last(metrics["engines/serving"])), "engines serving"));
  found.push(tile(seconds(run.seconds), run.state === "running" ? "running" : "ran, start-up aside"));
  return `<div class="tiles">${found.join("")}</div>`;
}

// How long the steps that are left take if they are like the last ten.
function left(run, metric) {
  const n = metric?.times.length;
  if (run.state !== "running" || !run.num_steps || n < 2 || run.steps >= run.num_steps) return "";
  const from = Math.max(0, n - 11);
  const each = (metric.times[n - 1] - metric.times[from]) / (metric.steps[n - 1] - metric.steps[from]);
  return ` · about ${seconds(each * (run.num_steps - run.steps))} left`;
}

export async function overview() {
  const [run, metrics] = await Promise.all([of("overview"), metricsOf()]);
  const find = (here.at.find || "").toLowerCase();
    const names = Object.keys(metrics).filter((name) => name.toLowerCase().includes(find) && metrics[name].values.length);
  const parts = new Map([["main", names.filter((name) => rank(name) < FIRST.length).sort((a, b) => rank(a) - rank(b))]]);
  for (const name of names) {
    const part = name.split("/")[0];
    if (rank(name) === FIRST.length) parts.set(part, [...(parts.get(part) || []), name]);
  }
  const drawn = [...parts].filter(([, members]) => members.length).map(([part, members]) => {
    const open = find || here.open.has(part);
    return `<details data-part="${safe(part)}" ${open ? "open" : ""}><summary>${safe(part)} <span class="quiet">${members.length}</span></summary>
      <div class="grid">${open ? members.map((name) => card(name, metrics[name], [curve(metrics[name], name)])).join("") : ""}</div></details>`;
  });
  const flags = run.flags.map(([flag, value]) => `<tr><td>${safe(flag)}</td><td>${safe(typeof value === "string" ? value : JSON.stringify(value))}</td></tr>`);
  const done = run.state === "finished";
  const steps = !run.num_steps ? `${run.steps} steps` : done && run.steps < run.num_steps
    ? `${run.steps} steps, of at most ${run.num_steps}` : `${run.steps} of ${run.num_steps} steps`;
  return `<p class="quiet path">${safe(run.folder)} · ${safe(steps)}${left(run, metrics["perf/step_s"])}</p>
    ${run.num_steps ? `<div class="bar"><i style="width:${done ? 100 : Math.min(100, (100 * run.steps) / run.num_steps)}%"></i></div>` : ""}
    ${run.error ? `<h2>Why it failed</h2><div class="error" data-keep="error">${safe(run.error)}</div>` : ""}
    ${run.state === "stopped" ? '<div class="note">It stopped without a summary or an error: killed, or interrupted.</div>' : ""}
    ${run.notes.map((note) => `<div class="note">${safe(note)}</div>`).join("")}
    ${tiles(run, metrics)}
    ${run.advice.length ? `<h2>What limits it</h2>${run.advice.map((sentence) => `<div class="advice">${safe(sentence)}</div>`).join("")}` : ""}
    <div class="tools"><b>Curves</b> ${findBox("a metric")} ${xChoice()} <span class="quiet">click a title to enlarge; hover for values</span></div>
    ${drawn.join("") || nothing(find ? `no metric has “${here.at.find}” in its name` : "no metrics yet")}
    <details id="flags"><summary>Command, and the flags that are not at their default</summary><pre>${safe(run.command)}</pre>
    <div class="scroll"><table>${flags.join("")}</table></div></details>`;
}

const byStep = (metric) => new Map(metric.steps.map((step, i) => [step, metric.values[i]]));

function stack(metrics, names, cut, options) {
  const known = names.filter((name) => metrics[name]?.values.length);
  const steps = [...new Set(known.flatMap((name) => metrics[name].steps))].sort((a, b) => a - b);
  return stacked(steps, known.map((name, i) => ({ name: name.slice(cut), values: byStep(metrics[name]),
    colour: name.startsWith("timing_s/") ? colourOf(name.slice(cut)) : colour(i) })), options);
}

export async function time() {
  const { step, from, to } = here.at;
  const asked = from ? `?from=${from}&to=${to}` : step ? `?step=${step}` : "";
  const [metrics, timeline] = await Promise.all([metricsOf(), of(`timeline${asked}`)]);
  const phases = Object.keys(metrics).filter((name) => /^timing_s\/[^/]+$/.test(name));
  const parts = Object.keys(metrics).filter((name) => /^timing_s\/[^/]+\/./.test(name));
  return `<h2>Seconds of each step, by phase of the driver</h2>${stack(metrics, phases, 9, { unit: "s", width: 1200 })}
    <h2>Who works when</h2>${timeline.tracks.length ? lanesOf(timeline) : nothing(timeline.steps.length
      ? "nothing was recorded in this window" : "run with --trace to see every phase, worker, request, tool call and reward here, and the bubbles between")}
    <h2>Parts of the phases, as workers measure them</h2><div class="grid">${parts.map((name) =>
      card(name.slice(9), metrics[name], [curve(metrics[name], name)])).join("") || nothing("none")}</div>`;
}

function lanesOf(window) {
  const { from, to, steps } = window;
  const [middle, half] = [(from + to) / 2, (to - from) / 2];
  const button = (text, about, shift, zoom) => `<button title="${about}" data-go='${JSON.stringify({ step: null,
    from: (middle + 2 * shift * half - half * zoom).toFixed(4), to: (middle + 2 * shift * half + half * zoom).toFixed(4) })}'>${text}</button>`;
  const options = steps.map((step) => `<option ${String(step) === here.at.step ? "selected" : ""}>${step}</option>`);
  const follows = !here.at.step && !here.at.from;
  const idle = window.tracks.map((t) => `<tr><td>${safe(t.process)} · ${safe(t.track)}</td><td class="n">${share(t.busy)}</td>
    <td class="n">${share(1 - t.busy)}</td><td class="n">${seconds((1 - t.busy) * (to - from))}</td><td class="n">${t.count}${t.is_cut ? "+" : ""}</td></tr>`);
  return `<div class="tools">${steps.length ? `<label>step <select data-key="step" id="step"><option value="">${follows
      ? "newest" : "–"}</option>${options.join("")}</select></label>` : ""}
    ${button("◀", "earlier", -0.5, 1)} ${button("▶", "later", 0.5, 1)} ${button("closer", "zoom in", 0, 0.5)} ${button("wider", "zoom out", 0, 2)}
    <button data-go='{"step":null,"from":null,"to":null}' ${follows ? "disabled" : ""}>newest</button>
    <span class="quiet">percentages: share of the window in which the lane is busy; clocks of several machines may differ</span></div>
    ${lanes(window)}
    <details id="idle"><summary>As numbers</summary><div class="scroll"><table><tr><th>lane</th><th class="n">busy</th><th class="n">idle</th>
    <th class="n">idle time</th><th class="n">spans</th></tr>${idle.join("")}</table></div></details>`;
}

export async function data() {
  const { step } = here.at;
  const [metrics, spread] = await Promise.all([metricsOf(), of(`spread${step ? `?step=${step}` : ""}`)]);
  const has = (name) => metrics[name]?.values.length;
  const pick = (names) => names.filter(has).map((name, i) => curve(metrics[name], name.replace("rollout/", ""), i));
  const length = (p) => metrics[`rollout/response_length_p${p}`];
  const band = (low, high) => ({ xs: curve(length(low), "").xs, low: length(low).values, high: length(high).values, colour: COLOURS[0] });
  const bands = has("rollout/response_length_p10") ? [band(10, 90), band(25, 75)] : [];
  const lengths = pick(["rollout/response_length_p50", "rollout/response_length_mean", "rollout/response_length_max"]);
  const ages = Object.keys(metrics).filter((name) => name.startsWith("rollout/tokens_by_age/")).sort();
  const states = Object.keys(metrics).filter((name) => /^buffer\/[^/]+$/.test(name));
  const counts = states.filter((name) => /\/(committed|dropped|replayed)$/.test(name));
  const now = states.filter((name) => !counts.includes(name));
  const reasons = Object.keys(metrics).filter((name) => /^(buffer\/(dropped|requeued)|rollout\/(groups_dropped|samples_left_out))\//.test(name));
  const box = (title, about, chart) => `<div class="card"><b>${title}</b> <span class="quiet">${about}</span>${chart}</div>`;
  const curves = (title, about, names) => { // what a kind of run never has is not drawn
    const series = pick(names);
    return series.length ? box(title, about, lines(series, { xName: xName() }) + legend(series)) : "";
  };
  const options = spread.steps.map((s) => `<option ${String(s) === step ? "selected" : ""}>${s}</option>`);
  const count = spread.lengths.length;
  return `<h2>All samples, over the steps</h2><div class="tools">${xChoice()}</div><div class="grid">
    ${box("response length", bands.length ? "tokens; bands: 10 to 90 %, 25 to 75 %" : "tokens", lines(lengths, { bands, xName: xName() }) + legend(lengths))}
    ${curves("reward", "lowest, mean, highest", ["rollout/reward_min", "rollout/reward_mean", "rollout/reward_max"])}
    ${curves("staleness", "weight versions; mean over tokens, and the oldest", ["rollout/staleness_mean", "rollout/staleness_max"])}
    ${ages.length ? box("age of trained tokens", "share by age in weight versions", stack(metrics, ages, 22, { width: 320, height: 120, top: 1 })) : ""}
    ${curves("equal groups, truncated", "share of groups and of samples", ["rollout/zero_std_groups_fraction", "rollout/truncated_fraction"])}</div>
    <h2>Logged samples of one step</h2>${count ? `<div class="tools"><label>step <select data-key="step" id="step"><option value="">newest</option>
      ${options.join("")}</select></label> <span class="quiet">${count} samples (--log-samples) of step ${spread.step}</span></div><div class="grid">
    ${box("length", "tokens", histogram(spread.lengths, "length"))}
    ${has("rollout/reward_mean") || spread.rewards.some(Boolean) ? box("reward", "", histogram(spread.rewards, "reward", COLOURS[2])) : ""}
    ${spread.ages.length ? box("age of tokens", "weight versions", columns(spread.ages.map(([age, many]) => [String(age), many]), "age", COLOURS[4])) : ""}</div>`
    : nothing("no samples were logged; --log-samples N logs N a step")}
    <h2>Buffer ledger: groups by state at the end of each step</h2>
    ${now.length ? stack(metrics, now, 7, { unit: "groups", width: 1200, height: 150 }) : nothing("this run has no buffer")}
    <div class="grid">${counts.filter(has).map((name) => card(name, metrics[name], [curve(metrics[name], name)])).join("")}
    ${reasons.map((name) => card(name, metrics[name], [curve(metrics[name], name, 1)])).join("")}</div>`;
}

export async function engines() {
  const [metrics, found] = await Promise.all([metricsOf(), of("engines")]);
  const states = ["serving", "stale", "slow", "down"].map((state) => `engines/${state}`);
  const has = states.some((name) => metrics[name]);
  const curves = !has && !found.logs.length ? [] : ["rollout/tokens_per_s", "rollout/wait_s", "rollout/seconds", "rollout/groups_in_flight", "rollout/cached_prompt_tokens_fraction",
    "sync/seconds", "sync/bytes", "rollout/wasted_tokens", "rollout/interrupted_groups", "train/logprob_diff_mean_abs",
    "faults/engine_restarts", "faults/router_restarts", "faults/train_restarts", "faults/slow_engines"].filter((name) => metrics[name]?.values.length);
  return `<h2>Engines by state at the end of each step</h2>${has ? stack(metrics, states, 8, { unit: "engines", width: 1200, height: 120 })
      : nothing("this run has no engines, or its metrics were written by an older version")}
    <div class="grid">${curves.map((name) => card(name, metrics[name], [curve(metrics[name], name)])).join("")}</div>
    <h2>Faults</h2>${found.faults.length ? `<pre data-keep="faults">${found.faults.map(safe).join("\n")}</pre>`
      : '<p class="quiet">none: no engine, router or worker was replaced</p>'}
    <h2>Logs</h2>${found.logs.map((log) => `<details id="log-${safe(log.name)}"><summary>${safe(log.name)} <span class="quiet">its end</span></summary>
      <pre data-keep="${safe(log.name)}">${safe(log.tail) || "empty"}</pre></details>`).join("") || nothing("none here")}`;
}

export async function compare() {
  const hidden = new Set((here.at.hide || "").split(","));
  const shown = here.runs.map((run, i) => ({ ...run, i, colour: colour(i) })).filter((run) => !hidden.has(String(run.i)));
  const read = await Promise.all(shown.map(async (run) => {
    try {
      const [about, metrics] = await Promise.all([of("overview", run.i), metricsOf(run.i)]);
      return { ...run, about, metrics };
    } catch (error) {
      if (!error.answered) throw error;
      return { ...run, about: null, metrics: {}, why: error.message };
    }
  }));
  const find = (here.at.find || "").toLowerCase();
  const names = [...new Set(read.flatMap((run) => Object.keys(run.metrics)))].filter((name) => name.toLowerCase().includes(find));
    names.sort((a, b) => rank(a) - rank(b));
  const cards = names.map((name) => {
    const having = read.filter((run) => run.metrics[name]?.values.length);
    if (!having.length) return "";
    const series = having.map((run) => curve(run.metrics[name], run.name, run.i));
    const metric = having[0].metrics[name];
    const big = here.big.has(name);
    return `<div class="card ${big ? "big" : ""}"><div class="head" data-big="${safe(name)}" title="${safe(metric.meaning)}"><b>${broken(name)}</b>
      <span class="now">${safe(unitOf(metric.unit))}</span></div>${lines(series, { xName: xName(), ...(big ? { width: 1100, height: 300 } : {}) })}</div>`;
  });
  const boxes = here.runs.map((run, i) => `<label><input type="checkbox" data-hide="${i}" ${hidden.has(String(i)) ? "" : "checked"}>
    <i style="background:${colour(i)}"></i>${safe(run.name)} <span class="${run.state}">${run.state}</span></label>`);
  return `<p class="legend">${boxes.join("")}</p>${here.runs.length < 2 ? nothing("one run: give several folders, or a folder of runs, to compare them") : ""}
    ${runTable(read)}${flagTable(read)}
    <div class="tools"><b>Curves</b> ${findBox("a metric")} ${xChoice()}</div><div class="grid">${cards.join("")}</div>`;
}

function runTable(runs) {
  const rows = runs.map((run) => {
    if (!run.about) return `<tr><td>${safe(run.name)}</td><td colspan="7" class="quiet">${safe(run.why)}</td></tr>`;
    const { metrics, about } = run;
    const evaluated = Object.keys(metrics).filter(isAccuracy);
    const mean = (name) => metrics[name]?.values.length ? metrics[name].values.reduce((a, b) => a + b, 0) / metrics[name].values.length : null;
    return `<tr><td>${safe(run.name)}</td><td class="${run.state}">${run.state}</td><td class="n">${about.steps}</td>
      <td>${evaluated.map((name) => `${safe(name.split("/")[1])} ${short(metrics[name].values[0])} → ${short(last(metrics[name]))}`).join(", ") || "–"}</td>
      <td class="n">${short(last(metrics["rollout/reward_mean"]))}</td><td class="n">${seconds(mean("perf/step_s"))}</td>
      <td class="n">${short(mean("perf/tokens_per_s"))}</td><td class="n">${seconds(about.seconds)}</td></tr>`;
  });
  return `<div class="scroll"><table><tr><th>run</th><th>state</th><th class="n">steps</th><th>accuracy</th><th class="n">last reward</th>
    <th class="n">mean step</th><th class="n">mean tokens/s</th><th class="n">ran</th></tr>${rows.join("")}</table></div>`;
}

function flagTable(runs) {
  const known = runs.filter((run) => run.about);
  const values = known.map((run) => new Map(run.about.flags.map(([flag, value]) => [flag, JSON.stringify(value)])));
  const flags = [...new Set(values.flatMap((of) => [...of.keys()]))].filter((flag) => new Set(values.map((of) => of.get(flag))).size > 1);
  if (known.length < 2) return "";
  const rows = flags.map((flag) => `<tr><td>${safe(flag)}</td>${values.map((of) => `<td>${safe(of.get(flag) ?? "default")}</td>`).join("")}</tr>`);
  return `<details id="differ" ${flags.length > 6 ? "" : "open"}><summary>Flags that differ <span class="quiet">${flags.length}</span></summary><div class="scroll"><table>
    <tr><th>flag</th>${known.map((run) => `<th>${safe(run.name)}</th>`).join("")}</tr>${rows.join("")}</table></div></details>`;
}
