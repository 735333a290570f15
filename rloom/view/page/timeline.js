// A range of steps on one time axis: generation, waiting, training, weight sync, and what was idle meanwhile.

import { get } from "./api.js";
import { colour } from "./chart_specs.js";
import { linear, ticks } from "./curves.js";
import { button, debounced, el, emptyState, field, link, replace, svg } from "./dom.js";
import { percent, seconds } from "./format.js";
import { Query } from "./query.js";
import { t } from "./texts.js";

const DEFAULTS = { first: "", last: "" }; // the last steps
const ROWS = ["generation", "waiting", "training", "sync", "other"];
const IDLE = ["engines", "trainer", "both"];
const MOST_STEPS = 200;
const [TOP, LANE, GAP, LEFT, RIGHT, BOTTOM] = [22, 26, 8, 96, 20, 22];
const HEIGHT = TOP + ROWS.length * (LANE + GAP) + BOTTOM;

export async function timeline(app, { query }) {
  const view = new TimelinePage(app, query);
  await view.load();
  return {
    node: view.node, update: () => view.load(), close: () => view.sizes.disconnect(),
    keys: { "[": () => view.move(-1), "]": () => view.move(1), "+": () => view.zoom(0.5), "-": () => view.zoom(2) },
    rows: [["[ ]", t("keys.range")], ["+ -", t("keys.zoom")]],
  };
}

class TimelinePage {
  constructor(app, query) {
    this.app = app;
    this.runId = app.runId; // the app may have gone on to another page before an answer arrives
    this.query = new Query(query, DEFAULTS);
    this.colours = new Map(); // row and stage -> colour, which stays with them
    this.width = 0;
    this.shown = "";
    const input = (name) => el("input", { type: "number", min: 0, class: "short", id: name, on: { change: debounced(() => this.typed(), 50) } });
    this.inputs = { first: input("first"), last: input("last") };
    this.svg = svg("svg", { role: "img", height: HEIGHT, "aria-label": t("timeline.title") });
    this.plot = el("div", { class: "plot" }, this.svg);
    this.body = el("div", {});
    this.node = el("section", { class: "page timeline" },
      el("div", { class: "page-head" }, el("h1", {}, t("timeline.title")), el("div", { class: "step-choice" },
        field(t("timeline.first"), this.inputs.first), field(t("timeline.last"), this.inputs.last),
        [["‹", () => this.move(-1), "keys.range"], ["›", () => this.move(1), "keys.range"], ["+", () => this.zoom(0.5), "keys.zoom"], ["−", () => this.zoom(2), "keys.zoom"]]
          .map(([sign, action, key]) => button(sign, action, { "aria-label": `${sign} ${t(key)}`, title: t(key) })))), this.body);
    this.sizes = new ResizeObserver(([entry]) => this.resize(entry.contentRect.width));
    this.sizes.observe(this.plot);
  }

  async load() {
    const found = await get(`runs/${this.runId}/timeline`, this.query.values);
    const text = JSON.stringify(found);
    if (text === this.shown) return;
    this.shown = text;
    this.found = found;
    for (const name of ["first", "last"]) if (document.activeElement !== this.inputs[name]) this.inputs[name].value = found[name];
    if (!found.steps.length) return void replace(this.body, emptyState(t("timeline.none"), t("timeline.none_hint")));
    const open = found.first === found.last ? link(`#/run/${this.runId}/step/${found.first}`, t("timeline.open", { step: found.first })) : null;
    replace(this.body, this.tiles(), found.idle.engines === null ? el("p", { class: "note" }, t("timeline.unknown")) : null,
      el("section", { class: "chart wide" }, this.plot), el("div", { class: "toolbar" }, open), this.table());
    this.draw();
  }

  typed() {
    const [first, last] = [this.inputs.first, this.inputs.last].map((input) => Math.max(0, Math.round(Number(input.value))));
    this.show(first, Math.max(first, last));
  }

  show(first, last) {
    this.query.set({ first, last: Math.min(last, first + MOST_STEPS - 1) });
    this.load().catch(() => {}); // shown as a lost connection
  }

  // By the number of steps that are shown, within those of the run.
  move(by) {
    const { first, last } = this.found;
    const [size, steps] = [last - first + 1, this.app.store().steps];
    const begin = Math.max(steps[0] ?? 0, Math.min(first + by * size, steps.at(-1) ?? first));
    this.show(begin, begin + size - 1);
  }

  // The last of the steps stays.
  zoom(factor) {
    const { first, last } = this.found;
    const size = Math.max(1, Math.round((last - first + 1) * factor));
    this.show(Math.max(0, last - size + 1), last);
  }

  tiles() {
    const { idle } = this.found;
    const tile = (name, text) => el("div", { "data-idle": name }, el("dt", {}, t(`timeline.${name}`)), el("dd", {}, text));
    return el("dl", { class: "tiles" }, IDLE.map((name) => tile(name, percent(idle[name]))), tile("time", seconds(this.found.seconds)));
  }

  resize(width) {
    if (Math.abs(width - this.width) < 1) return;
    this.width = width;
    this.draw();
  }

  colourOf(row, stage) {
    const key = `${row} ${stage}`; // where a run generates ahead, a step waits in the stage that is else its generation
    if (!this.colours.has(key)) this.colours.set(key, colour(this.colours.size));
    return this.colours.get(key);
  }

  draw() {
    if (!this.found?.steps.length || this.width < 80) return;
    const { spans, steps, seconds: whole } = this.found;
    const x = linear([0, Math.max(whole, 1e-9)], [LEFT, this.width - RIGHT]);
    const [bottom, edges] = [HEIGHT - BOTTOM, steps.filter(([, start], i) => !i || x.at(start) - x.at(steps[i - 1][1]) > 3)];
    const y = (row) => TOP + ROWS.indexOf(row) * (LANE + GAP);
    let last = -Infinity;
    const labelled = edges.filter(([, start]) => x.at(start) - last > 44 && (last = x.at(start)));
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("width", this.width);
    replace(this.svg, svg("g", { class: "axes" },
      ROWS.map((row) => [svg("rect", { class: "lane", x: LEFT, width: this.width - RIGHT - LEFT, y: y(row), height: LANE }),
        svg("text", { class: "row-name", x: 0, y: y(row) + LANE / 2 + 4 }, t(`timeline.${row}`))]),
      ticks([0, whole], Math.min(12, this.width / 90)).map((at) => svg("text", { x: x.at(at), y: bottom + 15, "text-anchor": "middle" }, `${at} s`)),
      edges.map(([, start]) => svg("line", { class: "step-edge", x1: x.at(start), x2: x.at(start), y1: TOP - 4, y2: bottom })),
      labelled.map(([step, start]) => svg("text", { x: x.at(start) + 3, y: TOP - 8 }, String(step)))),
    spans.map((span) => svg("rect", { class: "span", "data-row": span.row, x: x.at(span.start), width: Math.max(1, x.at(span.start + span.seconds) - x.at(span.start)), y: y(span.row), height: LANE, vars: { "--colour": this.colourOf(span.row, span.stage) } },
      svg("title", {}, t("timeline.span", { stage: span.stage, step: span.step, seconds: seconds(span.seconds) })))));
  }

  table() {
    const sums = new Map();
    for (const { row, stage, seconds: length } of this.found.spans) sums.set(`${row} ${stage}`, (sums.get(`${row} ${stage}`) ?? 0) + length);
    const order = [...sums].sort(([, a], [, b]) => b - a);
    return el("div", { class: "table-box" }, el("table", { class: "stages" },
      el("thead", {}, el("tr", {}, ["stage", "row", "seconds", "share"].map((name, i) => el("th", { scope: "col", class: i > 1 ? "number" : null }, t(`timeline.${name}`))))),
      el("tbody", {}, order.map(([key, length]) => {
        const [row, stage] = key.split(" ");
        return el("tr", {}, el("td", {}, el("i", { vars: { "--colour": this.colourOf(row, stage) } }), el("code", {}, stage)), el("td", {}, t(`timeline.${row}`)),
          el("td", { class: "number" }, seconds(length)), el("td", { class: "number" }, percent(length / this.found.seconds)));
      }))));
  }
}
