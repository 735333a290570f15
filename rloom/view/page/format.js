// Numbers, durations and times as text. Every number in the page comes from here, so that equal values look equal.

export const NONE = "–";

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size >= 1e9) return `${trim((value / 1e9).toFixed(2))}G`;
  if (size >= 1e6) return `${trim((value / 1e6).toFixed(2))}M`;
  if (size >= 1e4) return `${trim((value / 1e3).toFixed(1))}k`;
  if (Number.isInteger(value)) return minus(String(value));
  if (size >= 1000) return minus(value.toFixed(0));
  if (size >= 100) return minus(value.toFixed(1));
  if (size >= 10) return minus(value.toFixed(2));
  if (size >= 0.1) return minus(value.toFixed(3));
  if (size >= 0.001) return minus(value.toFixed(4));
  return minus(value.toExponential(2).replace("e+", "e"));
}

function trim(text) {
  return minus(text.replace(/\.?0+$/, ""));
}

function minus(text) {
  return text.replaceAll("-", "−"); // the minus sign is as wide as a digit
}

// A round number on an axis, with the digits that it needs.
export function tick(value) {
  const size = Math.abs(value);
  if (size >= 1e4 || (size > 0 && size < 0.001)) return number(value).replace(/\.?0+e/, "e");
  return minus(String(Number(value.toPrecision(6))));
}

export function percentTick(value) {
  return `${minus(String(Number((100 * value).toPrecision(6))))}\u202f%`;
}

// A score is often 0 or 1: two decimals keep the column of a table aligned.
export function score(value) {
  if (value === null || value === undefined) return NONE;
  return minus(value.toFixed(Math.abs(value) >= 100 ? 0 : 2));
}

export function fixed(value, decimals) {
  return value === null || value === undefined ? NONE : minus(value.toFixed(decimals));
}

export function percent(value) {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(1)}\u202f%`;
}

// A validation: an accuracy as a percentage, a score as it is.
export function measured(value, measure) {
  return measure === "accuracy" ? percent(value) : number(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return NONE;
  if (value < 1) return `${(value * 1000).toFixed(value < 0.01 ? 1 : 0)} ms`;
  if (value < 60) return `${value.toFixed(value < 10 ? 2 : 1)} s`;
  return duration(value);
}

export function duration(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const whole = Math.max(0, Math.round(value));
  const [days, hours] = [Math.floor(whole / 86400), Math.floor(whole / 3600) % 24];
  const [minutes, rest] = [Math.floor(whole / 60) % 60, whole % 60];
  if (days) return `${days} d ${hours} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${rest} s` : `${rest} s`;
}

export function time(secondsSince1970, language) {
  if (!secondsSince1970) return NONE;
  const options = { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
  return new Date(1000 * secondsSince1970).toLocaleString(language === "zh" ? "zh-CN" : "en-GB", options);
}

export function value(item) {
  if (item === null || item === undefined) return NONE;
  if (typeof item === "number" && item !== 0 && Math.abs(item) < 1e-3) return item.toExponential();
  return typeof item === "object" ? JSON.stringify(item) : String(item);
}
