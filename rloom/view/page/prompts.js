// The prompts of a step as a table: sort, filter, pages.

import { get } from "./api.js";
import { button, debounced, el, emptyState, field, link, replace, select, setText } from "./dom.js";
import { fixed, NONE, score } from "./format.js";
import { RowCursor } from "./keys.js";
import { pager } from "./pager.js";
import { question } from "./prompt_text.js";
import { Query } from "./query.js";
import { scoreMark } from "./score.js";
import { t } from "./texts.js";

const DEFAULTS = { sort: "group", order: "asc", source: "", text: "", min: "", max: "", page: 0, size: 50 };
const COLUMNS = ["group", "mean", "best", "worst", "spread", "failed", "length", "source"];
const NUMERIC = new Set(["group", "mean", "best", "worst", "spread", "failed", "length"]);
const LARGEST_FIRST = new Set(["mean", "best", "worst", "spread", "failed", "length"]);

const ON_WIDE_SCREENS = new Set(["best", "worst", "spread", "failed", "length", "source"]); // a phone has room for the prompt

function classOf(name) {
  return [NUMERIC.has(name) ? "number" : "", ON_WIDE_SCREENS.has(name) ? "wide-only" : ""].filter(Boolean).join(" ") || null;
}

export async function prompts(app, { path, query }) {
  const { runId } = app; // of this page: the app may have gone on to another before an answer arrives
  const dumps = await get(`runs/${runId}/dumps`);
  if (!dumps.train.length) return noDumps(app, runId);
  const step = path[1] === "last" ? dumps.train.at(-1) : Number(path[1]);
  if (path[1] === "last") history.replaceState(null, "", `#/run/${runId}/step/${step}`);
  const view = new Prompts(app, runId, step, dumps.train, query);
  if (dumps.skipped) view.node.append(el("p", { class: "note" }, t("dumps.skipped", { n: dumps.skipped })));
  await view.load();
  return {
    node: view.node,
    update: () => view.updateSteps(),
    keys: { ...view.cursor.keys(), "[": () => view.go(-1), "]": () => view.go(1), n: () => view.turn(1), p: () => view.turn(-1) },
    rows: [["j k", t("keys.move")], ["Enter", t("keys.open_prompt")], ["[ ]", t("keys.steps")], ["n p", t("keys.pages")]],
  };
}

function noDumps(app, runId) {
  const page = { node: el("section", { class: "page" }, emptyState(t("dumps.none"), t("dumps.none_hint")), el("p", { class: "empty" }, el("code", {}, "trainer.log_rollouts=True"))) };
  page.update = async () => {
    const dumps = await get(`runs/${runId}/dumps`);
    if (dumps.train.length) await app.navigate(); // the first dump appeared
  };
  return page;
}

class Prompts {
  constructor(app, runId, step, steps, query) {
    this.app = app;
    this.runId = runId;
    this.step = step;
    this.steps = steps;
    this.query = new Query(query, DEFAULTS);
    this.count = el("span", { class: "muted", "aria-live": "polite" });
    this.body = el("tbody", {});
    this.head = el("tr", {});
    this.pages = el("div", {});
    this.none = emptyState(t("prompts.none"), t("prompts.none_hint"));
    this.drawn = el("p", { class: "note", id: "drawn", hidden: true });
    this.choice = el("div", { class: "step-choice" });
    this.sources = el("span", {});
    this.cursor = new RowCursor(() => [...this.body.children], (row) => (location.hash = row.dataset.href));
    this.table = el("div", { class: "table-box" }, el("table", { class: "prompts" }, el("thead", {}, this.head), this.body));
    this.node = el("section", { class: "page" },
      el("div", { class: "page-head" }, el("h1", {}, t("prompts.title", { step })), this.choice, el("span", { class: "spacer" }), this.count),
      this.drawn, this.filters(), this.table, this.none, this.pages);
    this.drawChoice();
  }

  filters() {
    const { values } = this.query;
    const input = (name, attributes) => el("input", { value: values[name], autocomplete: "off", on: { input: debounced((event) => this.filter({ [name]: event.target.value.trim() })) }, ...attributes });
    return el("div", { class: "toolbar" },
      field(t("prompts.filter"), input("text", { type: "search", placeholder: t("prompts.filter_hint") }), { class: "field grow" }), this.sources,
      field(t("prompts.min"), input("min", { type: "number", step: "any", class: "short" })),
      field(t("prompts.max"), input("max", { type: "number", step: "any", class: "short" })));
  }

  // The select has every dumped step; the slider moves through them.
  drawChoice() {
    const at = this.steps.indexOf(this.step);
    const open = (step) => (location.hash = this.address(step));
    const slider = el("input", { type: "range", min: 0, max: this.steps.length - 1, value: at, "aria-label": t("prompts.step"), class: "step-slider",
      on: { change: (event) => open(this.steps[Number(event.target.value)]) } });
    replace(this.choice,
      button("‹", () => this.go(-1), { disabled: at <= 0, "aria-label": t("prompts.previous_step"), title: `${t("prompts.previous_step")}  [` }),
      select(this.steps.map((step) => [step, String(step)]), this.step, open, { "aria-label": t("prompts.step"), id: "step" }),
      button("›", () => this.go(1), { disabled: at >= this.steps.length - 1, "aria-label": t("prompts.next_step"), title: `${t("prompts.next_step")}  ]` }),
      this.steps.length > 2 ? slider : null);
  }

  address(step) {
    const text = new URLSearchParams(this.query.text());
    text.delete("page");
    return `#/run/${this.runId}/step/${step}${text.size ? `?${text}` : ""}`;
  }

  go(by) {
    const next = this.steps[this.steps.indexOf(this.step) + by];
    if (next !== undefined) location.hash = this.address(next);
  }

  turn(by) {
    const page = Number(this.query.values.page) + by;
    if (page < 0 || page >= Math.ceil(this.shown / Number(this.query.values.size))) return;
    this.change({ page });
  }

  filter(changes) {
    this.change({ ...changes, page: 0 });
  }

  async change(changes) {
    this.query.set(changes);
    await this.load().catch((error) => setText(this.count, this.app.explain(error)));
  }

  async load() {
    const asked = (this.asked = Symbol("request"));
    const answer = await get(`runs/${this.runId}/train/${this.step}/prompts`, this.query.values);
    if (asked !== this.asked) return; // a later request is under way
    this.shown = answer.shown;
    setText(this.count, answer.shown === answer.total ? t("prompts.count", { n: answer.total }) : t("prompts.count_of", { n: answer.shown, total: answer.total }));
    this.drawn.hidden = answer.of_step === null;
    if (answer.of_step !== null) setText(this.drawn, t("prompts.drawn", { n: answer.total, total: answer.of_step }));
    this.drawHead();
    this.drawSources(answer.sources);
    replace(this.body, answer.prompts.map((prompt) => this.row(prompt)));
    this.none.hidden = answer.prompts.length > 0;
    this.table.hidden = !answer.prompts.length;
    replace(this.pages, pager(answer, (page) => this.change({ page })));
    this.cursor.at = -1;
  }

  drawHead() {
    const { sort, order } = this.query.values;
    replace(this.head, COLUMNS.map((name) => {
      const sorted = name === sort ? (order === "asc" ? "ascending" : "descending") : null;
      const next = sorted ? (order === "asc" ? "desc" : "asc") : LARGEST_FIRST.has(name) ? "desc" : "asc";
      return el("th", { scope: "col", class: classOf(name), "aria-sort": sorted },
        button(t(`prompts.${name}`), () => this.filter({ sort: name, order: next }), { class: "sort", "data-sort": name }));
    }), el("th", { scope: "col" }, t("prompts.text")));
  }

  drawSources(sources) {
    const text = sources.join("\n");
    if (sources.length < 2 || text === this.sourcesText) return;
    this.sourcesText = text;
    replace(this.sources, field(t("prompts.source"), select([["", t("prompts.all_sources")], ...sources.map((name) => [name, name])],
      this.query.values.source, (source) => this.filter({ source }), { id: "source" })));
  }

  row(prompt) {
    const href = `#/run/${this.runId}/step/${this.step}/prompt/${prompt.group}`;
    return el("tr", { "data-href": href, on: { click: (event) => { if (!event.target.closest("a") && !String(getSelection())) location.hash = href; } } },
      el("td", { class: "number" }, link(href, String(prompt.group))),
      el("td", { class: "number" }, scoreMark(prompt.mean)),
      el("td", { class: classOf("best") }, score(prompt.best)), el("td", { class: classOf("worst") }, score(prompt.worst)),
      el("td", { class: classOf("spread") }, fixed(prompt.spread, 2)),
      el("td", { class: `${classOf("failed")} ${prompt.failed ? "failed" : "muted"}` }, prompt.failed ? `${prompt.failed} / ${prompt.answers}` : "0"),
      el("td", { class: classOf("length") }, fixed(prompt.length, 1)), el("td", { class: `${classOf("source")} nowrap` }, prompt.data_source ?? NONE),
      el("td", { class: "excerpt" }, el("span", {}, question(prompt.text).slice(0, 400))));
  }

  async updateSteps() {
    const { train } = await get(`runs/${this.runId}/dumps`);
    if (train.join() === this.steps.join()) return;
    this.steps = train;
    if (!this.choice.contains(document.activeElement)) this.drawChoice();
  }
}
