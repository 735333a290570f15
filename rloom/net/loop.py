"""An event loop in a thread of its own, for callers that have none."""

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


_thread = threading.local()


class EventLoop:
    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.thread.start()

    @classmethod
    def current(cls) -> "EventLoop | None":
        """The one whose thread calls this."""
        return getattr(_thread, "loop", None)

    def _run(self) -> None:
        _thread.loop = self
        self.loop.run_forever()

    def start(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.start(work).result()

    def cancel_all(self) -> None:
        """Cancel every coroutine that still runs, and wait for their ends."""
        self.run(cancel_others())

    def close(self) -> None:
        self.run(self._finish())
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join()
        self.loop.close()

    async def _finish(self) -> None:
        await asyncio.sleep(0)  # a closed connection releases its socket in the next turn of the loop
        await self.loop.shutdown_asyncgens()  # threads of `to_thread` are not waited for: a user's may never end


async def cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


class Signal:
    """Wakes every task that waits for a change of something that they share. Used in one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()  # replaced whenever it is set

    def notify(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float | None) -> None:
        """Returns at the next `notify`, or after `timeout_s`."""
        event = self._event
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await event.wait()
