// The configuration of a run: what differs from the defaults first, the command, versions, notices.

import { get } from "./api.js";
import { button, debounced, el, emptyState, field, replace, setText } from "./dom.js";
import { NONE, time, value } from "./format.js";
import { Query } from "./query.js";
import { language, t } from "./texts.js";

export async function config(app, { query }) {
  const { runId } = app; // of this page: the app may have gone on to another before an answer arrives
  const view = new ConfigPage(runId, query);
  await view.update();
  return { node: view.node, update: () => view.update() };
}

class ConfigPage {
  constructor(runId, query) {
    this.runId = runId;
    this.query = new Query(query, { text: "" });
    this.start = el("div", {});
    this.notices = el("div", {});
    this.count = el("span", { class: "muted", "aria-live": "polite" });
    this.changed = el("div", {});
    this.every = el("div", {});
    const search = el("input", { type: "search", value: this.query.values.text, autocomplete: "off", spellcheck: "false", placeholder: t("config.search_hint"),
      on: { input: debounced((event) => { this.query.set({ text: event.target.value.trim() }); this.drawKeys(); }, 80) } });
    this.node = el("section", { class: "page" }, el("div", { class: "page-head" }, el("h1", {}, t("config.title"))), this.start, this.notices,
      el("div", { class: "toolbar" }, field(t("config.search"), search, { class: "field grow" }), this.count), this.changed, this.every);
  }

  async update() {
    const answer = await get(`runs/${this.runId}/config`);
    const text = JSON.stringify([answer, language()]);
    if (text === this.last) return;
    this.last = text;
    this.answer = answer;
    this.drawStart();
    this.drawNotices();
    this.drawKeys();
  }

  drawStart() {
    const { start, starts, fault } = this.answer;
    const versions = Object.entries(start.versions ?? {});
    const row = (name, content) => el("div", {}, el("dt", {}, t(`config.${name}`)), el("dd", {}, content));
    replace(this.start, fault ? el("p", { class: "note" }, fault) : null, el("dl", { class: "card start" },
      row("command", start.command ? [el("code", { class: "command" }, start.command), copyButton(start.command)] : el("span", { class: "muted" }, t("config.not_recorded"))),
      row("commit", start.commit ? el("code", {}, start.commit.slice(0, 12)) : NONE),
      row("host", [start.host ?? NONE, start.pid ? el("span", { class: "muted" }, ` · ${t("config.process", { pid: start.pid })}`) : null]),
      row("started", [time(start.time, language()), starts > 1 ? el("span", { class: "muted" }, ` · ${t("config.starts", { n: starts })}`) : null]),
      row("versions", versions.length ? el("ul", { class: "versions" }, versions.map(([name, version]) => el("li", {}, el("span", { class: "muted" }, name), " ", version))) : NONE)));
  }

  drawNotices() {
    const { notices } = this.answer;
    replace(this.notices, notices.length ? el("section", { class: "block" }, el("h2", {}, t("config.notices"), el("span", { class: "count" }, String(notices.length))),
      el("ul", { class: "plain notices card" }, notices.map((one) => el("li", {}, one.step ? el("span", { class: "muted nowrap" }, t("findings.step", { step: one.step })) : null, " ", one.message)))) : null);
  }

  drawKeys() {
    const { config: values, changed } = this.answer;
    const words = this.query.values.text.toLowerCase().split(/\s+/).filter(Boolean);
    const keys = Object.keys(values).filter((key) => words.every((word) => `${key}=${value(values[key])}`.toLowerCase().includes(word)));
    setText(this.count, t("config.count", { n: keys.length, total: Object.keys(values).length }));
    const own = keys.filter((key) => key in changed);
    replace(this.changed, own.length ? this.table("config.changed", own, true) : null);
    replace(this.every, keys.length ? this.table("config.all", keys, false) : emptyState(t("config.none"), t("prompts.none_hint")));
  }

  table(title, keys, withDefault) {
    const { config: values, changed } = this.answer;
    const cell = (item) => el("td", {}, el("code", {}, item === null || item === undefined ? "null" : value(item)));
    return el("section", { class: "block" }, el("h2", {}, t(title), el("span", { class: "count" }, String(keys.length))), el("div", { class: "table-box" }, el("table", { class: withDefault ? "config changed" : "config" },
      el("thead", {}, el("tr", {}, ["config.key", "config.value", ...(withDefault ? ["config.default"] : [])].map((name) => el("th", { scope: "col" }, t(name))))),
      el("tbody", {}, keys.map((key) => el("tr", { class: !withDefault && key in changed ? "differs" : null }, el("th", { scope: "row" }, el("code", {}, key)), cell(values[key]), withDefault ? cell(changed[key]) : null))))));
  }
}

function copyButton(text) {
  return button(t("findings.copy"), async (event) => {
    const control = event.currentTarget;
    await navigator.clipboard.writeText(text).then(() => replace(control, t("findings.copied")), () => {});
  }, { class: "quiet" });
}
