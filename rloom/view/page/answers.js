// One prompt of a step: the prompt, what is expected, and all answers side by side.

import { get } from "./api.js";
import { AnswerCard } from "./answer_card.js";
import { button, el, field, link, replace, select } from "./dom.js";
import { fixed } from "./format.js";
import { measureOf } from "./measure.js";
import { promptBox } from "./prompt_text.js";
import { scoreMark } from "./score.js";
import { remember, remembered } from "./settings.js";
import { t } from "./texts.js";
import { available, legend, scaleOf, TokenInspector, versionText } from "./tokens.js";

const ORDERS = {
  given: () => 0,
  best: (a, b) => (b.score ?? -Infinity) - (a.score ?? -Infinity),
  worst: (a, b) => (a.score ?? Infinity) - (b.score ?? Infinity),
  longest: (a, b) => b.length - a.length,
  shortest: (a, b) => a.length - b.length,
};

export async function answers(app, { path }) {
  const { runId } = app; // of this page: the app may have gone on to another before an answer arrives
  const [kind, step, group] = [path[1], Number(path[2]), Number(path[3])];
  const answer = await get(`runs/${runId}/${kind === "step" ? "train" : kind}/${step}/prompts/${group}`);
  const view = new Answers(runId, kind, step, answer, measureOf(app.store().measures, answer.prompt.data_source));
  const open = (other) => other !== null && (location.hash = `#/run/${runId}/${kind}/${step}/prompt/${other}`);
  const [previous, next] = [() => open(answer.previous), () => open(answer.next)];
  return {
    node: view.node,
    close: () => view.close(),
    keys: { t: () => view.moveTurn(1), T: () => view.moveTurn(-1), j: next, k: previous, ArrowRight: next, ArrowLeft: previous, c: () => view.nextColour(), h: () => view.steps > 1 && (location.hash = view.historyHash()), Escape: () => (location.hash = view.listHash()) },
    rows: [["j k", t("keys.prompts")], ...(view.hasEpisodes ? [["t T", t("keys.turns")]] : []), ["c", t("keys.colour")], ["h", t("keys.history")], ["Esc", t("keys.back")]],
  };
}

class Answers {
  constructor(runId, kind, step, { prompt, answers: given, previous, next, steps }, measure) {
    Object.assign(this, { runId, kind, step, prompt, previous, next, steps });
    const versions = new Set(given.flatMap((answer) => [answer.version, ...(answer.versions ?? []).map(([, version]) => version)]));
    this.version = versions.size === 1 ? [...versions][0] : null; // null: answers of different weights
    this.given = given.map((answer, i) => ({ ...answer, number: i + 1 }));
    this.quantities = available(given.flatMap((answer) => [answer, ...(answer.branches ?? [])]));
    this.inspector = new TokenInspector();
    const wanted = remembered("tokens", "advantage");
    this.colour = wanted !== "" && this.quantities.length && !this.quantities.includes(wanted) ? this.quantities[0] : wanted;
    if (!this.quantities.length) this.colour = "";
    this.order = "given";
    this.scale = el("div", { class: "scale-box" });
    this.choices = el("div", { class: "segments", role: "group", "aria-label": t("answers.colour") });
    this.cards = this.given.map((answer) => new AnswerCard(answer, this.inspector, { isAccuracy: measure === "accuracy", showsVersion: this.version === null }));
    this.hasEpisodes = given.some((answer) => answer.episode);
    this.grid = el("div", { class: this.hasEpisodes ? "answers episodes" : "answers", "data-count": String(given.length) });
    this.node = el("section", { class: "page" }, this.head(), promptBox(prompt), this.toolbar(), this.grid, this.inspector.node);
    this.drawChoices();
    this.drawCards();
    this.onScroll = () => this.inspector.hide();
    addEventListener("scroll", this.onScroll, { passive: true });
  }

  close() {
    removeEventListener("scroll", this.onScroll);
    for (const card of this.cards) card.close();
  }

  listHash() {
    return this.kind === "step" ? `#/run/${this.runId}/step/${this.step}` : `#/run/${this.runId}/validation`;
  }

  historyHash() {
    return `#/run/${this.runId}/${this.kind === "step" ? "prompt" : "validation-prompt"}/${this.prompt.index}`;
  }

  head() {
    const { prompt } = this;
    const move = (text, group, label) => (group === null ? el("span", { class: "button disabled" }, text)
      : link(`#/run/${this.runId}/${this.kind}/${this.step}/prompt/${group}`, text, { class: "button", "aria-label": label, title: label }));
    return el("div", { class: "page-head" },
      el("h1", {}, link(this.listHash(), this.kind === "step" ? t("answers.step", { step: this.step }) : t("answers.validation", { step: this.step })),
        el("span", { class: "muted" }, " / "), t("answers.prompt", { group: prompt.group })),
      move("‹", this.previous, t("answers.previous")), move("›", this.next, t("answers.next")),
      el("dl", { class: "facts" },
        fact(t("prompts.mean"), scoreMark(prompt.mean)), fact(t("prompts.spread"), fixed(prompt.spread, 2)),
        fact(t("prompts.length"), fixed(prompt.length, 1)), fact(t("prompts.source"), prompt.data_source),
        this.version === null ? null : fact(t("answers.weights"), versionText(this.version)),
        prompt.failed ? fact(t("prompts.failed"), `${prompt.failed} / ${prompt.answers}`) : null),
      el("span", { class: "spacer" }), this.steps > 1 ? link(this.historyHash(), t("answers.history_of", { n: this.steps }), { id: "history" })
        : el("span", { class: "muted", id: "history" }, t("answers.one_step")));
  }

  toolbar() {
    const orders = Object.keys(ORDERS).map((name) => [name, t(`order.${name}`)]);
    return el("div", { class: "toolbar" }, el("span", { class: "label" }, t("answers.colour")), this.choices, this.scale, el("span", { class: "spacer" }),
      field(t("answers.order"), select(orders, this.order, (order) => { this.order = order; this.drawCards(); }, { id: "order" })));
  }

  drawChoices() {
    const names = ["", "logprob", "advantage", "entropy", "ratio"];
    replace(this.choices, names.map((name) => button(name ? t(`token.${name}`) : t("token.plain"), () => this.setColour(name), {
      "data-colour": name || "plain", "aria-pressed": String(name === this.colour), disabled: name !== "" && !this.quantities.includes(name),
      title: name !== "" && !this.quantities.includes(name) ? t("answers.not_dumped") : null })));
    const scale = scaleOf(this.given, this.colour);
    replace(this.scale, this.colour ? legend(this.colour, scale) : null);
    for (const card of this.cards) card.setColour(this.colour, scale);
  }

  setColour(name) {
    this.colour = name;
    remember("tokens", name);
    this.drawChoices();
  }

  nextColour() {
    const names = ["", ...this.quantities];
    this.setColour(names[(names.indexOf(this.colour) + 1) % names.length]);
  }

  // In the answer that has the focus, else in the first.
  moveTurn(by) {
    const card = this.cards.find((one) => one.node.contains(document.activeElement)) ?? this.cards[0];
    card?.episode?.moveTurn(by);
  }

  drawCards() {
    const order = ORDERS[this.order];
    replace(this.grid, [...this.cards].sort((a, b) => order(a.answer, b.answer)).map((card) => card.node));
  }
}

function fact(name, text) {
  return el("div", {}, el("dt", {}, name), el("dd", {}, text));
}
