r"""LaTeX answers as text: normalise notations of the same meaning, and split answers at their top level."""

import re
from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

from rloom.rewards.rules.numbers import MINUS_SIGNS, is_unit, scale_of

_SIGNS = MINUS_SIGNS | {
    ord(sign): f"{command} "
    for sign, command in {
        "×": r"\times", "·": r"\cdot", "≤": r"\le", "≥": r"\ge", "≠": r"\ne", "π": r"\pi", "∞": r"\infty", "∪": r"\cup",
        "∅": r"\emptyset", "ℝ": r"\mathbb{R}", "∈": r"\in", "≈": r"\approx", "±": r"\pm",
    }.items()
}  # fmt: skip
INEQUALITY = re.compile(r"[<>]|\\(?:l|g)(?:e|eq|eqslant|t)(?![a-zA-Z])|\\neq?(?![a-zA-Z])")


def _infinity(found: re.Match[str]) -> str:
    return r"-\infty " if (found[1] or "").strip().casefold() in ("negative", "-") else r"\infty "


_SYNONYMS: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\(?:left|right)\s*\.", ""),
        (r"\\(?:left|right|[bB]ig[lrm]?|[bB]igg[lrm]?|displaystyle|textstyle|limits)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\[dt]binom(?![a-zA-Z])", r"\\binom"),
        (r"\\(?:mbox|textnormal|textbf|textit|textrm|textsf|mathrm)(?![a-zA-Z])", r"\\text"),
        (r"\\mathbf\s*\{([a-zA-Z])\}", r"\1"),
        (r"\\text\s*\{\s*([ie])\s*\}", r"\1"),  # \mathrm{i}
        (r"\\(?:lbrace)(?![a-zA-Z])", r"\\{"),
        (r"\\(?:rbrace)(?![a-zA-Z])", r"\\}"),
        (r"\\(?:langle)(?![a-zA-Z])", "("),
        (r"\\(?:rangle)(?![a-zA-Z])", ")"),
        (r"\\(?:l|r)?vert(?![a-zA-Z])", "|"),
        (r"(?<=\d)\s{0,3}(?:\{\s{0,3},\s{0,3}\}|,\s{0,3}\\!|\\,)\s{0,3}(?=\d{3}(?!\d))", ","),  # thousands
        (r"\{\s*,\s*\}", ","),
        (r"(?<!\\)\\!", ""),
        (r"(?<!\\)\\[,;:> ]|~|\\q?quad(?![a-zA-Z])|\\(?:thin|med|thick)space(?![a-zA-Z])", " "),
        # degrees are removed, but the argument of a function is an angle: \sin 30^\circ
        (
            r"(\\(?:sin|cos|tan|cot|sec|csc)(?![a-zA-Z])\s*(?:\^\s*\{?\d\}?)?\s*[({]?\s*)(\d+(?:\.\d+)?)\s*"
            r"(?:\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degrees?(?![a-zA-Z])|°)",
            r"\1\\frac{\2\\pi}{180}",
        ),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degrees?(?![a-zA-Z])|°", ""),
        (r"\\?%|\\\$|\$", ""),  # `10\%` and `10` are the same answer
        (r",\s*,", ","),
        (r"\s+", " "),
        (r"\\varnothing(?![a-zA-Z])|\\\{ ?\\\}|\\text ?\{ ?(?:the )?empty set ?\}", r"\\emptyset "),
        (r"\\(?:mathbb|Bbb)(?:\{R\}| R)|\\(?:R|reals)(?![a-zA-Z])", r"\\mathbb{R}"),
        (r"(?i:\\text ?\{ ?(positive |negative |[-+])?infinity ?\})", _infinity),
        (r"(?i:(?<![a-z\\])(positive |negative |[-+])?infinity(?![a-z]))", _infinity),
        (r"(?<![\w)}\]]) ?\+ ?\\infty(?![a-zA-Z])", r"\\infty"),
        (r"^ ?(?:\\(?:approx|approxeq|simeq|sim)(?![a-zA-Z])|\\text ?\{ ?(?:about|approximately) ?\}) ?", ""),
    )
]
_CONJUNCTION = re.compile(
    r",?\s?\\text\s?\{\s?,?\s?(?P<text>and|or)\s?\}|(?:,\s?)?(?<![a-zA-Z\\])(?P<word>and|or)(?![a-zA-Z])"
)
_REALS = re.compile(
    r"(?:[a-zA-Z] ?\\in ?)?\\mathbb\{R\}|(?:\\text ?\{ ?)?(?i:all real(?:s| numbers?)) ?\}?",
)
_MATH_MODE = re.compile(
    r"\s*(?:\$+(?P<dollar>.*?)\$+|\\\((?P<inline>.*?)\\\)|\\\[(?P<display>.*?)\\\])\s*[.。]?\s*", re.S
)
_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_UNIT_WORDS = "cm|mm|km|kg|mg|ft|mi|hr|lb|oz|ml|mL|kph|mph|in"
_UNITS = re.compile(
    r"(?<=[\w})!|])(?:"
    r"\s?\\text\s?\{(?P<text>[^{}]*)\}"  # \text{ cm}
    rf"|\s?(?<=[\d}} ])(?P<plain>(?:{_UNIT_WORDS})(?![a-zA-Z])"  # 5 cm, 5cm
    r"|(?<=[\d}] )(?:[a-zA-Z]\.)+[a-zA-Z]"  # 60 m.p.h.
    r"|(?<=[\d}] )(?:sq\.? )?[a-zA-Z]{3,}(?: [a-zA-Z]{2,})*"  # 12 apples, 5 square units
    r"|[\u4e00-\u9fff]+))(?:\s?\^\s?\{?\s?[23]\s?\}?)?\.?\s?$"
)
_MERIDIEM = re.compile(r"(.*\d)\s?(?:\\text\{\s?)?([aApP])\.?\s?[mM]\.?\s?\}?")
_APPROXIMATELY = re.compile(r"\\approx(?![a-zA-Z])")
# `B`, `(B) 12`, `B) 12`, `B. 12`, `B: 12`, with or without \text around the letter
_OPTION = re.compile(r"(?:\\text\{)? ?(?:\(([A-H])\)|([A-H])[).:](?= ?[^\W_]|\}| ?\\)|([A-H]) ?\}?$)")
_OPTION_LETTER = re.compile(r"(?<![^\W_])[A-H](?![^\W_])|(?<![a-z])(?:or|and)(?![a-z])|,")
_COMMAND = re.compile(r"\\(?:[a-zA-Z]+|.)|_", re.S)
_ARGUMENTS = {"_": 1, r"\frac": 2, r"\binom": 2, r"\sqrt": 1, r"\text": 1, r"\overline": 1}
_NUMBER = r"(?:\d{1,3}(?:,\d{3})+|\d{1,3}(?: \d{3})+|\d+)?(?:\.\d*)?"
_EXACT = re.compile(
    rf"(?P<sign>[-+]?)\s*(?:"
    rf"(?P<top>{_NUMBER})\s*/\s*(?P<bottom>{_NUMBER})"
    rf"|(?P<whole>\d+)? ?\\frac\{{(?P<frac_sign>-?)(?P<frac_top>{_NUMBER})\}}\{{(?P<frac_bottom>{_NUMBER})\}}"
    rf"|(?P<mixed>\d+) (?P<mixed_top>\d+)/(?P<mixed_bottom>\d+)"
    rf"|(?P<repeating>\d*\.\d*)\\overline\{{(?P<period>\d+)\}}"
    rf"|(?P<number>{_NUMBER})"
    r"(?:[eE](?P<exponent>[-+]?\d{1,3})"
    r"| ?(?:\\times|\\cdot|\*) ?10 ?\^ ?(?:\{ ?(?P<power>[-+]?\d{1,3}) ?\}|(?P<digit>\d)))?"
    r")"
)
_BASED = re.compile(r"(-?)\s*\(?([0-9A-F]*[0-9][0-9A-F]*)\)?\s*_\s*(?:\{\s*(?:\\text\s*\{)?\s*(\d+)\s*\}*|(\d))")


@lru_cache(maxsize=4096)
def normalised(latex: str) -> str:
    r"""Remove math mode, sizes, thin spaces, degrees, per cent, currency and units; `\frac12` gets braces."""
    if re.fullmatch(r"-?\d+", latex, re.ASCII):
        return latex
    latex = latex.translate(_SIGNS)
    if inside := _MATH_MODE.fullmatch(latex):
        latex = next(part for part in inside.groups() if part is not None)
    for pattern, replacement in _SYNONYMS:
        latex = pattern.sub(replacement, latex)
    latex = _with_separators(latex)
    latex = with_braces(latex.strip().rstrip(".。, ")).strip()
    if (inside := _TEXT.fullmatch(latex)) and re.match(r"\s*-?\d", inside[1]):
        latex = inside[1].strip()  # \text{12 inches}
    return r"(-\infty,\infty)" if _REALS.fullmatch(latex) else without_units(latex)


def _with_separators(latex: str) -> str:
    r"""`1 \text{ or } 2` is a list, `x < 1 \text{ or } x > 2` a union."""
    if INEQUALITY.search(latex) is None:
        return re.sub(", ?,", ",", _CONJUNCTION.sub(",", latex))
    return _CONJUNCTION.sub(lambda found: r" \lor " if "or" in found.groups() else r" \land ", latex)


def without_units(latex: str) -> str:
    r"""Remove the unit of `5\text{ cm}^2`, `5 cm` and `12 apples`, which the question names. Number words multiply:
    `5\text{ million}` -> `5000000`."""
    unit = _UNITS.search(latex)
    if unit is None or meridiem(latex) is not None:
        return latex
    shorter = latex[: unit.start()].strip()
    # only a number has units, not `x + y \text{ even}`
    if not shorter or re.search(r"[\d})!|]$|\\pi$|^[a-zA-Z]$|[\d})][a-zA-Z]$", shorter) is None:
        return latex
    factor, rest = scale_of(unit["text"] or unit["plain"] or "")
    if not is_unit(rest):
        return latex
    if factor == 1:
        return shorter
    number = exact_number(shorter)
    return latex if number is None else str(number[0] * factor)


def meridiem(latex: str) -> tuple[str, str] | None:
    r"""`10:30\text{ p.m.}` -> ("10:30", "p")."""
    found = _MERIDIEM.fullmatch(latex)
    return None if found is None else (found[1], found[2].lower())


def with_braces(latex: str) -> str:
    r"""TeX's argument rule: an argument without braces is the next token. `\frac\pi 3` -> `\frac{\pi}{3}`."""
    out: list[str] = []
    at = 0
    while at < len(latex):
        piece, at = _token(latex, at)
        out.append(piece)
    return "".join(out)


def _token(latex: str, at: int) -> tuple[str, int]:
    """The token at `at` (a command with its arguments in braces), and the start of the next one."""
    if latex[at] == "{":
        end = _closing_brace(latex, at)
        return (latex[at:], len(latex)) if end is None else ("{" + with_braces(latex[at + 1 : end]) + "}", end + 1)
    command = _COMMAND.match(latex, at)
    if command is None:
        return latex[at], at + 1
    name, at = command[0], command.end()
    out = name
    if name == r"\sqrt" and (root := re.compile(r"\s*\[([^\[\]]*)\]").match(latex, at)):
        out, at = f"{out}[{root[1]}]", root.end()
    for _ in range(_ARGUMENTS.get(name, 0)):
        start = at + len(latex[at:]) - len(latex[at:].lstrip())
        if start >= len(latex):
            break
        argument, at = _token(latex, start)
        out += argument if argument.startswith("{") else "{" + argument + "}"
    return out, at


def _closing_brace(latex: str, at: int) -> int | None:
    depth, escaped = 0, False
    for index in range(at, len(latex)):
        if not escaped:
            depth += (latex[index] == "{") - (latex[index] == "}")
        if depth == 0:
            return index
        escaped = latex[index] == "\\" and not escaped
    return None


def as_text(latex: str) -> str:
    """For exact comparison: without spaces, `\\text` and the braces of single letters and digits."""
    compact = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", _TEXT.sub(r"\1", latex).strip())  # `1 2` is not 12
    return re.sub(r"([_^])\{(\w)\}", r"\1\2", compact)


def words(latex: str) -> str | None:
    r"""The answer in lower case if it is words: `\text{(C)}`, `east`. None for mathematics."""
    inside = _TEXT.fullmatch(latex)
    plain = (inside[1] if inside else latex).strip()
    stripped = re.sub(r"^\((.*)\)$", r"\1", plain)
    if re.search(r"[\d\\^_=<>{}]", stripped) or not re.search(r"[^\W\d_]", stripped):
        return None
    # Without \text, adjacent symbols are a product; four letters or more are a word.
    if inside is None and not re.search(r"[^\W\d_]{4,}", stripped):
        return None
    return " ".join(stripped.casefold().split())


def same_phrase(one: str, other: str) -> bool:
    """Word by word, in the singular or the plural: `no solution`, `no solutions`."""
    words, others = one.split(), other.split()
    return len(words) == len(others) and all(
        word == like or like in _plurals(word) or word in _plurals(like)
        for word, like in zip(words, others, strict=True)
    )


def _plurals(word: str) -> tuple[str, ...]:
    if len(word) < 3:
        return ()
    return (f"{word}es",) if word.endswith("s") else (f"{word}s", f"{word}es", f"{word[:-1]}ies")


def option(latex: str) -> str | None:
    r"""`B` for `\text{(B)}`, `(B) 12` and `\text{B. east}`: the letter of a choice with the text of that choice."""
    found = _OPTION.match(latex)
    if found is None or _OPTION_LETTER.search(latex, found.end()) or INEQUALITY.search(latex):
        return None
    return found[1] or found[2] or found[3]


def exact_number(latex: str) -> tuple[Fraction, bool] | None:
    r"""`1,234`, `-3/4`, `\frac{3}{4}`, `2\frac{1}{3}`, `0.\overline{6}`, `.5`, `6e23`: the value, and if a decimal."""
    match = _EXACT.fullmatch(latex.removeprefix("+"))
    if match is None:
        return None
    try:
        value = _value({name: part for name, part in match.groupdict().items() if part is not None})
    except (ValueError, ZeroDivisionError):  # only a sign or a point, or too many digits
        return None
    decimal = match["repeating"] is None and "." in latex
    return (-value if match["sign"] == "-" else value), decimal


def _value(parts: dict[str, str]) -> Fraction:
    if "top" in parts:
        return _fraction(parts["top"]) / _fraction(parts["bottom"])
    if "frac_top" in parts:
        fraction = _fraction(parts["frac_top"]) / _fraction(parts["frac_bottom"])
        return _fraction(parts.get("whole", "0")) + (-fraction if parts["frac_sign"] else fraction)
    if "mixed" in parts:
        return _fraction(parts["mixed"]) + _fraction(parts["mixed_top"]) / _fraction(parts["mixed_bottom"])
    if "repeating" in parts:
        start, period = parts["repeating"], parts["period"]
        places = len(start.partition(".")[2])
        repeated = Fraction(int(period), (10 ** len(period) - 1) * 10**places)
        return _fraction(start if start != "." else "0") + repeated
    exponent = parts.get("exponent") or parts.get("power") or parts.get("digit") or "0"
    return _fraction(parts["number"]) * Fraction(10) ** int(exponent)


def _fraction(text: str) -> Fraction:
    return Fraction(text.replace(",", "").replace(" ", ""))


def based_number(latex: str) -> tuple[str, int] | None:
    """`-1A_{12}` -> ("-1A", 12)."""
    match = _BASED.fullmatch(latex)
    return None if match is None else (match[1] + (match[2].lstrip("0") or "0"), int(match[3] or match[4]))


def split_at(latex: str, found: Callable[[str, int], int]) -> list[str]:
    r"""Split outside all brackets. `found(latex, index)` is the length of a separator at `index`, or 0."""
    parts, start, depth, index = [], 0, 0, 0
    while index < len(latex):
        length = found(latex, index) if depth == 0 else 0
        if length:
            parts.append(latex[start:index].strip())
            start = index = index + length
            continue
        step = 2 if latex[index] == "\\" else 1
        bracket = latex[index + step - 1 : index + step]
        depth += (bracket in ("(", "[", "{")) - (bracket in (")", "]", "}"))
        index += step
    return [*parts, latex[start:].strip()]


def at_commas(latex: str) -> list[str]:
    return split_at(latex, lambda text, index: int(text[index] == ","))


def at_colons(latex: str) -> list[str]:
    return split_at(latex, lambda text, index: int(text[index] == ":"))


def at_unions(latex: str) -> list[str]:
    return split_at(latex, lambda text, index: len(r"\cup") * bool(re.match(r"\\cup(?![a-zA-Z])", text[index:])))


def at_approximately(latex: str) -> list[str]:
    return split_at(latex, lambda text, index: len(r"\approx") * bool(_APPROXIMATELY.match(text, index)))


def at_equals(latex: str) -> list[str]:
    return split_at(
        latex, lambda text, index: int(text[index] == "=" and text[index - 1 : index] not in list("<>!\\:"))
    )


def enclosed(latex: str) -> tuple[str, str] | None:
    r"""`[0, 1)` -> ("[)", "0, 1"), `\{1\}` -> ("{}", "1"): the brackets around the whole answer and their content."""
    match = re.fullmatch(r"(\(|\[|\\\{)(.*)(\)|\]|\\\})", latex, re.S)
    if match is None:
        return None
    depth, index, inside = 0, 0, match[2]
    while index < len(inside):
        step = 2 if inside[index] == "\\" else 1
        bracket = inside[index + step - 1 : index + step]
        depth += (bracket in ("(", "[", "{")) - (bracket in (")", "]", "}"))
        if depth < 0:  # `(1)(2)`
            return None
        index += step
    return match[1][-1] + match[3][-1], inside.strip()


def matrix_rows(latex: str) -> tuple[str, list[list[str]]] | None:
    r"""The letter of the brackets (`p` and `b` count as equal) and the cells, if the whole answer is one matrix."""
    match = re.fullmatch(
        r"\\begin\{([pbvBV]?)(?:matrix|smallmatrix)\}(.*)\\end\{\1(?:matrix|smallmatrix)\}", latex, re.S
    )
    if match is None or r"\begin" in match[2]:
        return None
    rows = [row for row in re.split(r"\\\\", match[2]) if row.strip()]
    return match[1].replace("b", "p"), [[cell.strip() for cell in row.split("&")] for row in rows]
