// Scores and lengths of all answers of each step, as a heat map: the darker, the more answers have this value.

import { get } from "./api.js";
import { AXES } from "./axis.js";
import { Chart, HEIGHT, MARGIN } from "./charts.js";
import { svg } from "./dom.js";
import { number } from "./format.js";
import { t } from "./texts.js";

const ROWS = 24; // of the heat map
const COLUMN_PX = 5; // at least
const LEVELS = 8;

class DistributionChart extends Chart {
  set(series) {
    super.set(series);
    this.logButton.hidden = true; // the lowest score is often 0
    this.log = false;
  }

  valuesIn(visible, [low, high]) {
    return visible.flatMap(({ one }) => one.quantiles.flatMap((all, i) => (one.x[i] >= low && one.x[i] <= high ? [all[0], all.at(-1)] : [])));
  }

  csvColumns() {
    const [one] = this.series;
    const count = one?.quantiles[0]?.length ?? 0;
    return Array.from({ length: count }, (_, k) => ({ name: `${(100 * k) / (count - 1)} %`, one, value: (i) => one.quantiles[i][k] }));
  }

  lines(part) {
    const group = super.lines(part);
    group.prepend(...this.heat(part.one));
    return group;
  }

  // One path for each level of darkness.
  heat({ x, quantiles }) {
    const [low, high] = [HEIGHT - MARGIN.bottom, MARGIN.top].map((pixel) => this.yScale.invert(pixel));
    const size = (high - low) / ROWS;
    const paths = Array.from({ length: LEVELS }, () => []);
    for (const { from, to, members } of this.columns(x)) {
      const shares = new Float64Array(ROWS);
      for (const i of members) addShares(shares, quantiles[i], low, size, 1 / members.length);
      shares.forEach((share, row) => {
        const level = Math.min(LEVELS, Math.ceil(LEVELS * Math.sqrt(share)));
        if (level < 1) return;
        const [bottom, top] = [this.yScale.at(low + row * size), this.yScale.at(low + (row + 1) * size)];
        paths[level - 1].push(`M${from.toFixed(1)} ${bottom.toFixed(1)}V${top.toFixed(1)}H${to.toFixed(1)}V${bottom.toFixed(1)}Z`);
      });
    }
    return paths.map((path, i) => svg("path", { class: `heat h${i + 1}`, d: path.join("") }));
  }

  // Steps that share a column of the drawing.
  columns(x) {
    const found = [];
    const pixels = x.map((value) => this.xScale.at(value));
    const gap = pixels.length > 1 ? (pixels.at(-1) - pixels[0]) / (pixels.length - 1) : 4 * COLUMN_PX;
    pixels.forEach((pixel, i) => {
      const last = found.at(-1);
      if (last && pixel + gap / 2 - last.from < COLUMN_PX) {
        last.members.push(i);
        last.to = pixel + gap / 2;
      } else found.push({ from: last && last.to > pixel - gap ? last.to : pixel - gap / 2, to: pixel + gap / 2, members: [i] });
    });
    return found;
  }
}

// Between two neighbouring quantiles lies an equal share of the answers, spread evenly.
function addShares(shares, quantiles, low, size, weight) {
  const part = weight / (quantiles.length - 1);
  for (let i = 0; i + 1 < quantiles.length; i += 1) {
    const [from, to] = [(quantiles[i] - low) / size, (quantiles[i + 1] - low) / size];
    const [first, last] = [from, to].map((value) => Math.min(ROWS - 1, Math.max(0, Math.floor(value))));
    if (last - first > ROWS / 4) { // a gap, as between scores of 0 and 1: there are no values inside of it
      shares[first] += part / 2;
      shares[last] += part / 2;
    } else for (let row = first; row <= last; row += 1) {
      const inside = first === last ? 1 : (Math.min(to, row + 1) - Math.max(from, row)) / (to - from);
      shares[row] += part * Math.max(0, inside);
    }
  }
}

function mean(quantiles) {
  const inner = quantiles.slice(1, -1).reduce((sum, value) => sum + value, 0);
  return (inner + (quantiles[0] + quantiles.at(-1)) / 2) / (quantiles.length - 1);
}

// Two charts that are filled while the server reads the dumps.
export class Distributions {
  constructor(runId, group, store) {
    Object.assign(this, { runId, group, store });
    this.data = { step: [], score: [], length: [] };
    this.charts = ["score", "length"].map((name) => new DistributionChart(group, { id: `distribution-${name}`, title: t(`distribution.${name}`), format: number, points: true }));
    for (const chart of this.charts) chart.node.hidden = true;
    this.nodes = this.charts.map((chart) => chart.node);
  }

  // Replies come in parts: each is drawn, so that the first appears at once.
  async load() {
    if (this.loading || this.closed) return;
    this.loading = true;
    try {
      let left = 1;
      while (left > 0 && !this.closed) {
        const answer = await get(`runs/${this.runId}/distributions`, { after: this.data.step.at(-1) });
        if (this.every && answer.every !== this.every) this.data = { step: [], score: [], length: [] }; // the run grew: begin anew
        else for (const name of Object.keys(this.data)) this.data[name].push(...answer[name]);
        left = this.every && answer.every !== this.every ? 1 : answer.left;
        this.every = answer.every;
        this.draw();
      }
    } finally {
      this.loading = false;
    }
  }

  draw() {
    const places = new Map((AXES[this.group.axis].values(this.store) ?? []).map((x, i) => [this.store.steps[i], x]));
    ["score", "length"].forEach((name, k) => {
      const one = { name: t("distribution.mean"), colour: "var(--c0)", x: [], y: [], steps: [], quantiles: [] };
      this.data.step.forEach((step, i) => {
        const all = this.data[name][i];
        const x = places.get(step);
        if (!all || x === undefined || x === null) return;
        one.x.push(x);
        one.steps.push(step);
        one.quantiles.push(all);
        one.y.push(mean(all));
      });
      this.nodes[k].hidden = !one.x.length;
      if (one.x.length) this.charts[k].set([one]);
    });
  }

  close() {
    this.closed = true;
  }
}
