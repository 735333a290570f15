"""Ctrl-C, and the SIGTERM of a scheduler, which Slurm sends to every process of a job: the run is saved first."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def deferred_interrupt(on_first: Callable[[int], None]) -> Iterator[None]:
    """The first SIGINT or SIGTERM calls `on_first` with its number, the next one raises KeyboardInterrupt. All within a
    second are one, except ctrl-C twice: a scheduler sends SIGTERM to every process, and so does torchrun to its ranks
    and, as SIGINT, `rloom sweep` to its run.

    In a thread other than the main one it does nothing: Python delivers signals to the main thread only.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first, begun = 0, 0.0

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first, begun
        if first == 0:
            first, begun = number, time.monotonic()
            on_first(number)
        elif number == first == signal.SIGINT or time.monotonic() - begun > 1:
            raise KeyboardInterrupt

    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def sigterm_blocked() -> Iterator[None]:
    """Processes that are started meanwhile, and theirs, inherit the block: only SIGKILL or their own end ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def outlive_sigterm() -> None:
    """In a worker, which ends with its driver: the driver needs it to finish the step.

    A handler instead of a block or SIG_IGN: programs that this process starts have the default action, and
    `terminate()` ends them. Forked children, which have the handler, end too.
    """
    worker = os.getpid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getpid() != worker:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, handle)
    signal.siginterrupt(signal.SIGTERM, False)  # system calls of other threads, such as gloo's, are not interrupted
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
