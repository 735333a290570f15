// One prompt over the steps: its mean score, and its answers at two steps side by side.

import { get } from "./api.js";
import { Chart, ChartGroup } from "./charts.js";
import { colour } from "./chart_specs.js";
import { compareWords } from "./diff.js";
import { el, emptyState, field, link, replace, select } from "./dom.js";
import { score } from "./format.js";
import { promptBox } from "./prompt_text.js";
import { Query } from "./query.js";
import { scoreMark } from "./score.js";
import { t } from "./texts.js";
import { marked } from "./tokens.js";

export async function history(app, { path, query }) {
  const { runId } = app; // of this page: the app may have gone on to another before an answer arrives
  const [kind, index] = [path[1] === "prompt" ? "train" : "validation", Number(path[2])];
  const other = app.run(Number(query.get("with") ?? runId))?.id ?? runId;
  const view = new History(app, [runId, other], kind, index, query);
  await view.update();
  return {
    node: view.node, update: () => view.update(), close: () => view.group.close(),
    keys: { "[": () => view.move(-1), "]": () => view.move(1) },
    rows: [["[ ]", t("keys.history_steps")]],
  };
}

class History {
  // ids: of the runs on the left and on the right; equal unless two runs are compared
  constructor(app, ids, kind, index, query) {
    Object.assign(this, { app, ids, kind });
    this.addresses = ids.map((id) => (kind === "train" ? `runs/${id}/prompts/${index}/history` : `runs/${id}/validation/prompts/${index}/history`));
    this.query = new Query(query, { with: "", before: "", after: "" });
    this.group = new ChartGroup(0);
    this.chart = new Chart(this.group, { title: t("history.mean"), points: true, id: "history" });
    this.chartBox = el("div", { class: "chart-grid one" }, this.chart.node);
    this.head = el("div", {});
    this.choice = el("div", { class: "toolbar" });
    this.columns = el("div", { class: "two" });
    this.node = el("section", { class: "page" }, this.head, this.chartBox, this.choice, this.columns);
    this.shown = "";
    this.loaded = new Map();
  }

  async update() {
    const both = await Promise.all(this.two() ? this.addresses.map((address) => get(address)) : [get(this.addresses[0])]);
    const shown = both.map(({ steps }) => steps.length).join();
    if (shown === this.shown) return;
    this.shown = shown;
    const [answer] = both;
    this.sides = [0, 1].map((i) => (both[i] ?? answer).steps.map((one) => ({ ...one, run: this.ids[i] })));
    this.single = !this.two() && answer.steps.length === 1;
    replace(this.head, el("div", { class: "page-head" }, el("h1", {}, t("history.title", { index: answer.index })),
      el("span", { class: "muted" }, t("history.count", { n: answer.steps.length })), el("span", { class: "muted" }, answer.data_source ?? "")), promptBox(answer));
    this.chartBox.hidden = this.choice.hidden = this.single;
    if (this.single) this.head.append(el("p", { class: "note one-step" }, t("history.one")));
    this.chart.set(both.map(({ steps }, i) => {
      const scored = steps.filter((one) => one.mean !== null); // null: every score failed
      return { name: this.two() ? this.app.run(this.ids[i]).name : "", colour: colour(i), x: scored.map((one) => one.step), y: scored.map((one) => one.mean) };
    }));
    await this.drawColumns();
  }

  two() {
    return this.ids[0] !== this.ids[1];
  }

  // The two chosen steps; the first and the last unless others were chosen.
  chosen() {
    const find = (i, text, otherwise) => this.sides[i].find((one) => String(one.step) === String(text)) ?? this.sides[i].at(otherwise);
    return [find(0, this.query.values.before, this.two() ? -1 : 0), find(1, this.query.values.after, -1)];
  }

  move(by) {
    const [, steps] = this.sides;
    const next = steps[steps.indexOf(this.chosen()[1]) + by];
    if (next) this.choose({ after: next.step });
  }

  choose(change) {
    this.query.set(change);
    return this.drawColumns();
  }

  async answersOf(at) {
    const key = `${at.run} ${at.step}`;
    if (!this.loaded.has(key)) {
      const found = await get(`runs/${at.run}/${this.kind}/${at.step}/prompts/${at.group}`);
      this.loaded.set(key, found.answers);
    }
    return this.loaded.get(key);
  }

  async drawColumns() {
    const pair = this.chosen();
    const options = this.sides.map((steps) => steps.map((one) => [one.step, t("history.option", { step: one.step, mean: score(one.mean) })]));
    replace(this.choice, ["before", "after"].map((name, i) =>
      field(t(`history.${name}`), select(options[i], pair[i].step, (step) => this.choose({ [name]: step }), { id: `history-${name}` }))),
    el("span", { class: "muted hint" }, t("history.hint")));
    // a step whose answers were removed, since the folder was full, has only its mean
    const both = await Promise.all(pair.map((at) => this.answersOf(at).catch(() => [])));
    if (pair.some((at, i) => at !== this.chosen()[i])) return; // others were chosen meanwhile
    const same = pair[0].step === pair[1].step && !this.two();
    const changes = !same && both[0].length && both[1].length ? compareWords(both[0][0].text, both[1][0].text) : null;
    replace(this.columns, (this.single ? [pair[0]] : pair).map((at, i) => this.column(at, both[i], changes?.[i], i === 0 ? "removed" : "added")));
  }

  column(at, answers, changes, change) {
    const kind = this.kind === "train" ? "step" : "validation";
    return el("section", { class: "column", "data-step": at.step },
      el("header", { class: "section-head" }, this.two() ? el("b", {}, this.app.run(at.run).name) : null, el("h2", {}, link(`#/run/${at.run}/${kind}/${at.step}/prompt/${at.group}`, t("answers.step", { step: at.step }))),
        scoreMark(at.mean), el("span", { class: "muted" }, t("history.answers", { n: at.answers }))),
      answers.length ? answers.map((answer, i) => el("article", { class: "card answer" },
        el("header", {}, el("h3", {}, t("answer.title", { n: i + 1 })), scoreMark(answer.score), el("span", { class: "spacer" }),
          answer.finished ? null : el("span", { class: "tag warn" }, t("answer.cut_off")), el("span", { class: "muted nowrap" }, t("answer.tokens", { n: answer.length }))),
        el("div", { class: "text answer-text", tabindex: "0" }, i === 0 && changes
          ? changes.map((part) => (part.changed ? el(change === "removed" ? "del" : "ins", {}, marked(part.text)) : marked(part.text)))
          : marked(answer.text)))) : emptyState(t("history.gone")));
  }
}
