// One answer: score and its parts, how it ended, its text or tokens, the judge's words.

import { el, replace } from "./dom.js";
import { endingText, Episode, turnsOf } from "./episode.js";
import { number, score } from "./format.js";
import { scoreMark } from "./score.js";
import { t } from "./texts.js";
import { colourTokens, marked, tokenNodes, versionText } from "./tokens.js";

const TOKENS_AT_ONCE = 1500; // an element for each of 20,000 tokens would take the browser seconds
const AHEAD_PX = 800;

// Tokens are made only for answers near the visible part of the page.
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) entry.target.card.showTokens();
}, { rootMargin: "600px" });

export class AnswerCard {
  // isAccuracy: the reward says of each answer whether it is right
  constructor(answer, inspector, { isAccuracy, showsVersion }) {
    const title = t("answer.title", { n: answer.number });
    const judged = isAccuracy && (answer.accuracy === 0 || answer.accuracy === 1);
    this.answer = answer;
    this.inspector = inspector;
    this.colour = "";
    this.scale = 1;
    this.episode = answer.episode ? new Episode(answer, inspector, title) : null; // iff several turns
    this.text = this.episode?.node ?? el("div", { class: "text answer-text", tabindex: "0", role: "group", "aria-label": title }, marked(answer.text));
    this.node = el("article", { class: "card answer", "data-answer": answer.number },
      el("header", {}, el("h3", {}, title), scoreMark(answer.score, { title: t("answer.score") }), judged ? verdict(answer) : null, el("span", { class: "spacer" }),
        el("span", { class: "muted nowrap" }, t("answer.tokens", { n: answer.length }))),
      badges(answer, showsVersion), parts(answer, judged), this.text, words(answer));
    if (answer.pieces && !this.episode) {
      this.node.card = this;
      nearby.observe(this.node);
    }
  }

  close() {
    this.episode?.close();
    nearby.unobserve(this.node);
  }

  // Replaces the plain text by the same text as tokens.
  showTokens() {
    nearby.unobserve(this.node);
    if (this.tokens) return;
    this.tokens = true;
    this.made = 0;
    this.rest = el("span", {}); // what has no tokens yet
    replace(this.text, this.rest);
    this.makeTokens();
    this.text.addEventListener("scroll", () => this.onScroll(), { passive: true });
    this.inspector.attach(this.text, this.answer, (i) => { while (i >= this.made) this.makeTokens(); });
  }

  makeTokens() {
    const { pieces } = this.answer;
    const end = Math.min(pieces.length, this.made + TOKENS_AT_ONCE);
    const nodes = tokenNodes(this.answer, this.made, end);
    this.rest.before(...nodes);
    this.rest.textContent = pieces.slice(end).map((piece) => piece.text).join("");
    this.made = end;
    colourTokens(nodes, this.answer, this.colour, this.scale);
  }

  onScroll() {
    if (this.growing || this.made >= this.answer.pieces.length) return;
    const below = this.rest.getBoundingClientRect().top - this.text.getBoundingClientRect().bottom;
    if (below > AHEAD_PX) return;
    this.growing = true;
    this.makeTokens();
    requestAnimationFrame(() => { // one part a frame: the page stays usable
      this.growing = false;
      this.onScroll();
    });
  }

  setColour(name, scale) {
    this.episode?.setColour(name, scale);
    this.colour = name;
    this.scale = scale;
    this.text.classList.toggle("coloured", name !== "");
    if (this.tokens) colourTokens(this.text.querySelectorAll(".token"), this.answer, name, scale);
  }
}

function verdict(answer) {
  const right = answer.accuracy === 1;
  return el("span", { class: right ? "verdict right" : "verdict wrong" }, right ? `✓ ${t("answer.right")}` : `✗ ${t("answer.wrong")}`);
}

// Of an answer that was interrupted by updates of the weights: how many versions it has.
function versionsText(answer) {
  const versions = [...new Set((answer.versions ?? []).map(([, version]) => version))].sort((a, b) => a - b);
  return versions.length < 2 ? null : t("answer.versions", { n: versions.length, oldest: versionText(versions[0]), newest: versionText(versions.at(-1)) });
}

function badges(answer, showsVersion) {
  const given = answer.prediction !== null && answer.prediction !== undefined;
  const versions = versionsText(answer);
  return el("div", { class: "badges" },
    answer.episode ? episodeBadges(answer) : el("span", { class: answer.finished ? "tag" : "tag warn" }, answer.finished ? t("answer.finished") : t("answer.cut_off")),
    showsVersion && !versions ? el("span", { class: "tag" }, t("answers.weights"), " ", versionText(answer.version)) : null,
    versions ? el("span", { class: "tag" }, versions) : null,
    answer.turns?.length > 1 && !answer.episode ? el("span", { class: "tag" }, t("answer.turns", { n: answer.turns.length })) : null,
    given ? el("span", { class: "tag prediction" }, t("answer.prediction"), " ", el("code", {}, String(answer.prediction))) : null);
}

function episodeBadges(answer) {
  const { ending, reward, failure } = answer.episode;
  const turns = turnsOf(answer);
  const calls = turns.flatMap((turn) => turn.calls).length;
  return [el("span", { class: ending === "done" ? "tag ending" : "tag ending warn" }, endingText(ending)),
    el("span", { class: "tag" }, t("answer.turns", { n: turns.length })),
    calls ? el("span", { class: "tag" }, t("episode.calls", { n: calls })) : null,
    answer.branches.length ? el("span", { class: "tag" }, t("episode.count_branches", { n: answer.branches.length + 1 })) : null,
    reward === null ? null : el("span", { class: "tag" }, t("episode.reward", { value: number(reward) })),
    failure && !answer.reason ? el("span", { class: "tag warn" }, failure) : null];
}

// Without the part that the verdict says in words.
function parts(answer, judged) {
  const entries = Object.entries(answer.parts ?? {}).filter(([name]) => !(judged && name === "acc"));
  if (!entries.length) return null;
  return el("dl", { class: "parts" }, entries.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, Number.isInteger(value) ? score(value) : number(value)))));
}

function words(answer) {
  const failed = answer.reason ? el("p", { class: "reason" }, el("b", {}, t("answer.failed")), " ", answer.reason) : null;
  const judge = answer.detail ? el("details", { open: answer.detail.length < 400 }, el("summary", {}, t("answer.judge")), el("div", { class: "text judge" }, marked(answer.detail))) : null;
  return failed || judge ? el("footer", {}, failed, judge) : null;
}
