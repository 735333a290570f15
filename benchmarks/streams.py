"""Whether engines wait for the driver: one generation step over the streams of many shares.

    python benchmarks/streams.py                      # the table of docs/measurements/workers.md
    python benchmarks/streams.py --shares 512 --tokens 2700 --rate 5000

The driver is rloom's own: Sampler, Dispatcher, RemoteGroup, messages of forked workers, decoding, and scores that are
there at once. The workers and the clock are simulated: the clock advances by all CPU seconds of the driver, of its
threads too, as if they had one core, and jumps to the next answer where it has to wait. So other processes of the
machine change nothing; wakeups of threads and the network are not in it. An engine runs `--sequences` answers at a
time, together `--rate` tokens a second, and generates only while it has a `send` to work on, as
`Rollout.generate_stream` does. Lengths are log-normal; messages have the format and the size of real ones.

`idle`: the part of an engine's time in which it had unfinished answers and no `send`, from the first request to its
last answer; `empty`: in which it had no request, before its last answer. `full`: the seconds of the step if all engines
were full to its end; `driver`: CPU seconds of the driver in each of these, `loop`: those of its main thread.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from heapq import heappop, heappush
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any

import torch
from step import RandomScores, nobody
from transformers import AutoTokenizer

from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.rollout.base import Completion, Request, Sampling, report_interval_s
from rloom.runtime import remote
from rloom.runtime.processes import numbered, opened
from rloom.runtime.remote import Answer, RemoteGroup
from rloom.training.sampling import Sampler
from rloom.types import Prompt

EMBEDDED = Path(__file__).parents[1] / "rloom" / "assets" / "embedded" / "model"
SIGMA, LONGEST = 0.9, 8192
PROMPT_TOKENS, ANSWERS = 200, 8
TOKENS_L = torch.randint(20, 100, (LONGEST,))
LOGPROBS_L = torch.zeros(LONGEST)


class Clock:
    """Seconds that the driver has computed or waited."""

    def __init__(self) -> None:
        self.waited_s = self.not_counted_s = 0.0
        self.began = time.process_time()

    @property
    def driver_s(self) -> float:
        return time.process_time() - self.began - self.not_counted_s

    def now(self) -> float:
        return self.waited_s + self.driver_s

    def wait_until(self, when: float) -> None:
        self.waited_s += max(0.0, when - self.now())

    @contextmanager
    def simulation(self) -> Iterator[None]:
        """What is computed in it is not the driver's."""
        began = time.thread_time()
        yield
        self.not_counted_s += time.thread_time() - began


@dataclass
class Engine:
    """One simulated worker."""

    given: argparse.Namespace
    sends: deque[tuple[float, Answer, Sequence[Request]]] = field(default_factory=deque)  # with when each arrived
    busy: tuple[Answer, float] | None = None  # the send that it works on, since when
    waiting: deque[tuple[int, int]] = field(default_factory=deque)  # (index, tokens) of requests
    running: list[tuple[float, int, int]] = field(default_factory=list)  # (when it ends, index, tokens)
    submitted: int = 0
    tokens: int = 0
    clock: float = 0.0  # seconds of generation
    since: float = 0.0  # it has no send
    began: float = 0.0
    last: float = 0.0  # answer
    idle_s: float = 0.0
    empty_s: float = 0.0
    empty_now_s: float = 0.0  # since the last answer

    def work(self) -> float | None:
        """Begin the next send, if it is there. When its answer is due."""
        arrived, answer, items = self.sends.popleft()
        now = max(arrived, self.since)
        if self.submitted == 0:
            self.began = now
        elif self.running:
            self.idle_s += now - self.since
        else:
            self.empty_now_s += now - self.since
        for request in items:
            length = random.Random(request.seed).lognormvariate(0.0, SIGMA) * self.given.tokens
            tokens = max(1, min(LONGEST, round(length)))
            self.waiting.append((self.submitted, tokens))
            self.tokens += tokens
            self.submitted += 1
        self.fill()
        self.busy = answer, now
        if not self.running:
            return now  # it answers at once
        rest = self.given.interval if self.waiting else max(end for end, _, _ in self.running) - self.clock
        return now + min(self.given.interval, rest)

    def fill(self) -> None:
        while self.waiting and len(self.running) < self.given.sequences:
            index, tokens = self.waiting.popleft()
            end = self.clock + tokens * self.given.sequences / self.given.rate
            heappush(self.running, (end, index, tokens))

    def finish(self, now: float) -> tuple[Answer, Sequence[tuple[int, Completion]]]:
        """The answer to the send, and what it holds."""
        assert self.busy is not None
        answer, began = self.busy
        until, found = self.clock + now - began + 1e-9, []
        while self.running and self.running[0][0] <= until:
            self.clock, index, tokens = heappop(self.running)
            found.append((index, Completion(index, TOKENS_L[:tokens], LOGPROBS_L[:tokens], True, 0)))
            self.fill()
        self.clock, self.busy, self.since = until, None, now
        if found:
            self.last, self.empty_s, self.empty_now_s = now, self.empty_s + self.empty_now_s, 0.0
        return answer, found


class Simulation:
    def __init__(self, given: argparse.Namespace) -> None:
        self.clock = Clock()
        self.engines = [Engine(given) for _ in range(given.shares)]
        self.due: list[tuple[float, int]] = []  # (when, engine)
        self.arrived = remote.arrived
        remote.arrived = self.wait_for  # type: ignore[assignment]
        remote.time = SimpleNamespace(monotonic=self.clock.now)  # type: ignore[assignment]

    def submit(self, number: int, method: str, *arguments: Any) -> Answer:
        message, answer = numbered(1, (method, arguments)), Answer()
        with self.clock.simulation():
            if method != "send":
                answer.set_result(None)
                return answer
            engine, (_, (items,)) = self.engines[number], opened(bytes(message))[1]()
            engine.sends.append((self.clock.now(), answer, items))
            if engine.busy is None:
                self.begin(number)
        return answer

    def begin(self, number: int) -> None:
        if self.engines[number].sends:
            heappush(self.due, (self.engines[number].work(), number))

    def deliver(self) -> None:
        while self.due and self.due[0][0] <= self.clock.now():
            with self.clock.simulation():
                when, number = heappop(self.due)
                answer, found = self.engines[number].finish(when)
                message = bytes(numbered(1, (None, found)))
                self.begin(number)
            answer.set_result(opened(message)[1]()[1])

    def wait_for(self, answers: Iterable[Answer], timeout_s: float) -> list[Answer]:
        self.deliver()
        with self.clock.simulation():
            answers = list(answers)
            waits = not any(answer.done() for answer in answers)
        if waits and self.due:
            self.clock.wait_until(self.due[0][0])
            self.deliver()
        return self.arrived(answers, 0.0)


class Rollouts(RemoteGroup):
    """Answers `max_unfinished` without asking."""

    most = 0

    def call(self, method: str, *arguments: Any) -> list[Any]:
        return [self.most] if method == "max_unfinished" else super().call(method, *arguments)


def measure(given: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(1)
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED)
    simulation = Simulation(given)
    workers: Any = [
        SimpleNamespace(
            name=f"worker {number}",
            log_file=None,
            submit=lambda *call, number=number: simulation.submit(number, *call),
            death=lambda error: None,
        )
        for number in range(given.shares)
    ]
    group = Rollouts(workers, "rollout")
    group.most = 2 * given.sequences
    reward = CompositeReward([MixedPart("rule_score", RandomScores(seed=0))])

    def decode(answers: Sequence[Sequence[int]]) -> list[str]:
        return tokenizer.batch_decode(answers, skip_special_tokens=True) if answers else []

    sampler = Sampler(group, group, reward, decode, seed=0)
    mean_tokens = given.tokens * 1.5  # exp(SIGMA ** 2 / 2)
    prompts = max(given.shares, round(given.seconds * given.rate * given.shares / mean_tokens / ANSWERS))
    rows = [Prompt(row, (), "", tuple(range(20, 20 + PROMPT_TOKENS)), "random") for row in range(prompts)]
    clock = simulation.clock = Clock()
    remote.time = SimpleNamespace(monotonic=clock.now)  # type: ignore[assignment]
    loop_s = time.thread_time()
    sampler.generate(rows, ANSWERS, Sampling(LONGEST), "train/1", nobody)
    loop_s = time.thread_time() - loop_s - clock.not_counted_s
    engines, tokens = simulation.engines, sum(engine.tokens for engine in simulation.engines)
    full_s = tokens / given.rate / given.shares
    return {
        "shares": given.shares,
        "ahead": remote.SENDS_AHEAD,
        "interval": given.interval,
        "answers": prompts * ANSWERS,
        "tokens": tokens,
        "seconds": round(clock.now(), 1),
        "full": round(full_s, 1),
        "idle": f"{mean(one.idle_s / (one.last - one.began) for one in engines):.2%}",
        "most idle": f"{max(one.idle_s / (one.last - one.began) for one in engines):.2%}",
        "empty": f"{mean(one.empty_s / (one.last - one.began) for one in engines):.2%}",
        "driver": round(clock.driver_s / full_s, 2),
        "loop": round(loop_s / full_s, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=int)
    parser.add_argument("--tokens", type=int, default=2700, help="of an answer, the median (%(default)s)")
    parser.add_argument("--rate", type=float, default=5000.0, help="tokens a second of an engine (%(default)s)")
    parser.add_argument("--sequences", type=int, default=4, help="answers of an engine at a time (%(default)s)")
    parser.add_argument("--seconds", type=float, default=20.0, help="of generation (%(default)s)")
    parser.add_argument("--interval", type=float, help="between reports of an engine (that of so many shares)")
    given = parser.parse_args()
    if given.shares is None:
        for shares in (8, 64, 256, 512):
            subprocess.run([sys.executable, __file__, *sys.argv[1:], "--shares", str(shares)], check=True)
        return
    given.interval = given.interval or report_interval_s(given.shares)
    print(json.dumps(measure(given)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
