"""Tools of verl that are functions: `multi_turn.function_tool_path` names this file. verl need not be installed."""

from verl.tools.function_tool import function_tool


@function_tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)
