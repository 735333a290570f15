// First and last row, and the buttons of a list that is shown in pages.

import { button, el } from "./dom.js";
import { t } from "./texts.js";

export function pager({ shown, page, size }, open) {
  if (shown <= size) return null;
  const last = Math.ceil(shown / size) - 1;
  const step = (text, target, label) => button(text, () => open(target), { disabled: target < 0 || target > last || target === page, "aria-label": label, title: label });
  return el("nav", { class: "pager", "aria-label": t("pager.title") },
    step("«", 0, t("pager.first")), step("‹", page - 1, t("pager.previous")),
    el("span", { "aria-live": "polite" }, t("pager.rows", { first: page * size + 1, last: Math.min(shown, (page + 1) * size), total: shown })),
    step("›", page + 1, t("pager.next")), step("»", last, t("pager.last")));
}
