// Maps: their values, their colours, and the large view that zooms and pans. No formula of any encoding is here: a map
// comes from the server as 16 bits per cell and the range of its head.

const TOP = 65534, UNSEEN = 65535;
let palettes = {};
export const setPalettes = (given) => { palettes = given; };

/** Values of some heads. `norm(h)` says how the figures would colour a head. */
export class Maps {
  constructor({ tensors, facts }) {
    Object.assign(this, facts);
    const name = `layer.${facts.layer}.map.${facts.kind}`;
    this.cells = tensors[name].data;
    this.stride = tensors[name].shape[1];
    this.range = tensors[`${name}.range`].data;
  }

  /** Index of a cell of pixels, or -1 above the diagonal of a causal map. */
  at(row, column) {
    if (this.causal) return column > row ? -1 : (row * (row + 1)) / 2 + column;
    return row * this.n + column;
  }

  /** Value at query i and key j (tokens) of the head at place h, or null where it is not seen. */
  value(h, i, j) {
    const cell = this.at(Math.floor(i / this.block), Math.floor(j / this.block));
    if (cell < 0 || i >= this.length || j >= this.length) return null;
    const u = this.cells[h * this.stride + cell];
    if (u === UNSEEN) return null;
    const low = this.range[2 * h], high = this.range[2 * h + 1];
    return low + (u / TOP) * (high - low);
  }

  /** All values of a head as float32 [n, n], -inf where nothing is seen: for npz. */
  array(h) {
    const out = new Float32Array(this.n * this.n).fill(-Infinity);
    for (let row = 0; row < this.n; row++) {
      for (let column = 0; column < (this.causal ? row + 1 : this.n); column++) {
        const u = this.cells[h * this.stride + this.at(row, column)];
        const low = this.range[2 * h], high = this.range[2 * h + 1];
        if (u !== UNSEEN) out[row * this.n + column] = low + (u / TOP) * (high - low);
      }
    }
    return out;
  }

  norm(h, shared) { return shared ? this.shared : this.norms[h]; }

  /** Paint the head at place h on a canvas of n x n pixels. */
  paint(canvas, h, shared, palette) {
    const { n } = this;
    if (canvas.width !== n || canvas.height !== n) { canvas.width = n; canvas.height = n; }
    const context = canvas.getContext("2d");
    const image = context.createImageData(n, n);
    const pixels = new Uint32Array(image.data.buffer);
    const colour = table(this.norm(h, shared), palette, this.range[2 * h], this.range[2 * h + 1]);
    let cell = h * this.stride;
    for (let row = 0; row < n; row++) {
      const end = row * n + (this.causal ? row + 1 : n);
      for (let at = row * n; at < end; at++) pixels[at] = colour[this.cells[cell++]];
    }
    context.putImageData(image, 0, 0);
    return canvas;
  }
}

/** The second minus the first, where both are maps of the same heads and tokens. */
export function difference(a, b) {
  if (a.heads.length !== b.heads.length) throw new Error(`The first has ${a.heads.length} heads in this layer and the second ${b.heads.length}: there is no difference to show.`);
  if (a.block !== b.block || a.causal !== b.causal) throw new Error("These two differ in length or direction: there is no difference to show.");
  const small = a.n <= b.n ? a : b;
  const made = Object.create(Maps.prototype);
  Object.assign(made, small, { kind: "difference" });
  made.cells = new Uint16Array(small.cells.length);
  made.range = new Float32Array(2 * a.heads.length);
  made.norms = [];
  for (let h = 0; h < a.heads.length; h++) {
    const values = new Float64Array(small.stride);
    let size = 0;
    const [la, ha, lb, hb] = [a.range[2 * h], a.range[2 * h + 1], b.range[2 * h], b.range[2 * h + 1]];
    let cell = 0;
    for (let row = 0; row < small.n; row++) {
      for (let column = 0; column < (small.causal ? row + 1 : small.n); column++, cell++) {
        const ua = a.cells[h * a.stride + a.at(row, column)], ub = b.cells[h * b.stride + b.at(row, column)];
        if (ua === UNSEEN || ub === UNSEEN) { values[cell] = NaN; continue; }
        values[cell] = lb + (ub / TOP) * (hb - lb) - la - (ua / TOP) * (ha - la);
        size = Math.max(size, Math.abs(values[cell]));
      }
    }
    made.range[2 * h] = -size; made.range[2 * h + 1] = size;
    made.norms.push({ log: false, low: -size, high: size, palette: "relpos_diverging" });
    for (cell = 0; cell < small.stride; cell++) {
      made.cells[h * small.stride + cell] = Number.isNaN(values[cell]) ? UNSEEN
        : size ? Math.round(((values[cell] + size) / (2 * size)) * TOP) : TOP / 2;
    }
  }
  const most = Math.max(...made.range);
  made.shared = { log: false, low: -most, high: most, palette: "relpos_diverging" };
  return made;
}

/** Colour of every 16-bit number as RGBA, for a head with this range. */
function table(norm, palette, low, high) {
  const colours = palettes[palette || norm.palette];
  const out = new Uint32Array(65536);
  const span = norm.high - norm.low || 1;
  const floor = Math.log(norm.low), ratio = Math.log(norm.high) - floor || 1;
  for (let u = 0; u <= TOP; u++) {
    const value = low + (u / TOP) * (high - low);
    const t = norm.log ? (Math.log(Math.max(value, norm.low)) - floor) / ratio : (value - norm.low) / span;
    const at = 3 * Math.max(0, Math.min(255, Math.round(t * 255)));
    out[u] = 0xff000000 | (colours[at + 2] << 16) | (colours[at + 1] << 8) | colours[at];
  }
  return out; // 65535 stays 0: transparent
}

/** The colours of a norm from end to end, as a strip. */
export function strip(canvas, norm, palette) {
  const colours = palettes[palette || norm.palette];
  canvas.width = 256; canvas.height = 1;
  const context = canvas.getContext("2d");
  const image = context.createImageData(256, 1);
  for (let at = 0; at < 256; at++) {
    image.data.set([colours[3 * at], colours[3 * at + 1], colours[3 * at + 2], 255], 4 * at);
  }
  context.putImageData(image, 0, 0);
}

export const number = (value) => {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  const size = Math.abs(value);
  const text = size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(2) : String(Number(value.toPrecision(4)));
  return text.replace(/-/g, "−");
};

/** A token as one can read it. */
export const piece = (text) => (text === undefined ? "" : text.replace(/\n/g, "↵").replace(/\t/g, "⇥").replace(/ /g, "␣"));

/** The grid of small maps: one button per head, painted, with its scale and the value under the cursor. */
export class Grid {
  constructor(element, { choose, hover }) {
    Object.assign(this, { element, choose, hover, panels: [] });
  }

  build(count) {
    if (this.panels.length === count) return;
    this.element.replaceChildren();
    this.panels = Array.from({ length: count }, (_, h) => {
      const button = document.createElement("button");
      button.type = "button";
      button.className = "panel";
      button.dataset.head = h;
      button.innerHTML = '<b>Head <i></i><span></span></b><div class="map"><canvas></canvas><span class="cross"></span></div>'
        + '<canvas class="scale" aria-hidden="true"></canvas><div class="ends"><span></span><span></span></div><span class="now"></span>';
      const [name, canvas, cross, scale, ends, now] = ["b i", ".map canvas", ".cross", ".scale", ".ends", ".now"].map((at) => button.querySelector(at));
      name.replaceWith(String(h + 1));
      const panel = { button, canvas, cross, scale, ends, now, window: button.querySelector("b span") };
      button.addEventListener("click", () => this.choose(h));
      const move = (event) => {
        const box = canvas.getBoundingClientRect();
        const x = (event.clientX - box.left) / box.width, y = (event.clientY - box.top) / box.height;
        if (this.maps && x >= 0 && y >= 0 && x < 1 && y < 1) {
          const { n, block, length } = this.maps;
          this.hover(Math.min(length - 1, Math.floor(y * n) * block), Math.min(length - 1, Math.floor(x * n) * block), h);
        }
      };
      canvas.addEventListener("pointermove", move);
      this.element.append(button);
      return panel;
    });
  }

  show(maps, { shared, palette, windows, order }) {
    this.build(maps.heads.length);
    this.maps = maps;
    this.panels.forEach((panel, h) => {
      maps.paint(panel.canvas, h, shared, palette);
      panel.canvas.classList.toggle("few", maps.n < 200);
      const norm = maps.norm(h, shared);
      strip(panel.scale, norm, palette);
      const flat = maps.range[2 * h] === maps.range[2 * h + 1];
      panel.ends.children[0].textContent = flat ? `flat: ${number(maps.range[2 * h])}` : number(norm.low);
      panel.ends.children[1].textContent = flat ? "" : number(norm.high);
      this.label(h, windows);
    });
    this.order(order);
  }

  label(h, windows) {
    const { maps } = this, panel = this.panels[h];
    const window = windows ? Math.round(windows[h]) : null;
    panel.window.textContent = window === null ? "" : `window ${window}`;
    panel.button.setAttribute("aria-label", `Head ${h + 1}: ${maps.kind} from ${number(maps.range[2 * h])} to ${number(maps.range[2 * h + 1])}`
      + (window === null ? "" : `, effective window ${window} tokens`));
  }

  order(order) {
    const wanted = (order || this.panels.map((_, h) => h)).map((h) => this.panels[h].button);
    if (wanted.some((button, place) => this.element.children[place] !== button)) this.element.append(...wanted);
  }

  select(head) { this.panels.forEach((panel, h) => panel.button.setAttribute("aria-pressed", String(h === head))); }

  cursor(i, j) {
    const size = this.panels.length ? this.panels[0].canvas.clientWidth : 0; // one read before all writes
    this.panels.forEach((panel, h) => {
      const value = i === null || !this.maps ? null : this.maps.value(h, i, j);
      panel.now.textContent = i === null ? "" : number(value);
      panel.cross.style.visibility = i === null ? "hidden" : "visible";
      if (i !== null) {
        const cell = size / this.maps.n / this.maps.block;
        panel.cross.style.transform = `translate(${(j + 0.5) * cell}px, ${(i + 0.5) * cell}px)`;
      }
    });
  }
}

/** One large map of one head with axes, token labels when there is room, a crosshair, wheel zoom and drag. `view` is
 *  shared by linked maps: { x, y, size } in tokens. */
export class Large {
  constructor({ hover, changed, label }) {
    this.figure = document.createElement("figure");
    this.canvas = document.createElement("canvas");
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.caption = document.createElement("figcaption");
    // The crosshair lies over the canvas: moving it draws nothing anew.
    const over = (name) => Object.assign(document.createElement("span"), { className: name });
    this.stage = Object.assign(document.createElement("div"), { className: "stage" });
    this.lines = { column: over("line column"), row: over("line row"), cell: over("line cell") };
    this.stage.append(this.canvas, ...Object.values(this.lines));
    this.figure.append(this.caption, this.stage);
    this.image = document.createElement("canvas");
    Object.assign(this, { hover, changed, label, width: 0, maps: null, cursor: null, pieces: [] });
    const canvas = this.canvas;
    canvas.addEventListener("pointermove", (event) => this.moved(event));
    canvas.addEventListener("pointerdown", (event) => { canvas.setPointerCapture(event.pointerId); this.drag = { x: event.offsetX, y: event.offsetY, view: { ...this.view } }; });
    canvas.addEventListener("pointerup", () => { this.drag = null; });
    canvas.addEventListener("pointercancel", () => { this.drag = null; });
    canvas.addEventListener("wheel", (event) => {
      event.preventDefault();
      const [i, j] = this.token(event);
      this.changed(zoomed(this.view, event.deltaY < 0 ? 0.8 : 1.25, j, i, this.maps.length));
    }, { passive: false });
    new ResizeObserver(() => this.draw()).observe(canvas);
  }

  show(maps, h, shared, palette, view, pieces, caption) {
    maps.paint(this.image, h, shared, palette);
    Object.assign(this, { maps, h, view, pieces });
    this.caption.textContent = caption;
    this.canvas.setAttribute("aria-label", `${caption}. Shift and arrow keys move the cursor, plus and minus zoom.`);
    this.draw();
  }

  get margin() {
    if (!this.labelled) return 40;
    const { x, y, size } = this.view;
    const seen = [x, y].flatMap((from) => this.pieces.slice(Math.floor(from), Math.ceil(from + size)));
    return 22 + 7 * Math.min(9, Math.max(...seen.map((text) => text.length), 1));
  }

  get labelled() { return this.pieces.length > 0 && this.view && (this.width - 85) / this.view.size >= 11; }

  token(event) {
    const margin = this.margin, span = this.canvas.clientWidth - margin;
    const j = this.view.x + ((event.offsetX - margin) / span) * this.view.size;
    const i = this.view.y + ((event.offsetY - margin) / span) * this.view.size;
    return [i, j];
  }

  moved(event) {
    if (!this.maps) return;
    if (this.drag && event.buttons) {
      const cell = this.view.size / (this.canvas.clientWidth - this.margin);
      const { view } = this.drag;
      this.changed(clamped({ ...view, x: view.x - (event.offsetX - this.drag.x) * cell, y: view.y - (event.offsetY - this.drag.y) * cell }, this.maps.length));
      return;
    }
    const [i, j] = this.token(event).map(Math.floor);
    if (i >= 0 && j >= 0 && i < this.maps.length && j < this.maps.length) this.hover(i, j);
  }

  draw() {
    const width = this.width = this.canvas.clientWidth;
    if (!this.maps || !width) return;
    const ratio = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * ratio)) {
      this.canvas.width = this.canvas.height = Math.round(width * ratio);
    }
    this.canvas.style.aspectRatio = "1";
    this.canvas.style.touchAction = this.view.size < this.maps.length ? "none" : "pan-y"; // a finger scrolls past a whole map
    const context = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const { view, margin, maps } = this;
    const span = width - margin, cell = span / view.size;
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    context.clearRect(0, 0, width, width);
    context.save();
    context.beginPath();
    context.rect(margin, margin, span, span);
    context.clip();
    context.imageSmoothingEnabled = cell * maps.block < 2;
    context.imageSmoothingQuality = "high";
    const at = (x) => (x / maps.block);
    context.drawImage(this.image, at(view.x), at(view.y), at(view.size), at(view.size), margin, margin, span, span);
    context.restore();
    const text = style.color, line = style.getPropertyValue("--line");
    context.font = `11px ${style.fontFamily}`;
    context.fillStyle = text;
    context.strokeStyle = line;
    context.strokeRect(margin - 0.5, margin - 0.5, span, span);
    const step = this.labelled ? 1 : [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000].find((s) => s * cell >= 38) || 5000;
    for (const [begin, across] of [[view.x, true], [view.y, false]]) {
      for (let token = Math.ceil(begin / step) * step; token < Math.min(begin + view.size, maps.length); token += step) {
        const place = margin + (token + 0.5 - begin) * cell;
        if (place < margin || place > width) continue;
        const label = this.labelled ? piece(this.pieces[token]).slice(0, 9) : String(token);
        context.save();
        if (across) {
          context.translate(place, margin - 4);
          if (this.labelled) context.rotate(-Math.PI / 2);
          context.textAlign = this.labelled ? "left" : place + 14 > width ? "right" : "center";
          context.textBaseline = this.labelled ? "middle" : "bottom";
        } else {
          context.translate(margin - 4, place);
          context.textAlign = "right";
          context.textBaseline = "middle";
        }
        context.fillText(label, 0, 0);
        context.restore();
      }
    }
    context.fillText("key →", margin, 11);
    context.save();
    context.translate(10, margin + 36); context.rotate(-Math.PI / 2); context.fillText("query", 0, 0);
    context.restore();
    this.cross();
  }

  cross() {
    const { view, margin, lines, width } = this; // as last drawn: reading it anew would lay the page out in every frame
    if (!this.maps || !width) return;
    const [i, j] = this.cursor || [-1, -1], cell = (width - margin) / view.size;
    const x = margin + (j + 0.5 - view.x) * cell, y = margin + (i + 0.5 - view.y) * cell;
    const seen = (place) => this.cursor && place >= margin && place <= width;
    const put = (line, on, size, transform) => {
      line.style.visibility = on ? "visible" : "hidden";
      if (on) Object.assign(line.style, { ...size, transform });
    };
    put(lines.column, seen(x), { height: `${width - margin}px` }, `translate(${x}px, ${margin}px)`);
    put(lines.row, seen(y), { width: `${width - margin}px` }, `translate(${margin}px, ${y}px)`);
    put(lines.cell, seen(x) && seen(y) && cell > 4, { width: `${cell}px`, height: `${cell}px` }, `translate(${x - cell / 2}px, ${y - cell / 2}px)`);
  }
}

export function clamped(view, length) {
  const size = Math.max(Math.min(8, length), Math.min(length, view.size));
  const into = (start) => Math.max(0, Math.min(length - size, start));
  return { x: into(view.x), y: into(view.y), size };
}

/** A view with its size times `factor`, around key j and query i. */
export function zoomed(view, factor, j, i, length) {
  const size = Math.max(Math.min(8, length), Math.min(length, view.size * factor));
  const kept = size / view.size;
  return clamped({ x: j - (j - view.x) * kept, y: i - (i - view.y) * kept, size }, length);
}
