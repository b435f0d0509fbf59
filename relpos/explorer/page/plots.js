// Charts as SVG: profiles by distance, and perplexity by length. What is on the screen is what is saved.

import { number } from "relpos/maps.js";

const NAMESPACE = "http://www.w3.org/2000/svg";
// Okabe and Ito (https://jfly.uni-koeln.de/color/), as in the figures.
export const COLOURS = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31", "#7a7a7a"];

export function node(name, attributes = {}, ...children) {
  const made = document.createElementNS(NAMESPACE, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

const short = (value) => String(Number(value.toPrecision(6))).replace("-", "−");

function ticks(low, high, count = 6) {
  const raw = (high - low) / count || 1;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].find((s) => s * power >= raw) * power;
  const out = [];
  for (let at = Math.ceil(low / step) * step; at <= high + step * 1e-9; at += step) out.push(Math.abs(at) < step * 1e-9 ? 0 : at);
  return out;
}

const doublings = (low, high) => {
  const out = [];
  for (let at = 2 ** Math.ceil(Math.log2(low)); at <= high; at *= 2) out.push(at);
  return out;
};

const decades = (low, high) => {
  const out = [];
  for (let e = Math.floor(Math.log10(low)); e <= Math.log10(high); e++) for (const m of [1, 2, 5]) if (m * 10 ** e >= low && m * 10 ** e <= high) out.push(m * 10 ** e);
  return out.length > 1 ? out : [low, high];
};

/** A chart. series: { x, y, low, high, colour, width, label, dash, dots }. Returns the element, with `place(x)`. */
export function chart({ series, x, y, width = 640, height = 300, label, rules = [], right = 14 }) {
  const margin = { left: 68, right, top: 12, bottom: 40 };
  let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
  for (const one of series) {
    one.x.forEach((value, k) => {
      const [low, high] = [one.low ? one.low[k] : one.y[k], one.high ? one.high[k] : one.y[k]];
      if (!Number.isFinite(low) || !Number.isFinite(high)) return;
      x0 = Math.min(x0, value); x1 = Math.max(x1, value);
      y0 = Math.min(y0, low, one.y[k]); y1 = Math.max(y1, high, one.y[k]);
    });
  }
  if (x.log) { const room = (x1 / x0) ** 0.04 * (x0 === x1 ? 2 : 1); x0 /= room; x1 *= room; } else if (x0 === x1) { x0 -= 1; x1 += 1; }
  if (y.log) { y0 = Math.max(y0, y.floor || 1e-12); y1 = Math.max(y1, y0 * 1.01); } else { const pad = (y1 - y0) * 0.05 || 1; y0 -= pad; y1 += pad; }
  const tx = x.log ? Math.log : Number, ty = y.log ? (v) => Math.log(Math.max(v, y0)) : Number;
  const X = (v) => margin.left + ((tx(v) - tx(x0)) / (tx(x1) - tx(x0))) * (width - margin.left - margin.right);
  const Y = (v) => height - margin.bottom - ((ty(v) - ty(y0)) / (ty(y1) - ty(y0))) * (height - margin.top - margin.bottom);
  const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label, "font-family": "system-ui, sans-serif", "font-size": 12, fill: "currentColor" });
  for (const at of x.log ? doublings(x0, x1) : ticks(x0, x1, Math.min(8, width / 75))) {
    svg.append(node("line", { x1: X(at), x2: X(at), y1: margin.top, y2: height - margin.bottom, stroke: "currentColor", "stroke-opacity": 0.12 }),
      node("text", { x: X(at), y: height - margin.bottom + 15, "text-anchor": "middle" }, short(at)));
  }
  for (const at of y.log ? decades(y0, y1) : ticks(y0, y1)) {
    svg.append(node("line", { x1: margin.left, x2: width - margin.right, y1: Y(at), y2: Y(at), stroke: "currentColor", "stroke-opacity": 0.12 }),
      node("text", { x: margin.left - 5, y: Y(at) + 4, "text-anchor": "end" }, y.log ? number(at) : short(at)));
  }
  svg.append(node("text", { x: (margin.left + width) / 2, y: height - 6, "text-anchor": "middle" }, x.label),
    node("text", { transform: `translate(11 ${height / 2}) rotate(-90)`, "text-anchor": "middle" }, y.label));
  for (const { at, text } of rules) {
    if (at < x0 || at > x1) continue;
    svg.append(node("line", { x1: X(at), x2: X(at), y1: margin.top, y2: height - margin.bottom, stroke: "currentColor", "stroke-dasharray": "4 3", "stroke-opacity": 0.6 }),
      node("text", { x: X(at) + 4, y: margin.top + 11, "font-size": 11 }, text));
  }
  for (const one of series) {
    const points = Array.from(one.x, (value, k) => [X(value), Y(one.y[k])]);
    if (one.low) {
      const up = Array.from(one.x, (value, k) => `${X(value).toFixed(1)},${Y(one.high[k]).toFixed(1)}`);
      const down = Array.from(one.x, (value, k) => `${X(value).toFixed(1)},${Y(one.low[k]).toFixed(1)}`).reverse();
      if (one.dots) one.x.forEach((value, k) => svg.append(node("line", { x1: X(value), x2: X(value), y1: Y(one.low[k]), y2: Y(one.high[k]), stroke: one.colour })));
      else svg.append(node("polygon", { points: [...up, ...down].join(" "), fill: one.colour, "fill-opacity": 0.22 }));
    }
    const path = node("polyline", { points: points.map(([a, b]) => `${a.toFixed(1)},${b.toFixed(1)}`).join(" "), fill: "none", stroke: one.colour, "stroke-width": one.width || 1.2 });
    if (one.opacity) path.setAttribute("stroke-opacity", one.opacity);
    if (one.dash) path.setAttribute("stroke-dasharray", one.dash);
    if (one.label) path.append(node("title", {}, one.label));
    svg.append(path);
    if (one.dots) points.forEach(([a, b]) => svg.append(node("circle", { cx: a, cy: b, r: 3.2, fill: one.colour })));
  }
  // Over the chart, not in it: moving it draws nothing anew. Its own width is the chart's, so per cent will do.
  const mark = Object.assign(document.createElement("div"), { className: "mark" });
  mark.style.top = `${(100 * margin.top) / height}%`;
  mark.style.bottom = `${(100 * margin.bottom) / height}%`;
  svg.mark = mark;
  svg.place = (value) => {
    const seen = value !== null && value >= x0 && value <= x1;
    mark.style.visibility = seen ? "visible" : "hidden";
    if (seen) mark.style.transform = `translateX(${(100 * X(value)) / width}%)`;
  };
  svg.distance = (event) => {
    const box = svg.getBoundingClientRect();
    const t = ((event.clientX - box.left) / box.width * width - margin.left) / (width - margin.left - margin.right);
    return t < 0 || t > 1 ? null : Math.round(x0 + t * (x1 - x0));
  };
  return svg;
}

/** Profiles of all heads: the chosen one with its spread, the others faint. */
export function profileChart({ tensors, facts }, head, second, room) {
  const of = ({ tensors: t, facts: f }, h, look) => {
    const name = `layer.${f.layer}.profile.${f.kind}`;
    const n = t[`${name}.distances`].data.length;
    const slice = (key) => t[`${name}.${key}`].data.subarray(h * n, (h + 1) * n);
    const [mean, spread] = [slice("mean"), slice("spread")];
    const band = look.band && spread.some((s) => s > 0);
    return { x: t[`${name}.distances`].data, y: mean, ...look, ...(band ? { low: mean.map((m, k) => m - spread[k]), high: mean.map((m, k) => m + spread[k]) } : {}) };
  };
  const series = facts.heads.map((h) => of({ tensors, facts }, h, { colour: "currentColor", opacity: 0.28, label: `Head ${h + 1}` }));
  series.push(of({ tensors, facts }, head, { colour: COLOURS[0], width: 2.4, band: true, label: `Head ${head + 1}` }));
  if (second && head < second.facts.heads.length) series.push(of(second, head, { colour: COLOURS[1], width: 2.4, dash: "6 3", band: true, label: `Head ${head + 1} of the second` }));
  const log = facts.kind === "weights";
  const floor = log ? Math.max(1e-6, Math.min(...series.flatMap((s) => Array.from(s.y)).filter((v) => v > 0))) : 0;
  return chart({
    series, width: Math.max(320, Math.min(800, room || 640)), x: { label: "distance i − j in tokens" }, y: { label: facts.kind, log, floor },
    label: `${facts.kind} against distance, head ${head + 1} of ${facts.heads.length} marked`,
  });
}

/** Perplexity by length. */
export function curvesChart(curves, protocol) {
  const shown = curves.filter((one) => one.protocols[protocol]?.points.length);
  const series = shown.map((one, place) => {
    const { points } = one.protocols[protocol];
    return {
      x: points.map((p) => p.length), y: points.map((p) => p.perplexity),
      low: points.map((p) => p.ci95?.[0] ?? p.perplexity), high: points.map((p) => p.ci95?.[1] ?? p.perplexity),
      colour: COLOURS[place % COLOURS.length], width: 2, dots: true, label: one.label,
      dash: ["", "6 3", "2 3"][Math.floor(place / COLOURS.length) % 3],
    };
  });
  const all = series.flatMap((one) => one.y);
  const trained = new Set(shown.map((one) => one.train_length).filter(Boolean));
  const svg = chart({
    series, height: 380, width: 900, right: 210, x: { label: "window length in tokens", log: true },
    y: { label: "perplexity", log: Math.max(...all) > 3 * Math.min(...all) },
    label: `Perplexity by length, protocol ${protocol}: ${shown.map((one) => one.label).join(", ")}`,
    rules: trained.size === 1 ? [{ at: [...trained][0], text: `trained at ${[...trained][0]}` }] : [],
  });
  shown.forEach((one, place) => svg.append(
    node("rect", { x: 702, y: 18 + 16 * place, width: 14, height: 3, fill: COLOURS[place % COLOURS.length] }),
    node("text", { x: 722, y: 24 + 16 * place }, one.label)));
  return svg;
}
