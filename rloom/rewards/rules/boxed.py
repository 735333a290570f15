r"""Find `\boxed{...}`, with nested braces."""

import re

_BOXED = re.compile(r"\\(?:boxed|fbox)\s*")


def last_boxed(text: str) -> str | None:
    r"""The argument of the last `\boxed`; None if there is none or if it is not closed."""
    starts = [match.end() for match in _BOXED.finditer(text)]
    return boxed_at(text, starts[-1]) if starts else None


def boxed_at(text: str, position: int) -> str | None:
    r"""The argument at `position`, just after `\boxed`: a balanced `{...}`, or one bare token as in `\boxed 5`."""
    if not text.startswith("{", position):
        token = re.compile(r"[^\s$.,\\]+").match(text, position)
        return None if token is None else token[0]
    depth, escaped = 0, False
    for index in range(position, len(text)):
        character = text[index]
        if not escaped:
            depth += (character == "{") - (character == "}")
        if depth == 0:
            return text[position + 1 : index].strip()
        escaped = character == "\\" and not escaped
    return None
