// Axis, smoothing and zoom of a group of charts.

import { button, el, field, replace, setText } from "./dom.js";
import { fixed } from "./format.js";
import { remember, remembered } from "./settings.js";
import { t } from "./texts.js";

export function rememberedSmoothing() {
  return Number(remembered("smoothing", "0.5"));
}

// The axis that was chosen last, if all of these runs have it.
export function rememberedAxis(axes) {
  const wanted = remembered("axis", "step");
  return axes.includes(wanted) ? wanted : "step";
}

export class ChartToolbar {
  // onAxis: called after another axis was chosen, to draw the curves anew
  constructor(group, onAxis, hint = null) {
    this.group = group;
    this.onAxis = onAxis;
    this.axes = el("div", { class: "segments", role: "group", "aria-label": t("axis.title") });
    const shown = el("output", { class: "smoothing" }, fixed(group.smoothing, 2));
    const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: group.smoothing, id: "smoothing", on: { input: (event) => {
      const weight = Number(event.target.value);
      setText(shown, fixed(weight, 2));
      remember("smoothing", String(weight));
      group.setSmoothing(weight);
    } } });
    this.smoothing = el("span", { class: "field", title: t("overview.smoothing_hint") }, field(t("overview.smoothing"), slider), shown);
    const reset = button(t("overview.reset_zoom"), () => group.setZoom(null), { id: "reset-zoom", disabled: true });
    group.onZoom = (zoom) => (reset.disabled = zoom === null);
    this.node = el("div", { class: "toolbar" }, el("span", { class: "label" }, t("axis.title")), this.axes, this.smoothing, reset, hint ? el("span", { class: "muted hint" }, hint) : null);
  }

  // `names`: the axes that there are. `points`: of the longest curve; shorter ones than 50 are not smoothed.
  update(names, points) {
    this.smoothing.hidden = points < 50;
    const key = `${names.join()} ${this.group.axis}`;
    if (key === this.key) return;
    this.key = key;
    replace(this.axes, names.map((name) => button(t(`axis.${name}`), () => {
      remember("axis", name);
      this.group.setAxis(name);
      this.update(names, points);
      this.onAxis();
      this.group.redraw(); // the first chart was drawn while the others still had the old axis
    }, { "data-axis": name, "aria-pressed": String(name === this.group.axis) })));
  }
}
