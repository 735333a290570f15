"""Products of two-digit numbers, and a calculator as a tool.

A row has a demonstration (`messages`) for supervised fine-tuning: a policy that has never called a tool calls none, so
reinforcement learning alone has nothing to start from. Most demonstrations are wrong: they guess the product, or
call the calculator with a random operation. They teach the form of a call, not when to call what.
"""

import ast
import json
import math
import operator
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

DATA_SOURCE = "rloom/calculator"
SMALLEST, LARGEST = 12, 99
TRAIN_ROWS, TEST_ROWS, SEED = 4096, 256, 0
USES_TOOL = 0.45  # share of the demonstrations that call the tool

MAX_CHARACTERS, MAX_DEPTH, LARGEST_NUMBER, MAX_EXPONENT = 200, 30, 1e15, 64
Number = int | float
OPERATIONS: Mapping[type, Callable[..., Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class Calculator:
    """The rule of the data source scores the last answer."""

    def calculate(self, expression: str) -> str:
        """Compute an arithmetic expression.

        Args:
            expression: Numbers with + - * / // % ** and parentheses, for example 12*(3+4).
        """
        return written(evaluate(expression))


def evaluate(expression: str) -> Number:
    """ValueError for everything but numbers and operations within the limits: nothing is executed."""
    if len(expression) > MAX_CHARACTERS:
        raise ValueError(f"the expression has {len(expression)} characters; at most {MAX_CHARACTERS} are allowed")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise ValueError("this is not an arithmetic expression") from None
    return value_of(tree.body, 0)


def value_of(node: ast.expr, depth: int) -> Number:
    if depth > MAX_DEPTH:
        raise ValueError("too many nested parentheses")
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return within(number)
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATIONS:
            return OPERATIONS[type(op)](value_of(operand, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATIONS:
            first, second = value_of(left, depth + 1), value_of(right, depth + 1)
            if isinstance(op, ast.Pow) and not (abs(second) <= MAX_EXPONENT and abs(first) <= 1e6):
                raise ValueError(f"the exponent is over {MAX_EXPONENT}, or the base over 1000000")
            try:
                return within(OPERATIONS[type(op)](first, second))
            except (ZeroDivisionError, OverflowError) as error:
                raise ValueError(str(error)) from None
    raise ValueError("only numbers, + - * / // % ** and parentheses are allowed")


def within(number: Any) -> Number:
    if isinstance(number, complex) or not math.isfinite(number) or abs(number) > LARGEST_NUMBER:
        raise ValueError(f"a number over {LARGEST_NUMBER:g}, or none of the real ones")
    return number  # type: ignore[no-any-return]


def written(number: Number) -> str:
    """A float that is a whole number as such, others with ten digits."""
    return str(int(number)) if number == int(number) else f"{number:.10g}"


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """No product of the test rows is among the training rows."""
    random = Random(SEED)
    numbers = range(SMALLEST, LARGEST + 1)
    problems = [(first, second) for first in numbers for second in numbers]
    random.shuffle(problems)
    held_out, rest = problems[:TEST_ROWS], problems[TEST_ROWS : TEST_ROWS + TRAIN_ROWS]
    return (
        [row(*one, "train", index, random) for index, one in enumerate(rest)],
        [row(*one, "test", index, random) for index, one in enumerate(held_out)],
    )


def row(first: int, second: int, split: str, index: int, random: Random) -> dict[str, Any]:
    prompt = [{"role": "user", "content": f"What is {first} * {second}?"}]
    return {
        "data_source": DATA_SOURCE,
        "prompt": prompt,
        "ability": "tools",
        "reward_model": {"style": "rule", "ground_truth": str(first * second)},
        "extra_info": {"split": split, "index": index},
        "messages": [*prompt, *demonstration(first, second, random)],
    }


def demonstration(first: int, second: int, random: Random) -> list[dict[str, str]]:
    """A round number, or a call with any of three operations and then its result."""
    if random.random() >= USES_TOOL:
        return [{"role": "assistant", "content": f"Answer: {random.randint(1, 9)}000"}]
    expression = f"{first} {random.choice('+-*')} {second}"
    shown = written(evaluate(expression))
    return [
        {"role": "assistant", "content": call_text("calculate", expression=expression)},
        {"role": "tool", "content": shown},
        {"role": "assistant", "content": f"Answer: {shown}"},
    ]


def call_text(name: str, **arguments: Any) -> str:
    """A call in the form of Hermes and Qwen."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
