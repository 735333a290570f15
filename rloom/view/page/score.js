// A score as a number on a colour. The colour repeats the number; nothing is told by colour alone.

import { el } from "./dom.js";
import { NONE, score } from "./format.js";

// 0 to 1 is the usual range; scores outside of it get the colour of the nearer end.
export function scoreMark(value, attributes = {}) {
  if (value === null || value === undefined) return el("span", { class: "score none", ...attributes }, NONE);
  const share = Math.min(1, Math.max(0, value));
  return el("span", { class: "score", vars: { "--share": `${Math.round(100 * share)}%` }, ...attributes }, score(value));
}
