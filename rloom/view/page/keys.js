// Keys of the keyboard: those of every page here, those of one page from the page itself.

import { button, el, replace } from "./dom.js";
import { t } from "./texts.js";

const GO_WAIT_MS = 1200;

// places: {letter: hash} for "g" and a letter. page: {key: action}; a key may be "j" or "Shift+J" as `event.key` says it.
export class Keys {
  constructor() {
    this.places = {};
    this.page = {};
    this.rows = [];
    this.waiting = false;
    document.addEventListener("keydown", (event) => this.onKey(event));
  }

  onKey(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.defaultPrevented) return;
    const typing = event.target.closest("input:not([type=range]):not([type=checkbox]), textarea, select");
    if (typing) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const dialog = document.getElementById("keys");
    if (dialog.open) {
      if (event.key === "?") dialog.close();
      return;
    }
    const action = this.actionOf(event);
    if (!action) return;
    event.preventDefault();
    action();
  }

  actionOf(event) {
    const key = event.key;
    if (this.waiting) {
      this.waiting = false;
      return this.places[key] === undefined ? null : () => (location.hash = this.places[key]);
    }
    if (key === "g") return () => this.wait();
    if (key === "?") return () => this.showHelp();
    if (key === "/") return focusFilter;
    // Enter and the space bar belong to the element that has the focus, if it is one that can be used
    if ((key === "Enter" || key === " ") && event.target.closest("a, button, summary, [tabindex='0']")) return null;
    return this.page[key] ?? null;
  }

  wait() {
    this.waiting = true;
    setTimeout(() => (this.waiting = false), GO_WAIT_MS);
  }

  showHelp() {
    const dialog = document.getElementById("keys");
    const rows = [...this.rows, ["g r", t("keys.runs")], ["g o", t("keys.overview")], ["g s", t("keys.step")], ["g v", t("keys.validation")], ["g t", t("keys.timeline")],
      ["g f", t("keys.findings")], ["g a", t("keys.search")], ["g k", t("keys.config")], ["g c", t("keys.compare")], ["/", t("keys.filter")], ["?", t("keys.help")]];
    replace(dialog, el("h2", {}, t("keys.title")),
      el("dl", { class: "keys" }, rows.map(([key, text]) => [
        el("dt", {}, key.split(" ").map((part) => el("kbd", {}, part))), el("dd", {}, text)])),
      button(t("keys.close"), () => dialog.close()));
    dialog.showModal();
  }
}

function focusFilter() {
  const filter = document.querySelector("main input[type=search]");
  filter?.focus();
  filter?.select();
}

// A list of rows of which one is current: j and k move, Enter opens.
export class RowCursor {
  constructor(rows, open) {
    this.rows = rows; // () => elements
    this.open = open;
    this.at = -1;
  }

  keys() {
    const [down, up] = [() => this.move(1), () => this.move(-1)];
    return { j: down, k: up, ArrowDown: down, ArrowUp: up, Enter: () => this.at >= 0 && this.open(this.rows()[this.at]) };
  }

  move(by) {
    const rows = this.rows();
    if (!rows.length) return;
    this.mark(Math.min(rows.length - 1, Math.max(0, this.at + by)));
  }

  mark(at) {
    this.at = at;
    this.rows().forEach((row, i) => row.classList.toggle("current", i === at));
    this.rows()[at]?.scrollIntoView({ block: "nearest" });
  }
}
