"""Calls of a user's code: within a time limit, functions and coroutines alike, and what they return as text.

All in the main thread of an environment's process: SIGALRM raises the error of the limit inside of the code that runs.
"""

import asyncio
import inspect
import json
import signal
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

LONGEST_VALUE = 10_000  # characters of one attribute of an environment, as reward functions read it
BLOCKING_GRACE_S = 0.5  # coroutines are cancelled at the limit; what blocks the event loop is interrupted after that
TOO_LONG = "it took longer than its limit"
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


@dataclass(frozen=True)
class ToolResult:
    text: str
    reward: float | None = None
    metrics: Mapping[str, Any] | None = None


def as_result(found: Any) -> ToolResult:
    return ToolResult(as_text(found))


def as_text(found: Any) -> str:
    """What a tool returned, as the policy reads it. ValueError: an image."""
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
        return json.dumps(found, ensure_ascii=False, default=str)
    return str(found)


def is_blocks(found: Any) -> bool:
    """Parts of a message in OpenAI's form: [{"type": "text", "text": ...}]."""
    return isinstance(found, list) and bool(found) and all(isinstance(one, Mapping) and "type" in one for one in found)


def blocks_text(blocks: Sequence[Mapping[str, Any]]) -> str:
    if any(one["type"] != "text" for one in blocks):
        raise ValueError(NO_IMAGES)
    return "".join(str(one["text"]) for one in blocks)


def as_reward(found: Any) -> float | None:
    """A number, or what has one, such as a tensor or an array."""
    if found is None:
        return None
    item = getattr(found, "item", None)
    return float(found if item is None else item())


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
