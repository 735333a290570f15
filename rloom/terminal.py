"""Text of others on a terminal: rows, answers, replies of a judge, names of files and runs, output of programs.

A terminal interprets control characters: it moves the cursor over what was printed, sets its title, writes to the
clipboard (OSC 52). Bidirectional overrides show text in another order than it has. They are printed as escapes.
"""

import io
import os
import re
import sys
import unicodedata
from typing import TextIO

# Cc: control, Cf: format (bidirectional, invisible), Cs: half of a surrogate pair, which cannot be printed at all
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
KEPT = frozenset("\n\t\u200c\u200d")  # Persian and Hindi words and joined emoji need the last two

WIDE = 0x2E80  # the first code point of East Asian scripts
USUAL_WIDTH = 80


def printable(text: str) -> str:
    r"""Characters that a terminal would interpret become escapes such as \u001b. JSON stays JSON of the same value."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(escaped(c) if unicodedata.category(c) in HIDDEN and c not in KEPT else c for c in text)


def escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


def padded(text: str, width: int) -> str:
    """With spaces to this width, before it if the width is negative."""
    spaces = " " * (abs(width) - columns(text))
    return text + spaces if width > 0 else spaces + text


def columns(text: str) -> int:
    """A Chinese character takes two."""
    return len(text) + sum(ord(one) > WIDE for one in text)


def fitted(text: str, stream: TextIO) -> str:
    """`printable`, with lines folded if the stream is a terminal: it would break them inside words."""
    return folded(printable(text), terminal_width(stream)) if stream.isatty() else printable(text)


def terminal_width(stream: TextIO) -> int:
    try:
        return int(os.environ.get("COLUMNS") or 0) or os.get_terminal_size(stream.fileno()).columns or USUAL_WIDTH
    except (OSError, ValueError):  # no real terminal, or COLUMNS is no number
        return USUAL_WIDTH


# A line may be broken before a space and between two Chinese characters. Punctuation stays with what is before it; the
# percent sign and the point between two parts do, too.
PIECES = re.compile(
    r"\s*(?:[^\s\u2e80-\uffff]+|[\u2e80-\uffff])"
    r"(?: [%·][,;.)]*(?=\s|$))*[\u3001\u3002\uff01\uff09\uff0c\uff1a\uff1b\uff1f]*"
)
INDENT = "    "


def folded(text: str, width: int) -> str:
    """With lines of at most `width` columns where that is possible: a word that is longer, such as a path, stays whole
    and can be copied."""
    return "\n".join(part for line in text.split("\n") for part in _folded_line(line, width))


def _folded_line(line: str, width: int) -> list[str]:
    if columns(line) <= width:
        return [line]
    indent = INDENT + " " * (len(line) - len(line.lstrip()))
    lines = [""]
    for piece in PIECES.findall(line):
        if lines[-1].strip() and columns(lines[-1] + piece) > width:
            lines.append(indent + piece.lstrip())
        else:
            lines[-1] += piece
    return lines


def accept_any_text() -> None:
    """A standard output whose encoding lacks a character (ASCII, of a job without a locale) prints `?` for it."""
    stream = sys.stdout
    if isinstance(stream, io.TextIOWrapper) and not stream.encoding.lower().startswith("utf"):
        stream.reconfigure(errors="replace")


def discard_output() -> None:
    """After the reader of standard output has ended: what is still buffered goes nowhere, without a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
