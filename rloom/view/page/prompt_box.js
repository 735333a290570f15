// A prompt and the expected answer.

import { el } from "./dom.js";
import { t } from "./texts.js";
import { marked } from "./tokens.js";

export function promptBox(prompt) {
  const expected = prompt.ground_truth;
  return el("div", { class: "prompt-box" },
    el("section", {}, el("h2", {}, t("prompt.title")), el("div", { class: "text prompt-text", tabindex: "0" }, marked(prompt.text ?? ""))),
    expected === null || expected === undefined || expected === "" ? null
      : el("section", { class: "expected" }, el("h2", {}, t("prompt.expected")), el("div", { class: "text", tabindex: "0" }, marked(String(expected)))));
}
