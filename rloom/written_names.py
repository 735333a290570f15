"""The names that the text of a Python file defines, without running it."""

import ast
from collections.abc import Collection, Iterator, Sequence

DEFINE_BY_NAME = {"exec", "globals", "setattr", "vars"}  # a file with one of them may define names unseen in its text
Definition = ast.FunctionDef | ast.AsyncFunctionDef


def bound_names(body: Sequence[ast.stmt]) -> Iterator[str]:
    """The names that statements of a module bind, those in `if`, `try` and loops too; `*` for an import of all."""
    for statement in body:
        if isinstance(statement, Definition | ast.ClassDef):
            yield statement.name
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id
            elif isinstance(node, ast.alias):
                yield node.asname or node.name.partition(".")[0]
            elif isinstance(node, Definition | ast.ClassDef):
                yield node.name


def defines_unseen_names(module: ast.Module, bound: Collection[str]) -> bool:
    return "*" in bound or any(
        isinstance(node, ast.Global) or (isinstance(node, ast.Name) and node.id in DEFINE_BY_NAME)
        for node in ast.walk(module)
    )
