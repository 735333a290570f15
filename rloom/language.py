"""Chinese or English: the language of the terminal, by the locale, and of a text, by its characters.

English in the code is the key of a text. `assets/zh/*.txt` have the Chinese: the English, then the Chinese on lines
that begin with `= `, then an empty line. `{}` is a value; `{0}`, `{1}` in the Chinese name values in another order.
A text is translated when it is shown, so that errors, logs and files stay English.
"""

import os
import re
from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

CHINESE = re.compile("[\u4e00-\u9fff]")
KANA = re.compile("[\u3040-\u30ff]")  # Japanese has Chinese characters, too
LETTER = re.compile("[A-Za-z]")
TWO_WORDS = re.compile("[A-Za-z][,;:.]? [A-Za-z]")
PLACE = re.compile(r"\{(\d*)\}")
FEWEST_LETTERS = 12
FOLDER = Path(__file__).parent / "assets" / "zh"


def is_chinese(environment: Mapping[str, str]) -> bool:
    names = ("RLOOM_LANGUAGE", "LC_ALL", "LC_MESSAGES", "LANG")
    chosen = next((environment[name] for name in names if environment.get(name)), "")
    return chosen.startswith("zh")


def is_chinese_text(text: str) -> bool:
    return CHINESE.search(text) is not None and KANA.search(text) is None


def translate(text: str) -> str:
    """The text in the language of the terminal."""
    return to_chinese(text) if is_chinese(os.environ) else text


@lru_cache(maxsize=1024)  # a text without an entry is compared with every template: milliseconds
def to_chinese(text: str) -> str:
    """The Chinese of a text, of each of its paragraphs, or of each of its lines; what has none stays English."""
    stripped = text.strip()
    if stripped != text:
        return text.replace(stripped, to_chinese(stripped)) if stripped else text
    known, templates, joints = _catalogue()
    if text in known or not LETTER.search(text):
        return known.get(text, text)
    for template in templates:
        if template.longest in text and (values := template.values(text)) is not None:
            return template.filled([_value(value) for value in values])
    for separator in ("\n\n", "\n"):
        if separator in text:
            return separator.join(map(to_chinese, text.split(separator)))
    for joint in joints:
        values = joint.values(text) or []
        chinese = [_value(value) for value in values]
        if chinese != values:
            return joint.filled(chinese)
    return text


def _value(text: str) -> str:
    """One word is a name (of a key, a column, a state), and stays."""
    return to_chinese(text) if " " in text.strip() else text


class Template(NamedTuple):
    """An English text with values, cut at them, and its Chinese."""

    pieces: Sequence[str]
    chinese: str
    longest: str  # piece
    letters: int  # of all pieces

    def values(self, text: str) -> list[str] | None:
        """The values of a text that was made from this template. None: it was not."""
        first, *middle, last = self.pieces
        start, end = len(first), len(text) - len(last)
        if start > end or not text.startswith(first) or not text.endswith(last):
            return None
        values = []
        for piece in middle:  # the leftmost place of each piece: finds a match if there is one
            found = text.find(piece, start, end)
            if found < 0:
                return None
            values.append(text[start:found])
            start = found + len(piece)
        values.append(text[start:end])
        # `{} is {}` would match many sentences: with so few words it takes a name, not words, before them
        few = 0 < self.letters < (3 if first else FEWEST_LETTERS)
        names = values if self.letters < 4 and not first else values[:1]
        return None if few and any(map(TWO_WORDS.search, names)) else values

    def filled(self, values: Sequence[str]) -> str:
        order = iter(range(len(values)))
        return PLACE.sub(lambda place: values[int(place[1]) if place[1] else next(order)], self.chinese)


def template_of(english: str, chinese: str) -> Template:
    pieces = english.split("{}")
    return Template(pieces, chinese, max(pieces, key=len), sum(map(str.isalpha, "".join(pieces))))


def read_catalogue(file: Path) -> dict[str, str]:
    entries = file.read_text(encoding="utf-8").strip("\n").split("\n\n")
    pairs = (entry.split("\n= ") for entry in entries)
    return {english: "\n".join(chinese) for english, *chinese in pairs}


@cache
def _catalogue() -> tuple[dict[str, str], list[Template], list[Template]]:
    """(texts, those with values, those that only join values, such as `{}: {}`); the longest first."""
    every = {english: chinese for file in FOLDER.iterdir() for english, chinese in read_catalogue(file).items()}
    templates = [template_of(english, chinese) for english, chinese in every.items() if "{}" in english]
    templates.sort(key=lambda template: -sum(map(len, template.pieces)))
    return every, [each for each in templates if each.letters], [each for each in templates if not each.letters]
