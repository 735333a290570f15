"""Text of others on a terminal: rows, answers, replies of a judge, names of files and runs, output of programs.

A terminal interprets control characters: it moves the cursor over what was printed, sets its title, writes to the
clipboard (OSC 52). Bidirectional overrides show text in another order than it has. They are printed as escapes.
"""

import os
import sys
import unicodedata

# Cc: control, Cf: format (bidirectional, invisible), Cs: half of a surrogate pair, which cannot be printed at all
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Zl", "Zp"})
KEPT = frozenset("\n\t\u200c\u200d")  # Persian and Hindi words and joined emoji need the last two

WIDE = 0x2E80  # the first code point of East Asian scripts


def printable(text: str) -> str:
    r"""Characters that a terminal would interpret become escapes such as \u001b. JSON stays JSON of the same value."""
    if text.isascii() and text.replace("\n", "").replace("\t", "").isprintable():
        return text
    return "".join(escaped(c) if unicodedata.category(c) in HIDDEN and c not in KEPT else c for c in text)


def escaped(character: str) -> str:
    units = character.encode("utf-16-be", "surrogatepass")
    return "".join(f"\\u{units[place : place + 2].hex()}" for place in range(0, len(units), 2))


def padded(text: str, width: int) -> str:
    """With spaces to this width, before it if the width is negative; a Chinese character takes two columns."""
    spaces = " " * (abs(width) - sum(2 if ord(one) > WIDE else 1 for one in text))
    return text + spaces if width > 0 else spaces + text


def discard_output() -> None:
    """After the reader of standard output has ended: what is still buffered goes nowhere, without a traceback."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
