"""The sentences in rloom's code that a user may read. A value of an f-string is `{}`."""

import ast
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path

WORD = r"[A-Za-z`'(][\w`'().,;:/-]*"
SENTENCE = re.compile(rf"(?:^|\s){WORD}(?: +{WORD}){{2}}")  # three words in a row
# What only a developer sees, or what is not prose: built-in errors, programs, patterns.
NOT_SHOWN = {"AssertionError", "NotImplementedError", "RuntimeError", "TypeError", "KeyError", "ValueError"}
NOT_PROSE = {"compile", "filterwarnings", "execute", "executescript"}
LOGGED = re.compile("%[sd]")
FILLED_LATER = re.compile(r"\{[\w.]*(?:\{\}[\w.]*)*:?\}")  # `{algorithm.gamma}` of effects.py: the key with its value
MOST_VARIANTS = 8  # of one f-string with several conditional parts


def sentences(file: Path) -> Iterator[tuple[int, str]]:
    """(line, sentence)"""
    module = ast.parse(file.read_text(encoding="utf-8"))
    seen = set(hidden(module))
    for node in ast.walk(module):
        if node in seen or not isinstance(node, ast.expr):
            continue
        found = templates(node)
        if found:
            seen |= set(ast.walk(node))
        for text in found:
            shown = LOGGED.sub("{}", text).strip()
            if file.name == "effects.py":
                shown = FILLED_LATER.sub("{}", shown)
            if SENTENCE.search(shown):
                yield node.lineno, shown


def hidden(module: ast.Module) -> Iterator[ast.AST]:
    for node in ast.walk(module):
        is_docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        name = ""
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", "") or getattr(node.func, "attr", "")
        if is_docstring or isinstance(node, ast.Assert) or name in NOT_SHOWN | NOT_PROSE:
            yield from ast.walk(node)


def templates(node: ast.AST) -> list[str]:
    """A conditional part of an f-string makes two templates, if both of its sides are texts."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node.value]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [one + other for one, other in product(templates(node.left), templates(node.right))]
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Switch":
        return [switch_template(node)]
    if not isinstance(node, ast.JoinedStr):
        return []
    parts = [part_of(value) for value in node.values]
    variants = ["".join(each) for each in product(*parts)]
    if len(variants) <= MOST_VARIANTS:
        return variants
    return ["".join(part[0] if len(part) == 1 else "{}" for part in parts)]


def switch_template(call: ast.Call) -> str:
    """The sentence that `switch_rule` of effects.py makes of a declared switch."""
    name, off = map(ast.literal_eval, call.args)
    on = next((ast.literal_eval(word.value) for word in call.keywords if word.arg == "on"), "=True")
    return f"{FILLED_LATER.sub('{}', off)}; set {{}}.{name}{on}"


def part_of(value: ast.expr) -> list[str]:
    if isinstance(value, ast.Constant):
        return [str(value.value)]
    assert isinstance(value, ast.FormattedValue)
    if isinstance(value.value, ast.IfExp):
        sides = [templates(value.value.body), templates(value.value.orelse)]
        if all(sides):
            return [text for side in sides for text in side]
    return ["{}"]
