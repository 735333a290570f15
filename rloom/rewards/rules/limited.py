"""Evaluate one answer under a time limit. An answer that cannot be evaluated is wrong: a failed score is left out of
the group's baseline and of the loss, so an answer must not be able to cause one."""

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

LIMIT_S = 2.0  # CPU time of one answer, so that the result does not depend on the load of the machine
# A reward worker is ended after this time in code that ignores signals, such as a multiplication of large integers in a
# compiled library. Evaluating the answer and then the ground truth takes two limits.
HARD_LIMIT_S = 3 * LIMIT_S
TICK_S = 0.25  # the time is looked at this often: setting a timer for each answer takes longer than a cheap rule

Found = TypeVar("Found")


class GroundTruthError(ValueError):
    """The ground truth of a row cannot be used: the score fails, whatever the answer is."""


class _LimitReached(BaseException):
    """Not an Exception, so that a library's handlers do not catch it."""


def evaluated(evaluate: Callable[[], Found]) -> tuple[Found | None, str | None]:
    """What `evaluate` returns, or None and the reason why it returned nothing. It raises only GroundTruthError.

    Only the main thread gets signals: a user's function in another thread has the time limit of its call.
    """
    timed = threading.current_thread() is threading.main_thread()
    if timed:
        _clock.start()
    try:
        return evaluate(), None
    except _LimitReached:
        return None, f"evaluating it took over {LIMIT_S:g} s"
    except GroundTruthError:
        raise
    except Exception as error:  # RecursionError and MemoryError too
        return None, f"evaluating it raised {type(error).__name__}"
    finally:
        if timed:
            _clock.begun_s = None


def result(right: bool, answer: str | None, fault: str | None, *, wrong: float = 0.0) -> dict[str, float | str | None]:
    """What a rule returns. `fault`: why the answer could not be evaluated."""
    found: dict[str, float | str | None] = {"score": 1.0 if right else wrong, "acc": float(right), "pred": answer}
    return found if fault is None else found | {"detail": f"the answer was not compared: {fault}"}


class _Clock:
    """A timer over CPU time that ticks while answers are evaluated, and ends at the first tick after them."""

    begun_s: float | None = None  # CPU time of this process at the beginning of the answer
    process: int | None = None  # with a running timer, which a forked child does not have

    def start(self) -> None:
        if self.process != os.getpid():
            signal.signal(signal.SIGPROF, self._tick)
            signal.setitimer(signal.ITIMER_PROF, TICK_S, TICK_S)
            self.process = os.getpid()
        self.begun_s = time.process_time()

    def _tick(self, signum: int, frame: Any) -> None:
        if self.begun_s is None:
            signal.setitimer(signal.ITIMER_PROF, 0)
            self.process = None
        elif time.process_time() - self.begun_s >= LIMIT_S:  # at each further tick, too: a library may catch it
            raise _LimitReached


_clock = _Clock()
