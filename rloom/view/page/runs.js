// All runs: state, progress, reward, accuracy.

import { get } from "./api.js";
import { el, emptyState, link, replace } from "./dom.js";
import { duration, measured, NONE, number, time } from "./format.js";
import { RowCursor } from "./keys.js";
import { compareHash, elapsed } from "./shell.js";
import { language, t } from "./texts.js";

export async function runs(app) {
  const node = el("section", { class: "page" });
  const chosen = new Set();
  let last = "";
  const draw = () => {
    const text = JSON.stringify([app.runs, language()]);
    if (text === last) return;
    last = text;
    replace(node, app.runs.length ? content(app, chosen) : emptyState(t("runs.none"), t("runs.none_hint")));
  };
  await app.loadRuns();
  draw();
  const cursor = new RowCursor(() => [...node.querySelectorAll("tbody tr")], (row) => (location.hash = row.dataset.href));
  return {
    node,
    live: true,
    async update() {
      app.runs = (await get("runs")).runs;
      draw();
      if (cursor.at >= 0) cursor.mark(cursor.at);
    },
    keys: cursor.keys(),
    rows: [["j k", t("keys.move")], ["Enter", t("keys.open_run")]],
  };
}

function content(app, chosen) {
  const compare = link(compareHash(app), t("runs.compare"), { class: "button" });
  const choose = (id, on) => {
    if (on) chosen.add(id);
    else chosen.delete(id);
    compare.href = chosen.size > 1 ? `#/compare/${[...chosen].join(",")}` : compareHash(app);
  };
  const heads = ["", "name", "state", "progress", "reward", "accuracy", "algorithm", "started", "time"];
  const numeric = new Set(["reward", "time"]);
  return [
    el("div", { class: "page-head" }, el("h1", {}, t("runs.title")), el("span", { class: "muted" }, t("runs.count", { n: app.runs.length })),
      el("span", { class: "spacer" }), app.runs.length > 1 ? compare : null),
    el("div", { class: "table-box" }, el("table", { class: "runs" },
      el("thead", {}, el("tr", {}, heads.map((name) => el("th", { scope: "col", class: numeric.has(name) ? "number" : null }, name && t(`runs.${name}`))))),
      el("tbody", {}, app.runs.map((run) => row(run, chosen, choose))))),
  ];
}

function row(run, chosen, choose) {
  const { state } = run;
  const href = `#/run/${run.id}`;
  return el("tr", { "data-href": href },
    el("td", {}, el("input", { type: "checkbox", checked: chosen.has(run.id), "aria-label": t("runs.choose", { name: run.name }),
      on: { change: (event) => choose(run.id, event.target.checked) } })),
    el("td", {}, link(href, run.name, { class: "strong", title: run.path })),
    el("td", {}, el("span", { class: "badge", "data-status": state.status }, el("i", { class: "dot" }), el("b", {}, t(`status.${state.status}`))),
      state.error ? el("small", { class: "muted", title: state.error }, state.error) : null),
    el("td", {}, progress(state)),
    el("td", { class: "number" }, number(run.reward)),
    el("td", {}, accuracy(run.accuracy)),
    el("td", {}, run.algorithm ?? NONE, el("small", { class: "muted", title: run.model }, run.model ?? "")),
    el("td", { class: "nowrap" }, time(state.started, language())),
    el("td", { class: "number nowrap" }, duration(elapsed(state))));
}

export function progress(state) {
  const total = state.total_steps;
  return el("span", { class: "progress-line" },
    total ? el("progress", { max: total, value: Math.min(state.step, total), "aria-label": t("runs.progress") }) : null,
    el("span", { class: "nowrap" }, total ? `${state.step} / ${total}` : String(state.step)));
}

function accuracy(sources) {
  const names = Object.keys(sources ?? {});
  if (!names.length) return NONE;
  return el("ul", { class: "plain" }, names.map((name) => el("li", { class: "nowrap" },
    `${measured(sources[name].first[1], sources[name].measure)} → `, el("b", {}, measured(sources[name].last[1], sources[name].measure)),
    el("span", { class: "muted" }, ` ${name}${sources[name].measure === "score" ? ` · ${t("runs.score")}` : ""}`))));
}
