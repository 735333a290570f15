"""The column `episode` of a dump: what happened in one branch of an episode of several turns, as JSON.

{"ending": "done", "reward": 1.0, "failure": null, "origin": "prompt", "steps": [
   {"source": "prompt", "start": 0, "stop": 0, "messages": [["user", "Guess my number."]], ...},
   {"source": "policy", "start": 0, "stop": 3, "messages": [["assistant", "8"]], "version": 3, "finished": true,
    "trained": true, "seconds": 0.21, "reward": 0.0, "calls": []},
   {"source": "environment", "start": 3, "stop": 9, "messages": [["user", "+"]], "seconds": 0.001, ...}]}

`start` and `stop` count from the first token of the column `tokens`, which has none of the prompt. A call of a tool has
`name`, `arguments`, `result`, `seconds` and `error`.
"""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rloom.runs.records import Check, is_a, is_number, is_text, is_whole, or_none, parse_row, to_json_value

if TYPE_CHECKING:  # it imports torch, which readers of a dump do not need
    from rloom.batch import Trajectory
    from rloom.types import EpisodeStep, ToolCall

LONGEST_TEXT = 20_000  # characters of a message, or of what a tool got or returned; the tokens are whole
LONGEST_BRANCH = 2_000_000  # and of a branch: the texts of further steps are left out
SOURCES = ("prompt", "policy", "environment")
ORIGINS = ("prompt", "template", "agent")


def prompt_tokens(trajectory: "Trajectory") -> int:
    """Tokens before the first that is dumped. An environment may begin with other messages than the row's."""
    if trajectory.episode is None:
        return len(trajectory.prompt.tokens)
    return trajectory.episode.branches[trajectory.branch][0].stop


def episode_text(trajectory: "Trajectory") -> str | None:
    """None: it has one turn."""
    episode = trajectory.episode
    if episode is None:
        return None
    first, steps, written = prompt_tokens(trajectory), [], 0
    for step in episode.branches[trajectory.branch]:
        row = step_json(step, first, LONGEST_TEXT if written < LONGEST_BRANCH else 0)
        written += sum(len(content) for _, content in row["messages"])
        written += sum(len(call["arguments"]) + len(call["result"]) for call in row["calls"])
        steps.append(row)
    found = {
        "ending": episode.ending,
        "reward": episode.reward,
        "failure": episode.failure,
        "origin": episode.origins[trajectory.branch],
        "steps": steps,
    }
    return json.dumps(to_json_value(found), ensure_ascii=False, allow_nan=False)


def step_json(step: "EpisodeStep", first: int, longest: int) -> dict[str, Any]:
    """`first`: the first token that is dumped."""
    return {
        "source": step.source,
        "start": max(0, step.start - first),
        "stop": step.stop - first,
        "messages": [(role, shortened(content, longest)) for role, content in step.messages],
        "version": step.version,
        "finished": step.finished,
        "trained": step.trained,
        "seconds": round(step.seconds, 3),
        "reward": step.reward,
        "calls": [call_json(call, longest) for call in step.calls],
    }


def call_json(call: "ToolCall", longest: int) -> dict[str, Any]:
    return {
        "name": shortened(call.name, 200),
        "arguments": shortened(call.arguments, longest),
        "result": shortened(call.result, longest),
        "seconds": round(call.seconds, 3),
        "error": None if call.error is None else shortened(call.error, longest),
    }


def shortened(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[:longest]} … (+{len(text) - longest:,})"


def read_episode(text: str, tokens: int) -> dict[str, Any] | None:
    """None: a value that a run does not write. `tokens`: how many are dumped."""
    found = parse_row(text.encode())
    if found is None or not fits(found, EPISODE):
        return None
    end = 0
    for step in found["steps"]:
        if not fits(step, STEP) or not end == step["start"] <= step["stop"]:
            return None
        end = step["stop"]
        if not all(map(is_message, step["messages"])) or not all(fits(call, CALL) for call in step["calls"]):
            return None
    return found if end == tokens else None


def is_message(pair: Any) -> bool:
    return isinstance(pair, list) and len(pair) == 2 and all(map(is_text, pair))


Checks = Mapping[str, Check]

EPISODE: Checks = {
    "ending": is_text,
    "reward": or_none(is_number),
    "failure": or_none(is_text),
    "origin": ORIGINS.__contains__,
    "steps": is_a(list),
}
STEP: Checks = {
    "source": SOURCES.__contains__,
    **dict.fromkeys(("start", "stop", "version"), is_whole),
    **dict.fromkeys(("messages", "calls"), is_a(list)),
    **dict.fromkeys(("finished", "trained"), is_a(bool)),
    "seconds": is_number,
    "reward": or_none(is_number),
}
CALL: Checks = {
    **dict.fromkeys(("name", "arguments", "result"), is_text),
    "seconds": is_number,
    "error": or_none(is_text),
}


def fits(row: Any, checks: Checks) -> bool:
    return isinstance(row, dict) and row.keys() == checks.keys() and all(checks[name](row[name]) for name in checks)
