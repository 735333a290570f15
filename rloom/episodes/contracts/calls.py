"""Calls of a user's code: within a time limit, functions and coroutines alike, and what they return as text.

All in the main thread of an environment's process: SIGALRM raises the error of the limit inside of the code that runs.
"""

import asyncio
import inspect
import json
import re
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, SupportsFloat, SupportsIndex

LONGEST_VALUE = 10_000  # characters of one attribute of an environment, as reward functions read it
BLOCKING_GRACE_S = 0.5  # coroutines are cancelled at the limit; what blocks the event loop is interrupted after that
TOO_LONG = "it took longer than its limit"
SEED, OPTIONS = "seed", "options"  # of Gymnasium's reset
ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]{6,}")  # in the text of an object whose class has no __str__
NO_IMAGES = "it returned an image, which episodes cannot hold; return text"


class CallTimeout(Exception):
    """A call took longer than its limit."""


@contextmanager
def time_limit(limit_s: float) -> Iterator[None]:
    # set each time: a user's code may have changed the handler
    before = signal.signal(signal.SIGALRM, raise_timeout)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before or signal.SIG_DFL)


def raise_timeout(number: int, frame: FrameType | None) -> None:
    raise CallTimeout(TOO_LONG)


class UserCalls:
    """Calls of the code of one environment. Coroutines share an event loop: connections live between calls."""

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self.loop: asyncio.AbstractEventLoop | None = None

    def __call__(self, function: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """The function may be a coroutine."""
        with time_limit(self.limit_s + (BLOCKING_GRACE_S if inspect.iscoroutinefunction(function) else 0)):
            found = function(*arguments, **named)
            return self.wait(self.awaited(found)) if inspect.isawaitable(found) else found

    def together(self, coroutines: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
        """All of them at the same time, each within the limit. What one raises is its result."""
        with time_limit(self.limit_s + BLOCKING_GRACE_S):
            return list(self.wait(self.gathered(coroutines)))

    async def gathered(self, coroutines: Sequence[Callable[[], Awaitable[Any]]]) -> list[Any]:
        return await asyncio.gather(*(self.awaited(one()) for one in coroutines), return_exceptions=True)

    async def awaited(self, found: Awaitable[Any]) -> Any:
        try:
            async with asyncio.timeout(self.limit_s) as limit:
                return await found
        except TimeoutError:
            if limit.expired():
                raise CallTimeout(TOO_LONG) from None
            raise

    def wait(self, coroutine: Any) -> Any:
        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        finally:
            task.cancel()  # if the limit interrupted the event loop itself

    def close(self) -> None:
        if self.loop is not None and not self.loop.is_running():
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
            self.loop.close()
        self.loop = None


def accepted(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return dict(given)
    return {name: value for name, value in given.items() if name in parameters}


def reset_arguments(reset: Callable[..., Any], row: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """The columns that it names, or all if it has `**row`; `seed` and `options`, as Gymnasium has them, by name only:
    the episode's seed, and the row."""
    of_gymnasium = {SEED: seed % 2**31, OPTIONS: dict(row)}
    named = {name: of_gymnasium[name] for name in inspect.signature(reset).parameters if name in of_gymnasium}
    return {**named, **accepted(reset, row)}


def required_columns(reset: Callable[..., Any]) -> list[str]:
    """What it cannot be called without."""
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, one in inspect.signature(reset).parameters.items()
        if one.kind in by_name and one.default is inspect.Parameter.empty and name not in (SEED, OPTIONS)
    ]


@dataclass(frozen=True)
class ToolResult:
    text: str
    reward: float | None = None
    metrics: Mapping[str, Any] | None = None


def as_result(found: Any) -> ToolResult:
    return ToolResult(as_text(found))


def as_text(found: Any) -> str:
    """What a tool returned, as the policy reads it. ValueError: an image. TypeError: an object without a text."""
    if found is None:
        return ""
    if isinstance(found, str):
        return found
    if isinstance(found, bytes):
        return found.decode(errors="replace")
    if getattr(found, "image", None) or getattr(found, "video", None) or type(found).__module__.startswith("PIL."):
        raise ValueError(NO_IMAGES)
    if callable(getattr(found, "is_text_only", None)):  # verl's ToolResponse
        return str(found.text or "")
    if is_blocks(found):
        return blocks_text(found)
    if isinstance(found, Mapping | list | tuple):
        return json.dumps(found, ensure_ascii=False, default=value_text)
    return value_text(found)


def value_text(found: Any) -> str:
    """Equal in every process: a resumed run reads the same. An address in memory, or the order of a set, is not."""
    if isinstance(found, set | frozenset):
        return f"{{{', '.join(sorted(map(repr, found)))}}}"
    text = str(found)
    if ADDRESS.search(text):
        kind = type(found).__name__
        raise TypeError(f"it returned an object of {kind}, whose text is an address; return text, or write __str__")
    return text


def is_blocks(found: Any) -> bool:
    """Parts of a message in OpenAI's form: [{"type": "text", "text": ...}]."""
    return isinstance(found, list) and bool(found) and all(isinstance(one, Mapping) and "type" in one for one in found)


def blocks_text(blocks: Sequence[Mapping[str, Any]]) -> str:
    if any(one["type"] != "text" for one in blocks):
        raise ValueError(NO_IMAGES)
    return "".join(str(one["text"]) for one in blocks)


def as_reward(found: Any, source: str) -> float | None:
    """A number, or what has one, such as a tensor or an array. `source`: the method that returned it."""
    if found is None:
        return None
    item = getattr(found, "item", None)
    number = found if item is None else item()
    if not isinstance(number, SupportsFloat | SupportsIndex):  # as a text
        raise TypeError(f"the reward of {source} is {repr(found)[:100]}; return a number")
    return float(number)


def plain_values(found: Mapping[str, Any]) -> dict[str, Any]:
    """Those that JSON can hold, and that are short."""
    kept = {}
    for name, value in found.items():
        try:
            if not str(name).startswith("_") and len(json.dumps(value)) <= LONGEST_VALUE:
                kept[str(name)] = value
        except (TypeError, ValueError, RecursionError):
            continue
    return kept


def numbers(found: Any) -> dict[str, float]:
    """The metrics among what a user's code returned."""
    if not isinstance(found, Mapping):
        return {}
    return {str(name): float(value) for name, value in found.items() if isinstance(value, int | float)}
