// The bar above every page: run, pages of the run, state, language, theme, keys.

import { button, el, link, replace, select, setText } from "./dom.js";
import { number } from "./format.js";
import { setTheme, theme, THEMES } from "./settings.js";
import { language, setLanguage, t } from "./texts.js";

export function drawTop(app) {
  const top = document.getElementById("top");
  setText(document.getElementById("skip"), t("nav.skip"));
  replace(top,
    el("div", { class: "bar" },
      link("#/", el("b", {}, "rloom"), { class: "brand" }),
      app.runId === null ? null : runChoice(app),
      app.runId === null ? null : app.badge,
      el("span", { class: "spacer" }),
      app.runs.length > 1 ? link(compareHash(app), t("nav.compare"), current(app, "compare")) : null,
      button(language() === "zh" ? "EN" : "中文", () => { setLanguage(language() === "zh" ? "en" : "zh"); app.redraw(); },
        { class: "quiet", id: "language", lang: language() === "zh" ? "en" : "zh", "aria-label": t("nav.language") }),
      button(themeMark(), (event) => nextTheme(event.currentTarget), { class: "quiet", id: "theme", "aria-label": themeLabel(), title: themeLabel() }),
      button("?", () => app.keys.showHelp(), { class: "quiet", "aria-label": t("keys.title"), title: t("keys.title") })),
    app.runId === null ? null : el("nav", { class: "tabs", "aria-label": t("nav.pages") }, tabs(app)));
}

function runChoice(app) {
  if (app.runs.length < 2) return el("span", { class: "run-name" }, app.run().name);
  const options = app.runs.map((run) => [run.id, run.name]);
  return select(options, app.runId, (id) => (location.hash = `#/run/${id}`), { class: "run-name", "aria-label": t("nav.run") });
}

function tabs(app) {
  const base = `#/run/${app.runId}`;
  return [["overview", base], ["step", `${base}/step/last`], ["validation", `${base}/validation`], ["timeline", `${base}/timeline`], ["findings", `${base}/findings`], ["search", `${base}/search`], ["config", `${base}/config`]]
    .map(([name, href]) => link(href, t(`nav.${name}`), current(app, name)));
}

function current(app, name) {
  return { "aria-current": app.page === name ? "page" : null };
}

export function compareHash(app) {
  return `#/compare/${app.runs.filter((run) => !run.hidden).slice(0, 6).map((run) => run.id).join(",")}`;
}

function nextTheme(control) {
  setTheme(THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length]);
  setText(control, themeMark());
  control.setAttribute("aria-label", themeLabel());
  control.title = themeLabel();
}

function themeMark() {
  return { system: "◐", light: "☀", dark: "☾" }[theme()];
}

function themeLabel() {
  return t("nav.theme", { name: t(`theme.${theme()}`) });
}

// Status, and step of total.
export function stateBadge() {
  return el("span", { class: "badge", id: "state" });
}

export function updateBadge(badge, state) {
  if (!state) return;
  badge.dataset.status = state.status;
  const steps = state.total_steps ? `${state.step} / ${state.total_steps}` : number(state.step);
  const key = `${state.status} ${steps} ${language()}`;
  if (badge.dataset.key === key) return;
  badge.dataset.key = key;
  replace(badge, el("i", { class: "dot" }), el("b", {}, t(`status.${state.status}`)), el("span", { class: "steps" }, steps));
}

export function elapsed(state) {
  if (!state.started) return null;
  return (state.status === "running" ? Date.now() / 1000 : state.updated) - state.started;
}
