// Smoothing and zoom of a group of charts.

import { button, el, field, setText } from "./dom.js";
import { fixed } from "./format.js";
import { remember, remembered } from "./settings.js";
import { t } from "./texts.js";

export function rememberedSmoothing() {
  return Number(remembered("smoothing", "0.5"));
}

export function chartToolbar(group, hint = null) {
  const shown = el("output", { class: "smoothing" }, fixed(group.smoothing, 2));
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: group.smoothing, id: "smoothing", on: { input: (event) => {
    const weight = Number(event.target.value);
    setText(shown, fixed(weight, 2));
    remember("smoothing", String(weight));
    group.setSmoothing(weight);
  } } });
  const reset = button(t("overview.reset_zoom"), () => group.setZoom(null), { id: "reset-zoom", disabled: true });
  group.onZoom = (zoom) => (reset.disabled = zoom === null);
  return el("div", { class: "toolbar" }, field(t("overview.smoothing"), slider), shown, reset,
    hint ? el("span", { class: "muted hint" }, hint) : null);
}
