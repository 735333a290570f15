"""Rollout engines and training strategies are declared in tables: no code compares their names."""

import ast
from collections.abc import Iterator

from rloom.engines.kinds import STRATEGIES
from rloom.rollout.kinds import ROLLOUTS
from tests.architecture.source import Module, modules

NAMES = {*ROLLOUTS, *STRATEGIES}


def compared_names(tree: ast.AST) -> Iterator[int]:
    """The lines with a comparison of the name of an engine or a strategy, alone or in a tuple, list or set."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            parts = [
                part
                for side in sides
                for part in (side.elts if isinstance(side, ast.Tuple | ast.List | ast.Set) else [side])
            ]
            if any(isinstance(part, ast.Constant) and part.value in NAMES for part in parts):
                yield node.lineno


def found(module: Module) -> list[str]:
    return [f"{module.name}:{line}" for line in compared_names(module.tree)]


def test_names_of_engines_and_strategies_are_not_compared() -> None:
    places = [place for module in modules() for place in found(module)]
    assert places == []


def test_a_comparison_is_found() -> None:
    code = "a = name == 'vllm'\nb = x.strategy in ('fsdp', 'megatron')\nc = name == 'other'\nd = {'vllm': 1}"
    assert list(compared_names(ast.parse(code))) == [1, 2]
