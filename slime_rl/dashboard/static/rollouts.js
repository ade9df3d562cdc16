// The rollout browser: groups of a step, their samples beside each other, conversation or tokens in colour.
import { safe, share, short } from "/static/draw.js";
import { here, of } from "/static/state.js";

const VIEWS = ["tokens", "conversation"];
const ORDERS = ["as trained", "lowest reward", "highest reward", "largest spread"];
const SURPRISING = 6; // nats: a chance of 1 in 400
const [GREEN, RED, BLUE, ORANGE] = [135, 0, 220, 28];

// Every colouring: what it needs of a sample, a token's number, and how strong the colour is for it.
const likely = (value) => {
  const surprise = Math.min(1, Math.max(0, -value / SURPRISING));
  return { h: GREEN - (GREEN - RED) * surprise, a: 0.18 + 0.42 * surprise };
};
const signed = (value, scale) => ({ h: value > 0 ? BLUE : ORANGE, a: 0.62 * Math.min(1, Math.abs(value) / scale) });
const COLOURINGS = {
  "log-prob": { needs: "log_probs", of: (s, i) => s.log_probs[i], shade: likely, scale: "surprise" },
  "trainer log-prob": { needs: "train_log_probs", of: (s, i) => s.train_log_probs[i], shade: likely, scale: "surprise" },
  ratio: { needs: "train_log_probs", of: (s, i) => logRatio(s, i), shade: signed, scale: "ratio" },
  advantage: { needs: "advantages", of: (s, i) => (trained(s, i) ? s.advantages[i] : null), shade: signed, scale: "advantage" },
  mask: { needs: "loss_mask", of: (s, i) => Number(trained(s, i)), shade: (on) => (on ? { h: GREEN, a: 0.35 } : { h: RED, a: 0.3 }), scale: "mask" },
  version: { needs: "weight_versions_by_token", of: (s, i) => age(s, i), shade: (old) => ({ h: 210 + 50 * Math.min(old, 5), a: 0.25 + 0.06 * Math.min(old, 5) }), scale: "version" },
  plain: { needs: "tokens", of: () => null, shade: () => null, scale: "plain" },
};
// Surprise has colours that say good and bad, so the others do not use them; tokens that no model sampled have none.
const sampled = (s, i) => (s.weight_versions_by_token?.[i] ?? 0) >= 0;
const trained = (s, i) => ((s.train_mask || s.loss_mask || [])[i] ?? 1) > 0;
const age = (s, i) => (sampled(s, i) ? s.step - s.weight_versions_by_token[i] : null);

export function logRatio(s, i) {
  const [now, then] = [s.train_log_probs?.[i], s.log_probs?.[i]];
  return sampled(s, i) && Number.isFinite(now) && Number.isFinite(then) ? now - then : null;
}

function largest(groups, colouring) {
  let most = 0;
  for (const sample of groups.flatMap((g) => g.samples)) {
    for (let i = 0; sample[colouring.needs] && i < (sample.tokens || []).length; i++) most = Math.max(most, Math.abs(colouring.of(sample, i) ?? 0));
  }
  return most;
}

const swatch = (shade) => `<i style="--h:${shade.h.toFixed(0)};--a:${shade.a.toFixed(2)}"></i>`;
function scaleText(colouring, scale, most) {
  const edge = (value) => swatch(colouring.shade(value, scale));
  const texts = {
    surprise: () => `${edge(0)} certain ${edge(-2)} ${edge(-4)} ${edge(-SURPRISING)} a chance of 1 in 400 or less`,
    ratio: () => `${edge(-scale)} trainer finds it less likely, ×${short(Math.exp(-scale))} ${edge(-scale / 2)} ${edge(scale / 2)} ${edge(scale)} likelier, ×${
      short(Math.exp(scale))}; furthest from 1 on this page: ×${(Math.exp(most)).toPrecision(most < 1e-3 ? 7 : 4)} or its inverse`,
    advantage: () => `${edge(-scale)} ${short(-scale)} ${edge(-scale / 2)} 0 ${edge(scale / 2)} ${edge(scale)} ${short(scale)}`,
    mask: () => `${edge(1)} trained ${edge(0)} not`,
    version: () => `${edge(0)} current weights ${edge(1)} 1 version old ${edge(2)} 2 ${edge(3)} 3 …`,
    plain: () => "",
  };
  return `<span class="scale">${texts[colouring.scale]()} <span>dotted underline: text that no model sampled, or that does not train</span></span>`;
}

function tipOf(s, i) {
  const percent = (value) => share(Math.exp(value));
  const rows = [JSON.stringify(s.tokens[i]), `token ${i + 1}`];
  if (!sampled(s, i)) rows.push("not sampled by a model");
  else if (Number.isFinite(s.log_probs?.[i])) rows.push(`engine: log-prob ${short(s.log_probs[i])} (${percent(s.log_probs[i])})`);
  if (Number.isFinite(s.train_log_probs?.[i])) rows.push(`trainer: log-prob ${short(s.train_log_probs[i])} (${percent(s.train_log_probs[i])})`);
  if (Number.isFinite(s.old_log_probs?.[i])) rows.push(`trainer before the step: ${short(s.old_log_probs[i])}`);
  const ratio = logRatio(s, i);
  if (ratio !== null) rows.push(`ratio trainer / engine: ${Math.exp(ratio).toPrecision(Math.abs(ratio) < 1e-3 ? 7 : 4)}`);
  if (Number.isFinite(s.advantages?.[i]) && trained(s, i)) rows.push(`advantage ${short(s.advantages[i])}`);
  if (sampled(s, i) && s.weight_versions_by_token) rows.push(`weights of version ${s.weight_versions_by_token[i]} (${age(s, i)} old)`);
  rows.push(trained(s, i) ? "trained on" : "not trained on");
  return rows.join("\n");
}

const visible = (text) => (text === "" ? '<span class="mark">·</span>' : safe(text).replace(/\n/g, '<span class="mark">↵</span>\n'));

function tokens(sample, colouring, scale, first) {
  if (!sample.tokens) return `<pre>${safe(sample.response)}</pre>`;
  const can = sample[colouring.needs];
  let parted = !first || first === sample || !here.at.dim;
  const spans = sample.tokens.map((text, i) => {
    parted ||= text !== first.tokens?.[i];
    const value = can ? colouring.of(sample, i) : null;
    const shade = value === null || !Number.isFinite(value) ? null : colouring.shade(value, scale);
    const classes = [sampled(sample, i) && trained(sample, i) ? "" : "env", parted ? "" : "same"].filter(Boolean).join(" ");
    return `<span ${classes ? `class="${classes}"` : ""} ${shade ? `style="--h:${shade.h.toFixed(0)};--a:${shade.a.toFixed(2)}"` : ""}
      data-tip="${safe(tipOf(sample, i))}">${visible(text)}</span>`;
  });
  return `<div class="tokens" data-keep="s${sample.index}">${spans.join("")}${sample.tokens_cut ? '<span class="mark"> … cut here</span>' : ""}</div>`;
}

function content(message) {
  if (typeof message.content === "string") return safe(message.content);
  return `<code>${safe(JSON.stringify(message.tool_calls ?? message.content ?? message, null, 1))}</code>`;
}

function promptTurns(prompt) {
  const messages = Array.isArray(prompt) ? prompt : [{ role: "user", content: String(prompt) }];
  return messages.map((message) => `<div class="turn ${safe(message?.role)}"><b>${safe(message?.role ?? "?")}</b>${content(message ?? {})}</div>`).join("");
}

// Runs of tokens that a model sampled are its turns; what is between came from tools or the environment.
function turns(sample) {
  const whole = (text) => `<div class="turn assistant"><b>assistant</b>${safe(text)}</div>`;
  if (!sample.tokens || !sample.weight_versions_by_token) return whole(sample.response);
  const parts = [];
  sample.tokens.forEach((text, i) => {
    const by = sampled(sample, i) || sample.weight_versions_by_token.every((v) => v < 0) ? "assistant" : "tool";
    if (parts[parts.length - 1]?.by === by) parts[parts.length - 1].text += text;
    else parts.push({ by, text });
  });
  if (parts.length < 2) return whole(sample.response);
  return parts.map(({ by, text }) => `<div class="turn ${by}"><b>${by === "tool" ? "tool or environment" : by}</b>${safe(text)}</div>`).join("")
    + (sample.tokens_cut ? '<p class="quiet">… cut here</p>' : "");
}

const sign = (value) => (value === null || value === undefined ? "" : `<span class="${value > 0 ? "plus" : value < 0 ? "minus" : ""}">${value > 0 ? "+" : ""}${short(value)}</span>`);
function mean(sample, value) {
  const numbers = (sample.tokens || []).map((_, i) => value(sample, i)).filter((v) => v !== null && Number.isFinite(v));
  return numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null;
}

function sampleRow(s, number) {
  const kept = (field) => mean(s, (x, i) => (x[field] && trained(x, i) ? x[field][i] : null));
  const ratio = mean(s, (x, i) => (trained(x, i) ? logRatio(x, i) : null));
  return `<tr><td>${number + 1}</td><td class="n">${short(s.reward)}</td><td class="n">${sign(s.reward_minus_mean)}</td><td class="n">${sign(kept("advantages"))}</td>
    <td class="n">${short(s.response_length)}</td><td class="n">${short(kept("log_probs"))}</td><td class="n">${ratio === null ? "–" : short(Math.exp(ratio))}</td>
    <td>${(s.weight_versions || []).length ? safe([...new Set(s.weight_versions)].join(" to ")) : "–"}</td><td>${safe(s.status)}</td></tr>`;
}

// Not all samples of a group need be logged: only the advantages tell whether the others have the same reward.
function equalRewards(samples) {
  const known = samples.filter((s) => s.advantages?.length);
  if (!known.length) return "their rewards are equal";
  return known.some((s) => s.advantages.some((a) => a)) ? "their rewards are equal, those of the others are not"
    : "rewards are equal: nothing to learn for GRPO";
}

function groupOf(group, view, colouring, scale) {
  const { samples } = group;
  const facts = [`${samples.length} sample${samples.length === 1 ? "" : "s"} logged`, `mean reward of those ${short(group.mean)}`];
  if (samples.length > 1) facts.push(group.std === 0 ? equalRewards(samples) : `deviation ${short(group.std)}`);
  if (group.label !== null && group.label !== undefined) facts.push(`label ${(typeof group.label === "string" ? group.label : JSON.stringify(group.label)).slice(0, 400)}`);
  const shown = samples.map((s, i) => `<div class="sample"><b>${i + 1}</b> <span class="quiet">reward ${short(s.reward)}${
    Object.keys(s.reward_info || {}).length ? ` · ${safe(JSON.stringify(s.reward_info)).slice(0, 400)}` : ""}</span>
    ${view === "conversation" ? turns(s) : tokens(s, colouring, scale, samples[0])}</div>`);
  return `<section class="group"><h3>group ${safe(group.group_index)} <span class="quiet">· ${facts.map(safe).join(" · ")}</span></h3>
    ${promptTurns(group.prompt)}<div class="scroll"><table><tr><th></th><th class="n">reward</th><th class="n">− mean</th><th class="n">advantage</th>
    <th class="n">tokens</th><th class="n">log-prob</th><th class="n">ratio</th><th>weights</th><th>ended</th></tr>${samples.map(sampleRow).join("")}</table></div>
    <div class="columns">${shown.join("")}</div></section>`;
}

export async function rollouts() {
  const at = here.at;
  const asked = new URLSearchParams(Object.entries({ kind: at.kind, step: at.step, order: at.order, find: at.find, first: at.first }).filter(([, v]) => v));
  const found = await of(`samples?${asked}`);
  if (!found.kinds.length) return '<p class="quiet">no samples were logged; --log-samples N logs N a step</p>';
  const view = VIEWS.includes(at.view) ? at.view : "tokens";
  const name = Object.hasOwn(COLOURINGS, at.colour) ? at.colour : "log-prob";
  const colouring = COLOURINGS[name];
  const most = largest(found.groups, colouring);
  const scale = colouring.scale === "ratio" ? Math.min(1, Math.max(0.02, most)) : most || 1;
  const lacks = view === "tokens" && found.groups.length && !found.groups.some((g) => g.samples.some((s) => s[colouring.needs]));
  return `${toolbar(found, view, name)}
    ${view === "tokens" && !lacks ? `<p>${scaleText(colouring, scale, most)}</p>` : ""}
    ${lacks ? `<div class="note">these samples have no ${safe(name)}: ${found.kind === "evaluation" ? "evaluation logs texts only"
      : "--log-token-training was off, the step did not train the policy, or an older version wrote them"}</div>` : ""}
    ${found.groups.map((group) => groupOf(group, view, colouring, scale)).join("") || `<p class="quiet">no group of this step ${
      at.find ? `has “${safe(at.find)}” in a prompt or response` : "is here"}</p>`}
    ${found.num_groups > found.per_page ? pages(found) : ""}`;
}

function toolbar(found, view, colour) {
  const { steps, step } = found;
  const at = steps.indexOf(step);
  const pick = (key, names, now) => `<select data-key="${key}" id="${key}">${names.map((n) => `<option ${n === now ? "selected" : ""}>${safe(n)}</option>`).join("")}</select>`;
  const move = (to, text, about) => `<button title="${about}" ${steps[to] === undefined ? "disabled" : ""} data-go='${JSON.stringify({ step: String(steps[to]), first: null })}'>${text}</button>`;
  return `<div class="tools"><label>${pick("kind", found.kinds.includes(found.kind) ? found.kinds : [found.kind, ...found.kinds], found.kind)} step</label>
    ${move(at - 1, "◀", "step before")}<select data-key="step" id="step">${steps.map((s) => `<option ${s === step ? "selected" : ""}>${s}</option>`).join("")}</select>${move(at + 1, "▶", "next step")}
    <label>view ${pick("view", VIEWS, view)}</label> ${view === "tokens" ? `<label>coloured by ${pick("colour", Object.keys(COLOURINGS), colour)}</label>
    <label><input type="checkbox" data-key="dim" id="dim" ${here.at.dim ? "checked" : ""}> dim what begins like the first sample</label>` : ""}
    <label>order ${pick("order", ORDERS, here.at.order || ORDERS[0])}</label>
    <input id="find" type="text" placeholder="find text" value="${safe(here.at.find || "")}">${pages(found)}
    ${found.num_read < found.num_samples ? `<span class="quiet">the first ${found.num_read} of ${found.num_samples} samples of this step</span>` : ""}</div>`;
}

function pages(found) {
  const { first, per_page: size, num_groups: count } = found;
  const button = (to, text, off) => `<button ${off ? "disabled" : ""} data-go='${JSON.stringify({ first: String(to) })}'>${text}</button>`;
  return `<span>${button(Math.max(0, first - size), "‹", first === 0)} groups ${count ? first + 1 : 0} to ${Math.min(count, first + size)} of ${count}
    ${button(first + size, "›", first + size >= count)}</span>`;
}
