"""Schemas of tools, and calls of tools in an answer."""

from typing import Any, Literal

import pytest
from transformers.utils import get_json_schema

from rloom.episodes.base import EpisodeLimits, cut
from rloom.episodes.contracts.table import UserCode
from rloom.episodes.contracts.tools import FunctionTools, ToolEnvironment
from rloom.episodes.schema import tool_schema
from rloom.episodes.tool_calls import ParsedCall, parse_tool_calls
from rloom.errors import ConfigError


def search(query: str, limit: int = 3, exact: bool = False) -> list[str]:
    """
    Search the corpus.

    It is small.

    Args:
        query: What to search for.
        limit: How many passages
            to return.
        exact: Whether words must match.

    Returns:
        The passages.
    """
    return [query] * limit


def plot(points: list[float], labels: dict[str, int], kind: Literal["line", "bar"], title: str | None = None) -> None:
    """Plot.

    Args:
        points: The values.
        labels: By name.
        kind: The kind of plot.
        title: Above it.
    """


def union(value: int | str, anything: Any) -> str:
    """Two kinds.

    Args:
        value: One of both.
        anything: Not checked.
    """


@pytest.mark.parametrize("function", [search, plot, union])
def test_a_schema_is_that_of_transformers(function):
    theirs = get_json_schema(function)["function"]
    theirs.pop("return", None)  # no template of a known family reads it
    for described in theirs["parameters"]["properties"].values():
        described["description"] = " ".join(described["description"].split())
    assert tool_schema(function)["function"] == theirs


def test_a_tool_without_a_docstring_or_a_hint_is_refused():
    def silent(number: int) -> None: ...

    def untyped(number):
        """Text.

        Args:
            number: A number.
        """

    with pytest.raises(ConfigError, match="silent has no docstring"):
        tool_schema(silent)
    with pytest.raises(ConfigError, match="no type hint for number"):
        tool_schema(untyped)


@pytest.mark.parametrize(
    "text, calls",
    [
        ("The answer is 7.", []),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', [ParsedCall("add", {"a": 1})]),
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', [ParsedCall("add", {"a": 1})]),
        ('{"name": "add", "parameters": {"a": 1}}', [ParsedCall("add", {"a": 1})]),
        ('[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1}}]', [ParsedCall("add", {"a": 1})]),
        ('<think><tool_call>{"name": "add"}</tool_call></think>7', []),
        (
            '<tool_call>{"name": "a", "arguments": {}}</tool_call><tool_call>{"name": "b"}</tool_call>',
            [ParsedCall("a", {}), ParsedCall("b", {})],
        ),
    ],
)
def test_calls_are_read_in_every_form(text, calls):
    assert parse_tool_calls(text) == calls


@pytest.mark.parametrize(
    "body, reason",
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("7", "must have the form"),
        ('{"name": 7}', "must have the form"),
        ('{"name": "add", "arguments": 7}', "must be a JSON object"),
        ('{"name": "add", "arguments": "{"}', "arguments are not valid JSON"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_that_the_policy_reads(body, reason):
    (found,) = parse_tool_calls(f"<tool_call>{body}</tool_call>")
    assert reason in found.error
    seen = ToolEnvironment([FunctionTools.of([search])], EpisodeLimits(100)).act(f"<tool_call>{body}</tool_call>")
    assert not seen.done and seen.messages[0]["content"].startswith("Error: ") and reason in seen.calls[0].error


class Counter:
    """An environment whose methods are tools."""

    def reset(self, start: int, **row: Any) -> str:
        self.value = start
        return f" It is {start}."

    def add(self, number: int) -> int:
        """Add.

        Args:
            number: What to add.
        """
        self.value += number
        return self.value

    async def wait(self) -> str:
        """Wait."""
        return "é\ud800" * 3

    def get_reward(self) -> float:
        return float(self.value == 5)


def call(name: str, **arguments: Any) -> str:
    import json

    return f'<tool_call>{{"name": "{name}", "arguments": {json.dumps(arguments)}}}</tool_call>'


def test_the_methods_of_a_class_are_tools_and_the_answer_without_a_call_ends_the_episode():
    limits = EpisodeLimits(100, parallel_calls=2, result_characters=4, truncate_side="left")
    environment = UserCode(limits, Counter).environment({}, seed=0)
    assert [tool["function"]["name"] for tool in environment.tools] == ["add", "wait"]
    assert environment.begin({"start": 2, "other": 1}, [{"role": "user", "content": "Go."}]) == (
        {"role": "user", "content": "Go. It is 2."},
    )
    seen = environment.act(call("add", number=3) + call("add", number=10) + call("add", number=100))
    assert [message["content"] for message in seen.messages] == ["5", "15"]  # the third one is over the limit
    assert environment.act(call("wait")).messages[0]["content"] == "é\ufffdé\ufffd...(truncated)"
    assert "there is no tool 'sub'" in environment.act(call("sub")).calls[0].error
    assert "TypeError" in environment.act(call("add", amount=3)).calls[0].error
    assert environment.end() == 0.0
    environment.act(call("add", number=-10))
    assert environment.end() == 1.0
    assert environment.act("done").done
    environment.close()


def test_a_long_result_is_cut_where_the_key_says():
    assert cut("abcdefgh", 4, "left") == "abcd...(truncated)"
    assert cut("abcdefgh", 4, "right") == "(truncated)...efgh"
    assert cut("abcdefgh", 4, "middle") == "ab...(truncated)...gh"
    assert cut("abcd", 4, "middle") == "abcd" and cut("abcdefgh", None, "left") == "abcdefgh"


class Gym:
    def reset(self, **row):
        return "look", {}

    def step(self, text):
        return "seen", 0.5, False, text == "stop", {}


class SkyRl:
    def init(self, prompt):
        return [*prompt, {"role": "user", "content": "begin"}], {}

    def step(self, text):
        return {"observations": [{"role": "user", "content": "seen"}], "reward": 0.5, "done": text == "stop"}


@pytest.mark.parametrize("given, begun", [(Gym, ["Go.look"]), (SkyRl, ["Go.", "begin"])])
def test_environments_of_other_systems_run(given, begun):
    environment = UserCode(EpisodeLimits(100), given).environment({}, seed=0)
    messages = environment.begin({}, [{"role": "user", "content": "Go."}])
    assert [message["content"] for message in messages] == begun
    seen = environment.act("on")
    assert [message["content"] for message in seen.messages] == ["seen"] and seen.reward == 0.5 and not seen.done
    assert environment.act("stop").done
    environment.close()
