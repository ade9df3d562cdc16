// Drawing without a library: everything is SVG text made from numbers. Text from runs always goes through `safe`.

export const COLOURS = [0, 1, 2, 3, 4, 5, 6, 7, 8].map((i) => `var(--c${i})`);
const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };

// What the pointer over a chart needs to tell values: [{xs, x0, x1, rows: [{name, values, unit, colour}]}]
let charts = [];
// Phases have the same colour wherever they are drawn, names that are not known one by their letters.
const PHASES = { rollout: 0, train: 1, forward_backward: 1, sync: 3, "send weights": 3, commit: 2, evaluate: 4, save: 5, log_probs: 6, ref_log_probs: 6,
  values: 2, optimizer: 8, advantages: 4, other: 7, start: 7, export: 5, stop: 7, step: 7, reward: 2, request: 0 };
export const colourOf = (name) => COLOURS[PHASES[name] ?? [...name].reduce((sum, letter) => sum + letter.charCodeAt(0), 0) % COLOURS.length];

export const forgetCharts = () => { charts = []; };
export const chartOf = (svg) => charts[+svg.dataset.chart];

export function safe(text) {
  return String(text ?? "").replace(/[&<>"']/g, (sign) => SIGNS[sign]);
}

export function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(1).replace("e+", "e");
  return String(+value.toPrecision(size >= 1000 ? Math.max(digits, Math.ceil(Math.log10(size))) : digits));
}

export function bytes(value) {
  if (typeof value !== "number") return short(value);
  const power = Math.max(0, Math.min(4, Math.floor(Math.log2(Math.abs(value) || 1) / 10)));
  return `${short(value / 1024 ** power)} ${["bytes", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

export const amount = (value, unit) => (unit === "bytes" ? bytes(value) : `${short(value)} ${unit && unit !== "-" ? unit : ""}`);

// Labels of an axis: as few digits as tell them apart.
function labels(values, unit) {
  if (unit === "bytes") return values.map(bytes);
  const enough = [3, 4, 5, 6, 7].find((digits) => new Set(values.map((value) => short(value, digits))).size === values.length);
  return values.map((value) => short(value, enough));
}

// `like` is the time that it stands beside: both have the same parts.
export function seconds(value, like = value) {
  if (value === null || value === undefined) return "–";
  if (like < 120) return `${short(value)} s`;
  const [hours, minutes] = [Math.floor(value / 3600), Math.floor((value % 3600) / 60)];
  return hours ? `${hours} h ${minutes} min` : `${minutes} min ${Math.round(value % 60)} s`;
}

export const share = (value) => `${short(100 * value)} %`;
export const legend = (parts) => `<p class="legend">${parts.map((p) =>
  `<span><i style="background:${p.colour}"></i>${safe(p.name)}</span>`).join("")}</p>`;
export const nothing = (why) => `<p class="quiet">${safe(why)}</p>`;

const THINNED = 1200; // points; longer curves come thinned out
const LEFT = 54, RIGHT = 8, TOP = 8, BOTTOM = 20;

// The frame of a chart: scales, axes with labels, and a number by which the pointer finds its values.
function frame(width, height, xs, low, high, xName, rows, draw) {
  const [first, last] = [xs[0], xs[xs.length - 1]];
  const x = (value) => LEFT + (last > first ? (value - first) / (last - first) : 0.5) * (width - LEFT - RIGHT);
  const y = (value) => TOP + (1 - (value - low) / (high - low)) * (height - TOP - BOTTOM);
  const number = charts.push({ xs, from: x(first), to: x(last), width, xName, rows }) - 1;
  const at = [low, (low + high) / 2, high];
  const texts = labels(at, rows[0]?.unit);
  const ticks = at.map((value, i) => `<line class="grid" x1="${LEFT}" x2="${width - RIGHT}"
    y1="${y(value).toFixed(1)}" y2="${y(value).toFixed(1)}"/>
    <text x="${LEFT - 5}" y="${(y(value) + 3.5).toFixed(1)}" text-anchor="end">${texts[i]}</text>`);
  return wide(width, `<svg viewBox="0 0 ${width} ${height}" data-chart="${number}">${ticks.join("")}${draw(x, y)}
    <text x="${LEFT}" y="${height - 5}">${short(first)}</text>
    <text x="${(LEFT + width - RIGHT) / 2}" y="${height - 5}" text-anchor="middle">${safe(xName)}</text>
    <text x="${width - RIGHT}" y="${height - 5}" text-anchor="end">${short(last)}</text></svg>`);
}

// Of a wide picture a narrow window shows a part, large enough to be read.
const wide = (width, svg, keep = "") => (width < 800 ? svg : `<div class="scroll wide" ${keep && `data-keep="${keep}"`}>${svg}</div>`);

const ascending = (values) => [...new Set(values)].sort((a, b) => a - b);
const path = (points) => points.map(([x, y], i) => `${i ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");

// series: [{xs, values, colour, name, unit, dashed}]; bands: [{xs, low, high, colour}] behind them
export function lines(series, { bands = [], xName = "step", width = 320, height = 120 } = {}) {
  const points = [...series.flatMap((s) => s.values), ...bands.flatMap((b) => [...b.low, ...b.high])].filter(Number.isFinite);
  if (!points.length) return nothing("no values yet");
  let low = Infinity, high = -Infinity;
  for (const value of points) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === high) [low, high] = low === 0 ? [0, 1] : [low - Math.abs(low) / 2, high + Math.abs(high) / 2];
  const xs = ascending(series.flatMap((s) => s.xs));
  const rows = series.map((s) => ({ ...s, values: new Map(s.xs.map((at, i) => [at, s.values[i]])) }));
  return frame(width, height, xs, low, high, xName, rows, (x, y) => bands.map((b) =>
    `<path d="${path([...b.xs.map((at, i) => [x(at), y(b.high[i])]), ...b.xs.map((at, i) => [x(at), y(b.low[i])]).reverse()])}Z"
      fill="${b.colour}" opacity="0.18"/>`).join("") + series.map((s) => {
    const shown = s.xs.map((at, i) => [x(at), y(s.values[i])]).filter(([, at]) => Number.isFinite(at));
    const dots = shown.length > 40 ? "" : shown.map(([cx, cy]) =>
      `<circle cx="${cx.toFixed(1)}" cy="${cy.toFixed(1)}" r="1.8" fill="${s.colour}"/>`).join("");
    return `<path d="${path(shown)}" fill="none" stroke="${s.colour}" stroke-width="1.5"
      ${s.dashed ? 'stroke-dasharray="4 3"' : ""} stroke-linejoin="round"/>${dots}`;
  }).join(""));
}

// parts: [{name, values: Map(x -> value), colour}]; one block for each x, parts on top of each other
export function stacked(xs, parts, { unit = "", xName = "step", width = 900, height = 190, top = null } = {}) {
  if (!xs.length || !parts.length) return nothing("no values yet");
  const below = xs.map(() => 0);
  const layers = parts.map((part) => {
    let known = 0; // of a curve that was thinned out not every x is here: then the value before stands; else it was nothing
    return { ...part, from: [...below], to: xs.map((at, i) => {
      known = part.values.get(at) ?? (xs.length > THINNED ? known : 0);
      return (below[i] += known);
    }) };
  });
  const high = top ?? (Math.max(...below) || 1);
  const rows = [...parts.map((p) => ({ ...p, unit })), { name: "together", unit, values: new Map(xs.map((at, i) => [at, below[i]])) }];
  const chart = frame(width, height, xs, 0, high, xName, parts.length > 1 ? rows : rows.slice(0, 1), (x, y) => {
    const block = (width - LEFT - RIGHT) / Math.max(1, xs.length);
    const edges = xs.map((_, i) => [LEFT + i * block, LEFT + (i + 1) * block - (block > 5 ? 1 : 0)]);
    return layers.map((layer) => `<path fill="${layer.colour}" d="${layer.to.map((to, i) => to - layer.from[i] > 0
      ? `M${edges[i][0].toFixed(1)} ${y(layer.from[i]).toFixed(1)}V${y(to).toFixed(1)}H${edges[i][1].toFixed(1)}V${
        y(layer.from[i]).toFixed(1)}Z` : "").join("")}"/>`).join("");
  });
  charts[charts.length - 1].blocks = true;
  return chart + legend(parts);
}

export function histogram(values, name, colour = COLOURS[0], width = 320, height = 120) {
  if (!values.length) return nothing("no values");
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const whole = values.every(Number.isInteger);
  const most = whole ? Math.min(24, high - low + 1) : Math.min(24, Math.max(4, Math.ceil(Math.sqrt(values.length))));
  const count = low === high ? 1 : most;
  const size = low === high ? 1 : (whole ? high - low + 1 : high - low) / count;
  const bins = Array(count).fill(0);
  for (const value of values) bins[Math.min(count - 1, Math.floor((value - low) / size))] += 1;
  return columns(bins.map((many, i) => [whole && size === 1 ? short(low + i) : `${short(low + i * size)} to ${
    short(low + (i + 1) * size)}`, many]), name, colour, width, height);
}

// bars: [[label, count]]
export function columns(bars, name, colour = COLOURS[0], width = 320, height = 120) {
  if (!bars.length) return nothing("no values");
  const most = Math.max(...bars.map((bar) => bar[1]));
  const each = Math.min(60, (width - LEFT - RIGHT) / bars.length);
  const every = Math.ceil(bars.length / Math.max(1, Math.floor((width - LEFT) / 60)));
  const drawn = bars.map(([label, count], i) => {
    const tall = (count / most) * (height - TOP - BOTTOM);
    const middle = LEFT + (i + 0.5) * each;
    return `<rect x="${(LEFT + i * each + 1).toFixed(1)}" y="${(height - BOTTOM - tall).toFixed(1)}" width="${(each - 2).toFixed(1)}"
      height="${tall.toFixed(1)}" fill="${colour}" data-tip="${safe(name)} ${safe(label)}: ${count}"/>
      ${i % every ? "" : `<text x="${middle.toFixed(1)}" y="${height - 5}" text-anchor="middle">${safe(label.split(" to ")[0])}</text>`}`;
  });
  return `<svg viewBox="0 0 ${width} ${height}"><text x="${LEFT - 5}" y="${TOP + 4}" text-anchor="end">${most}</text>
    <text x="${LEFT - 5}" y="${height - BOTTOM}" text-anchor="end">0</text>
    <line class="grid" x1="${LEFT}" x2="${width - RIGHT}" y1="${height - BOTTOM}" y2="${height - BOTTOM}"/>${drawn.join("")}</svg>`;
}

// window: {from, to, marks: [[step, time]], tracks: [{process, track, busy, gaps, bars | at_once}]}, in seconds
export function lanes(window, width = 1200) {
  const label = 190;
  const { from, to, tracks, marks } = window;
  const x = (time) => label + ((Math.min(to, Math.max(from, time)) - from) / (to - from)) * (width - label - 10);
  const plain = (name) => name.replace(/ \d+$/, ""); // "step 7" and "step 8" have one colour
  const names = [...new Set(tracks.flatMap((t) => (t.bars || []).map((bar) => plain(bar[3]))))];
  const colour = (name) => colourOf(plain(name));
  const rows = [];
  let y = 18;
  for (const track of tracks) {
    const count = track.bars ? 1 + Math.max(...track.bars.map((bar) => bar[0])) : 0;
    const tall = track.bars ? Math.max(18, count * 13) : 44;
    rows.push(`<text class="label" x="4" y="${y + 12}">${safe(track.process)} · ${safe(track.track)}</text>
      <text x="${label - 8}" y="${y + 12}" text-anchor="end">${share(track.busy)}</text>
      <rect class="lane" x="${label}" y="${y}" width="${width - label - 10}" height="${tall}"/>`);
    for (const [start, end] of track.gaps) {
      rows.push(`<rect class="gap" x="${x(start).toFixed(1)}" y="${y}" width="${Math.max(0.5, x(end) - x(start)).toFixed(1)}"
        height="${tall}" fill="url(#idle)" data-tip="${safe(track.process)} · ${safe(track.track)}\nidle for ${seconds(end - start)}"/>`);
    }
    for (const [lane, start, end, name, details] of track.bars || []) {
      const [left, right] = [x(start), x(end)];
      const told = Object.entries(details || {}).map(([key, value]) => `\n${key}: ${typeof value === "object" ? JSON.stringify(value) : value}`);
      const high = count > 1 ? 12 : tall;
      rows.push(`<rect x="${left.toFixed(1)}" y="${y + lane * 13}" width="${Math.max(0.6, right - left - 0.4).toFixed(1)}" height="${high}"
        fill="${colour(name)}" data-tip="${safe(name)}\n${seconds(end - start)}${safe(told.join(""))}"/>`);
      if (right - left > 7 * name.length + 8) {
        rows.push(`<text class="inside" x="${(left + 4).toFixed(1)}" y="${y + lane * 13 + (count > 1 ? 10 : 13)}">${safe(name)}</text>`);
      }
    }
    if (track.at_once) {
      const most = Math.max(...track.at_once.map((point) => point[1]));
      const step = (to - from) / track.at_once.length;
      const up = (many) => y + tall - (many / most) * (tall - 4);
      rows.push(`<path fill="${COLOURS[0]}" opacity="0.75" d="M${x(from)} ${y + tall}${track.at_once.map(([time, many]) =>
        `V${up(many).toFixed(1)}H${x(time + step).toFixed(1)}`).join("")}V${y + tall}Z"/>
        <text class="label" x="4" y="${y + 27}">${track.count}${track.is_cut ? "+" : ""} in all, up to ${most} at once</text>`);
    }
    y += tall + 8;
  }
  const lines = marks.map(([step, time]) => `<line class="mark" x1="${x(time).toFixed(1)}" x2="${x(time).toFixed(1)}" y1="14" y2="${y}"/>
    <text x="${(x(time) - 3).toFixed(1)}" y="11" text-anchor="end">step ${step} ends</text>`);
  return wide(width, `<svg viewBox="0 0 ${width} ${y + 16}" class="lanes"><defs><pattern id="idle" width="6" height="6" patternUnits="userSpaceOnUse"
    patternTransform="rotate(45)"><rect width="6" height="6" class="hatch-back"/><line x1="0" x2="0" y1="0" y2="6" class="hatch"/></pattern></defs>
    ${rows.join("")}${lines.join("")}<text x="${label}" y="${y + 12}">${seconds(from, to)}</text>
    <text x="${(label + width - 10) / 2}" y="${y + 12}" text-anchor="middle">since the run began</text>
    <text x="${width - 10}" y="${y + 12}" text-anchor="end">${seconds(to)}</text></svg>`, "lanes")
    + `<p class="legend">${names.map((name) => `<span><i style="background:${colour(name)}"></i>${safe(name)}</span>`).join("")}
    <span><i class="idle"></i>idle: a bubble</span></p>`;
}
