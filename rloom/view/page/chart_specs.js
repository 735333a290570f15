// Which metrics the overview shows first, in this order, and their healthy ranges (docs/reading_a_run.md).

import { number, percent, percentTick } from "./format.js";
import { measureOf } from "./measure.js";

const VALIDATION = /^val-core\/(.+)\/(?:acc|reward|score)\/mean@\d+$/;
const ENDING = /^episode\/ended\/(.+)$/;
const MEMORY = /^perf\/.*memory.*_gb$/;

// `metrics`: all of them in one chart. `oneOf`: the first that was measured. `pattern`: one line for each name that matches.
const SPECS = [
  { id: "reward", metrics: ["critic/score/mean"] },
  { id: "accuracy", pattern: VALIDATION, measure: "accuracy", points: true, format: percent, tick: percentTick, most: 1 },
  { id: "score", pattern: VALIDATION, measure: "score", points: true },
  { id: "kl", oneOf: ["actor/reward_kl_penalty", "actor/kl_loss", "actor/kl_divergence"], band: [0.001, 0.1], log: true },
  { id: "ppo_kl", metrics: ["actor/ppo_kl"] },
  { id: "entropy", metrics: ["actor/entropy"] },
  { id: "length", metrics: ["response_length/mean", "response_length/max", "response_length/min"] },
  { id: "cut_off", metrics: ["response_length/clip_ratio"], format: percent, tick: percentTick, most: 1 },
  { id: "turns", metrics: ["episode/turns/mean", "episode/turns/max"] },
  { id: "endings", pattern: ENDING, format: percent, tick: percentTick, most: 1 },
  { id: "tool_calls", metrics: ["tool/calls"] },
  { id: "tool_errors", metrics: ["tool/errors", "tool/timeouts", "tool/unused"], format: percent, tick: percentTick, most: 1 },
  { id: "clip_fraction", metrics: ["actor/pg_clipfrac"], band: [0, 0.3] },
  { id: "ppo_ratio", metrics: ["actor/ppo_ratio"], band: [0.8, 1.2] },
  { id: "policy_loss", metrics: ["actor/pg_loss"] },
  { id: "value_loss", metrics: ["critic/vf_loss"] },
  { id: "loss", metrics: ["train/loss", "val/loss"] },
  { id: "grad_norm", metrics: ["actor/grad_norm", "critic/grad_norm", "train/grad_norm"] },
  { id: "learning_rate", metrics: ["train/lr"] },
  { id: "throughput", metrics: ["perf/throughput", "train/tokens_per_s"] },
  { id: "memory", pattern: MEMORY },
];

export function colour(i) {
  return `var(--c${i % 10})`;
}

// The specs that a run has metrics for, each with the names of its metrics. `measures`: of the data sources.
export function chartsOf(names, measures) {
  const known = new Set(names);
  return SPECS.map((spec) => ({ format: number, ...spec, names: namesOf(spec, known, names, measures) })).filter((spec) => spec.names.length);
}

function namesOf(spec, known, names, measures) {
  if (spec.measure) return names.filter((name) => spec.pattern.test(name) && measureOf(measures, spec.pattern.exec(name)[1]) === spec.measure).sort();
  if (spec.pattern) return names.filter((name) => spec.pattern.test(name)).sort();
  if (spec.oneOf) return spec.oneOf.filter((name) => known.has(name)).slice(0, 1);
  return spec.metrics.filter((name) => known.has(name));
}

// What a line of a chart is called: the data source of a validation metric, the last different part of other names.
export function labelOf(spec, name) {
  const source = spec.pattern?.exec(name)?.[1];
  if (source) return source;
  if (spec.names.length === 1) return "";
  const parts = name.split("/");
  const others = spec.names.map((other) => other.split("/"));
  return parts.filter((part, i) => others.some((other) => other[i] !== part)).join("/");
}

// Metrics that no chart above shows, by the first part of their names. Times have a chart of their own.
export function otherMetrics(names, shown) {
  const taken = new Set(shown.flatMap((spec) => spec.names));
  const groups = new Map();
  for (const name of [...names].sort()) {
    if (taken.has(name) || name === "step" || name.startsWith("timing_s/")) continue;
    const group = name.split("/")[0];
    if (!groups.has(group)) groups.set(group, []);
    groups.get(group).push(name);
  }
  return groups;
}
