// Where the time of the steps goes: one stacked bar a step, which opens the step in the timeline.

import { colour } from "./chart_specs.js";
import * as curves from "./curves.js";
import { el, replace, setText, svg } from "./dom.js";
import { NONE, seconds } from "./format.js";
import { t } from "./texts.js";

const HEIGHT = 180;
const MARGIN = { top: 8, right: 12, bottom: 22, left: 48 };
const PREFIX = "timing_s/";

export class StepTimes {
  constructor(runId, group) {
    this.runId = runId;
    this.group = group; // its cursor and zoom are those of the charts
    this.steps = [];
    this.series = []; // its bars do not widen the axis of the curves
    this.stages = []; // {name, colour, y}
    this.chosen = null;
    this.smoothed = new Map(); // as a chart has it: bars are never smoothed
    this.width = 0;
    this.legend = el("div", { class: "legend" });
    this.svg = svg("svg", { role: "img", height: HEIGHT, "aria-label": t("times.title"), tabindex: "0" });
    this.plot = el("div", { class: "plot" }, this.svg);
    this.node = el("section", { class: "step-times chart wide" }, el("div", { class: "section-head" }, el("h2", {}, t("times.title")),
      el("span", { class: "muted" }, t("times.hint"))), this.legend, this.plot);
    this.listen();
    group.add(this);
  }

  set(store) {
    this.steps = store.steps;
    const names = [...store.columns.keys()].filter((name) => name.startsWith(PREFIX) && name !== `${PREFIX}step`);
    const total = (name) => store.columns.get(name).reduce((sum, value) => sum + (value ?? 0), 0);
    const order = names.map((name) => [name, total(name)]).sort((a, b) => b[1] - a[1]);
    // a colour stays with its stage while the run goes on
    this.colours ??= new Map();
    for (const [name] of order) if (!this.colours.has(name)) this.colours.set(name, colour(this.colours.size));
    this.stages = order.map(([name]) => ({ name: name.slice(PREFIX.length), colour: this.colours.get(name), y: store.columns.get(name) }));
    this.values = this.stages.map(() => el("b", { class: "value" }, NONE));
    replace(this.legend, this.stages.map((stage, i) => el("span", { class: "key", vars: { "--colour": stage.colour } },
      el("i", { class: "square" }), el("span", { class: "name" }, stage.name), this.values[i])));
    this.node.hidden = !this.stages.length;
    this.redraw();
  }

  redraw() {
    this.stale = true;
    if (this.visible) this.draw();
  }

  resize(width) {
    if (Math.abs(width - this.width) < 1) return;
    this.width = width;
    this.redraw();
  }

  // Bars are one a step: cursor and zoom of the curves are theirs only if the curves are over steps.
  follows() {
    return this.group.axis === "step";
  }

  domain() {
    const [low, high] = (this.follows() && this.group.zoom) || [this.steps[0] ?? 0, this.steps.at(-1) ?? 1];
    return [low - 0.5, high + 0.5];
  }

  draw() {
    if (!this.stale || this.width < 80 || !this.stages.length) return;
    this.stale = false;
    const domain = this.domain();
    this.xScale = curves.linear(domain, [MARGIN.left, this.width - MARGIN.right]);
    const bars = this.bars(domain);
    const most = Math.max(1e-9, ...bars.map((bar) => bar.heights.reduce((sum, value) => sum + value, 0)));
    const y = curves.linear([0, most * 1.04], [HEIGHT - MARGIN.bottom, MARGIN.top]);
    const paths = this.stages.map(() => []);
    for (const bar of bars) {
      let below = 0;
      bar.heights.forEach((value, i) => {
        if (value > 0) paths[i].push(rectangle(bar.left, y.at(below + value), bar.right, y.at(below)));
        below += value;
      });
    }
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("width", this.width);
    this.cursor = svg("g", { class: "cursor" });
    this.mark = svg("g", { class: "chosen" });
    replace(this.svg, this.axes(domain, y, most), paths.map((path, i) => svg("path", { class: "stack", vars: { "--colour": this.stages[i].colour }, d: path.join("") })),
      this.mark, this.cursor);
    this.markChosen();
    this.showCursor(this.group.cursor);
  }

  // One bar for each step; where steps are narrower than two pixels, one bar is the mean of several.
  bars(domain) {
    const first = curves.firstAtLeast(this.steps, domain[0]);
    const last = curves.firstAtLeast(this.steps, domain[1]);
    const width = (this.width - MARGIN.left - MARGIN.right) / (domain[1] - domain[0]);
    const together = Math.max(1, Math.ceil(2 / width));
    const bars = [];
    for (let i = first; i < last; i += together) {
      const end = Math.min(last, i + together);
      const heights = this.stages.map(({ y }) => {
        let sum = 0;
        for (let k = i; k < end; k += 1) sum += y[k] ?? 0;
        return sum / (end - i);
      });
      const gap = width > 5 ? Math.min(3, width * 0.15) : 0;
      bars.push({ heights, left: this.xScale.at(this.steps[i] - 0.5) + gap / 2, right: this.xScale.at(this.steps[end - 1] + 0.5) - gap / 2 });
    }
    return bars;
  }

  axes(domain, y, most) {
    const [left, right, bottom] = [MARGIN.left, this.width - MARGIN.right, HEIGHT - MARGIN.bottom];
    return svg("g", { class: "axes" },
      curves.ticks([0, most], 4).map((value) => [
        svg("line", { class: "grid", x1: left, x2: right, y1: y.at(value), y2: y.at(value) }),
        svg("text", { x: left - 6, y: y.at(value) + 3.5, "text-anchor": "end" }, `${value} s`)]),
      svg("line", { class: "base", x1: left, x2: right, y1: bottom + 0.5, y2: bottom + 0.5 }),
      curves.ticks(domain, Math.min(16, this.width / 70), true).map((value) =>
        svg("text", { x: this.xScale.at(value), y: bottom + 15, "text-anchor": "middle" }, String(value))));
  }

  showCursor(place) {
    const x = this.follows() ? place : null;
    const at = x === null ? this.steps.length - 1 : curves.nearest(this.steps, x);
    this.stages.forEach((stage, i) => setText(this.values[i], seconds(stage.y[at] ?? null)));
    if (!this.cursor || !this.visible) return;
    if (x === null) return void this.cursor.replaceChildren();
    const pixel = this.xScale.at(x);
    replace(this.cursor, svg("line", { x1: pixel, x2: pixel, y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom }),
      svg("text", { class: "cursor-step", x: pixel, y: HEIGHT - MARGIN.bottom + 15, "text-anchor": "middle" }, String(x)));
  }

  stepAt(event) {
    const value = this.xScale.invert(event.clientX - this.svg.getBoundingClientRect().left);
    const at = curves.nearest(this.steps, value);
    return at < 0 ? null : this.steps[at];
  }

  listen() {
    this.svg.addEventListener("pointermove", (event) => this.xScale && this.follows() && this.group.setCursor(this.stepAt(event)));
    this.svg.addEventListener("pointerleave", () => this.group.setCursor(null));
    this.svg.addEventListener("click", (event) => this.xScale && this.open(this.stepAt(event)));
    this.svg.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (event.key === "Enter") this.open(this.chosen);
      if (!move) return;
      event.preventDefault();
      event.stopPropagation();
      const from = this.chosen === null ? this.steps.length - 1 : this.steps.indexOf(this.chosen) + move;
      this.choose(this.steps[Math.min(this.steps.length - 1, Math.max(0, from))]);
    });
  }

  choose(step) {
    this.chosen = step;
    this.markChosen();
  }

  open(step) {
    if (step !== null) location.hash = `#/run/${this.runId}/timeline?first=${step}&last=${step}`;
  }

  markChosen() {
    if (this.chosen === null || !this.mark) return;
    const [left, right] = [this.xScale.at(this.chosen - 0.5), this.xScale.at(this.chosen + 0.5)];
    replace(this.mark, svg("rect", { x: left, width: Math.max(2, right - left), y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom }));
  }
}

function rectangle(left, top, right, bottom) {
  return `M${left.toFixed(1)} ${bottom.toFixed(1)}V${top.toFixed(1)}H${right.toFixed(1)}V${bottom.toFixed(1)}Z`;
}
