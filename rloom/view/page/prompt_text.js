// A prompt as a reader knows it: the last message of the user, without the marks of the chat template.

import { el } from "./dom.js";
import { t } from "./texts.js";
import { marked } from "./tokens.js";

// [before a message of the user, after it] of the usual chat templates
const TEMPLATES = [
  ["<|im_start|>user\n", "<|im_end|>"], // Qwen, ChatML
  ["<|start_header_id|>user<|end_header_id|>\n\n", "<|eot_id|>"], // Llama 3
  ["<|header_start|>user<|header_end|>\n\n", "<|eot|>"], // Llama 4
  ["<start_of_turn>user\n", "<end_of_turn>"], // Gemma
  ["<｜User｜>", "<｜Assistant｜>"], // DeepSeek
  ["<|user|>\n", "<|"], // Phi, GLM
  ["<|start|>user<|message|>", "<|end|>"], // gpt-oss
  ["[INST]", "[/INST]"], // Mistral
];

// null: the prompt has no such template
function lastMessage(text) {
  for (const [before, after] of TEMPLATES) {
    const start = text.lastIndexOf(before);
    if (start < 0) continue;
    const from = start + before.length;
    const end = text.indexOf(after, from);
    const message = text.slice(from, end < 0 ? undefined : end).trim();
    if (message) return message;
  }
  return null;
}

export function question(text) {
  return lastMessage(text) ?? text;
}

// The question, and the whole prompt on demand.
export function promptText(text, attributes = {}) {
  const message = lastMessage(text);
  const shown = el("div", { class: "text prompt-text", tabindex: "0", ...attributes }, marked(message ?? text));
  return message === null ? shown : [shown, el("details", { class: "whole-prompt" }, el("summary", {}, t("prompt.whole")), el("div", { class: "text", tabindex: "0" }, marked(text)))];
}

// A prompt and the expected answer.
export function promptBox(prompt) {
  const expected = prompt.ground_truth;
  return el("div", { class: "prompt-box" },
    el("section", {}, el("h2", {}, t("prompt.title")), promptText(prompt.text ?? "")),
    expected === null || expected === undefined || expected === "" ? null
      : el("section", { class: "expected" }, el("h2", {}, t("prompt.expected")), el("div", { class: "text", tabindex: "0" }, marked(String(expected)))));
}
