// Which words of two texts differ: the longest common subsequence of their words.

const MOST_WORDS = 1200; // the table has this squared as entries

// [[before parts], [after parts]], each part {text, changed}; null where the texts are too long to compare.
export function compareWords(before, after) {
  const [a, b] = [words(before), words(after)];
  if (a.length > MOST_WORDS || b.length > MOST_WORDS) return null;
  const width = b.length + 1;
  const common = new Uint16Array((a.length + 1) * width);
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      common[i * width + j] = a[i] === b[j] ? common[(i + 1) * width + j + 1] + 1 : Math.max(common[(i + 1) * width + j], common[i * width + j + 1]);
    }
  }
  const [left, right] = [[], []];
  let [i, j] = [0, 0];
  while (i < a.length || j < b.length) {
    if (i < a.length && j < b.length && a[i] === b[j]) {
      add(left, a[i++], false);
      add(right, b[j++], false);
    } else if (j === b.length || (i < a.length && common[(i + 1) * width + j] >= common[i * width + j + 1])) add(left, a[i++], true);
    else add(right, b[j++], true);
  }
  return [left, right];
}

// Words, runs of white space and single signs; Chinese text has no spaces, so each of its characters is a word.
function words(text) {
  return text.match(/[\p{Script=Han}]|[\p{L}\p{N}]+|\s+|[^\p{L}\p{N}\s]/gu) ?? [];
}

function add(parts, text, changed) {
  const last = parts.at(-1);
  if (last && last.changed === changed) last.text += text;
  else parts.push({ text, changed });
}
