"""Numbers as people and models write them: `$1,000.`, `−3`, `3/4`, `42.0`, `1.8e1`, `5 million`."""

import re
from fractions import Fraction

MINUS_SIGNS = str.maketrans(dict.fromkeys("−–－﹣", "-"))  # U+2212, en dash, full width, small
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")

# A minus after an operand is a subtraction, not a sign: `5-3` ends in 3, `= -3` and `是-3` in -3.
# Thousands need groups of exactly three digits, so that `1,2` is two numbers; a comma after them may end a clause.
# Repetitions are bounded where a failed match would be tried again at each position of a long answer.
_NUMBER = re.compile(
    r"(?P<sign>(?<![a-zA-Z\d_)\]}])[-+])?\\?[$€£¥￥]?(?P<inner_sign>(?<=[$€£¥￥])[-+])?"
    r"(?P<value>(?:\d{1,3}(?:,\d{3}){1,30}(?!,?\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:\s{0,3}/\s{0,3}(?P<denominator>\d+(?:\.\d+)?)"
    r"|[eE](?P<exponent>[-+]?\d{1,3})(?![\d.])"
    r"|\s{0,3}(?:×|\\times|\\cdot|\*)\s{0,3}10\s{0,3}(?:\^\s{0,3}\{?(?P<power>[-+]?\d{1,3})\}?"
    r"|(?P<superscript>[⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,3})))?"
)
_PLAIN = re.compile(r"[ \t]*(-?\d{1,18})\.?[ \t\r]*")  # most answers: no further expression is needed
_LATEX_FRACTION = re.compile(r"\\[dtc]?frac\s{0,3}\{([^{}]+)\}\s{0,3}\{([^{}]+)\}")

# Thin and non-breaking spaces between thousands: `84\,000`. A plain space may separate two numbers.
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\,|[\u00a0\u2009\u202f])(?=\d{3}(?!\d))")
_SPACED_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?: \d{3})+(?![\d,])")

# Before a number: bold, code, brackets, `:`, `≈`, `$`, `\(`, `\boxed{`. Not a line break, and no words: `#### Step 2`
# is a heading of Markdown.
_OPENING = re.compile(
    r"(?:[ \t\u00a0*`_{$(\[\"'“:：=≈~]|\\[(\[,;: ]|\\(?:boxed|fbox|text|textbf|mathbf|mathrm)(?![a-zA-Z]))*"
)

# After a number: spaces, currency, per cent, degrees, closing brackets and marks, closing tags.
_CLOSING = re.compile(
    r"(?:[\s*`_}$)\]\"'“”’）】%％‰°€£¥￥¢#]|\\[%$)\],;!: ]|\^\s*\{?\\circ\}?|\\q?quad(?![a-zA-Z])"
    r"|</?[a-zA-Z][^<>]*>|<\|[^<>|]*\|>)*"
)
_LATEX_TEXT = re.compile(r"\\(?:text(?:bf|it|rm|normal)?|mathrm|mbox)\s*\{([^{}]*)\}")
_CLAUSE = re.compile(r"[^.,;:!?。，；：！？…(（*`_}$)\]）】\\<>=+|~×÷·&^]*(?:\.(?=[^\W\d_])[^.,;:!?\s]*)*")
_PUNCTUATION = re.compile(r"(?:[.,;:!?。，；：！？…(（—\s]|-\s)+")

# What multiplies a number.
_SCALES = {"hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9, "trillion": 10**12, "dozen": 12}
_SCALES |= {f"{name}s": value for name, value in _SCALES.items()} | {"k": 10**3, "K": 10**3}
_CHINESE_SCALES = {"十": 10, "百": 10**2, "千": 10**3, "万": 10**4, "亿": 10**8}
_SCALE = re.compile(
    rf"\s{{0,3}}(?:(?P<english>{'|'.join(_SCALES)})(?![^\W\d_]|-)|(?P<chinese>[十百千万亿]{{1,3}})(?![克米瓦卡赫帕焦伏分]))"
)

# Words that change the value or leave it open, so that they do not belong to a unit: numerals, fractions, comparisons,
# operators. English numerals are a closed class; `-illion` and the endings of ordinals cover those of any size.
_SMALL = "zero|one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|[a-z]+teen"
_TENS = "twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety"
_ORDINALS = "fourth|fifth|sixth|seventh|eighth|ninth|tenth|eleventh|twelfth|[a-z]+teenth|[a-z]+tieth|[a-z]+redth"
_NUMERAL = re.compile(
    rf"(?:{_SMALL}|{_TENS}|(?:{_TENS})-[a-z]+|hundreds?|thousands?|[a-z]*illion(?:th)?s?|dozens?|gross|score|googol|lakhs?|crores?"
    rf"|half|halves|thirds?|(?:{_ORDINALS}|[a-z]+sandth)s?|or|nor|than|plus|minus|least|most|not|either)"
)
_OPERATOR_WORD = re.compile(
    "and|to|but|times?-|x|over|under|above|below|beyond|through|divided|multiplied|squared|cubed|factorial|point|"
    "repeating|recurring|mod|modulo|less|equals|is"
)
_LETTER = re.compile("[A-Za-zͰ-Ͽ]")
_UNIT_LETTERS = frozenset("mgshdlLAVWNJCFtΩ")  # `5 m`; other single letters are variables: `5x`, `5i`, `5π`
_UNIT_TEXT = re.compile(r"(?:[^\W\d_]|[\s.'’/()·°-]|(?<=[^\W\d_])(?:[²³]|\^\{?[23]\}?))*")
_CHINESE_MEASURE = re.compile(r"[百千](?=[克米瓦卡赫帕焦伏分])|[平立]方(?=[千厘分毫公英]?[米尺里寸])")
_CHINESE_NUMERAL = re.compile("[〇零一二三四五六七八九十百千万亿兆半多或和与及到至以加减乘除]|[平立次]方")

TOLERANCE = Fraction(1, 1_000_000)
MOST_BITS = 14_000  # Python writes integers of at most 4,300 digits
LONGEST_REST = 1000  # characters that are checked after a number


def plain_notation(text: str) -> str:
    r"""ASCII minus signs, thousands of LaTeX (`1{,}234`, `1,\!234`, `1\,234`) as `1,234`, and simple LaTeX fractions as
    `a/b`."""
    commas = _THIN_SPACE.sub(",", text.translate(MINUS_SIGNS).replace("{,}", ",").replace(r",\!", ","))
    return _LATEX_FRACTION.sub(lambda found: f"{found[1].strip()}/{found[2].strip()}", commas)


def numbers_in(text: str) -> list[Fraction]:
    text = plain_notation(text)
    found = (_scaled_value(match, text) for match in _NUMBER.finditer(text))
    return [number for number in found if number is not None]


def last_number(text: str) -> Fraction | None:
    text = plain_notation(text)
    found = (_scaled_value(match, text) for match in reversed(list(_NUMBER.finditer(text))))
    return next((number for number in found if number is not None), None)


def leading_number(text: str) -> Fraction | None:
    """The number at the start of the first line, after any markup. None if the line goes on with an operator or another
    number, so that `18 + 2`, `18-19` and `18 or 19` are not 18."""
    line = text.partition("\n")[0]
    if plain := _PLAIN.fullmatch(line):
        return Fraction(int(plain[1]))
    line = _without_spaces(plain_notation(line))
    opening = _OPENING.match(line)
    assert opening is not None  # it may be empty
    return _whole_number(_NUMBER.match(line[opening.end() :]))


def first_number(text: str) -> Fraction | None:
    """As `leading_number`, with words before it."""
    return _whole_number(_NUMBER.search(_without_spaces(plain_notation(text))))


def parse_number(text: str) -> Fraction | None:
    """`text` as a number, without surrounding spaces and trailing full stops; None if it is not one."""
    if plain := _PLAIN.fullmatch(text):
        return Fraction(int(plain[1]))
    match = _NUMBER.fullmatch(_without_spaces(plain_notation(text).strip().rstrip(".。").strip()))
    return None if match is None else _value(match)


def scale_of(text: str) -> tuple[int, str]:
    """The factor of number words at the start of what follows a number, and the rest: ` million dollars`, `万元`."""
    factor = 1
    while found := _SCALE.match(text):
        if found["english"] is not None:
            factor *= _SCALES[found["english"]]
        else:
            for sign in found["chinese"]:
                factor *= _CHINESE_SCALES[sign]
        text = text[found.end() :]
    return factor, text


def is_unit(text: str) -> bool:
    """Whether words after a number only name what it counts: `cm`, `square feet`, `apples`, `元`. `or more`, `squared`
    and `thousandths` change the value."""
    if _UNIT_TEXT.fullmatch(text) is None or _CHINESE_NUMERAL.search(_CHINESE_MEASURE.sub("", text)):
        return False
    words = [word.strip(".,'’()") for word in text.replace("/", " ").split()]
    words = [word for word in words if word]
    if words and (_OPERATOR_WORD.fullmatch(words[0].lower()) or _LETTER.fullmatch(words[0])):
        return words[0] in _UNIT_LETTERS
    return not any(_NUMERAL.fullmatch(word.lower()) for word in words)


def close(left: Fraction, right: Fraction) -> bool:
    """Equal up to the rounding of a printed decimal; integers of any size must be equal."""
    if left.denominator == right.denominator == 1:
        return left.numerator == right.numerator
    return abs(left - right) <= TOLERANCE * min(Fraction(1), max(abs(left), abs(right)))


def canonical(number: Fraction) -> str:
    """One text per value, so that votes for 42, 42.0 and 42. are counted together."""
    if number.denominator == 1:
        return str(number.numerator)
    if number.numerator.bit_length() > 1_000 or number.denominator.bit_length() > 1_000:  # beyond a float
        return str(number)
    decimal = str(float(number))
    return decimal if Fraction(decimal) == number else str(number)


def _without_spaces(text: str) -> str:
    return _SPACED_THOUSANDS.sub(lambda found: found[0].replace(" ", ""), text)


def _whole_number(match: re.Match[str] | None) -> Fraction | None:
    if match is None:
        return None
    factor, rest = scale_of(match.string[match.end() : match.end() + LONGEST_REST])
    return None if rest and not _ends_number(rest) else _value(match, factor)


def _ends_number(rest: str) -> bool:
    """Whether what follows a number on its line is a unit, closing markup, or another clause."""
    while rest:
        closing = _CLOSING.match(rest)
        assert closing is not None  # it may be empty
        if closing.end() == len(rest):
            return True
        rest = rest[closing.end() :]
        if text := _LATEX_TEXT.match(rest):
            if not is_unit(text[1]):
                return False
            rest = re.sub(r"^\s*\^\s*(?:[23]|\{[23]\})", "", rest[text.end() :])  # \text{ cm}^2
        elif rest[0].isalpha() or re.match(r"[-/][^\W\d_]", rest):
            clause = _CLAUSE.match(rest)
            assert clause is not None
            if not is_unit(clause[0].lstrip("-/")):
                return False
            rest = rest[clause.end() :]
        elif punctuation := _PUNCTUATION.match(rest):
            return _begins_clause(rest[punctuation.end() :])
        else:
            return False
    return True


def _begins_clause(text: str) -> bool:
    """`1,234, as asked`, not `18, 19`."""
    closing = _CLOSING.match(text)
    assert closing is not None
    text = text[closing.end() :]
    if not text:
        return True
    word = re.match(r"[^\W\d_]+", text)
    return word is not None and _NUMERAL.fullmatch(word[0].lower()) is None and not _CHINESE_NUMERAL.match(text)


def _scaled_value(match: re.Match[str], text: str) -> Fraction | None:
    return _value(match, scale_of(text[match.end() : match.end() + 24])[0])


def _value(match: re.Match[str], factor: int = 1) -> Fraction | None:
    try:
        value = Fraction(match["value"].replace(",", "")) * factor
        if match["denominator"] is not None:
            value /= Fraction(match["denominator"])
    except (ValueError, ZeroDivisionError):  # thousands of digits, or a division by zero
        return None
    if power := match["exponent"] or match["power"] or match["superscript"]:
        value *= Fraction(10) ** int(power.translate(SUPERSCRIPTS))
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MOST_BITS:
        return None
    return -value if match["sign"] == "-" or match["inner_sign"] == "-" else value
