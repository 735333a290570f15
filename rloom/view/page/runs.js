// All runs: state, findings, progress, reward, validation; sort, filter, tags, hiding.

import { get, post } from "./api.js";
import { button, debounced, el, emptyState, field, link, replace, select, setText } from "./dom.js";
import { saveText, toCsv } from "./export.js";
import { severityBadge } from "./findings.js";
import { duration, measured, NONE, number, time } from "./format.js";
import { RowCursor } from "./keys.js";
import { measureTitle, mergedMeasures } from "./measure.js";
import { Query } from "./query.js";
import { compareHash, elapsed } from "./shell.js";
import { inLanguage, language, t } from "./texts.js";

const DEFAULTS = { sort: "", order: "desc", text: "", state: "", algorithm: "", tag: "", hidden: "" };
const SEVERITIES = ["note", "warning", "error"]; // the worst last
const BADGES_AGAIN_MS = 300;

const lastOf = (run) => {
  const all = Object.values(run.accuracy ?? {}).map((one) => one.last[1]);
  return all.length ? all.reduce((sum, one) => sum + one, 0) / all.length : null;
};
// What a column is sorted by; null is last in both orders.
const KEYS = {
  name: (run) => run.name,
  state: (run) => run.state.status,
  findings: (run, badges) => (badges[run.id]?.worst ? 1000 * SEVERITIES.indexOf(badges[run.id].worst.severity) + badges[run.id].count : badges[run.id] ? -1 : null),
  progress: (run) => (run.state.total_steps ? run.state.step / run.state.total_steps : run.state.step),
  reward: (run) => run.reward,
  accuracy: lastOf,
  algorithm: (run) => run.algorithm,
  started: (run) => run.state.started,
  time: (run) => elapsed(run.state),
};
const measuresOf = (run) => Object.fromEntries(Object.entries(run.accuracy ?? {}).map(([source, { measure }]) => [source, measure]));
const NUMERIC = new Set(["reward", "time"]);
const ON_WIDE_SCREENS = new Set(["state", "progress", "reward", "algorithm", "started", "time"]); // a phone has room for findings and validation

const classOf = (name) => [NUMERIC.has(name) ? "number" : "", ON_WIDE_SCREENS.has(name) ? "wide-only" : ""].filter(Boolean).join(" ") || null;

export async function runs(app, { query }) {
  const view = new Runs(app, query);
  await app.loadRuns();
  view.draw();
  view.loadBadges(); // the list does not wait for it
  return {
    node: view.node,
    live: true,
    async update() {
      await app.loadRuns();
      view.draw();
      view.loadBadges();
    },
    close: () => (view.closed = true),
    keys: view.cursor.keys(),
    rows: [["j k", t("keys.move")], ["Enter", t("keys.open_run")]],
  };
}

class Runs {
  constructor(app, query) {
    this.app = app;
    this.query = new Query(query, DEFAULTS);
    this.chosen = new Set();
    this.badges = {};
    this.last = "";
    this.count = el("span", { class: "muted", "aria-live": "polite" });
    this.compare = link("#/", t("runs.compare"), { class: "button" });
    this.choices = el("span", { class: "choices" });
    this.fault = el("p", { class: "note", hidden: true, role: "alert" });
    this.head = el("tr", {});
    this.body = el("tbody", {});
    this.table = el("div", { class: "table-box" }, el("table", { class: "runs" }, el("thead", {}, this.head), this.body));
    this.none = emptyState(t("runs.none"), t("runs.none_hint"));
    this.noMatch = emptyState(t("runs.no_match"), t("prompts.none_hint"));
    this.cursor = new RowCursor(() => [...this.body.children], (row) => (location.hash = row.dataset.href));
    const search = el("input", { type: "search", value: this.query.values.text, autocomplete: "off", placeholder: t("runs.filter_hint"),
      on: { input: debounced((event) => this.change({ text: event.target.value.trim() }), 80) } });
    this.node = el("section", { class: "page" },
      el("div", { class: "page-head" }, el("h1", {}, t("runs.title")), this.count, el("span", { class: "spacer" }),
        button("CSV", () => this.saveCsv(), { title: t("runs.save_csv"), "aria-label": t("runs.save_csv") }), this.compare),
      el("div", { class: "toolbar" }, field(t("prompts.filter"), search, { class: "field grow" }), this.choices), this.fault, this.table, this.none, this.noMatch);
  }

  change(changes) {
    this.query.set(changes);
    this.draw();
  }

  // Findings take a while of a long run: the server reports as many runs as it has read, and is asked again.
  async loadBadges() {
    if (this.loading) return;
    this.loading = true;
    try {
      let waiting = 1;
      while (waiting && !this.closed) {
        const answer = await get("findings");
        this.badges = answer.badges;
        waiting = answer.waiting;
        this.draw();
        if (waiting) await new Promise((done) => setTimeout(done, BADGES_AGAIN_MS));
      }
    } catch {
      // shown by the page's connection line; the next update asks again
    } finally {
      this.loading = false;
    }
  }

  shown() {
    const { text, state, algorithm, tag, hidden, sort, order } = this.query.values;
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = this.app.runs.filter((run) => {
      const searched = [run.name, run.path, run.model, run.algorithm, run.state.error, ...run.tags].join(" ").toLowerCase();
      return words.every((word) => searched.includes(word)) && (!state || run.state.status === state) && (!algorithm || run.algorithm === algorithm)
        && (!tag || run.tags.includes(tag)) && (hidden || !run.hidden);
    });
    const key = KEYS[sort];
    if (!key) return kept;
    const known = kept.map((run) => [key(run, this.badges), run]).filter(([value]) => value !== null && value !== undefined);
    const sign = order === "asc" ? 1 : -1;
    known.sort(([a], [b]) => sign * (typeof a === "string" ? a.localeCompare(b) : a - b));
    const found = known.map(([, run]) => run);
    return [...found, ...kept.filter((run) => !found.includes(run))];
  }

  draw() {
    const text = JSON.stringify([this.app.runs, this.badges, this.query.values, language()]);
    if (text === this.last || this.body.contains(document.activeElement?.closest("input.tags"))) return; // a tag is being typed
    this.last = text;
    const { runs: all } = this.app;
    const shown = this.shown();
    const hidden = all.filter((run) => run.hidden).length;
    setText(this.count, shown.length === all.length ? t("runs.count", { n: all.length }) : t("runs.count_of", { n: shown.length, total: all.length }));
    this.drawChoices(hidden);
    this.drawHead();
    replace(this.body, shown.map((run) => this.row(run)));
    this.table.hidden = !shown.length;
    this.none.hidden = all.length > 0;
    this.noMatch.hidden = !all.length || shown.length > 0;
    this.compare.hidden = all.length < 2;
    this.drawCompare();
    if (this.cursor.at >= 0) this.cursor.mark(this.cursor.at);
  }

  drawCompare() {
    this.compare.href = this.chosen.size > 1 ? `#/compare/${[...this.chosen].join(",")}` : compareHash(this.app);
  }

  // A choice for each kind that the runs differ in.
  drawChoices(hidden) {
    const { values } = this.query;
    const known = (pick) => [...new Set(this.app.runs.flatMap(pick).filter(Boolean))].sort();
    const states = known((run) => run.state.status);
    const choice = (name, all, label = (one) => one) => (all.length < 2 && !values[name] ? null : field(t(`runs.${name}`),
      select([["", t("prompts.all_sources")], ...all.map((one) => [one, label(one)])], values[name], (chosen) => this.change({ [name]: chosen }), { id: `filter-${name}` })));
    const key = JSON.stringify([states, known((run) => run.algorithm), known((run) => run.tags), hidden, values, language()]);
    if (key === this.choicesKey) return;
    this.choicesKey = key;
    const tags = known((run) => run.tags);
    replace(this.choices, choice("state", states, (one) => t(`status.${one}`)), choice("algorithm", known((run) => run.algorithm)), tags.length ? choice("tag", tags) : null,
      hidden ? field(t("runs.show_hidden", { n: hidden }), el("input", { type: "checkbox", id: "show-hidden", checked: Boolean(values.hidden), on: { change: (event) => this.change({ hidden: event.target.checked ? "yes" : "" }) } })) : null);
  }

  drawHead() {
    const { sort, order } = this.query.values;
    const title = (name) => (name === "accuracy" ? t("runs.first_last", { name: measureTitle(mergedMeasures(this.app.runs.map(measuresOf))) }) : t(`runs.${name}`));
    replace(this.head, el("th", {}, el("span", { class: "visually-hidden" }, t("runs.compare"))), Object.keys(KEYS).map((name) => {
      const sorted = name === sort ? (order === "asc" ? "ascending" : "descending") : null;
      const first = ["name", "state", "algorithm"].includes(name) ? "asc" : "desc";
      const next = sorted ? (order === "asc" ? "desc" : "asc") : first;
      return el("th", { scope: "col", class: classOf(name), "aria-sort": sorted }, button(title(name), () => this.change({ sort: name, order: next }), { class: "sort", "data-sort": name }));
    }));
  }

  row(run) {
    const { state } = run;
    const href = `#/run/${run.id}`;
    const badge = this.badges[run.id];
    return el("tr", { "data-href": href, "data-severity": badge?.worst?.severity, class: run.hidden ? "hidden-run" : null },
      el("td", {}, el("input", { type: "checkbox", checked: this.chosen.has(run.id), "aria-label": t("runs.choose", { name: run.name }), on: { change: (event) => {
        if (event.target.checked) this.chosen.add(run.id);
        else this.chosen.delete(run.id);
        this.drawCompare();
      } } })),
      el("td", { class: "run-cell" }, link(href, run.name, { class: "strong", title: run.path }), el("span", { class: "narrow-only" }, status(state)), this.tags(run)),
      el("td", { class: "wide-only" }, status(state),
        state.error ? el("small", { class: "muted", title: state.error }, state.error) : null),
      el("td", {}, badge ? link(`${href}/findings`, severityBadge(badge), { title: badge.worst ? inLanguage(badge.worst.title) : t("findings.none"), class: "finding-badge" }) : el("span", { class: "muted" }, "…")),
      el("td", { class: classOf("progress") }, progress(state)),
      el("td", { class: classOf("reward") }, number(run.reward)),
      el("td", { class: "validated" }, validated(run)),
      el("td", { class: classOf("algorithm") }, run.algorithm ?? NONE, el("small", { class: "muted", title: run.model }, run.model ?? "")),
      el("td", { class: `${classOf("started")} nowrap` }, time(state.started, language())),
      el("td", { class: `${classOf("time")} nowrap` }, duration(elapsed(state))));
  }

  tags(run) {
    const box = el("span", { class: "run-tags" });
    const edit = () => {
      const input = el("input", { class: "tags", value: run.tags.join(", "), "aria-label": t("runs.tags_of", { name: run.name }), placeholder: t("runs.tags_hint"), on: {
        keydown: (event) => {
          if (event.key === "Escape") input.value = run.tags.join(", ");
          if (event.key === "Enter" || event.key === "Escape") input.blur();
        },
        blur: () => this.label(run, { tags: input.value.split(",").map((tag) => tag.trim()).filter(Boolean) }),
      } });
      replace(box, input);
      input.focus();
    };
    replace(box, run.tags.map((tag) => button(tag, () => this.change({ tag }), { class: "tag", "aria-label": t("runs.only_tag", { tag }) })),
      button(t("runs.tag_edit"), edit, { class: "quiet edit-tags", "aria-label": t("runs.tags_of", { name: run.name }) }),
      button(run.hidden ? t("runs.show") : t("runs.hide"), () => this.label(run, { hidden: !run.hidden }), { class: "quiet hide", "aria-label": `${run.hidden ? t("runs.show") : t("runs.hide")} ${run.name}` }));
    return box;
  }

  // Written beside the run, for every browser; a folder that cannot be written to says so.
  async label(run, changes) {
    const { tags, hidden } = { tags: run.tags, hidden: run.hidden, ...changes };
    this.last = "";
    try {
      if (JSON.stringify([tags, hidden]) !== JSON.stringify([run.tags, run.hidden])) Object.assign(run, await post(`runs/${run.id}/labels`, { tags, hidden: hidden ? "yes" : "no" }));
      this.fault.hidden = true;
    } catch (error) {
      setText(this.fault, this.app.explain(error));
      this.fault.hidden = false;
    }
    this.draw();
  }

  saveCsv() {
    const sources = [...new Set(this.app.runs.flatMap((run) => Object.keys(run.accuracy ?? {})))];
    const rows = this.shown().map((run) => [run.name, run.path, run.state.status, this.badges[run.id]?.count, this.badges[run.id]?.worst?.severity, run.state.step, run.state.total_steps, run.reward,
      ...sources.flatMap((source) => ["first", "best", "last"].map((name) => run.accuracy[source]?.[name][1])), run.algorithm, run.model, run.tags.join(" ")]);
    const head = ["run", "path", "state", "findings", "worst", "step", "total_steps", "reward", ...sources.flatMap((source) => ["first", "best", "last"].map((name) => `${source} ${name}`)), "algorithm", "model", "tags"];
    saveText("runs.csv", "text/csv", toCsv([head, ...rows]));
  }
}

function status(state) {
  return el("span", { class: "badge", "data-status": state.status }, el("i", { class: "dot" }), el("b", {}, t(`status.${state.status}`)));
}

function progress(state) {
  const total = state.total_steps;
  return el("span", { class: "progress-line" },
    total ? el("progress", { max: total, value: Math.min(state.step, total), "aria-label": t("runs.progress") }) : null,
    el("span", { class: "nowrap" }, total ? `${state.step} / ${total}` : String(state.step)));
}

function validated(run) {
  const names = Object.keys(run.accuracy ?? {});
  if (!names.length) return NONE;
  return el("ul", { class: "plain" }, names.map((name) => {
    const { first, last, measure } = run.accuracy[name];
    return el("li", {}, el("span", { class: "nowrap" }, `${measured(first[1], measure)} → `, el("b", {}, measured(last[1], measure))), el("span", { class: "muted" }, ` ${name}`));
  }));
}
