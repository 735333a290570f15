"""What the process of an environment or an agent replies, checked where it is read: generated code may have written it.

Whatever a reply causes here is a WrongReply, which fails that episode and no other.
"""

import json
import reprlib
from collections.abc import Callable, Mapping
from typing import Any, TypeGuard, TypeVar

from rloom.episodes.base import EnvironmentReport, Observation, ToolSchema
from rloom.episodes.record import Ending
from rloom.types import Message, ToolCall, is_usable, plain_text

LONGEST_REPLY = 8 << 20  # bytes; a million tokens with their mask, as an agent returns them
MOST_BRACKETS = (
    100_000  # opening ones in a reply, also in its texts; a list of JSON takes 20 times its length in memory
)
DEEPEST_VALUE = 20  # lists and mappings inside of each other
MOST_CALLS, MOST_METRICS, LONGEST_NAME, LONGEST_REASON = 1000, 1000, 200, 1000
LONGEST_CALL_S = 1e9
# what reading a value of another form than expected raises; RecursionError and torch's errors are RuntimeErrors
READ_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, RuntimeError, TypeError, ValueError)
T = TypeVar("T")


class EnvironmentFailed(Exception):
    """The environment raised an error, did not answer in time, or its process ended. The episode has no reward."""

    def __init__(self, reason: str, ending: Ending = Ending.FAILED) -> None:
        super().__init__(reason)
        self.ending = ending


class WrongReply(EnvironmentFailed):
    """A reply of another form than `base.py` describes."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, Ending.WRONG_REPLY)


def read_reply(read: Callable[[Any], T], found: Any) -> T:
    """What `read` makes of a reply, or of a part of it."""
    try:
        return read(found)
    except EnvironmentFailed:
        raise
    except READ_ERRORS as error:
        raise WrongReply(f"its reply cannot be read ({type(error).__name__}): {shown(found)}") from error


def as_object(body: bytes) -> dict[str, Any]:
    if (brackets := body.count(b"[") + body.count(b"{")) > MOST_BRACKETS:
        raise WrongReply(f"a reply with {brackets:,} brackets; at most {MOST_BRACKETS:,} are read")
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        raise WrongReply("its reply is not JSON") from None
    if not isinstance(found, dict):
        raise WrongReply(f"its reply is {type(found).__name__}, not a JSON object")
    return found


def as_beginning(
    found: Mapping[str, Any],
) -> tuple[tuple[Message, ...], tuple[ToolSchema, ...] | None, float | None]:
    """The messages before the first answer; the tools, None: those of all episodes; `Environment.reward_of_steps`."""
    tools = found.get("tools")
    if tools is not None:
        if not isinstance(tools, list):
            raise WrongReply(f"its tools are {shown(tools)}, not a list")
        tools = tuple(map(as_plain, tools))
        for tool in tools:
            if not isinstance(tool["function"]["name"], str):
                raise WrongReply(f"a tool of it is {shown(tool)}; a function with a name is needed")
    return as_messages(found.get("messages")), tools, as_reward(found.get("reward_of_steps"))


def as_observation(found: Mapping[str, Any]) -> Observation:
    done = found.get("done")
    if not isinstance(done, bool):
        raise WrongReply(f"its reply has done={shown(done)}; true or false are possible")
    messages, reward = as_messages(found.get("messages")), as_reward(found.get("reward"))
    return Observation(messages, reward, done, as_calls(found.get("calls")))


def as_end(found: Mapping[str, Any]) -> tuple[float | None, EnvironmentReport]:
    """The reward at the end, and the report."""
    facts, state, metrics = found.get("facts"), found.get("state"), found.get("metrics")
    if not (isinstance(facts, dict) and isinstance(state, dict) and isinstance(metrics, dict)):
        raise WrongReply(f"its report is {shown([facts, state, metrics])}, not three mappings")
    if len(metrics) > MOST_METRICS or any(len(name) > LONGEST_NAME for name in metrics):
        raise WrongReply(
            f"its report has {len(metrics)} metrics; {MOST_METRICS} with names of {LONGEST_NAME} characters are read"
        )
    numbers = {plain_text(name): float(value) for name, value in metrics.items() if is_number(value)}
    return as_reward(found.get("reward")), EnvironmentReport(as_plain(facts), as_plain(state), numbers)


def as_messages(found: Any) -> tuple[Message, ...]:
    if not isinstance(found, list):
        raise WrongReply(f"its messages are {shown(found)}, not a list")
    for message in found:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise WrongReply(f"a message of it is {shown(message)}; a role and a content, both text, are needed")
    return tuple(map(as_plain, found))


def as_reward(found: Any) -> float | None:
    if found is None:
        return None
    if not is_number(found):
        raise WrongReply(f"its reward is {shown(found)}, not a finite number")
    return float(found)


def is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and is_usable(value)


def as_calls(found: Any) -> tuple[ToolCall, ...]:
    if not isinstance(found, list) or len(found) > MOST_CALLS:
        raise WrongReply(f"its calls of tools are {shown(found)}, not a list of {MOST_CALLS} at most")
    return tuple(read_reply(as_call, one) for one in found)


def as_call(found: Any) -> ToolCall:
    call = ToolCall(**as_plain(found))
    texts = (call.name, call.arguments, call.result, "" if call.error is None else call.error)
    fits = all(isinstance(text, str) for text in texts)
    if not fits or not is_number(call.seconds) or not 0 <= call.seconds <= LONGEST_CALL_S:
        raise WrongReply(f"a call of its tools is {shown(found)}")
    return call


def as_plain(value: Any, deepest: int = DEEPEST_VALUE) -> Any:
    """With texts that files and terminals accept, and no deeper than what recursive functions can follow."""
    if isinstance(value, str):
        return plain_text(value)
    if not isinstance(value, dict | list):
        return value
    if deepest == 0:
        raise WrongReply(f"a value of its reply has more than {DEEPEST_VALUE} lists or mappings inside of each other")
    if isinstance(value, list):
        return [as_plain(one, deepest - 1) for one in value]
    return {plain_text(name): as_plain(one, deepest - 1) for name, one in value.items()}


def shown(value: Any) -> str:
    """At most about 100 characters, whatever the size of the value."""
    return plain_text(_SHOWN.repr(value)[:100])


_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = _SHOWN.maxlong = 80
