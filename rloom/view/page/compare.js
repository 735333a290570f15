// Runs beside each other: validation by source, curves overlaid, differences of the configuration, answers of two of them.

import { get } from "./api.js";
import { Chart, ChartGroup } from "./charts.js";
import { axesOf } from "./axis.js";
import { ChartToolbar, rememberedAxis, rememberedSmoothing } from "./chart_toolbar.js";
import { chartsOf, colour, labelOf } from "./chart_specs.js";
import { el, emptyState, field, link, replace, select } from "./dom.js";
import { measured, NONE, value } from "./format.js";
import { measureTitle, mergedMeasures } from "./measure.js";
import { storeOf } from "./store.js";
import { t } from "./texts.js";
import { Validation } from "./validation.js";

export async function compare(app, { path, query }) {
  const ids = path[0].split(",").filter(Boolean).map(Number).filter((id) => app.run(id));
  const view = new Compare(app, [...new Set(ids)], query);
  await view.load();
  return { node: view.node, live: view.live(), update: () => view.update(), close: () => view.group.close(), keys: { Escape: () => view.group.setZoom(null) }, rows: [["Esc", t("keys.reset_zoom")]] };
}

class Compare {
  constructor(app, ids, query) {
    this.app = app;
    this.ids = ids;
    this.query = query;
    this.group = new ChartGroup(rememberedSmoothing());
    this.toolbar = new ChartToolbar(this.group, () => this.drawCurves());
    this.answersBox = el("section", { class: "block", id: "two-runs" });
    this.charts = new Map();
    this.grid = el("div", { class: "chart-grid" });
    this.accuracyBox = el("div", {});
    this.configBox = el("div", {});
    this.versions = "";
    this.node = el("section", { class: "page" }, el("div", { class: "page-head" }, el("h1", {}, t("compare.title"))), this.choices(),
      ids.length < 2 ? emptyState(t("compare.few"), t("compare.few_hint")) : [this.accuracyBox, this.toolbar.node, this.grid, this.configBox, this.answersBox]);
  }

  // A run's colour is that of its place in the list of all runs, on every chart and whichever are chosen.
  colourOf(id) {
    return colour(this.app.runs.findIndex((run) => run.id === id));
  }

  // Without the project where the experiments' names differ: a legend has little room.
  labelOf(id) {
    const short = (run) => run.name.split("/").at(-1);
    const names = this.ids.map((one) => short(this.app.run(one)));
    return new Set(names).size === names.length ? short(this.app.run(id)) : this.app.run(id).name;
  }

  live() {
    return this.ids.some((id) => storeOf(id).state?.status === "running");
  }

  choices() {
    const chosen = new Set(this.ids);
    const toggle = (id) => {
      if (chosen.has(id)) chosen.delete(id);
      else chosen.add(id);
      location.hash = `#/compare/${this.app.runs.map((run) => run.id).filter((one) => chosen.has(one)).join(",")}`;
    };
    return el("fieldset", { class: "run-choices" }, el("legend", { class: "visually-hidden" }, t("compare.choose")), this.app.runs.map((run) =>
      el("label", { class: "run-choice", vars: { "--colour": this.colourOf(run.id) } },
        el("input", { type: "checkbox", checked: chosen.has(run.id), value: run.id, on: { change: () => toggle(run.id) } }), el("i", { class: "square" }), run.name,
        el("span", { class: "muted" }, t(`status.${run.state.status}`)))));
  }

  async load() {
    if (this.ids.length < 2) return;
    const [answer] = await Promise.all([get("compare", { runs: this.ids.join(",") }), ...this.ids.map((id) => storeOf(id).refresh())]);
    replace(this.accuracyBox, this.accuracy(answer.accuracy));
    replace(this.configBox, this.config(answer.config));
    this.group.axis = rememberedAxis(axesOf(this.stores()));
    this.draw();
    this.loadAnswers().catch((error) => replace(this.answersBox, el("p", { class: "muted" }, this.app.explain(error)))); // curves do not wait for it
  }

  stores() {
    return this.ids.map((id) => storeOf(id));
  }

  // What one run fixed or broke of another: the first two runs that have validated, unless others are chosen.
  async loadAnswers() {
    const steps = new Map(await Promise.all(this.ids.map(async (id) => [id, (await get(`runs/${id}/dumps`)).validation])));
    const able = this.ids.filter((id) => steps.get(id).length);
    const title = el("h2", {}, t("compare.answers"));
    if (able.length < 2) return void replace(this.answersBox, title, el("p", { class: "muted" }, t("compare.no_answers")));
    const asked = ["left", "right"].map((name) => Number(this.query.get(name) ?? NaN));
    const pair = [able.includes(asked[0]) ? asked[0] : able[0]];
    pair.push(able.includes(asked[1]) && asked[1] !== pair[0] ? asked[1] : able.find((id) => id !== pair[0]));
    const view = new Validation(this.app, pair.map((id) => ({ runId: id, steps: steps.get(id), name: this.labelOf(id) })), this.query);
    const options = able.map((id) => [id, this.labelOf(id)]);
    const choose = (name, id) => {
      view.query.set({ [name]: id, before: "", after: "", page: 0 });
      this.query = new URLSearchParams(view.query.text());
      return this.loadAnswers();
    };
    const runChoice = (name, i) => field(t(`compare.${name}`), select(options, pair[i], (id) => choose(name, id), { id: `run-${name}` }));
    await view.load();
    replace(this.answersBox, title, el("p", { class: "muted" }, t("compare.answers_hint", { first: this.labelOf(pair[0]), second: this.labelOf(pair[1]) })),
      el("div", { class: "toolbar" }, able.length > 2 ? [runChoice("left", 0), runChoice("right", 1)] : null, view.choice), view.node);
  }

  async update() {
    if (this.ids.length < 2) return;
    await Promise.all(this.ids.map((id) => storeOf(id).refresh()));
    const before = this.versions;
    this.draw();
    if (before !== this.versions) replace(this.accuracyBox, this.accuracy((await get("compare", { runs: this.ids.join(",") })).accuracy));
  }

  draw() {
    const versions = this.ids.map((id) => storeOf(id).version).join();
    if (versions === this.versions) return;
    this.versions = versions;
    this.toolbar.update(axesOf(this.stores()), Math.max(...this.stores().map((store) => store.steps.length)));
    this.drawCurves();
  }

  measures() {
    return mergedMeasures(this.stores().map((store) => store.measures));
  }

  drawCurves() {
    const names = [...new Set(this.ids.flatMap((id) => [...storeOf(id).columns.keys()]))];
    for (const spec of chartsOf(names, this.measures())) this.drawSpec(spec);
  }

  // One chart for each metric; of metrics that share a chart in the overview (lengths), the first one.
  drawSpec(spec) {
    for (const name of spec.pattern || spec.id === "grad_norm" ? spec.names : spec.names.slice(0, 1)) {
      if (!this.charts.has(name)) {
        const label = spec.names.length > 1 && (spec.pattern || spec.id === "grad_norm") ? ` · ${labelOf(spec, name)}` : "";
        const chart = new Chart(this.group, { ...spec, id: name, title: t(`chart.${spec.id}`) + label, metric: name });
        this.charts.set(name, chart);
        this.grid.append(chart.node);
      }
      const series = this.ids.map((id) => ({ name: this.labelOf(id), colour: this.colourOf(id), ...storeOf(id).series(name, this.group.axis) }));
      this.charts.get(name).set(series.filter((one) => one.x.length));
    }
  }

  heads() {
    return this.ids.map((id) => el("th", { scope: "col" }, el("span", { class: "key", vars: { "--colour": this.colourOf(id) } }, el("i", { class: "square" }), link(`#/run/${id}`, this.app.run(id).name))));
  }

  accuracy(rows) {
    const cell = ({ first, best, last }, measure) => {
      const text = (point) => measured(point[1], measure);
      return last ? [el("span", { class: "nowrap" }, `${text(first)} → `, el("b", {}, text(last))), el("small", { class: "muted nowrap" }, t("compare.best", { value: text(best), step: best[0] }))] : NONE;
    };
    return el("section", { class: "block" }, el("h2", {}, t("compare.accuracy", { name: measureTitle(Object.fromEntries(rows.map((row) => [row.source, row.measure]))) })), rows.length
      ? el("div", { class: "table-box" }, el("table", { class: "accuracy" },
        el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("prompts.source")), this.heads())),
        el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { scope: "row" }, row.source),
          this.ids.map((_, i) => el("td", {}, cell({ first: row.first[i], best: row.best[i], last: row.last[i] }, row.measure))))))))
      : el("p", { class: "muted" }, t("validation.none")));
  }

  config(rows) {
    return el("section", { class: "block" }, el("h2", {}, t("compare.config"), el("span", { class: "count" }, String(rows.length))), rows.length
      ? el("div", { class: "table-box tall" }, el("table", { class: "config" }, el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("compare.key")), this.heads())),
        el("tbody", {}, rows.map((row) => el("tr", {}, el("th", { scope: "row" }, el("code", {}, row.key)), row.values.map((one) => el("td", {}, el("code", {}, value(one)))))))))
      : el("p", { class: "muted" }, t("compare.same")));
  }
}
