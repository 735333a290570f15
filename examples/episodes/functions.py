"""Functions as tools. They keep no state; the rule of the data source scores the last answer.

On the command line, mark functions with verl's `@function_tool` and set `multi_turn.function_tool_path`
(verl_function_tools.py).
"""

import sys

import rloom


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def subtract(a: int, b: int) -> int:
    """Subtract the second number from the first.

    Args:
        a: The first number.
        b: The second number.
    """
    return a - b


TOOLS = [add, subtract]

if __name__ == "__main__":
    print(rloom.train(["trainer.total_training_steps=1", *sys.argv[1:]], tools=TOOLS))
