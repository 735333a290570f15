// What the x axis of curves counts: steps, seconds of training, tokens or answers.

import * as curves from "./curves.js";
import { duration, number } from "./format.js";
import { t } from "./texts.js";

const TOKENS = ["perf/total_num_tokens", "train/answer_tokens"]; // of one step; the first that the run has
const UNITS = [[1, "s"], [60, "min"], [3600, "h"], [86400, "d"]];

// values(store): one for each of its steps, or null if the run did not record it.
export const AXES = {
  step: { values: (store) => store.steps, text: String, words: (x) => t("chart.at_step", { step: x }), ticks: (domain, count) => curves.ticks(domain, count, true).map((x) => [x, String(x)]) },
  time: { values: (store) => (store.seconds.some((x) => x > 0) ? store.seconds : null), text: duration, words: duration, ticks: timeTicks },
  tokens: { values: tokens, text: number, words: (x) => t("chart.at_tokens", { n: number(x) }), ticks: numberTicks },
  samples: { values: (store) => (store.answersPerStep ? store.steps.map((step) => step * store.answersPerStep) : null), text: number, words: (x) => t("chart.at_samples", { n: number(x) }), ticks: numberTicks },
};

// The axes that all of these runs have.
export function axesOf(stores) {
  return Object.keys(AXES).filter((name) => stores.every((store) => AXES[name].values(store)));
}

function tokens(store) {
  const column = TOKENS.map((name) => store.columns.get(name)).find(Boolean);
  if (!column) return null;
  let sum = 0;
  return column.map((value) => (sum += value ?? 0));
}

function numberTicks(domain, count) {
  return curves.ticks(domain, count).map((x) => [x, number(x)]);
}

// Round numbers of the largest unit of which the axis has two.
function timeTicks(domain, count) {
  const [size, name] = UNITS.findLast(([seconds]) => domain[1] >= 2 * seconds) ?? UNITS[0];
  return curves.ticks(domain.map((x) => x / size), count).map((x) => [x * size, `${x} ${name}`]);
}
