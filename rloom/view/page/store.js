// Metrics and state of one run. The first request gets every step, later ones only what was added.

import { get } from "./api.js";
import { AXES } from "./axis.js";

const stores = new Map();

export function storeOf(id) {
  if (!stores.has(id)) stores.set(id, new RunStore(id));
  return stores.get(id);
}

export class RunStore {
  constructor(id) {
    this.id = id;
    this.generation = null;
    this.steps = [];
    this.columns = new Map(); // metric -> one value or null for each step
    this.seconds = []; // of training, at the end of each step
    this.answersPerStep = null;
    this.measures = {}; // data source -> accuracy or score
    this.state = null;
    this.skipped = 0; // records that do not fit
    this.fault = null; // of config.yaml
    this.version = 0; // grows with every change
    this.last = "";
  }

  // Calls at the same time share one request.
  refresh() {
    this.pending ??= this.load().finally(() => (this.pending = null));
    return this.pending;
  }

  async load() {
    const known = this.generation !== null && this.steps.length > 0;
    const after = known ? { generation: this.generation, after: this.steps.at(-1) } : {};
    this.merge(await get(`runs/${this.id}/metrics`, after));
  }

  merge(answer) {
    const text = JSON.stringify([answer.generation, answer.steps, answer.metrics]);
    this.answersPerStep = answer.answers_per_step;
    this.measures = answer.measures;
    this.state = answer.state;
    this.skipped = answer.skipped;
    this.fault = answer.fault;
    this.generation = answer.generation;
    if (text === this.last) return;
    this.last = text;
    this.version += 1;
    if (answer.complete) {
      this.steps = [];
      this.columns = new Map();
      this.seconds = [];
    }
    const first = answer.steps.length ? answer.steps[0] : Infinity;
    let kept = this.steps.length;
    while (kept > 0 && this.steps[kept - 1] >= first) kept -= 1;
    const total = kept + answer.steps.length;
    this.steps.length = kept;
    this.seconds.length = kept;
    for (const step of answer.steps) this.steps.push(step);
    for (const value of answer.seconds) this.seconds.push(value);
    for (const name of Object.keys(answer.metrics)) if (!this.columns.has(name)) this.columns.set(name, []);
    for (const [name, column] of this.columns) {
      column.length = Math.min(column.length, kept);
      while (column.length < kept) column.push(null);
      const added = answer.metrics[name] ?? [];
      for (let i = 0; i < total - kept; i += 1) column.push(added[i] ?? null);
    }
  }

  // Places on the axis, values and steps of a metric, without the steps that lack it.
  series(name, axis = "step") {
    const series = { x: [], y: [], steps: [] };
    const column = this.columns.get(name) ?? [];
    const places = AXES[axis].values(this) ?? this.steps;
    for (let i = 0; i < column.length; i += 1) {
      if (column[i] === null || places[i] === null) continue;
      series.x.push(places[i]);
      series.y.push(column[i]);
      series.steps.push(this.steps[i]);
    }
    return series;
  }

  lastValue(name) {
    const column = this.columns.get(name) ?? [];
    for (let i = column.length - 1; i >= 0; i -= 1) if (column[i] !== null) return column[i];
    return null;
  }
}
