// Files that the user saves: a chart as SVG, numbers as CSV.

import { svg } from "./dom.js";

const STYLES = ["fill", "fill-opacity", "stroke", "stroke-width", "stroke-dasharray", "stroke-linejoin", "opacity", "font-family", "font-size", "font-weight"];
const HEAD = 46; // pixels of the title and the legend

export function saveText(name, type, text) {
  const address = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const anchor = Object.assign(document.createElement("a"), { href: address, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(address), 10000);
}

// A text that a spreadsheet would take for a formula gets a quote before it: answers and names may contain anything.
function cell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number") return String(value);
  const text = /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function toCsv(rows) {
  return rows.map((row) => row.map(cell).join(",")).join("\r\n") + "\r\n";
}

// One row for each place on the axis that is shown, one column for each curve. Values are as logged, without smoothing.
export function chartCsv(chart) {
  const [low, high] = chart.domain();
  const { axis } = chart.group;
  const rows = new Map();
  const columns = chart.csvColumns();
  columns.forEach(({ one, value }, column) => one.x.forEach((x, i) => {
    if (x < low || x > high) return;
    const key = `${x} ${one.steps?.[i] ?? x}`;
    if (!rows.has(key)) rows.set(key, [one.steps?.[i] ?? x, x, ...columns.map(() => null)]);
    rows.get(key)[2 + column] = value(i);
  }));
  const sorted = [...rows.values()].sort((a, b) => a[1] - b[1]);
  const named = ["step", axis, ...columns.map(({ name }) => name)];
  return toCsv(axis === "step" ? [named, ...sorted].map(([step, , ...values]) => [step, ...values]) : [named, ...sorted]);
}

// The drawing with the colours that the page's style sheets give it, title and legend above.
export function saveChart(chart) {
  const drawn = chart.svg;
  const width = chart.width;
  const height = Number(drawn.getAttribute("height"));
  const copy = drawn.cloneNode(true);
  const originals = [drawn, ...drawn.querySelectorAll("*")];
  [copy, ...copy.querySelectorAll("*")].forEach((node, i) => style(node, originals[i]));
  for (const node of copy.querySelectorAll(".cursor, .brush")) node.remove();
  copy.setAttribute("y", HEAD);
  const page = getComputedStyle(chart.node);
  const text = { fill: plain(page.color), "font-family": "sans-serif" };
  const whole = svg("svg", { width, height: height + HEAD, viewBox: `0 0 ${width} ${height + HEAD}` },
    svg("rect", { width, height: height + HEAD, fill: plain(page.backgroundColor) }),
    svg("text", { x: 12, y: 19, "font-size": 13, "font-weight": 600, ...text }, [chart.spec.title, chart.spec.metric].filter((one, i, all) => one && all.indexOf(one) === i).join(" · ")),
    legend(chart, text), copy);
  saveText(`${chart.fileName()}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(whole));
}

function legend(chart, text) {
  let x = 12;
  return [...chart.legend.children].map((key) => {
    const name = key.querySelector(".name").textContent;
    const at = x;
    x += 26 + 6.5 * name.length;
    return name ? [svg("rect", { x: at, y: 30, width: 12, height: 4, fill: plain(getComputedStyle(key.querySelector("i")).backgroundColor) }),
      svg("text", { x: at + 17, y: 36, "font-size": 11, ...text }, name)] : null;
  });
}

function style(node, original) {
  const computed = getComputedStyle(original);
  for (const name of STYLES) node.setAttribute(name, plain(computed.getPropertyValue(name)));
  for (const name of ["class", "style", "role", "tabindex"]) node.removeAttribute(name);
}

// color(srgb 0.5 0 1 / 0.3) -> rgba(128, 0, 255, 0.3), which drawing programs know.
function plain(value) {
  return value.replace(/color\(srgb ([\d.e-]+) ([\d.e-]+) ([\d.e-]+)(?: \/ ([\d.e-]+))?\)/g, (_, ...parts) => {
    const [red, green, blue] = parts.slice(0, 3).map((part) => Math.round(255 * Number(part)));
    return `rgba(${red}, ${green}, ${blue}, ${Number(parts[3] ?? 1)})`;
  });
}
