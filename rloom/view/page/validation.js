// Two validations, of one run or of two: which prompts were fixed, which were broken, and both answers.

import { get } from "./api.js";
import { button, debounced, el, emptyState, field, link, replace, select, setText } from "./dom.js";
import { percent } from "./format.js";
import { RowCursor } from "./keys.js";
import { pager } from "./pager.js";
import { promptText } from "./prompt_text.js";
import { Query } from "./query.js";
import { scoreMark } from "./score.js";
import { storeOf } from "./store.js";
import { t } from "./texts.js";
import { marked } from "./tokens.js";

const DEFAULTS = { left: "", right: "", before: "", after: "", outcome: "all", text: "", source: "", page: 0, size: 20 };
const OUTCOMES = ["fixed", "broken", "right", "wrong"];
const MARKS = { fixed: "↑", broken: "↓", right: "✓", wrong: "✗" };

export async function validation(app, { query }) {
  const { runId } = app; // of this page: the app may have gone on to another before an answer arrives
  const dumps = await get(`runs/${runId}/dumps`);
  if (!dumps.validation.length) return none(app, runId);
  const side = { runId, steps: dumps.validation, name: "" };
  const view = new Validation(app, [side, side], query);
  await view.load();
  return {
    node: el("section", { class: "page" }, el("div", { class: "page-head" }, el("h1", {}, t("validation.title")), view.choice), view.node),
    update: () => view.updateSteps(), keys: view.cursor.keys(),
    rows: [["j k", t("keys.move")], ["Enter", t("keys.open_prompt")]],
  };
}

function none(app, runId) {
  return {
    node: el("section", { class: "page" }, emptyState(t("validation.none"), t("validation.none_hint")), el("p", { class: "empty" }, el("code", {}, "trainer.test_freq=5 trainer.log_rollouts=True"))),
    async update() {
      if ((await get(`runs/${runId}/dumps`)).validation.length) await app.navigate();
    },
  };
}

export class Validation {
  // sides: {runId, steps, name} of the validation before and after; of one run they are equal, and `name` is empty
  constructor(app, sides, query) {
    this.app = app;
    this.sides = sides;
    this.sameRun = sides[0].runId === sides[1].runId;
    this.query = new Query(query, DEFAULTS);
    this.choice = el("div", { class: "step-choice" });
    this.outcomes = el("div", { class: "outcomes", role: "group", "aria-label": t("validation.outcome") });
    this.bySource = el("div", {});
    this.rows = el("div", { class: "pairs" });
    this.pages = el("div", {});
    this.count = el("span", { class: "muted", "aria-live": "polite" });
    this.cursor = new RowCursor(() => [...this.rows.querySelectorAll(".pair")], (row) => (location.hash = row.dataset.href));
    const filter = el("input", { type: "search", value: this.query.values.text, autocomplete: "off", placeholder: t("prompts.filter_hint"),
      on: { input: debounced((event) => this.change({ text: event.target.value.trim(), page: 0 })) } });
    const isScore = sides.some(({ runId }) => Object.values(storeOf(runId).measures).includes("score"));
    this.node = el("div", { class: "validation" }, isScore ? el("p", { class: "muted" }, t("validation.of_scores")) : null,
      this.outcomes, this.bySource, el("div", { class: "toolbar" }, field(t("prompts.filter"), filter, { class: "field grow" }), this.count), this.rows, this.pages);
    this.drawChoice();
  }

  pair() {
    const { before, after } = this.query.values;
    const [first, second] = this.sides;
    return [before === "" ? first.steps.at(this.sameRun ? 0 : -1) : Number(before), after === "" ? second.steps.at(-1) : Number(after)];
  }

  // Two runs are compared, not two times: their names stand where "before" and "after" would.
  drawChoice() {
    const pair = this.pair();
    replace(this.choice, ["before", "after"].map((name, i) => {
      const options = this.sides[i].steps.map((step) => [step, step === 0 ? t("validation.start") : t("answers.step", { step })]);
      return field(this.sides[i].name || t(`validation.${name}`), select(options, pair[i], (step) => this.change({ [name]: step, page: 0 }), { id: name }));
    }));
  }

  place(i, step) {
    const { name } = this.sides[i];
    return name ? `${name} · ${t("answers.step", { step })}` : t("answers.step", { step });
  }

  async change(changes) {
    this.query.set(changes);
    await this.load().catch((error) => setText(this.count, this.app.explain(error)));
  }

  async load() {
    const asked = (this.asked = Symbol("request"));
    const [before, after] = this.pair();
    const ids = this.sides.map((side) => side.runId);
    const asking = { ...this.query.values, before, after };
    const answer = await (this.sameRun ? get(`runs/${ids[0]}/validation`, asking) : get("compare/validation", { runs: ids.join(","), ...asking }));
    if (asked !== this.asked) return;
    this.drawOutcomes(answer.counts);
    this.drawSources(answer.by_source);
    const key = answer.unscored ? "validation.unscored" : "prompts.count";
    setText(this.count, t(key, { n: answer.shown, unscored: answer.unscored }));
    replace(this.rows, answer.rows.length ? answer.rows.map((row) => this.row(row, before, after)) : emptyState(t("validation.no_rows"), t("prompts.none_hint")));
    replace(this.pages, pager(answer, (page) => this.change({ page }).then(() => scrollTo(0, 0))));
    this.cursor.at = -1;
  }

  drawOutcomes(counts) {
    const total = OUTCOMES.reduce((sum, name) => sum + counts[name], 0);
    const choice = (name, n) => button([el("span", { class: "outcome-name" }, name === "all" ? t("outcome.all") : `${MARKS[name]} ${t(`outcome.${name}`)}`),
      el("b", {}, String(n)), el("small", {}, name === "all" ? "" : percent(total ? n / total : 0))], () => this.change({ outcome: name, page: 0 }),
    { "data-outcome": name, "aria-pressed": String(this.query.values.outcome === name), title: name === "all" ? null : t(this.sameRun ? `outcome.${name}_hint` : `outcome.${name}_two_runs`, { first: this.sides[0].name, second: this.sides[1].name }) });
    replace(this.outcomes, OUTCOMES.map((name) => choice(name, counts[name])), choice("all", total));
  }

  drawSources(sources) {
    const names = Object.keys(sources);
    if (!names.length) return void replace(this.bySource);
    const accuracy = (row, before) => {
      const total = OUTCOMES.reduce((sum, name) => sum + row[name], 0);
      return total ? (row.right + (before ? row.broken : row.fixed)) / total : null;
    };
    const choose = (name) => this.change({ source: this.query.values.source === name ? "" : name, page: 0 });
    replace(this.bySource, el("div", { class: "table-box" }, el("table", { class: "by-source" },
      el("thead", {}, el("tr", {}, el("th", { scope: "col" }, t("prompts.source")), [this.sides[0].name || t("validation.accuracy_before"), this.sides[1].name || t("validation.accuracy_after"), t("validation.change")].map((text) => el("th", { class: "number", scope: "col" }, text)),
        OUTCOMES.map((name) => el("th", { class: "number", scope: "col" }, t(`outcome.${name}`))))),
      el("tbody", {}, names.map((name) => {
        const [first, last] = [accuracy(sources[name], true), accuracy(sources[name], false)];
        const change = `${last >= first ? "+" : "−"}${(100 * Math.abs(last - first)).toFixed(1)}`;
        return el("tr", {}, el("td", {}, button(name, () => choose(name), { class: "quiet", "aria-pressed": String(this.query.values.source === name) })),
          el("td", { class: "number" }, percent(first)), el("td", { class: "number strong" }, percent(last)), el("td", { class: "number" }, change),
          OUTCOMES.map((outcome) => el("td", { class: "number" }, String(sources[name][outcome]))));
      })))));
  }

  row(row, before, after) {
    const ids = this.sides.map((one) => one.runId);
    const href = (i, step, side) => `#/run/${ids[i]}/validation/${step}/prompt/${side.group}`;
    const side = (i, step, one) => el("div", { class: "side" }, el("header", {}, link(href(i, step, one), this.place(i, step)), scoreMark(one.mean)),
      el("div", { class: "text", tabindex: "0" }, marked(one.answer ?? "")));
    const over = this.sameRun ? "" : `?with=${ids[1]}&before=${before}&after=${after}`;
    const several = !this.sameRun || this.sides[0].steps.length > 1;
    return el("article", { class: "card pair", "data-outcome": row.outcome, "data-href": href(1, after, row.after) },
      el("header", {}, el("span", { class: "outcome", "data-outcome": row.outcome }, `${MARKS[row.outcome]} ${t(`outcome.${row.outcome}`)}`),
        el("span", { class: "muted" }, row.data_source), el("span", { class: "spacer" }), several ? link(`#/run/${ids[0]}/validation-prompt/${row.index}${over}`, t(this.sameRun ? "answers.history" : "validation.all_answers")) : null),
      promptText(row.text, { class: "text question" }),
      row.ground_truth ? el("p", { class: "expected-line" }, el("span", { class: "muted" }, t("prompt.expected")), " ", el("code", {}, String(row.ground_truth))) : null,
      el("div", { class: "two" }, side(0, before, row.before), side(1, after, row.after)));
  }

  // A new validation: it is shown at once if the last one was, by default.
  async updateSteps() {
    const before = this.sides.map((side) => side.steps.join()).join(";");
    for (const side of new Set(this.sides)) side.steps = (await get(`runs/${side.runId}/dumps`)).validation;
    if (this.sides.map((side) => side.steps.join()).join(";") === before) return;
    if (!this.choice.contains(document.activeElement)) this.drawChoice();
    if (this.query.values.after === "" && this.query.values.page === 0 && scrollY < 50) await this.load();
  }
}
