// The page: its state, which the address keeps, and what follows from it. Every change goes through `set`.

import { capture, exported, json } from "relpos/data.js";
import { Grid, Large, Maps, clamped, difference, number, piece, setPalettes, zoomed } from "relpos/maps.js";
import { Playground } from "relpos/playground.js";
import { curvesChart, profileChart } from "relpos/plots.js";
import { saveNpz, savePng, saveSvg, sheet, stacked } from "relpos/save.js";

const $ = (id) => document.getElementById(id);
const START = { view: "heads", a: "", b: "", layer: "", head: 0, kind: "", shared: "", palette: "", sort: "", grid: "a", zoom: "", at: "", theme: "", text: "", protocol: "", play: "" };
const state = { ...START };
let index, playground, A = null, B = null; // the facts of the two sources
let shown = {}; // what is on the screen: maps of the kinds, of both sources
let turn = 0; // the latest drawing wins
const views = { a: null, b: null, d: null };

// State and address -----------------------------------------------------------------------------------------------

function readAddress() {
  const given = new URLSearchParams(location.hash.slice(1));
  for (const key of Object.keys(START)) state[key] = given.get(key) ?? START[key];
  state.head = Math.max(0, Math.trunc(Number(state.head)) || 0);
  if (!["heads", "play", "curves"].includes(state.view)) state.view = "heads";
}

let writing = 0, own = "";
function writeAddress(now = false) {
  clearTimeout(writing);
  const write = () => {
    const kept = new URLSearchParams();
    for (const [key, value] of Object.entries(state)) if (String(value) !== String(START[key])) kept.set(key, value);
    own = `#${kept}`;
    try { history.replaceState(null, "", own); } catch { /* a frame without an address of its own */ }
  };
  if (now) write(); else writing = setTimeout(write, 150);
}

async function set(change) {
  Object.assign(state, change);
  writeAddress();
  await draw();
}

function fail(error) {
  $("alert").hidden = !error;
  if (error) $("alert").firstElementChild.textContent = error.message || String(error);
}

// Data ------------------------------------------------------------------------------------------------------------

const facts = new Map();
const describe = async (key) => {
  if (!facts.has(key)) facts.set(key, await json(`api/source?source=${encodeURIComponent(key)}`));
  return facts.get(key);
};
const address = (what, source, layer, kind) => `api/${what}?source=${encodeURIComponent(source.key)}&layer=${layer}&kind=${kind}`;

const decoded = new WeakMap();
async function maps(source, layer, kind, head = null) {
  const answer = await capture(address("maps", source, layer, kind) + (head === null ? "" : `&head=${head}`));
  if (!decoded.has(answer)) decoded.set(answer, new Maps(answer));
  return decoded.get(answer);
}

/** Layer of a source for the layer that is asked for: itself, or the last that can be drawn. */
const layerOf = (source, layer) => (source.layers[layer] ? String(layer) : Object.keys(source.layers).at(-1));

// Drawing ---------------------------------------------------------------------------------------------------------

const look = () => ({ shared: Boolean(state.shared), palette: state.palette || null });

async function draw() {
  const mine = ++turn;
  theme();
  for (const tab of document.querySelectorAll("[role=tab]")) {
    const on = tab.dataset.view === state.view;
    tab.setAttribute("aria-selected", String(on));
    tab.tabIndex = on ? 0 : -1;
    $(`view-${tab.dataset.view}`).hidden = !on;
  }
  try {
    if (state.view === "heads") await drawHeads(mine);
    else if (state.view === "play") { if (!playground.name) playground.open(playState()); else if (playground.answer) playground.show(); }
    else drawCurves();
    if (mine === turn) fail(null);
  } catch (error) {
    if (mine === turn) { fail(error); $("main").setAttribute("aria-busy", "false"); $("heads").classList.remove("loading"); }
  }
}

const playState = () => { try { return JSON.parse(state.play); } catch { return null; } };

async function drawHeads(mine) {
  if (!index.sources.length) { $("heads").innerHTML = '<p class="empty">There is nothing to show: start relpos explore with a capture, a model folder or an encoding.</p>'; return; }
  $("main").setAttribute("aria-busy", "true");
  $("heads").classList.add("loading");
  if (!A) $("title").textContent = "Loading…";
  // A link may name sources of another page; texts that were typed have keys of their own.
  const lost = ["a", "b"].filter((side) => state[side] && !state[side].startsWith("t") && !index.sources.some((s) => s.key === state[side]));
  for (const side of lost) state[side] = "";
  const a = await describe(state.a || index.sources[0].key);
  const b = state.b ? await describe(state.b) : null;
  if (mine !== turn) return;
  A = a; B = b;
  if (!Object.keys(A.layers).length) throw new Error(`Nothing of ${A.title} can be drawn: its capture holds no layer.`);
  const layer = layerOf(A, state.layer);
  const kinds = A.layers[layer];
  const kind = kinds.includes(state.kind) ? state.kind : kinds.includes(A.default_kind) ? A.default_kind : kinds[0];
  if (state.kind && kind !== state.kind) note(`${A.title} holds no ${state.kind} in layer ${Number(layer) + 1}; ${kind} are shown.`); else note(lost.length ? "The link names a source that this page does not have." : "");
  let layerB = null;
  if (B) {
    layerB = layerOf(B, state.layer || layer);
    if (!B.layers[layerB].includes(kind)) throw new Error(`${B.title} holds no ${kind} in layer ${Number(layerB) + 1}: choose another kind.`);
  }
  const [first, second] = await Promise.all([maps(A, layer, kind), B ? maps(B, layerB, kind) : null]);
  if (mine !== turn) return;
  state.head = Math.min(state.head, first.heads.length - 1);
  const change = second ? cachedDifference(first, second) : null;
  shown = { layer, layerB, kind, first, second, change, values: { a: { [kind]: first }, b: second ? { [kind]: second } : {} }, windows: null, profile: null };
  controls();
  paint();
  $("heads").classList.remove("loading");
  $("main").setAttribute("aria-busy", "false");
  requestAnimationFrame(() => performance.mark("relpos-painted")); // benchmarks/explorer.py reads it
  document.documentElement.dataset.painted = `${A.key}/${layer}/${kind}/${state.b}`;
  rest(mine).catch((error) => { if (mine === turn) fail(error); });
}

let lastDifference = null;
function cachedDifference(first, second) {
  if (lastDifference?.first !== first || lastDifference?.second !== second) lastDifference = { first, second, made: difference(first, second) };
  return lastDifference.made;
}

const note = (text) => { $("text-note").textContent = text; };
const inGrid = () => (shown.second && state.grid === "b" ? shown.second : shown.second && state.grid === "d" ? shown.change : shown.first);

let lastPaint = null;
function paint() {
  const { first, second, change, layer, kind, windows } = shown;
  const order = state.sort === "window" && windows ? windows.map((_, h) => h).slice() : null;
  const ranked = order ? Array.from(windows.keys()).sort((x, y) => windows[x] - windows[y]) : null;
  const key = [inGrid(), state.shared, state.palette];
  if (!lastPaint || lastPaint.some((part, k) => part !== key[k])) {
    grid.show(inGrid(), { ...look(), windows, order: ranked });
    lastPaint = key;
  } else {
    grid.panels.forEach((_, h) => grid.label(h, windows));
    grid.order(ranked);
  }
  grid.select(state.head);
  const name = (source, at) => `${source.title}${source.num_layers > 1 ? `, layer ${Number(at) + 1} of ${source.num_layers}` : ""}`;
  $("title").replaceChildren(`${name(A, layer)}: ${kind}${first.alone ? " of the bias alone" : ""}${B ? `, beside ${name(B, shown.layerB)}` : ""} `,
    Object.assign(document.createElement("small"), { textContent: `${first.length} tokens${first.block > 1 ? `, each pixel the mean of ${first.block} × ${first.block}` : ""}` }));
  enlarge();
  table();
  provenance();
}

function enlarge() {
  const { first, second, change, kind } = shown;
  const view = clamped(zoom() || { x: 0, y: 0, size: first.length }, first.length);
  const wanted = second ? ["a", "b", "d"] : ["a"];
  for (const key of wanted) {
    views[key] ||= new Large({ hover, changed: (next) => { state.zoom = [next.x, next.y, next.size].map((v) => Number(v.toFixed(2))).join(","); writeAddress(); frame(() => enlarge()); } });
  }
  const figures = wanted.map((key) => views[key].figure);
  if ($("large").children.length !== figures.length) $("large").replaceChildren(...figures);
  $("large").classList.toggle("two", Boolean(second));
  const pick = { a: full("a") || first, b: second && (full("b") || second), d: change };
  const names = { a: second ? ` of ${A.title}` : "", b: ` of ${B?.title}`, d: ", second minus first" };
  for (const key of wanted) {
    const map = pick[key], h = map.heads.length === 1 ? 0 : Math.min(state.head, map.heads.length - 1);
    const small = { a: first, b: second, d: change }[key];
    const caption = `Head ${state.head + 1}${names[key]}: ${key === "d" ? `difference of ${kind}` : kind} from ${number(small.range[2 * Math.min(state.head, small.heads.length - 1)])} to ${number(small.range[2 * Math.min(state.head, small.heads.length - 1) + 1])}`;
    views[key].cursor = cursor();
    if (views[key].maps === map && views[key].h === h && views[key].painted === `${state.shared}${state.palette}`) {
      Object.assign(views[key], { view, pieces: (key === "b" ? B : A).pieces });
      views[key].draw();
    } else {
      views[key].show(withShared(map, small), h, look().shared, look().palette, view, (key === "b" ? B : A).pieces, caption);
      views[key].maps = map;
      views[key].painted = `${state.shared}${state.palette}`;
    }
  }
  readout();
}

/** A map of one head is coloured by the shared range of all of them. */
const withShared = (map, all) => { if (map !== all) map.shared = all.shared; return map; };
const full = (side) => shown.full?.[side]?.heads[0] === state.head ? shown.full[side] : null;

/** After the first picture: profile and windows, the other kinds for the readout, all cells of a pooled head, and
 *  the neighbouring layers, so that walking there waits for nothing. */
async function rest(mine) {
  const { layer, kind, layerB } = shown;
  const [profile, second] = await Promise.all([capture(address("profile", A, layer, kind)), B ? capture(address("profile", B, layerB, kind)) : null]);
  if (mine !== turn) return;
  shown.profile = profile; shown.profileB = second;
  shown.windows = profile.tensors[`layer.${layer}.window`]?.data || null;
  paint();
  chart();
  await fullCells(mine);
  for (const [side, source, at] of [["a", A, layer], ["b", B, layerB]]) {
    for (const other of source ? source.layers[at] : []) {
      const made = await maps(source, at, other);
      if (mine !== turn) return;
      shown.values[side][other] = made;
      readout();
    }
  }
  document.documentElement.dataset.ready = document.documentElement.dataset.painted;
  const near = [Number(layer) - 1, Number(layer) + 1].filter((at) => A.layers[at]?.includes(kind));
  for (const at of near) {
    await maps(A, at, kind);
    if (mine !== turn) return;
  }
}

async function fullCells(mine) {
  const { first, second, kind, layer, layerB } = shown, { head } = state;
  if (exported || first.block === 1) return;
  const [a, b] = await Promise.all([maps(A, layer, kind, head), second ? maps(B, layerB, kind, head) : null]);
  if (mine !== turn || state.head !== head) return;
  shown.full = { a, ...(b ? { b } : {}) };
  enlarge();
}

function chart() {
  if (!shown.profile) return;
  const svg = profileChart(shown.profile, state.head, shown.profileB, $("profile").clientWidth);
  svg.addEventListener("pointermove", (event) => {
    const d = svg.distance(event), i = cursor()?.[0] ?? shown.first.length - 1;
    if (d !== null && i - d >= 0 && i - d < shown.first.length) hover(i, i - d);
  });
  $("profile").replaceChildren(svg, svg.mark);
  shown.svg = svg;
  const at = shown.windows;
  $("profile-note").textContent = `Mean over the text; the band is one standard deviation over the pairs of tokens at a distance. Head ${state.head + 1} is marked`
    + (shown.profileB ? ", dashed: the second source" : "") + (at ? `. Its effective window (90% of the weight${shown.profile.facts.alone ? " of the bias alone" : ""}) is ${at[state.head].toFixed(1)} tokens.` : ".");
  place();
}

function drawCurves() {
  if (!index.curves.length) {
    $("curves").innerHTML = '<p class="empty">No evaluation results were given. <code>relpos evaluate RUN --data DATA</code> writes them; then <code>relpos explore evaluation/*.json</code> draws them here.</p>';
    return;
  }
  const names = [...new Set(index.curves.flatMap((one) => Object.keys(one.protocols).filter((name) => one.protocols[name].points.length)))];
  const protocol = names.includes(state.protocol) ? state.protocol : names[0];
  fill($("protocol"), names.map((name) => [name, name]), protocol);
  $("curves-bar").hidden = !protocol; // without a curve there is nothing to choose or to save
  if (!protocol) { $("curves").innerHTML = '<p class="empty">No length was measured in these results.</p>'; return; }
  const svg = curvesChart(index.curves, protocol);
  $("curves").replaceChildren(svg);
  $("curves-note").textContent = [index.curves.find((one) => one.protocols[protocol])?.protocols[protocol].statement, "Bars: 95% intervals.", ...index.warnings].join(" ");
  const lengths = [...new Set(index.curves.flatMap((one) => (one.protocols[protocol]?.points || []).map((p) => p.length)))].sort((x, y) => x - y);
  const made = document.createElement("table");
  const row = (cells, tag) => { const line = made.insertRow(); for (const text of cells) line.append(Object.assign(document.createElement(tag), { textContent: text })); };
  row(["perplexity at", ...lengths], "th");
  for (const one of index.curves) row([one.label, ...lengths.map((l) => number(one.protocols[protocol]?.points.find((p) => p.length === l)?.perplexity))], "td");
  $("curves-table").replaceChildren(made);
}

// Cursor ----------------------------------------------------------------------------------------------------------

const pair = (text, count) => { const parts = String(text).split(",").map(Number); return parts.length === count && parts.every(Number.isFinite) ? parts : null; };
const cursor = () => { const at = pair(state.at, 2); return at && shown.first && at.every((v) => v >= 0 && v < shown.first.length) ? at.map(Math.trunc) : null; };
const zoom = () => { const at = pair(state.zoom, 3); return at && { x: at[0], y: at[1], size: at[2] }; };

let pending = 0;
const frame = (work) => { if (!pending) pending = requestAnimationFrame(() => { pending = 0; work(); }); };

function hover(i, j) {
  const next = `${i},${j}`;
  if (next === state.at) return;
  state.at = next;
  writeAddress();
  $("readout").setAttribute("aria-live", "off");
  frame(place);
}

function place() {
  const at = cursor();
  grid.cursor(at ? at[0] : null, at ? at[1] : null);
  for (const view of Object.values(views)) if (view && view.figure.isConnected) { view.cursor = at; view.cross(); }
  shown.svg?.place(at ? at[0] - at[1] : null);
  readout();
}

function value(side, kind) {
  const at = cursor(), all = shown.values?.[side]?.[kind];
  if (!at || !all) return null;
  const exact = kind === shown.kind && full(side);
  return exact ? exact.value(0, ...at) : state.head < all.heads.length ? all.value(state.head, ...at) : null;
}

const READ = [["bias", "bias"], ["scores", "content score"], ["weights", "attention weight"]];
let lines = null; // the readout's cells, built once and then only filled: this runs in every frame of a hover

function readout() {
  const box = $("readout"), at = cursor();
  if (!at) { box.textContent = "Point at a map to read its values."; lines = null; return; }
  const rows = [["a", A, `${A.title}, head ${state.head + 1}`], ...(B ? [["b", B, `${B.title}, head ${state.head + 1}`], ["d", null, "difference"]] : [])];
  const key = JSON.stringify(rows.map(([, , name]) => name));
  if (lines?.key !== key || !lines.head.isConnected) {
    box.innerHTML = `<div>query <span></span> <code></code>, key <span></span> <code></code>, distance <span></span></div><table><tr><th></th>${READ.map(([, name]) => `<th scope="col">${name}</th>`).join("")}</tr>`
      + `${rows.map(([side, , name]) => `<tr data-side="${side}"><th scope="row">${escaped(name)}</th>${READ.map(([kind]) => `<td data-kind="${kind}"></td>`).join("")}</tr>`).join("")}</table>`;
    lines = { key, head: box.firstElementChild, parts: [...box.firstElementChild.children], cells: [...box.querySelectorAll("td")] };
  }
  const [i, j] = at, [query, queryToken, other, otherToken, distance] = lines.parts;
  query.textContent = i;
  other.textContent = j;
  for (const [code, place] of [[queryToken, i], [otherToken, j]]) { code.hidden = !A.pieces.length; code.textContent = piece(A.pieces[place]); }
  distance.textContent = `${i - j}${shown.first.block > 1 && !full("a") ? `, mean of ${shown.first.block} × ${shown.first.block} cells` : ""}`;
  let place = 0;
  for (const [side, source] of rows) {
    for (const [kind] of READ) {
      const cell = lines.cells[place++];
      if (side === "d") {
        const [x, y] = [value("a", kind), value("b", kind)];
        cell.textContent = x === null || y === null ? "–" : number(y - x);
      } else {
        cell.textContent = shownValue(side, source, kind);
        cell.dataset.value = value(side, kind) ?? "";
      }
    }
  }
}

function shownValue(side, source, kind) {
  const at = side === "a" ? shown.layer : shown.layerB;
  if (!source.layers[at].includes(kind)) return kind === "bias" && source.default_kind !== "bias" ? "none" : "not held";
  const [i, j] = cursor();
  if (!shown.values[side][kind]) return "…";
  const found = value(side, kind);
  if (found === null) return j > i ? "not seen" : "–";
  return number(found) + (shown.values[side][kind].alone ? " (bias alone)" : ""); // q and k are not held
}

const escaped = (text) => text.replace(/[&<>"]/g, (letter) => `&#${letter.charCodeAt(0)};`);

// Controls --------------------------------------------------------------------------------------------------------

function fill(select, options, value) {
  const key = JSON.stringify(options);
  if (select.dataset.key !== key) {
    select.replaceChildren(...options.map(([at, text]) => new Option(text, at)));
    select.dataset.key = key;
  }
  select.value = value;
}

function controls() {
  const { layer, kind, first } = shown;
  const sources = index.sources.map(({ key, name }) => [key, name]);
  const typed = A.key.startsWith("t") ? [[A.key, `${A.name} (your text)`]] : [];
  fill($("a"), [...typed, ...sources], A.key);
  fill($("b"), [["", "nothing"], ...sources.filter(([key]) => key !== A.key)], B ? B.key : "");
  fill($("layer"), Object.keys(A.layers).map((at) => [at, `${Number(at) + 1} of ${A.num_layers}`]), layer);
  fill($("head"), first.heads.map((h) => [String(h), String(h + 1)]), String(state.head));
  fill($("kind"), A.layers[layer].map((name) => [name, name]), kind);
  $("shared").value = state.shared ? "1" : "";
  fill($("palette"), [["", "as in figures"], ...Object.keys(index.palettes).map((name) => [name, name.replace("_", " ")])], state.palette);
  $("sort").value = state.sort;
  $("grid").value = state.grid;
  $("grid-label").hidden = !B;
  const model = facts.get(A.key.startsWith("t") ? state.reader : A.key);
  $("text-form").hidden = !(index.live && model?.reads);
}

function table() {
  const { first, windows, profile, layer } = shown;
  const made = document.createElement("table");
  const row = (cells, tag) => { const line = made.insertRow(); cells.forEach((text, k) => line.append(Object.assign(document.createElement(k ? tag : "th"), { textContent: text }))); };
  row(["head", "lowest", "highest", "effective window", "± over queries", "entropy, nats"], "th");
  const spread = profile?.tensors[`layer.${layer}.window.spread`]?.data, entropy = profile?.tensors[`layer.${layer}.entropy`]?.data;
  first.heads.forEach((_, h) => row([h + 1, number(first.range[2 * h]), number(first.range[2 * h + 1]), windows ? windows[h].toFixed(1) : "–", spread ? spread[h].toFixed(1) : "–", entropy ? entropy[h].toFixed(2) : "–"], "td"));
  $("numbers").replaceChildren(made);
}

function provenance() {
  const list = $("provenance");
  list.replaceChildren();
  for (const source of [A, B].filter(Boolean)) {
    for (const [key, text] of Object.entries({ name: source.name, ...source.provenance })) {
      list.append(Object.assign(document.createElement("dt"), { textContent: key }), Object.assign(document.createElement("dd"), { textContent: text }));
    }
  }
}

function theme() {
  if (state.theme) document.documentElement.dataset.theme = state.theme; else delete document.documentElement.dataset.theme;
  $("theme").textContent = `Theme: ${state.theme || "system"}`;
}

function walkHeads(by) {
  const count = shown.first.heads.length;
  const order = state.sort === "window" && shown.windows ? Array.from(shown.windows.keys()).sort((x, y) => shown.windows[x] - shown.windows[y]) : [...Array(count).keys()];
  choose(order[(order.indexOf(state.head) + by + count) % count]);
}

/** Another head of the maps that are here already: nothing is asked for, but all cells of a pooled one. */
function choose(head) {
  state.head = head;
  writeAddress();
  $("head").value = String(head);
  grid.select(head);
  enlarge();
  chart();
  fullCells(turn).catch(fail);
}

function walkLayers(by) {
  const layers = Object.keys(A.layers), at = layers.indexOf(shown.layer) + by;
  if (at >= 0 && at < layers.length) set({ layer: layers[at] });
}

function zoomBy(factor) {
  const { length } = shown.first, view = clamped(zoom() || { x: 0, y: 0, size: length }, length);
  const [i, j] = cursor() || [view.y + view.size / 2, view.x + view.size / 2];
  const next = zoomed(view, factor, j, i, length);
  state.zoom = next.size >= length ? "" : [next.x, next.y, next.size].map((v) => Number(v.toFixed(2))).join(",");
  writeAddress();
  enlarge();
}

function moveCursor(di, dj) {
  const { length } = shown.first, [i, j] = cursor() || [length - 1, Math.max(0, length - 2)];
  state.at = `${Math.max(0, Math.min(length - 1, i + di))},${Math.max(0, Math.min(length - 1, j + dj))}`;
  writeAddress();
  $("readout").setAttribute("aria-live", "polite");
  const view = zoom();
  if (view) {
    const [y, x] = cursor();
    const into = (start, at) => Math.max(at + 1 - view.size, Math.min(start, at));
    state.zoom = [into(view.x, x), into(view.y, y), view.size].join(",");
    enlarge();
  }
  place();
}

function keys(event) {
  const field = event.target.closest?.("input, select, textarea, [role=tablist]");
  if (field || event.ctrlKey || event.metaKey || event.altKey || state.view !== "heads" || !shown.first) return;
  const arrows = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  const kind = { b: "bias", s: "scores", w: "weights" }[event.key];
  if (event.key in arrows) {
    const [di, dj] = arrows[event.key];
    if (event.shiftKey) moveCursor(di, dj); else if (dj) walkHeads(dj); else walkLayers(-di);
  } else if (event.key === "+" || event.key === "=") zoomBy(0.5);
  else if (event.key === "-") zoomBy(2);
  else if (event.key === "0") { state.zoom = ""; writeAddress(); enlarge(); }
  else if (kind && A.layers[shown.layer].includes(kind)) set({ kind });
  else return;
  event.preventDefault();
}

async function readText(text) {
  const reader = A?.key.startsWith("t") ? state.reader : A?.key || state.a || index.sources[0].key;
  note("Reading…");
  const begin = performance.now();
  try {
    await describe(reader);
    const made = await json("api/text", { source: reader, text });
    facts.set(made.key, made);
    state.reader = reader;
    await set({ a: made.key, zoom: "", at: "", text: text.length <= 4000 ? text : "" });
    note(`${made.length} tokens in ${Math.round(performance.now() - begin)} ms`);
  } catch (error) {
    note("");
    fail(error);
  }
}

const grid = new Grid($("heads"), { choose, hover });

function saving(name, work) { $(name).onclick = () => { try { const done = work(); done?.catch?.(fail); } catch (error) { fail(error); } }; }
const fileName = () => `relpos-${A.name}${B ? `-and-${B.name}` : ""}-layer-${Number(shown.layer) + 1}-${shown.kind}`.replace(/[^A-Za-z0-9.]+/g, "-");
const captionOf = () => Object.entries(A.provenance).map(([key, text]) => `${key}: ${text}`).join("; ");
const picture = () => {
  const panels = B ? [[shown.first, A.title], [shown.second, B.title], [shown.change, "second − first"]].map(([map, title]) => ({ maps: map, h: state.head, title: `Head ${state.head + 1}: ${title}` }))
    : shown.first.heads.map((_, h) => ({ maps: shown.first, h, title: `Head ${h + 1}` }));
  return sheet(panels, { title: $("title").textContent, caption: captionOf(), ...look() });
};

function wire() {
  for (const id of ["a", "b", "layer", "head", "kind", "shared", "palette", "sort", "grid", "protocol"]) {
    $(id).addEventListener("change", () => {
      const value = $(id).value;
      if (id === "head") return choose(Number(value));
      return set(id === "a" ? { a: value, b: state.b === value ? "" : state.b, zoom: "", at: "", text: "" } : { [id]: value });
    });
  }
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  for (const tab of document.querySelectorAll("[role=tab]")) tab.onclick = () => set({ view: tab.dataset.view });
  $("tabs").addEventListener("keydown", (event) => {
    const tabs = [...document.querySelectorAll("[role=tab]")], at = tabs.indexOf(document.activeElement);
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (by && at >= 0) { const next = tabs[(at + by + tabs.length) % tabs.length]; next.focus(); next.click(); }
  });
  $("theme").onclick = () => set({ theme: { "": "light", light: "dark", dark: "" }[state.theme] });
  $("copy").onclick = async () => {
    writeAddress(true);
    try { await navigator.clipboard.writeText(location.href); $("copy").textContent = "Copied"; } catch { $("copy").textContent = "It is in the address bar"; }
    setTimeout(() => { $("copy").textContent = "Copy link"; }, 1500);
  };
  $("skip").onclick = (event) => { event.preventDefault(); $("main").focus(); };
  $("retry").onclick = () => { fail(null); draw(); };
  $("dismiss").onclick = () => fail(null);
  $("zoom-in").onclick = () => zoomBy(0.5);
  $("zoom-out").onclick = () => zoomBy(2);
  $("zoom-reset").onclick = () => { state.zoom = ""; writeAddress(); enlarge(); };
  saving("save-png", () => savePng(fileName(), picture()));
  saving("save-svg", () => saveSvg(fileName(), picture()));
  saving("save-npz", () => saveNpz(fileName(), { [shown.kind]: stacked(shown.first), ...(B ? { second: stacked(shown.second), difference: stacked(shown.change) } : {}) }));
  saving("curves-svg", () => { const svg = $("curves").querySelector("svg"); if (svg) saveSvg("relpos-extrapolation", svg); });
  saving("curves-png", () => { const svg = $("curves").querySelector("svg"); return svg && savePng("relpos-extrapolation", svg); });
  saving("curves-npz", () => {
    const protocol = $("protocol").value, arrays = {};
    for (const one of index.curves) {
      const points = one.protocols[protocol]?.points || [];
      const name = one.label.replace(/[^A-Za-z0-9.]+/g, "-");
      arrays[`${name}-length`] = { data: Int32Array.from(points, (p) => p.length), shape: [points.length] };
      arrays[`${name}-perplexity`] = { data: Float64Array.from(points, (p) => p.perplexity), shape: [points.length] };
    }
    saveNpz(`relpos-extrapolation-${protocol}`, arrays);
  });
  $("text-form").addEventListener("submit", (event) => { event.preventDefault(); readText($("text").value); });
  $("text").addEventListener("keydown", (event) => { if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) { event.preventDefault(); readText($("text").value); } });
  $("text-back").onclick = () => { $("text").value = ""; set({ a: state.reader || A.key, text: "", zoom: "", at: "" }); };
  document.addEventListener("keydown", keys);
  addEventListener("hashchange", () => { if (location.hash !== own) { readAddress(); playground.name = ""; start(); } });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { if (shown.first) enlarge(); });
}

/** Draw what the address says; a typed text is read again, since the server may have forgotten it. */
async function start() {
  const { text } = state;
  if (state.a.startsWith("t")) state.a = state.reader || "";
  if (text && index.live && !state.a.startsWith("t")) {
    $("text").value = text;
    await readText(text);
    return;
  }
  await draw();
}

START.reader = "";
state.reader = "";
readAddress();
theme();
try {
  index = await json("api/index");
  setPalettes(index.palettes);
  playground = new Playground(index, { failed: fail, look, changed: () => { state.play = JSON.stringify(playground.state()); writeAddress(); } });
  wire();
  await start();
} catch (error) {
  fail(error);
  $("title").textContent = "The explorer could not start.";
  $("retry").onclick = () => location.reload();
} finally {
  $("main").setAttribute("aria-busy", "false");
}
