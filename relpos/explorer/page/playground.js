// The playground: an encoding, its options and its parameters as sliders; the maps redrawn as they move. The server
// computes (the latest setting wins); an exported page holds grids made beforehand, each slider moved by itself.

import { capture, exported } from "relpos/data.js";
import { Grid, Maps, number } from "relpos/maps.js";
import { profileChart } from "relpos/plots.js";
import { saveNpz, savePng, saveSvg, sheet, stacked } from "relpos/save.js";

const $ = (id) => document.getElementById(id);

export class Playground {
  constructor(index, { changed, failed, look }) {
    Object.assign(this, { index, changed, failed, look, options: {}, parameters: {}, head: 0, name: "", busy: false, again: false });
    this.form = $("play-controls");
    this.form.addEventListener("submit", (event) => event.preventDefault());
    this.grid = new Grid($("play-heads"), { choose: (head) => { this.head = head; this.chart(); this.grid.select(head); }, hover: (i, j, h) => this.hover(i, j, h) });
    $("play-png").onclick = () => this.maps && savePng(this.file(), this.sheet());
    $("play-svg").onclick = () => this.maps && saveSvg(this.file(), this.sheet());
    $("play-npz").onclick = () => this.maps && saveNpz(this.file(), { [this.maps.kind]: stacked(this.maps) });
  }

  file() { return `relpos-${this.spec().replace(/[^A-Za-z0-9.]+/g, "-")}`; }
  sheet() { return sheet(this.maps.heads.map((h) => ({ maps: this.maps, h, title: `Head ${h + 1}` })), { title: this.spec(), caption: this.note || "", ...this.look() }); }

  entry() { return this.index.encodings.find((one) => one.name === this.name); }

  /** `name:option=value,...`, with `base` last, as the grammar has it. */
  spec() {
    const given = Object.entries(this.options).sort(([a], [b]) => (a === "base") - (b === "base"));
    return this.name + (given.length ? `:${given.map(([key, value]) => `${key}=${value}`).join(",")}` : "");
  }

  /** What the address keeps. */
  state() { return { spec: this.spec(), parameters: this.parameters }; }

  open(state) {
    const names = this.index.encodings.map((one) => one.name);
    if (!names.length) { this.form.innerHTML = '<p class="empty">This page was exported without a playground.</p>'; return; }
    const [name, rest] = (state?.spec || "").split(/:(.*)/s);
    this.name = names.includes(name) ? name : names.includes("kerple") ? "kerple" : names[0];
    this.options = {};
    if (name === this.name && rest) {
      const base = rest.match(/(?:^|,)base=(?!\d)(.*)$/);
      const plain = base ? rest.slice(0, base.index) : rest;
      for (const part of plain.split(",").filter(Boolean)) { const [key, value] = part.split(/=(.*)/s); this.options[key] = value; }
      if (base) this.options.base = base[1];
    }
    this.parameters = { ...(name === this.name ? state?.parameters : {}) };
    this.told = null;
    this.build();
    this.draw();
  }

  build() {
    const { form } = this, entry = this.entry();
    form.replaceChildren();
    const choice = document.createElement("select");
    choice.id = "play-name";
    choice.append(...this.index.encodings.map((one) => new Option(one.title === one.name ? one.name : `${one.title} (${one.name})`, one.name, false, one.name === this.name)));
    choice.onchange = () => this.open({ spec: choice.value });
    form.append(labelled("Encoding", choice));
    const about = document.createElement("p");
    about.className = "formula";
    about.append(entry.formula);
    form.append(about);
    if (/^https?:/.test(entry.paper)) {
      const link = document.createElement("a");
      link.href = entry.paper; link.rel = "noreferrer"; link.target = "_blank"; link.textContent = "paper";
      about.append(" (", link, ")");
    }
    const box = fieldset("Options");
    for (const option of entry.options) box.append(this.option(option));
    if (entry.options.length) form.append(box);
    this.box = fieldset("Parameters");
    this.box.hidden = true;
    form.append(this.box);
    const reset = document.createElement("button");
    reset.type = "button"; reset.textContent = "Reset"; reset.id = "play-reset";
    reset.onclick = () => this.open({ spec: this.name });
    form.append(reset);
    if (exported) {
      const note = document.createElement("p");
      note.textContent = "This page holds grids made beforehand: moving one slider puts the others back.";
      form.append(note);
    }
  }

  moved(set) {
    if (exported) { this.options = {}; this.parameters = {}; }
    set();
    if (exported) { this.told = null; this.build(); }
    this.draw();
  }

  option(option) {
    const { name } = option, now = this.options[name] ?? option.default;
    const set = (value) => this.moved(() => { if (value === option.default || value === "") delete this.options[name]; else this.options[name] = value; });
    if (option.choices) {
      const select = document.createElement("select");
      select.append(...option.choices.map((value) => new Option(value, value, false, value === now)));
      if (!option.choices.includes(option.default)) select.prepend(new Option(`default (${option.default})`, "", now === option.default, now === option.default));
      select.onchange = () => set(select.value);
      select.dataset.option = name;
      return labelled(name, select);
    }
    if (option.values) {
      const slider = range(0, option.values.length - 1, 1, Math.max(0, option.values.indexOf(now)));
      const shown = document.createElement("output");
      shown.textContent = now;
      slider.setAttribute("aria-valuetext", now);
      slider.oninput = () => { const value = option.values[slider.value]; shown.textContent = value; slider.setAttribute("aria-valuetext", value); set(value); };
      slider.dataset.option = name;
      return labelled(name, slider, shown);
    }
    const input = document.createElement("input");
    input.type = "text"; input.value = now === "null" || now === "none" ? "" : now; input.placeholder = option.takes;
    input.disabled = exported;
    input.onchange = () => set(input.value.trim());
    input.dataset.option = name;
    return labelled(name, input);
  }

  /** Sliders of the parameters, which depend on the options: built when the first answer names them. */
  sliders(told) {
    const same = this.told && JSON.stringify(this.told.map((p) => [p.name, p.shape])) === JSON.stringify(told.map((p) => [p.name, p.shape]));
    this.told = told;
    if (!same) {
      this.box.querySelectorAll("label").forEach((label) => label.remove());
      const { factors } = this.index.play;
      for (const { name, shape, times } of told) {
        const now = this.parameters[name];
        const slider = exported ? range(0, factors.length - 1, 1, Math.max(0, factors.indexOf(now ?? 1))) : range(-4, 4, 0.1, now === undefined ? 0 : times ? Math.log2(Math.abs(now) || 1) : now);
        slider.dataset.parameter = name;
        slider.oninput = () => {
          const by = exported ? factors[slider.value] : times ? Number((2 ** slider.value).toPrecision(4)) : Number(slider.value);
          this.moved(() => { if (by === (times || exported ? 1 : 0)) delete this.parameters[name]; else this.parameters[name] = by; });
        };
        const shown = document.createElement("output");
        shown.dataset.of = name;
        this.box.append(labelled(`${name}${shape.length && shape.some((s) => s > 1) ? ` [${shape.join(", ")}]` : ""}`, slider, shown));
      }
      this.box.hidden = !told.length;
    }
    for (const { name, times, low, high } of told) {
      const text = `${times ? `× ${this.parameters[name] ?? 1}` : `+ ${this.parameters[name] ?? 0}`} (${low === high ? number(low) : `${number(low)} to ${number(high)}`})`;
      this.box.querySelector(`output[data-of="${CSS.escape(name)}"]`).textContent = text;
      this.box.querySelector(`[data-parameter="${CSS.escape(name)}"]`).setAttribute("aria-valuetext", text);
    }
  }

  /** Ask and draw; while an answer is on its way, only the latest setting waits. */
  async draw() {
    this.changed();
    if (this.busy) { this.again = true; return; }
    this.busy = true;
    $("play-heads").classList.add("loading");
    try {
      do {
        this.again = false;
        const { length, heads } = this.index.play;
        const asked = { spec: this.spec(), parameters: { ...this.parameters } };
        let answer;
        try {
          answer = await capture("api/playground", exported ? asked : { ...asked, length, heads });
        } catch (error) {
          if (!this.again) { this.message(error.message); }
          continue;
        }
        this.failed(null);
        this.answer = answer;
        this.show();
      } while (this.again);
    } finally {
      this.busy = false;
      $("play-heads").classList.remove("loading");
    }
  }

  message(text) {
    this.maps = null;
    this.grid.panels = [];
    const box = document.createElement("p");
    box.className = "empty"; box.setAttribute("role", "alert"); box.textContent = text;
    $("play-heads").replaceChildren(box);
    $("play-profile").replaceChildren();
    $("play-title").textContent = this.spec();
  }

  show() {
    const { answer } = this;
    this.maps = new Maps(answer);
    const { shared, palette } = this.look();
    if (!this.grid.panels.length) $("play-heads").replaceChildren();
    this.head = Math.min(this.head, this.maps.heads.length - 1);
    this.grid.show(this.maps, { shared, palette, windows: answer.tensors["layer.0.window"]?.data });
    this.grid.select(this.head);
    this.note = answer.facts.note;
    $("play-title").textContent = `${this.spec()}: ${answer.facts.kind}, ${answer.facts.length} tokens`;
    $("play-note").textContent = `${this.note}. Window: that of the weights${answer.facts.alone ? " of the bias alone" : ""}.`;
    this.sliders(answer.facts.parameters);
    this.chart();
  }

  chart() {
    if (!this.maps) return;
    this.svg = profileChart(this.answer, this.head, null, $("play-profile").clientWidth);
    $("play-profile").replaceChildren(this.svg, this.svg.mark);
  }

  hover(i, j) {
    if (!this.maps) return;
    this.grid.cursor(i, j);
    this.svg?.place(i - j);
    $("play-readout").textContent = `query ${i}, key ${j}, distance ${i - j}: ${this.maps.kind} of head ${this.head + 1} ${number(this.maps.value(this.head, i, j))}`;
  }
}

function labelled(text, control, output) {
  const label = document.createElement("label"), line = document.createElement("span");
  line.append(text);
  if (output) line.append(output);
  label.append(line, control);
  return label;
}

function fieldset(title) {
  const box = document.createElement("fieldset"), legend = document.createElement("legend");
  legend.textContent = title;
  box.append(legend);
  return box;
}

function range(min, max, step, value) {
  const slider = document.createElement("input");
  Object.assign(slider, { type: "range", min, max, step });
  slider.value = value;
  return slider;
}
