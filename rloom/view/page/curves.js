// Arithmetic of curves: smoothing, reduction to pixels, scales and ticks. No drawing here.

// Exponential moving average without the bias towards 0 at the start: the weights of the values seen so far sum to 1.
export function smooth(y, weight) {
  if (weight <= 0) return y;
  let mean = 0;
  let share = 1;
  return y.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    share *= weight;
    return mean / (1 - share);
  });
}

// At most four points for each pixel column: first, lowest, highest, last. The drawn line is the same as with all points.
export function reduceToPixels(x, y, toPixel) {
  const points = [];
  let i = 0;
  while (i < x.length) {
    const column = Math.floor(toPixel(x[i]));
    let [low, high] = [i, i];
    let end = i;
    while (end + 1 < x.length && Math.floor(toPixel(x[end + 1])) === column) {
      end += 1;
      if (y[end] < y[low]) low = end;
      if (y[end] > y[high]) high = end;
    }
    for (const k of [...new Set([i, low, high, end])].sort((a, b) => a - b)) points.push([x[k], y[k]]);
    i = end + 1;
  }
  return points;
}

// Positions [from, to) of the values of the sorted array that are within the domain, and one more on each side.
export function visibleRange(x, [low, high]) {
  let from = firstAtLeast(x, low);
  let to = firstAtLeast(x, high);
  while (to < x.length && x[to] <= high) to += 1;
  from = Math.max(0, from - 1);
  to = Math.min(x.length, to + 1);
  return [from, to];
}

export function firstAtLeast(sorted, value) {
  let [low, high] = [0, sorted.length];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle + 1;
    else high = middle;
  }
  return low;
}

export function nearest(sorted, value) {
  const after = firstAtLeast(sorted, value);
  if (after === 0) return sorted.length ? 0 : -1;
  if (after === sorted.length) return after - 1;
  return value - sorted[after - 1] <= sorted[after] - value ? after - 1 : after;
}

export function linear([low, high], [from, to]) {
  const span = high - low || 1;
  return {
    at: (value) => from + ((value - low) / span) * (to - from),
    invert: (pixel) => low + ((pixel - from) / (to - from)) * span,
  };
}

export function logarithmic([low, high], range) {
  const inner = linear([Math.log10(low), Math.log10(high)], range);
  return { at: (value) => inner.at(Math.log10(value)), invert: (pixel) => 10 ** inner.invert(pixel) };
}

const MOST_TICKS = 50;

// Round numbers (1, 2 or 5 times a power of ten) within the domain, about `count` of them.
export function ticks([low, high], count, whole = false) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough * 0.7);
  if (whole) step = Math.max(1, step);
  const first = Math.ceil(low / step - 1e-9);
  const found = Array.from({ length: Math.min(MOST_TICKS, Math.floor((high - low) / step) + 2) }, (_, k) => (first + k) * step);
  return found.filter((value) => value <= high + step * 1e-9).map((value) => Number(value.toPrecision(12)));
}

export function logTicks([low, high], count) {
  const decades = [];
  for (let k = Math.ceil(Math.log10(low) - 1e-9); k <= Math.log10(high) + 1e-9; k += 1) decades.push(k);
  if (decades.length >= 3) {
    const every = Math.ceil(decades.length / count);
    return decades.filter((k) => k % every === 0).map((k) => Number(`1e${k}`));
  }
  const found = [];
  for (let k = Math.floor(Math.log10(low)); k <= Math.ceil(Math.log10(high)); k += 1) {
    for (const factor of [1, 2, 5]) found.push(Number(`${factor}e${k}`));
  }
  return found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
}

// The y domain of what is visible, with some room above and below.
export function valueDomain(values, { log, band }) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (!(low <= high)) [low, high] = log ? [0.1, 1] : [0, 1];
  if (log) {
    // a logarithmic axis has room for the healthy range: the distance to it is visible
    if (band && band[0] > 0) [low, high] = [Math.min(low, band[0]), Math.max(high, band[1])];
    return [low / 1.25, high * 1.25];
  }
  // values that differ by rounding alone are one value
  const span = high - low > 1e-9 * Math.abs(high) ? high - low : 0;
  const room = span * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low >= 0 && low < room * 4 ? 0 : low - room, high + room];
}
