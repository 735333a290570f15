// A text in the answers of all steps. The server searches step by step, the last first; the page shows what was found so far.

import { get } from "./api.js";
import { button, el, emptyState, field, link, replace, select, setText } from "./dom.js";
import { question } from "./prompt_text.js";
import { Query } from "./query.js";
import { scoreMark } from "./score.js";
import { t } from "./texts.js";

const ENOUGH = 50; // answers, before the user is asked whether to go on

export async function search(app, { query }) {
  const view = new Search(app, app.runId, query);
  if (view.query.values.text) view.begin();
  return { node: view.node, close: () => view.stop(), keys: {}, rows: [] };
}

class Search {
  constructor(app, runId, query) {
    Object.assign(this, { app, runId });
    this.query = new Query(query, { text: "", kind: "train" });
    this.state = el("p", { class: "muted", "aria-live": "polite", id: "searched" });
    this.found = el("div", { class: "pairs" });
    this.more = el("div", { class: "pager" });
    const input = el("input", { type: "search", value: this.query.values.text, autocomplete: "off", maxlength: 200, placeholder: t("search.hint") });
    const kinds = [["train", t("search.train")], ["validation", t("nav.validation")]];
    const form = el("form", { class: "toolbar", on: { submit: (event) => {
      event.preventDefault();
      this.query.set({ text: input.value.trim() });
      this.begin();
    } } }, field(t("search.text"), input, { class: "field grow" }), field(t("search.in"), select(kinds, this.query.values.kind, (kind) => { this.query.set({ kind }); this.begin(); }, { id: "search-kind" })),
    el("button", { type: "submit" }, t("search.start")));
    this.node = el("section", { class: "page" }, el("div", { class: "page-head" }, el("h1", {}, t("search.title"))), form, this.state, this.found, this.more);
  }

  stop() {
    this.turn = Symbol("stopped");
  }

  begin() {
    Object.assign(this, { before: null, searched: 0, skipped: 0, answers: 0 });
    replace(this.found);
    replace(this.more);
    setText(this.state, "");
    if (this.query.values.text) return this.goOn(ENOUGH);
    this.stop();
  }

  async goOn(most) {
    const turn = (this.turn = Symbol("search"));
    const { text, kind } = this.query.values;
    replace(this.more, button(t("search.stop"), () => this.pause(), {}));
    let left = 1;
    try {
      while (left) {
        const answer = await get(`runs/${this.runId}/search`, { text, kind, before: this.before });
        if (turn !== this.turn) return;
        this.add(answer, text, kind);
        left = answer.left;
        if (this.answers >= most) break;
      }
    } catch (error) {
      if (turn === this.turn) setText(this.state, this.app.explain(error));
      return void replace(this.more);
    }
    this.offer(left);
  }

  pause() {
    this.stop();
    this.offer(1);
  }

  offer(left) {
    replace(this.more, left ? button(t("search.more"), () => this.goOn(this.answers + ENOUGH), { id: "search-more" }) : null);
    if (!left && !this.answers) replace(this.found, emptyState(t("search.none")));
  }

  add(answer, text, kind) {
    this.before = answer.before;
    this.searched += answer.searched;
    this.skipped += answer.skipped;
    for (const step of answer.steps) {
      this.answers += step.count;
      this.found.append(this.step(step, text, kind));
    }
    setText(this.state, t(answer.left ? "search.so_far" : "search.done", { n: this.answers, steps: this.searched, left: answer.left })
      + (this.skipped ? ` ${t("search.skipped", { n: this.skipped })}` : ""));
  }

  step({ step, count, answers }, text, kind) {
    const place = kind === "train" ? "step" : "validation";
    const href = (group) => `#/run/${this.runId}/${place}/${step}/prompt/${group}`;
    const all = kind === "train" ? link(`#/run/${this.runId}/step/${step}?text=${encodeURIComponent(text)}`, t("search.all_of_step", { n: count })) : el("span", { class: "muted" }, t("history.answers", { n: count }));
    return el("section", { class: "card pair", "data-step": step },
      el("header", {}, el("h2", {}, t(kind === "train" ? "answers.step" : "answers.validation", { step })), all),
      answers.map((one) => el("article", { class: "found" },
        el("header", {}, link(href(one.group), t("search.answer", { group: one.group, n: one.number })), scoreMark(one.score), el("span", { class: "muted" }, one.data_source)),
        el("p", { class: "muted clamp" }, question(one.prompt).slice(0, 300)),
        el("div", { class: "text" }, one.cut[0] ? "… " : "", highlighted(one.excerpt, text), one.cut[1] ? " …" : ""))));
  }
}

// Upper and lower case are equal; a letter that changes its length in the other case is not marked.
function highlighted(excerpt, text) {
  const [low, wanted] = [excerpt.toLowerCase(), text.toLowerCase()];
  if (low.length !== excerpt.length) return excerpt;
  const parts = [];
  let from = 0;
  for (let at = low.indexOf(wanted); at >= 0; at = low.indexOf(wanted, from)) {
    parts.push(excerpt.slice(from, at), el("mark", {}, excerpt.slice(at, at + wanted.length)));
    from = at + wanted.length;
  }
  return [...parts, excerpt.slice(from)];
}
