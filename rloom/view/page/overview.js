// One run: state, findings, curves, time of the steps.

import { get } from "./api.js";
import { Chart, ChartGroup } from "./charts.js";
import { axesOf } from "./axis.js";
import { ChartToolbar, rememberedAxis, rememberedSmoothing } from "./chart_toolbar.js";
import { chartsOf, colour, labelOf, otherMetrics } from "./chart_specs.js";
import { Distributions } from "./distributions.js";
import { debounced, el, emptyState, field, link, replace, setText } from "./dom.js";
import { findingTitle } from "./findings.js";
import { duration, NONE, number, seconds, time } from "./format.js";
import { elapsed } from "./shell.js";
import { StepTimes } from "./step_times.js";
import { language, t } from "./texts.js";

const FINDINGS_SHOWN = 4;

export async function overview(app) {
  const view = new Overview(app);
  view.update();
  view.loadFindings().catch(() => {}); // curves do not wait for it
  view.distributions.load().catch(() => {}); // nor for the dumps
  return {
    node: view.node,
    update: () => view.update(),
    close: () => view.close(),
    keys: { Escape: () => view.group.setZoom(null) },
    rows: [["← →", t("keys.cursor")], ["Esc", t("keys.reset_zoom")]],
  };
}

class Overview {
  constructor(app) {
    this.app = app;
    this.runId = app.runId; // the app may have gone on to another page before an answer arrives
    this.store = app.store();
    this.group = new ChartGroup(rememberedSmoothing(), rememberedAxis(axesOf([this.store])));
    this.toolbar = new ChartToolbar(this.group, () => this.drawCurves(), t("overview.zoom_hint"));
    this.charts = new Map(); // id -> {chart, names}
    this.version = -1;
    this.head = el("div", { class: "run-head" });
    this.tiles = el("dl", { class: "tiles" });
    this.findings = el("div", { class: "findings-short" });
    this.main = el("div", { class: "chart-grid" });
    this.stepTimes = new StepTimes(app.runId, this.group);
    this.distributions = new Distributions(app.runId, this.group, this.store);
    this.spread = el("section", { class: "chart-grid spread", "aria-label": t("distribution.title") }, this.distributions.nodes);
    this.others = el("div", { class: "others" });
    this.filter = el("input", { type: "search", autocomplete: "off", spellcheck: "false", on: { input: debounced(() => this.drawOthers(), 120) } });
    this.body = el("div", {}, this.toolbar.node, this.main, this.spread, this.stepTimes.node,
      el("section", { "aria-label": t("overview.others") },
        el("div", { class: "section-head" }, el("h2", {}, t("overview.others")), field(t("overview.filter"), this.filter, { class: "field grow" })), this.others));
    this.empty = emptyState(t("overview.no_steps"), t("overview.no_steps_hint"));
    this.node = el("section", { class: "page" }, this.head, this.tiles, this.findings, this.body, this.empty);
  }

  async update() {
    this.drawHead();
    const { store } = this;
    if (store.version === this.version) return;
    const before = this.version;
    this.version = store.version;
    const some = store.steps.length > 0;
    this.body.hidden = !some;
    this.empty.hidden = some;
    if (!some) return;
    this.toolbar.update(axesOf([store]), store.steps.length);
    this.drawTiles();
    this.drawCurves();
    this.stepTimes.set(store);
    if (before >= 0) {
      this.distributions.load().catch(() => {});
      this.app.announce(t("overview.announce", { step: store.steps.at(-1) }));
      await this.loadFindings();
    }
  }

  drawCurves() {
    this.drawMain();
    this.drawOthers();
    this.distributions.draw();
  }

  close() {
    this.group.close();
    this.distributions.close();
  }

  drawHead() {
    const { state, skipped, fault } = this.store;
    const run = this.app.run(this.runId);
    const text = JSON.stringify([state, skipped, fault, language(), state.status === "running" ? Math.floor(Date.now() / 1000) : 0]);
    if (text === this.headText) return;
    this.headText = text;
    const share = state.total_steps ? Math.min(1, state.step / state.total_steps) : null;
    const facts = [
      [t("overview.elapsed"), duration(elapsed(state))],
      state.status === "running" ? [t("overview.remaining"), this.remaining(state)] : null,
      [t("overview.started"), time(state.started, language())],
      [t("overview.updated"), time(state.updated, language())],
      [t("overview.algorithm"), run.algorithm ?? NONE],
      [t("overview.model"), run.model ?? NONE],
    ].filter(Boolean);
    replace(this.head,
      el("div", { class: "page-head" }, el("h1", { title: run.path }, run.name),
        el("span", { class: "badge large", "data-status": state.status }, el("i", { class: "dot" }), el("b", {}, t(`status.${state.status}`)),
          state.error ? el("code", {}, state.error) : null),
        share === null ? el("span", { class: "muted" }, t("overview.step", { step: state.step })) : el("span", { class: "progress-line wide" },
          el("progress", { max: 1, value: share, "aria-label": t("runs.progress") }),
          el("span", { class: "nowrap" }, t("overview.step_of", { step: state.step, total: state.total_steps }), ` · ${Math.round(100 * share)}\u202f%`))),
      state.status === "killed" ? el("p", { class: "note" }, t("overview.killed")) : null,
      skipped ? el("p", { class: "note" }, t("overview.skipped", { n: skipped })) : null,
      fault ? el("p", { class: "note" }, fault) : null,
      el("dl", { class: "facts" }, facts.map(([name, text]) => el("div", {}, el("dt", {}, name), el("dd", {}, text)))));
  }

  remaining(state) {
    const { y } = this.store.series("timing_s/step");
    if (!y.length || !state.total_steps) return NONE;
    const last = y.slice(-20);
    return duration((last.reduce((sum, value) => sum + value, 0) / last.length) * (state.total_steps - state.step));
  }

  drawTiles() {
    const { store } = this;
    const tile = (title, text, detail) => el("div", {}, el("dt", {}, title), el("dd", {}, text, detail ? el("small", {}, detail) : null));
    const specs = new Map(this.specs().map((spec) => [spec.id, spec]));
    const items = [];
    const plain = (id, name, format) => {
      const spec = specs.get(id);
      if (!spec) return;
      const { y } = store.series(name ?? spec.names[0]);
      items.push(tile(t(`chart.${id}`), format(y.at(-1)), y.length > 1 ? t("overview.from", { value: format(y[0]) }) : null));
    };
    plain("reward", null, number);
    for (const spec of ["accuracy", "score"].map((id) => specs.get(id)).filter(Boolean)) {
      for (const name of spec.names.slice(0, 3)) {
        const { y } = store.series(name);
        const title = spec.names.length > 1 ? labelOf(spec, name) : t(`chart.${spec.id}`);
        items.push(tile(title, spec.format(y.at(-1)), y.length > 1 ? t("overview.from", { value: spec.format(y[0]) }) : null));
      }
    }
    for (const id of ["kl", "entropy", "length", "loss", "throughput"]) plain(id, null, number);
    const step = store.lastValue("timing_s/step") ?? store.lastValue("perf/time_per_step");
    if (step !== null) items.push(tile(t("overview.step_time"), seconds(step)));
    replace(this.tiles, items);
  }

  specs() {
    return chartsOf([...this.store.columns.keys()], this.store.measures);
  }

  drawMain() {
    const specs = this.specs();
    for (const spec of specs) {
      let entry = this.charts.get(spec.id);
      if (!entry) {
        const metric = spec.names.length === 1 ? spec.names[0] : null;
        entry = new Chart(this.group, { ...spec, title: t(`chart.${spec.id}`), metric });
        this.charts.set(spec.id, entry);
        const before = specs.slice(specs.indexOf(spec) + 1).map((next) => this.charts.get(next.id)).find(Boolean);
        this.main.insertBefore(entry.node, before?.node ?? null);
      }
      entry.set(spec.names.map((name, i) => ({ name: labelOf(spec, name), colour: colour(i), ...this.store.series(name, this.group.axis) })));
    }
  }

  // A chart for each metric of the groups that are open; while a filter is set, for each metric whose name contains it.
  drawOthers() {
    const names = [...this.store.columns.keys()];
    const wanted = this.filter.value.trim().toLowerCase();
    const groups = otherMetrics(names, wanted ? [] : this.specs());
    for (const [group, members] of groups) {
      const matching = members.filter((name) => name.toLowerCase().includes(wanted));
      const box = this.groupBox(group);
      box.hidden = !matching.length;
      setText(box.querySelector(".count"), String(matching.length));
      box.members = matching;
      if (wanted) box.open = matching.length > 0;
      if (box.open) this.fillBox(box);
    }
    for (const box of this.others.querySelectorAll("details")) if (!groups.has(box.dataset.group)) box.hidden = true;
  }

  groupBox(group) {
    const found = [...this.others.children].find((box) => box.dataset.group === group);
    if (found) return found;
    const box = el("details", { "data-group": group, on: { toggle: () => box.open && this.fillBox(box) } },
      el("summary", {}, el("code", {}, `${group}/`), el("span", { class: "count muted" })), el("div", { class: "chart-grid small" }));
    this.others.append(box);
    return box;
  }

  fillBox(box) {
    const grid = box.lastElementChild;
    const wanted = new Set(box.members);
    for (const figure of [...grid.children]) {
      if (wanted.has(figure.dataset.chart)) continue;
      this.group.remove(this.charts.get(`other:${figure.dataset.chart}`));
      this.charts.delete(`other:${figure.dataset.chart}`);
      figure.remove();
    }
    for (const name of box.members) {
      let chart = this.charts.get(`other:${name}`);
      if (!chart) {
        chart = new Chart(this.group, { title: name, metric: name });
        this.charts.set(`other:${name}`, chart);
        grid.append(chart.node);
      }
      chart.set([{ name: "", colour: colour(0), ...this.store.series(name, this.group.axis) }]);
    }
  }

  async loadFindings() {
    const { findings } = await get(`runs/${this.runId}/findings`);
    const href = `#/run/${this.runId}/findings`;
    const text = JSON.stringify([findings, language()]);
    if (text === this.findingsText) return;
    this.findingsText = text;
    replace(this.findings, findings.length
      ? [el("h2", {}, t("findings.title"), el("span", { class: "count" }, String(findings.length))),
        el("ul", { class: "plain" }, findings.slice(0, FINDINGS_SHOWN).map((finding) => el("li", {}, findingTitle(finding, href)))),
        findings.length > FINDINGS_SHOWN ? link(href, t("findings.more", { n: findings.length - FINDINGS_SHOWN })) : null]
      : null);
  }
}
