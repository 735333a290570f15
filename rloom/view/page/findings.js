// What the run's metrics show to be wrong: evidence, likely causes, keys to change.

import { get } from "./api.js";
import { button, el, emptyState, link, replace } from "./dom.js";
import { value } from "./format.js";
import { inLanguage, language, t } from "./texts.js";

const MARKS = { error: "✕", warning: "!", note: "i" }; // a sign beside the colour

export async function findings(app) {
  const { runId } = app; // of this page: the app may have gone on to another before an answer arrives
  const node = el("section", { class: "page narrow" });
  let last = "";
  const update = async () => {
    const answer = await get(`runs/${runId}/findings`);
    const text = JSON.stringify([answer, language()]);
    if (text === last) return;
    last = text;
    replace(node, el("div", { class: "page-head" }, el("h1", {}, t("findings.title")),
      el("span", { class: "muted" }, t("findings.read", { n: answer.steps }))),
    answer.findings.length ? answer.findings.map(card) : emptyState(t("findings.none"), t("findings.none_hint")));
  };
  await update();
  return { node, update };
}

export function severityMark(severity) {
  return el("span", { class: "severity", "data-severity": severity }, el("i", { "aria-hidden": "true" }, MARKS[severity]),
    el("span", {}, t(`severity.${severity}`)));
}

// How many findings a run has, in the colour of the worst.
export function severityBadge({ count, worst }) {
  if (!worst) return el("span", { class: "severity none" }, el("i", { "aria-hidden": "true" }, "✓"), el("span", {}, "0"));
  return el("span", { class: "severity", "data-severity": worst.severity }, el("i", { "aria-hidden": "true" }, MARKS[worst.severity]),
    el("span", {}, String(count)), el("span", { class: "wide-only" }, t(`severity.${worst.severity}`)));
}

export function findingTitle(finding, href) {
  return [severityMark(finding.severity), link(href, inLanguage(finding.title), { class: "strong" }), steps(finding)];
}

function steps(finding) {
  if (!finding.steps?.length) return null;
  const [first, last] = [finding.steps[0], finding.steps.at(-1)];
  return el("span", { class: "muted nowrap" }, first === last ? t("findings.step", { step: first }) : t("findings.steps", { first, last }));
}

function card(finding) {
  return el("article", { class: "card finding", "data-kind": finding.kind },
    el("header", {}, severityMark(finding.severity), el("h2", {}, inLanguage(finding.title)), steps(finding)),
    finding.evidence.length ? part("findings.evidence", el("ul", {}, finding.evidence.map((line) => el("li", {}, inLanguage(line))))) : null,
    finding.causes.length ? part("findings.causes", el("ol", {}, finding.causes.map((line) => el("li", {}, inLanguage(line))))) : null,
    finding.actions.length || finding.changes.length
      ? part(finding.begin_again ? "findings.begin_again" : "findings.changes", el("ul", { class: "changes" },
        finding.actions.map((line) => el("li", {}, el("span", {}, inLanguage(line)))), finding.changes.map(change)))
      : null);
}

function part(key, content) {
  return el("section", {}, el("h3", {}, t(key)), content);
}

function change(item) {
  const text = item.value === null || item.value === undefined || item.value === "" ? item.key : `${item.key}=${value(item.value)}`;
  const copy = button(t("findings.copy"), async (event) => {
    const control = event.currentTarget;
    await navigator.clipboard.writeText(text).then(() => replace(control, t("findings.copied")), () => {});
  }, { class: "quiet" });
  return el("li", {}, el("code", { class: "key-value" }, text), copy, el("span", {}, inLanguage(item.why)));
}
