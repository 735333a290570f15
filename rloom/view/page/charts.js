// Line charts as SVG. Charts of a group share the cursor, the zoom and the smoothing.

import { AXES } from "./axis.js";
import * as curves from "./curves.js";
import { button, el, replace, setText, svg } from "./dom.js";
import { chartCsv, saveChart, saveText } from "./export.js";
import { NONE, number, tick } from "./format.js";
import { t } from "./texts.js";

export const HEIGHT = 168;
export const MARGIN = { top: 8, right: 12, bottom: 22, left: 48 };

const FEWEST_SMOOTHED = 50; // an average over fewer points would hide a change within one step

export class ChartGroup {
  constructor(smoothing = 0, axis = "step") {
    this.axis = axis; // a name of AXES
    this.charts = new Set();
    this.cursor = null; // a place on the axis, or null
    this.dragging = false;
    this.zoom = null; // [first, last] place on the axis, or null: everything
    this.smoothing = smoothing;
    this.onZoom = () => {};
    this.seen = new IntersectionObserver((entries) => {
      for (const entry of entries) {
        const chart = entry.target.chart;
        chart.visible = entry.isIntersecting;
        if (chart.visible) chart.draw();
      }
    }, { rootMargin: "300px" });
    this.resized = new ResizeObserver((entries) => {
      for (const entry of entries) entry.target.chart.resize(entry.contentRect.width);
    });
  }

  add(chart) {
    this.charts.add(chart);
    chart.plot.chart = chart;
    this.seen.observe(chart.plot);
    this.resized.observe(chart.plot);
  }

  remove(chart) {
    this.charts.delete(chart);
    this.seen.unobserve(chart.plot);
    this.resized.unobserve(chart.plot);
  }

  setCursor(x) {
    this.cursor = x;
    for (const chart of this.charts) chart.showCursor(x);
  }

  setZoom(domain) {
    this.zoom = domain;
    this.onZoom(domain);
    this.redraw();
  }

  setSmoothing(weight) {
    this.smoothing = weight;
    for (const chart of this.charts) chart.smoothed.clear();
    this.redraw();
  }

  setAxis(name) {
    this.axis = name;
    this.cursor = null;
    this.setZoom(null);
  }

  // First and last place of all charts: the same step is at the same place on each of them.
  extent() {
    let [low, high] = [Infinity, -Infinity];
    for (const chart of this.charts) {
      for (const { x } of chart.series) if (x.length) [low, high] = [Math.min(low, x[0]), Math.max(high, x.at(-1))];
    }
    if (low > high) return [0, 1];
    return low === high ? [low - 1, high + 1] : [low, high];
  }

  redraw() {
    for (const chart of this.charts) chart.redraw();
  }

  drawStale() {
    for (const chart of this.charts) if (chart.visible) chart.draw();
  }

  close() {
    this.seen.disconnect();
    this.resized.disconnect();
  }
}

export class Chart {
  // spec: title, metric, band [low, high] (healthy), log (may be switched), format, from0, points
  constructor(group, spec) {
    this.group = group;
    this.spec = { format: number, tick, ...spec };
    this.log = Boolean(spec.log);
    this.series = []; // {name, colour, x, y}
    this.smoothed = new Map(); // series -> y
    this.width = 0;
    this.visible = false;
    this.stale = true;
    this.legend = el("div", { class: "legend" });
    this.svg = svg("svg", { role: "img", tabindex: "0", height: HEIGHT });
    this.plot = el("div", { class: "plot" }, this.svg);
    this.logButton = button(t("chart.log"), () => this.toggleLog(), { class: "quiet", "aria-pressed": this.log });
    this.node = el("figure", { class: "chart", "data-chart": spec.id ?? spec.metric },
      el("figcaption", {},
        el("span", { class: "chart-title" }, spec.title, spec.metric && spec.metric !== spec.title
          ? el("code", {}, spec.metric) : null),
        spec.band ? el("span", { class: "healthy" }, bandText(spec.band)) : null, this.logButton,
        button("SVG", () => saveChart(this), { class: "quiet", "aria-label": t("chart.save_svg"), title: t("chart.save_svg") }),
        button("CSV", () => saveText(`${this.fileName()}.csv`, "text/csv", chartCsv(this)), { class: "quiet", "aria-label": t("chart.save_csv"), title: t("chart.save_csv") })),
      this.legend, this.plot);
    this.listen();
    group.add(this);
  }

  set(series) {
    this.series = series;
    this.smoothed.clear();
    const positive = series.every((one) => one.y.every((value) => value > 0));
    this.logButton.hidden = !positive;
    if (!positive) this.log = false;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.keys = series.map((one) => el("b", { class: "value" }, NONE));
    replace(this.legend, series.map((one, i) =>
      el("span", { class: "key", vars: { "--colour": one.colour } }, el("i", {}), el("span", { class: "name" }, one.name ?? ""), this.keys[i])));
    this.redraw();
  }

  csvColumns() {
    return this.series.map((one) => ({ name: one.name || this.spec.metric || this.spec.title, one, value: (i) => one.y[i] }));
  }

  fileName() {
    return String(this.spec.id ?? this.spec.metric ?? "chart").replace(/[^\w.-]+/g, "-");
  }

  toggleLog() {
    this.log = !this.log;
    this.logButton.setAttribute("aria-pressed", String(this.log));
    this.redraw();
  }

  redraw() {
    this.stale = true;
    if (this.visible && !this.group.dragging) this.draw();
  }

  resize(width) {
    if (Math.abs(width - this.width) < 1) return;
    this.width = width;
    this.redraw();
  }

  domain() {
    return this.group.zoom ?? this.group.extent();
  }

  drawn(one) {
    const weight = one.x.length >= FEWEST_SMOOTHED && !this.spec.points ? this.group.smoothing : 0;
    if (weight === 0) return one.y;
    if (!this.smoothed.has(one)) this.smoothed.set(one, curves.smooth(one.y, weight));
    return this.smoothed.get(one);
  }

  draw() {
    if (!this.stale || this.width < 80) return;
    this.stale = false;
    const domain = this.domain();
    const visible = this.series.map((one) => {
      const [from, to] = curves.visibleRange(one.x, domain);
      return { one, x: one.x.slice(from, to), y: one.y.slice(from, to), line: this.drawn(one).slice(from, to) };
    });
    const values = this.valuesIn(visible, domain);
    const inside = values.length ? values : this.valuesIn(visible, [-Infinity, Infinity]);
    const yDomain = curves.valueDomain(inside, { log: this.log, band: this.spec.band });
    if (this.spec.most !== undefined) yDomain[1] = Math.min(yDomain[1], inside.reduce((most, value) => Math.max(most, value), this.spec.most));
    this.xScale = curves.linear(domain, [MARGIN.left, this.width - MARGIN.right]);
    this.yScale = (this.log ? curves.logarithmic : curves.linear)(yDomain, [HEIGHT - MARGIN.bottom, MARGIN.top]);
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    this.svg.setAttribute("width", this.width);
    this.svg.setAttribute("aria-label", this.summary());
    this.cursor = svg("g", { class: "cursor" });
    this.brush = svg("rect", { class: "brush", y: MARGIN.top, height: HEIGHT - MARGIN.top - MARGIN.bottom, width: 0 });
    replace(this.svg, this.band(yDomain), this.axes(domain, yDomain), this.frame(visible.map((part) => this.lines(part))), this.brush, this.cursor);
    this.showCursor(this.group.cursor);
  }

  // What the y axis has room for.
  valuesIn(visible, [low, high]) {
    return visible.flatMap(({ x, y }) => y.filter((_, i) => x[i] >= low && x[i] <= high));
  }

  band(yDomain) {
    if (!this.spec.band) return null;
    const [low, high] = this.spec.band.map((value) => Math.min(Math.max(value, yDomain[0]), yDomain[1]));
    if (high <= low) return null;
    const [top, bottom] = [this.yScale.at(high), this.yScale.at(low)];
    return svg("rect", { class: "band", x: MARGIN.left, width: Math.max(0, this.width - MARGIN.left - MARGIN.right), y: top, height: bottom - top });
  }

  axes(domain, yDomain) {
    const [left, right, bottom] = [MARGIN.left, this.width - MARGIN.right, HEIGHT - MARGIN.bottom];
    const yTicks = this.log ? curves.logTicks(yDomain, 4) : curves.ticks(yDomain, 4);
    const xTicks = AXES[this.group.axis].ticks(domain, Math.max(2, Math.min(8, this.width / 70)));
    return svg("g", { class: "axes" },
      yTicks.map((value) => {
        const y = crisp(this.yScale.at(value));
        return [svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
          svg("text", { x: left - 6, y: y + 3.5, "text-anchor": "end" }, this.spec.tick(value))];
      }),
      svg("line", { class: "base", x1: left, x2: right, y1: crisp(bottom), y2: crisp(bottom) }),
      xTicks.map(([value, text]) => svg("text", { x: this.xScale.at(value), y: bottom + 15, "text-anchor": "middle" }, text)));
  }

  // An inner <svg> cuts off what is outside of the axes, with room for the points at its edges.
  frame(children) {
    const [x, y] = [MARGIN.left - 4, MARGIN.top - 4];
    const [width, height] = [Math.max(0, this.width - MARGIN.right + 4 - x), HEIGHT - MARGIN.bottom + 4 - y];
    return svg("svg", { x, y, width, height, viewBox: `${x} ${y} ${width} ${height}` }, children);
  }

  lines({ one, x, y, line }) {
    const group = svg("g", { class: "series", vars: { "--colour": one.colour } });
    if (line !== y && this.drawn(one) !== one.y) group.append(svg("path", { class: "raw", d: this.path(x, y) }));
    group.append(svg("path", { class: "line", d: this.path(x, line) }));
    if (x.length <= (this.spec.points ? 60 : 20)) x.forEach((step, i) => group.append(svg("circle", { r: 2.25, cx: this.xScale.at(step), cy: this.yScale.at(line[i]) })));
    return group;
  }

  path(x, y) {
    const points = curves.reduceToPixels(x, y, this.xScale.at);
    return points.map(([a, b], i) => `${i ? "L" : "M"}${this.xScale.at(a).toFixed(1)} ${this.yScale.at(b).toFixed(1)}`).join("");
  }

  summary() {
    const parts = this.series.filter((one) => one.x.length).map((one) =>
      t("chart.summary", { name: one.name || this.spec.title, value: this.spec.format(one.y.at(-1)), at: AXES[this.group.axis].words(one.x.at(-1)) }));
    return `${this.spec.title}. ${parts.join(". ")}`;
  }

  // The values at the cursor's step; without a cursor, the last ones.
  showCursor(x) {
    const marks = [];
    this.series.forEach((one, i) => {
      const at = x === null ? one.x.length - 1 : curves.nearest(one.x, x);
      setText(this.keys[i], at < 0 ? NONE : this.spec.format(one.y[at]));
      if (x !== null && at >= 0 && this.xScale) marks.push(svg("circle", { class: "mark", r: 3.5, vars: { "--colour": one.colour },
        cx: this.xScale.at(one.x[at]), cy: this.yScale.at(this.drawn(one)[at]) }));
    });
    if (!this.cursor || !this.visible) return;
    const pixel = x === null ? -1 : this.xScale.at(x);
    if (pixel < MARGIN.left - 1 || pixel > this.width - MARGIN.right + 1) return void this.cursor.replaceChildren();
    const line = svg("line", { x1: crisp(pixel), x2: crisp(pixel), y1: MARGIN.top, y2: HEIGHT - MARGIN.bottom });
    replace(this.cursor, line, marks, svg("text", { class: "cursor-step", x: pixel, y: HEIGHT - MARGIN.bottom + 15, "text-anchor": "middle" }, AXES[this.group.axis].text(x)));
  }

  stepAt(event) {
    const box = this.svg.getBoundingClientRect();
    const value = this.xScale.invert(event.clientX - box.left);
    const [low, high] = this.domain();
    const steps = this.allSteps();
    const at = curves.nearest(steps, Math.min(high, Math.max(low, value)));
    return at < 0 ? null : steps[at];
  }

  allSteps() {
    if (this.series.length === 1) return this.series[0].x;
    return [...new Set(this.series.flatMap((one) => one.x))].sort((a, b) => a - b);
  }

  listen() {
    let start = null;
    this.svg.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || event.pointerType === "touch" || !this.xScale) return;
      start = event.clientX;
      this.group.dragging = true; // an update must not remove what is being drawn
      this.svg.setPointerCapture(event.pointerId);
    });
    this.svg.addEventListener("pointermove", (event) => {
      if (!this.xScale) return;
      if (start !== null) this.showBrush(start, event.clientX);
      this.group.setCursor(this.stepAt(event));
    });
    this.svg.addEventListener("pointerup", (event) => {
      if (start !== null && Math.abs(event.clientX - start) > 6) this.zoomTo(start, event.clientX);
      start = null;
      this.group.dragging = false;
      this.group.drawStale();
      this.brush?.setAttribute("width", 0);
    });
    this.svg.addEventListener("pointerleave", () => start === null && this.group.setCursor(null));
    this.svg.addEventListener("dblclick", () => this.group.setZoom(null));
    this.svg.addEventListener("blur", () => this.group.setCursor(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move || !this.xScale) return;
    const steps = this.allSteps();
    const from = this.keyStep === undefined ? steps.length - 1 : steps.indexOf(this.keyStep) + move;
    this.keyStep = steps[Math.min(steps.length - 1, Math.max(0, from))];
    this.group.setCursor(this.keyStep);
    event.preventDefault();
    event.stopPropagation();
  }

  showBrush(from, to) {
    const left = this.svg.getBoundingClientRect().left;
    this.brush.setAttribute("x", Math.min(from, to) - left);
    this.brush.setAttribute("width", Math.abs(to - from));
  }

  zoomTo(from, to) {
    const left = this.svg.getBoundingClientRect().left;
    const [low, high] = [Math.min(from, to), Math.max(from, to)].map((pixel) => this.xScale.invert(pixel - left));
    const [first, last] = this.domain();
    const zoom = [Math.max(first, low), Math.min(last, high)];
    if (zoom[1] - zoom[0] >= 1) this.group.setZoom(zoom);
  }
}

function crisp(pixel) {
  return Math.round(pixel) + 0.5; // a line of one pixel, not two blurred ones
}

function bandText([low, high]) {
  return low === 0 ? t("chart.healthy_up_to", { high: tick(high) }) : t("chart.healthy", { low: tick(low), high: tick(high) });
}
