// Routes (location.hash), the page that is shown, and the regular update of it.

import { get, NotFound, onConnection, Refused } from "./api.js";
import { compare } from "./compare.js";
import { config } from "./config.js";
import { el, emptyState, replace, setText } from "./dom.js";
import { findings } from "./findings.js";
import { history } from "./history.js";
import { Keys } from "./keys.js";
import { overview } from "./overview.js";
import { answers } from "./answers.js";
import { prompts } from "./prompts.js";
import { runs } from "./runs.js";
import { search } from "./search.js";
import { compareHash, drawTop, stateBadge, updateBadge } from "./shell.js";
import { storeOf } from "./store.js";
import { language, t } from "./texts.js";
import { timeline } from "./timeline.js";
import { validation } from "./validation.js";

const RUNNING_MS = 2000;
const ENDED_MS = 10000; // a run that ended may be resumed
const KIND = "(step|validation)";

// [pattern, name of the tab, page]. A page is `async (app, parameters) -> {node, update?, keys?, rows?, close?}`.
const ROUTES = [
  [/^\/$/, "runs", runs],
  [/^\/run\/(\d+)$/, "overview", overview],
  [/^\/run\/(\d+)\/step\/(\d+|last)$/, "step", prompts],
  [new RegExp(`^/run/(\\d+)/${KIND}/(\\d+)/prompt/(\\d+)$`), null, answers],
  [/^\/run\/(\d+)\/(prompt|validation-prompt)\/(\d+)$/, null, history],
  [/^\/run\/(\d+)\/validation$/, "validation", validation],
  [/^\/run\/(\d+)\/timeline$/, "timeline", timeline],
  [/^\/run\/(\d+)\/findings$/, "findings", findings],
  [/^\/run\/(\d+)\/search$/, "search", search],
  [/^\/run\/(\d+)\/config$/, "config", config],
  [/^\/compare\/([\d,]*)$/, "compare", compare],
];

class App {
  constructor() {
    this.runs = [];
    this.runId = null;
    this.page = null;
    this.shown = null;
    this.turn = 0; // grows with every navigation: an answer for an earlier page is dropped
    this.badge = stateBadge();
    this.keys = new Keys();
    this.main = document.getElementById("main");
  }

  run(id = this.runId) {
    return this.runs.find((run) => run.id === id);
  }

  store() {
    return storeOf(this.runId);
  }

  async start() {
    onConnection((state) => this.showConnection(state));
    addEventListener("hashchange", () => this.navigate());
    document.addEventListener("visibilitychange", () => !document.hidden && this.tick());
    // the token is in a cookie by now; without it the address can be shown to others
    if (location.search) window.history.replaceState(null, "", location.pathname + location.hash);
    const opened = /^#\/run\/(\d+)/.exec(location.hash);
    if (opened) storeOf(Number(opened[1])).refresh().catch(() => {}); // beside the list of runs; `navigate` reports errors
    await this.loadRuns();
    if (this.runs.length === 1 && parse().path === "/") window.history.replaceState(null, "", `#/run/${this.runs[0].id}`);
    await this.navigate();
    this.schedule();
  }

  async loadRuns() {
    this.runs = (await get("runs")).runs;
  }

  async navigate() {
    const turn = (this.turn += 1);
    const { path, query } = parse();
    const route = ROUTES.map(([pattern, name, page]) => ({ name, page, found: pattern.exec(path) })).find((one) => one.found);
    let made;
    let runId = null;
    try {
      if (path.startsWith("/run/") && route) {
        runId = Number(route.found[1]);
        if (!this.run(runId)) throw new NotFound(t("error.no_run", { id: runId }));
        await storeOf(runId).refresh();
      }
      if (!route) throw new NotFound(t("error.no_page"));
      if (turn !== this.turn) return;
      this.runId = runId;
      made = await route.page(this, { path: route.found.slice(1), query });
    } catch (error) {
      if (turn !== this.turn) return;
      this.runId = this.run(runId) ? runId : null;
      made = { node: emptyState(t("error.title"), this.explain(error)) };
    }
    if (turn !== this.turn) return void made.close?.();
    this.show(made, route?.name ?? "step");
  }

  show(made, page) {
    this.shown?.close?.();
    const samePage = this.page === page && this.shownPath === parse().path;
    this.shown = made;
    this.page = page;
    this.shownPath = parse().path;
    document.documentElement.lang = language() === "zh" ? "zh-CN" : "en";
    document.title = this.runId === null ? "rloom" : `${this.run().name} · rloom`;
    if (this.runId !== null) updateBadge(this.badge, this.store().state);
    drawTop(this);
    replace(this.main, made.node);
    this.main.dataset.page = page;
    this.main.dataset.shown = location.hash; // which page this is the content of, once it is drawn
    this.keys.page = made.keys ?? {};
    this.keys.rows = made.rows ?? [];
    const base = `#/run/${this.runId ?? this.runs[0]?.id}`;
    this.keys.places = { r: "#/", o: base, s: `${base}/step/last`, v: `${base}/validation`, t: `${base}/timeline`, f: `${base}/findings`, a: `${base}/search`, k: `${base}/config`, c: compareHash(this) };
    if (!samePage) scrollTo(0, 0);
  }

  // The same page again in another language.
  redraw() {
    this.badge.dataset.key = "";
    const at = scrollY;
    this.navigate().then(() => scrollTo(0, at));
  }

  async tick() {
    if (this.busy) return;
    this.busy = true;
    const turn = this.turn;
    try {
      if (!this.runs.length) await this.loadRuns();
      if (this.runId !== null) {
        await this.store().refresh();
        updateBadge(this.badge, this.store().state);
      }
      if (turn === this.turn) await this.shown?.update?.();
    } catch {
      // shown by `showConnection`; the next tick tries again
    } finally {
      this.busy = false;
    }
  }

  schedule() {
    const live = this.shown?.live ?? (this.runId !== null && this.store().state?.status === "running");
    const wait = live || this.lost ? RUNNING_MS : ENDED_MS;
    setTimeout(async () => {
      if (!document.hidden) await this.tick();
      this.schedule();
    }, wait);
  }

  showConnection(state) {
    const line = document.getElementById("connection");
    this.lost = state !== "ok";
    line.hidden = state === "ok";
    setText(line, state === "ok" ? "" : t(`connection.${state}`));
    if (state === "ok") this.announce(t("connection.back"));
  }

  announce(text) {
    setText(document.getElementById("announcer"), text);
  }

  explain(error) {
    if (error instanceof Refused) return t("connection.refused");
    if (error instanceof NotFound) return error.message;
    return error instanceof TypeError && this.lost ? t("connection.lost") : String(error);
  }
}

function parse() {
  const [path, query] = (location.hash.slice(1) || "/").split("?");
  return { path, query: new URLSearchParams(query ?? "") };
}

const app = new App();
app.start().catch((error) => replace(app.main, el("p", { class: "empty" }, app.explain(error))));
