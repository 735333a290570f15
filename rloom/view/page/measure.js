// What a validation measures on a data source, as the server says it: an accuracy, or a score.

import { t } from "./texts.js";

// measures: data source -> accuracy or score
export function measureOf(measures, source) {
  return measures[source] ?? "accuracy";
}

// The name of a column or table with these sources.
export function measureTitle(measures) {
  const kinds = new Set(Object.values(measures));
  return kinds.size === 1 ? t(`measure.${[...kinds][0]}`) : t("measure.both");
}

// Of several runs: a source is a score as soon as one run says so.
export function mergedMeasures(all) {
  const merged = {};
  for (const measures of all) for (const [source, kind] of Object.entries(measures)) merged[source] = merged[source] === "score" ? "score" : kind;
  return merged;
}
