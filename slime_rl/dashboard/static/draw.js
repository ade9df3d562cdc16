// Drawing without a library: everything is SVG text made from numbers. Text from runs always goes through `safe`.

export const COLOURS = ["#2563eb", "#d97706", "#059669", "#db2777", "#7c3aed", "#0891b2", "#ca8a04", "#64748b", "#dc2626"];

export function safe(text) {
  const signs = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;", "'": "&#39;" };
  return String(text).replace(/[&<>"']/g, (sign) => signs[sign]);
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  if (typeof value !== "number") return String(value);
  const size = Math.abs(value);
  if (size >= 1e6 || (size < 1e-3 && size > 0)) return value.toExponential(2);
  return String(+value.toPrecision(4));
}

const axis = (value) => short(+value.toPrecision(3)); // what fits beside a chart

// series: [{steps, values, colour, name}]
export function lines(series, width = 300, height = 110) {
  const points = series.flatMap((s) => s.values.filter(Number.isFinite));
  const steps = series.flatMap((s) => s.steps);
  if (!points.length) return `<p class="quiet">no values</p>`;
  let [low, high] = [Math.min(...points), Math.max(...points)];
  if (low === high) [low, high] = [low - 0.5, high + 0.5];
  const [first, last] = [Math.min(...steps), Math.max(...steps, Math.min(...steps) + 1)];
  const x = (step) => 42 + ((step - first) / (last - first)) * (width - 50);
  const y = (value) => 6 + (1 - (value - low) / (high - low)) * (height - 24);
  const paths = series.map((s) => {
    const shown = s.steps.map((step, i) => [step, s.values[i]]).filter(([, value]) => Number.isFinite(value));
    const d = shown.map(([step, value], i) => `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
    const dots = shown.length > 60 ? "" : shown.map(([step, value]) =>
      `<circle cx="${x(step).toFixed(1)}" cy="${y(value).toFixed(1)}" r="2.2" fill="${s.colour}"
        data-tip="${safe(s.name)}\nstep ${step}: ${short(value)}"/>`).join("");
    return `<path d="${d}" fill="none" stroke="${s.colour}" stroke-width="1.5"/>${dots}`;
  });
  return `<svg viewBox="0 0 ${width} ${height}">
    <line x1="42" y1="${height - 18}" x2="${width - 8}" y2="${height - 18}" stroke="var(--line)"/>
    <text x="38" y="12" text-anchor="end">${axis(high)}</text>
    <text x="38" y="${height - 18}" text-anchor="end">${axis(low)}</text>
    <text x="42" y="${height - 5}">${first}</text>
    <text x="${width - 8}" y="${height - 5}" text-anchor="end">${last}</text>${paths.join("")}</svg>`;
}

// parts: [{name, values, colour}] all over the same steps, stacked
export function stacked(steps, parts, unit = "", width = 900, height = 180) {
  if (!steps.length) return `<p class="quiet">no steps yet</p>`;
  const totals = steps.map((_, i) => parts.reduce((sum, part) => sum + (part.values[i] || 0), 0));
  const top = Math.max(...totals) || 1;
  const wide = (width - 50) / steps.length;
  const bars = steps.map((step, i) => {
    let from = 0;
    return parts.map((part) => {
      const value = part.values[i] || 0;
      const y = height - 18 - ((from + value) / top) * (height - 28);
      from += value;
      return `<rect x="${(44 + i * wide).toFixed(2)}" y="${y.toFixed(2)}" width="${Math.max(0.5, wide - (wide > 4 ? 1 : 0)).toFixed(2)}"
        height="${((value / top) * (height - 28)).toFixed(2)}" fill="${part.colour}"
        data-tip="step ${step}\n${safe(part.name)}: ${short(value)} ${unit}\nall: ${short(totals[i])} ${unit}"/>`;
    }).join("");
  });
  return `<svg viewBox="0 0 ${width} ${height}"><text x="40" y="14" text-anchor="end">${short(top)}</text>
    <text x="44" y="${height - 4}">${steps[0]}</text>
    <text x="${width - 6}" y="${height - 4}" text-anchor="end">${steps[steps.length - 1]}</text>${bars.join("")}</svg>
    <p class="legend">${parts.map((p) => `<span><i style="background:${p.colour}"></i>${safe(p.name)}</span>`).join("")}</p>`;
}

export function histogram(values, name, colour = COLOURS[0], width = 300, height = 110) {
  if (!values.length) return `<p class="quiet">no values</p>`;
  const [low, high] = [Math.min(...values), Math.max(...values)];
  const count = low === high ? 1 : Math.min(24, Math.max(4, Math.ceil(Math.sqrt(values.length))));
  const bins = Array(count).fill(0);
  for (const value of values) bins[Math.min(count - 1, Math.floor(((value - low) / (high - low || 1)) * count))] += 1;
  const edge = (i) => low + ((high - low) * i) / count;
  const steps = bins.map((_, i) => i);
  const bars = steps.map((i) => {
    const tall = (bins[i] / Math.max(...bins)) * (height - 28);
    const wide = (width - 20) / count;
    return `<rect x="${10 + i * wide}" y="${height - 18 - tall}" width="${wide - 1}" height="${tall}" fill="${colour}"
      data-tip="${safe(name)} ${short(edge(i))} to ${short(edge(i + 1))}: ${bins[i]}"/>`;
  });
  return `<svg viewBox="0 0 ${width} ${height}">${bars.join("")}<text x="10" y="${height - 4}">${short(low)}</text>
    <text x="${width - 10}" y="${height - 4}" text-anchor="end">${short(high)}</text></svg>`;
}

// tracks: [{process, track, bars: [[lane, start, end, name, details]]}] in seconds; only the window [from, to] is drawn
export function lanes(tracks, from, to, width = 1200) {
  const rows = [];
  const names = [...new Set(tracks.flatMap((t) => t.bars.map((bar) => bar[3].replace(/ \d+$/, ""))))];
  const colour = (name) => COLOURS[names.indexOf(name.replace(/ \d+$/, "")) % COLOURS.length];
  let y = 4;
  for (const { process, track, bars } of tracks) {
    const shown = bars.filter((bar) => bar[2] >= from && bar[1] <= to);
    const count = Math.min(24, 1 + Math.max(-1, ...shown.map((bar) => bar[0])));
    if (!count) continue;
    const tall = count > 4 ? 5 : 14;
    rows.push(`<text x="4" y="${y + 10}">${safe(process)} · ${safe(track)}</text>`);
    for (const [lane, start, end, name, details] of shown) {
      if (lane >= count) continue;
      const left = 150 + ((Math.max(start, from) - from) / (to - from)) * (width - 160);
      const right = 150 + ((Math.min(end, to) - from) / (to - from)) * (width - 160);
      const told = Object.entries(details).map(([key, value]) => `\n${key}: ${value}`).join("");
      rows.push(`<rect x="${left.toFixed(2)}" y="${y + lane * tall}" width="${Math.max(0.6, right - left).toFixed(2)}"
        height="${tall - 1}" fill="${colour(name)}" data-tip="${safe(name)}\n${short(end - start)} s${safe(told)}"/>`);
    }
    y += Math.max(count * tall, 14) + 6;
  }
  return `<svg viewBox="0 0 ${width} ${y + 14}">${rows.join("")}<text x="150" y="${y + 10}">${short(from)} s</text>
    <text x="${width - 8}" y="${y + 10}" text-anchor="end">${short(to)} s</text></svg>`;
}
