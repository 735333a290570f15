// The tokens of an answer, coloured by one of their numbers, and the numbers of the token under the pointer.

import { el, replace } from "./dom.js";
import { fixed, NONE, number } from "./format.js";
import { t } from "./texts.js";

const LEVELS = 8;

// from: values that get no colour and the strongest one. Diverging quantities have two colours, one for each side.
export const QUANTITIES = {
  logprob: { field: "logprobs", diverging: false, strength: (v) => -v / 5, ends: ["0", "≤ −5"] },
  advantage: { field: "advantages", diverging: true, strength: (v, scale) => v / scale },
  entropy: { field: "entropy", diverging: false, strength: (v) => v / 3, ends: ["0", "≥ 3"] },
  ratio: { field: "ratio", diverging: true, strength: (v) => Math.log(v) / Math.log(1.5), ends: ["≤ 0.67", "1", "≥ 1.5"] },
};

export function available(answers) {
  return Object.keys(QUANTITIES).filter((name) => answers.some((answer) => answer.pieces && answer[QUANTITIES[name].field]));
}

// The largest size of an advantage of the shown answers: both ends of its scale, so that 0 stays without colour.
export function scaleOf(answers, name) {
  if (name !== "advantage") return 1;
  let most = 0;
  for (const answer of answers) {
    answer.advantages?.forEach((value, i) => {
      if (value !== null && !answer.pieces?.[i]?.masked) most = Math.max(most, Math.abs(value));
    });
  }
  return most || 1;
}

export function legend(name, scale) {
  const quantity = QUANTITIES[name];
  const ends = quantity.ends ?? [`−${number(scale)}`, "0", number(scale)];
  const levels = quantity.diverging ? [...range(LEVELS).reverse().map((i) => `n${i}`), "", ...range(LEVELS).map((i) => `p${i}`)] : ["", ...range(LEVELS).map((i) => `s${i}`)];
  return el("div", { class: "scale", role: "img", "aria-label": `${t(`token.${name}`)}: ${ends.join(", ")}` },
    el("div", { class: "scale-bar" }, levels.map((level) => el("i", { class: level ? `token ${level}` : "token" }))),
    el("div", { class: "scale-ends" }, ends.map((text) => el("span", {}, text))));
}

function range(n) {
  return [...Array(n).keys()].map((i) => i + 1);
}

export function levelOf(name, value, scale) {
  if (value === null || value === undefined) return "";
  const strength = QUANTITIES[name].strength(value, scale);
  const level = Math.min(LEVELS, Math.round(Math.abs(strength) * LEVELS));
  if (level === 0 || Number.isNaN(level)) return "";
  if (!QUANTITIES[name].diverging) return strength > 0 ? `s${level}` : "";
  return strength > 0 ? `p${level}` : `n${level}`;
}

// Tokens `from` to `to` as one element each. Newlines get a visible mark by CSS; the text itself is unchanged.
export function tokenNodes(answer, from, to) {
  const starts = new Map((answer.turns ?? []).map(([start], i) => [start, i + 1]));
  const several = starts.size > 1;
  const nodes = [];
  let masked = from > 0 && answer.pieces[from - 1].masked;
  for (let i = from; i < to; i += 1) {
    const piece = answer.pieces[i];
    if (several && starts.has(i)) nodes.push(el("span", { class: "turn", "data-label": t("token.turn", { n: starts.get(i) }) }));
    if (piece.masked && !masked) nodes.push(el("span", { class: "turn tool", "data-label": t("token.tool") }));
    masked = piece.masked;
    nodes.push(el("span", { class: masked ? "token masked" : "token", "data-i": i }, marked(piece.text)));
  }
  return nodes;
}

export function marked(text) {
  return text.split(/(\n)/).filter(Boolean).map((part) => (part === "\n" ? el("span", { class: "newline" }, "\n") : part));
}

export function colourTokens(nodes, answer, name, scale) {
  const values = name && answer[QUANTITIES[name].field];
  for (const node of nodes) {
    if (!node.classList.contains("token")) continue; // the mark of a turn
    const i = Number(node.dataset.i);
    const level = values && !answer.pieces[i].masked ? levelOf(name, values[i], scale) : "";
    const wanted = `token${answer.pieces[i].masked ? " masked" : ""}${level ? ` ${level}` : ""}`;
    if (node.className !== wanted) node.className = wanted;
  }
}

// The policy after this step; 0 is the model that the run began with.
export function versionText(version) {
  return version === 0 ? t("answer.version_start") : t("answer.version", { step: version });
}

// Of the weights that sampled token i. Undefined: no answer of the step has several versions.
function versionOf(answer, i) {
  return answer.versions?.find(([stop]) => i < stop)?.[1];
}

// A box that follows the pointer, or the arrow keys while the answer has the focus.
export class TokenInspector {
  constructor() {
    this.node = el("div", { class: "inspector", role: "status", hidden: true });
  }

  // `make(i)`: called before token i is selected, which may not be in the document yet
  attach(box, answer, make) {
    let at = -1;
    const select = (i) => {
      box.querySelector(".token.selected")?.classList.remove("selected");
      at = Math.min(answer.pieces.length - 1, Math.max(0, i));
      make(at);
      const node = box.querySelector(`[data-i="${at}"]`);
      node.classList.add("selected");
      node.scrollIntoView({ block: "nearest" });
      this.show(node, answer, at);
    };
    box.addEventListener("pointerover", (event) => {
      const node = event.target.closest(".token");
      if (node) this.show(node, answer, Number(node.dataset.i));
      else this.hide();
    });
    box.addEventListener("pointerleave", () => this.hide());
    box.addEventListener("blur", () => { box.querySelector(".selected")?.classList.remove("selected"); this.hide(); });
    box.addEventListener("keydown", (event) => {
      const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!move || event.altKey || event.ctrlKey || event.metaKey) return;
      event.preventDefault();
      event.stopPropagation();
      select(at + move);
    });
  }

  show(node, answer, i) {
    const piece = answer.pieces[i];
    const values = piece.masked ? [] : Object.entries(QUANTITIES).filter(([, { field }]) => answer[field])
      .map(([name, { field }]) => [t(`token.${name}`), fixed(answer[field][i] ?? null, 4)]);
    const version = piece.masked ? undefined : versionOf(answer, i);
    if (version !== undefined) values.push([t("answers.weights"), versionText(version)]);
    const probability = answer.logprobs && !piece.masked && answer.logprobs[i] !== null ? `${(100 * Math.exp(answer.logprobs[i])).toFixed(2)}\u202f%` : NONE;
    replace(this.node,
      el("div", { class: "inspected" }, el("code", {}, JSON.stringify(piece.text)), el("span", { class: "muted" }, t("token.place", { i: i + 1, n: answer.pieces.length }))),
      piece.masked ? el("p", {}, t("token.masked")) : el("dl", {}, [[t("token.probability"), probability], ...values].map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)])));
    this.node.hidden = false;
    const [place, own] = [node.getBoundingClientRect(), this.node.getBoundingClientRect()];
    const left = Math.max(8, Math.min(place.left, innerWidth - own.width - 8));
    const below = place.bottom + 6 + own.height < innerHeight;
    this.node.style.setProperty("left", `${left}px`);
    this.node.style.setProperty("top", `${below ? place.bottom + 6 : Math.max(8, place.top - own.height - 6)}px`);
  }

  hide() {
    this.node.hidden = true;
  }
}
