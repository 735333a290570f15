// An answer of several turns: turns of the policy, calls of tools, what the environment added; branches as tabs.

import { button, el, replace } from "./dom.js";
import { number, seconds } from "./format.js";
import { t, TEXTS } from "./texts.js";
import { colourTokens, marked, tokenNodes } from "./tokens.js";

const OPEN_CHARACTERS = 300; // a longer result is folded
const TOKENS_AT_ONCE = 1500; // as in answer_card.js

// Tokens are made only for steps near the visible part of the page: an episode may have hundreds.
const nearby = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) entry.target.step.showTokens();
}, { rootMargin: "400px" });

// The label of an ending; a text that this page does not know is shown as it is.
export function endingText(ending) {
  const name = ending.replaceAll(" ", "_");
  return `ending.${name}` in TEXTS ? t(`ending.${name}`) : ending;
}

export function turnsOf(answer) {
  return [answer, ...answer.branches].flatMap((branch) => branch.episode.steps.filter((step) => step.trained));
}

export class Episode {
  constructor(answer, inspector, title) {
    this.branches = [answer, ...answer.branches].map((branch, i) => new Branch(branch, inspector, title, i));
    this.tabs = this.branches.map((branch, i) => button(t("episode.branch", { n: i + 1 }), () => this.show(i), { role: "tab" }));
    this.panel = el("div", { class: "branch-panel" });
    this.node = el("div", { class: "episode" }, this.tabs.length > 1 ? el("div", { class: "branch-tabs", role: "tablist", "aria-label": t("episode.branches"), on: { keydown: (event) => this.onKey(event) } }, this.tabs) : null, this.panel);
    this.show(0);
  }

  show(at) {
    this.at = at;
    this.tabs.forEach((tab, i) => { tab.setAttribute("aria-selected", String(i === at)); tab.setAttribute("tabindex", i === at ? "0" : "-1"); });
    replace(this.panel, this.branches[at].node);
  }

  // The arrows belong to the tabs while one of them has the focus; elsewhere they open other prompts.
  onKey(event) {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (!move) return;
    event.preventDefault();
    event.stopPropagation();
    this.show((this.at + move + this.tabs.length) % this.tabs.length);
    this.tabs[this.at].focus();
  }

  moveTurn(by) {
    this.branches[this.at].moveTurn(by);
  }

  setColour(name, scale) {
    for (const branch of this.branches) branch.setColour(name, scale);
  }

  close() {
    for (const branch of this.branches) for (const step of branch.steps) nearby.unobserve(step.node);
  }
}

class Branch {
  constructor(answer, inspector, title, place) {
    const { steps, origin } = answer.episode;
    const versions = new Set(steps.filter((step) => step.source === "policy").map((step) => step.version));
    let turn = 0;
    this.answer = answer;
    this.turn = -1;
    this.steps = steps.map((step) => new Step(this, step, { turn: step.source === "policy" ? (turn += 1) : turn, showsVersion: versions.size > 1, origin }));
    this.node = el("div", { class: "text answer-text turns", tabindex: "0", role: "group", "aria-label": place ? `${title}, ${t("episode.branch", { n: place + 1 })}` : title }, this.steps.map((step) => step.node));
    if (answer.pieces) inspector.attach(this.node, answer, (i) => this.steps.find((step) => step.start <= i && i < step.stop)?.makeUntil(i));
  }

  // To the next or previous turn of the policy, at the top of the box.
  moveTurn(by) {
    const turns = this.steps.filter((step) => step.source === "policy");
    if (!turns.length) return;
    this.turn = Math.min(turns.length - 1, Math.max(0, this.turn + by));
    const { node } = turns[this.turn];
    this.node.querySelector(".step.current")?.classList.remove("current");
    node.classList.add("current");
    this.node.focus({ preventScroll: true });
    this.node.scrollIntoView({ block: "nearest" });
    this.node.scrollTop += node.getBoundingClientRect().top - this.node.getBoundingClientRect().top - 8;
  }

  setColour(name, scale) {
    Object.assign(this, { colour: name, scale });
    this.node.classList.toggle("coloured", name !== "");
    colourTokens(this.node.querySelectorAll(".token"), this.answer, name, scale);
  }
}

class Step {
  constructor(branch, step, { turn, showsVersion, origin }) {
    Object.assign(this, { branch, source: step.source, start: step.start, stop: step.stop });
    this.text = el("div", { class: "step-text" }, marked(step.messages.map(([, content]) => content).join("\n")));
    this.node = el("section", { class: `step ${step.source}` });
    if (step.source === "prompt") {
      this.node.append(el("details", {}, el("summary", {}, t(`episode.origin_${origin}`)), step.messages.map(([role, content]) => el("div", { class: "message" }, el("span", { class: "role" }, role), marked(content)))));
      return;
    }
    const label = step.source === "environment" ? t("episode.environment") : step.trained ? t("episode.turn", { n: turn }) : t("episode.earlier_turn", { n: turn });
    this.node.append(el("header", {}, el("span", { class: "step-label" }, label), details(step, showsVersion)), this.text);
    for (const call of step.calls) this.node.append(callBox(call));
    if (branch.answer.pieces && step.stop > step.start) {
      this.node.step = this;
      nearby.observe(this.node);
    }
  }

  // Replaces the plain text by its tokens.
  showTokens() {
    nearby.unobserve(this.node);
    if (this.made !== undefined) return;
    this.made = this.start;
    this.rest = el("span", {}); // what has no tokens yet
    replace(this.text, this.rest);
    this.makeTokens();
  }

  makeTokens() {
    const { answer, colour, scale } = this.branch;
    const end = Math.min(this.stop, this.made + TOKENS_AT_ONCE);
    const nodes = tokenNodes({ pieces: answer.pieces }, this.made, end).filter((node) => node.classList.contains("token"));
    this.rest.before(...nodes);
    this.rest.textContent = answer.pieces.slice(end, this.stop).map((piece) => piece.text).join("");
    this.made = end;
    if (colour) colourTokens(nodes, answer, colour, scale);
    if (end < this.stop) requestAnimationFrame(() => this.makeTokens()); // one part a frame: the page stays usable
  }

  makeUntil(i) {
    this.showTokens();
    while (this.made <= i) this.makeTokens();
  }
}

function details(step, showsVersion) {
  const roles = step.source === "environment" ? [...new Set(step.messages.map(([role]) => role))].join(", ") : "";
  return [roles ? el("span", { class: "muted" }, roles) : null,
    showsVersion && step.source === "policy" ? el("span", { class: "muted" }, t("episode.version", { step: step.version })) : null,
    step.source === "policy" && !step.finished ? el("span", { class: "tag warn" }, t("answer.cut_off")) : null,
    el("span", { class: "spacer" }),
    step.reward === null ? null : el("span", { class: "tag turn-reward" }, t("episode.reward", { value: number(step.reward) })),
    step.seconds ? el("span", { class: "muted nowrap" }, seconds(step.seconds)) : null];
}

function callBox(call) {
  const failed = call.error !== null;
  return el("div", { class: failed ? "call failed" : "call" },
    el("div", { class: "call-head" }, el("code", {}, call.name || "?"), el("span", { class: "spacer" }),
      failed ? el("span", { class: "tag warn" }, t("episode.error")) : null, el("span", { class: "muted nowrap" }, seconds(call.seconds))),
    el("div", { class: "call-arguments" }, marked(call.arguments)),
    failed ? el("div", { class: "call-error" }, marked(call.error)) : null,
    call.result && !failed ? el("details", { open: call.result.length <= OPEN_CHARACTERS }, el("summary", {}, t("episode.result")), el("div", { class: "call-result" }, marked(call.result))) : null);
}
