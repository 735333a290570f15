"""Generation on workers of its own, while a step trains: the queue of groups of ahead.py, and a thread for the stream.

The thread does nothing but send requests and add what was generated to the groups. It pauses for new weights and for
a validation: every unfinished answer is interrupted, and goes on behind its tokens afterwards. So weights change while
no request runs, and each token has one version of the weights.

Where pauses are decides in which order a replay opens streams. Part 0 of a step ends with the first call of `generate`:
a validation is in it, or not if the run was resumed since. Part 1 ends with the next pause.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rloom.training.ahead import SCORES_S, AheadSampler, Queue
from rloom.training.scoring import PendingTrajectories, Progress

# After an error a worker may never answer. The run kills its workers then, and the thread ends with their answers.
END_S = 10.0


class SeparateSampler(AheadSampler):
    """All methods but `run` are called on the thread of the loop."""

    generates = False  # whether the thread may send requests
    closing = False
    error: BaseException | None = None  # raised by the thread

    def __enter__(self) -> Self:
        super().__enter__()
        self.thread = threading.Thread(target=self.run, name="generate", daemon=True)
        self.thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self.changed:
            self.closing, self.generates = True, False
            self.changed.notify_all()
        self.thread.join(None if error is None else END_S)
        super().__exit__(kind, error, trace)

    def load(self, queue: Queue, step: int) -> None:
        with self.changed:
            super().load(queue, step)

    def generate(self, step: int, progress: Progress) -> None:
        """Until the step has its groups."""
        if self.step < step:
            self.begin(step)
        if not self.generates:
            self.resume()
        needed = self.settings.groups_per_step * self.answers_per_prompt
        with self.changed:
            self.part = 1
            self.changed.notify_all()
            while self.chosen(step) is None:
                self.check()
                self.changed.notify_all()  # of groups that were admitted
                complete = sum(answer.complete for group in self.groups.values() for answer in group.answers)
                progress(min(complete, needed), needed)
                self.changed.wait(SCORES_S)

    def take(self, step: int) -> tuple[PendingTrajectories, dict[str, float]]:
        """As of any queue. From now on, groups for the next step are generated."""
        with self.changed:
            found = super().take(step)
            self.admit(self.settings.most_groups_in_training)
            self.changed.notify_all()
        return found

    def begin(self, step: int) -> None:
        with self.changed:
            super().begin(step)

    @contextmanager
    def paused(self, next_step: int | None = None) -> Iterator[None]:
        generated = self.generates
        self.pause()
        yield
        if next_step is not None:
            self.begin(next_step)
        if generated:
            self.resume()

    def pause(self) -> None:
        """Until no engine has a request. In a replay, each stream that had ended by now ends first."""
        with self.changed:
            self.admits = False
            if self.generates:
                self.changed.wait_for(lambda: self.error is not None or self.recorded is None)
            self.generates = False
            self.changed.wait_for(lambda: self.streaming is None)
            self.check()
            self.part += self.part > 0

    def resume(self) -> None:
        self.sampler.wake()  # they sleep after a validation only: nothing else needs their memory
        with self.changed:
            self.generates = self.admits = True
            self.changed.notify_all()

    def check(self) -> None:
        if self.error is not None:
            raise self.error
        super().check()

    def run(self) -> None:
        """On the thread: a stream whenever there are answers to generate."""
        try:
            while self.opens_stream():
                self.run_stream(lambda: not self.generates, lambda done, total: None)
                self.close_stream()
        except BaseException as error:
            self.error = error
        finally:
            self.close_stream()

    def opens_stream(self) -> bool:
        """Waits for answers to generate. False: the thread ends."""
        with self.changed:
            self.changed.wait_for(lambda: self.closing or (self.generates and self.has_stream))
            self.streaming = None if self.closing else time.time()
        return not self.closing
