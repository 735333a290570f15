"""Runs episodes: asks the rollout engines for answers and the environments for what follows, many at a time.

Episodes are coroutines of one event loop. The thread that drives the engines takes their requests from `Turns` and
puts completions there, so tools run while other episodes decode.
"""

import asyncio
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Protocol

from rloom.episodes.base import Limits, Report, ToolSchema
from rloom.episodes.pool import EnvironmentFailed, EnvironmentPool, RunningEnvironment
from rloom.episodes.record import Ending, EpisodeRecord
from rloom.episodes.writer import EpisodeWriter, Texts
from rloom.net.loop import EventLoop
from rloom.rollout.base import Completion, Request, Sampling
from rloom.types import Prompt

IDLE_S = 0.02  # how long the engines' thread waits for the next request
BEGIN_S = 5.0  # and for the first requests of all episodes


@dataclass(frozen=True)
class EpisodeRow:
    """One episode that is to run."""

    row: int
    share: int
    prompt: Prompt
    seed: Callable[[int], int]  # of each turn


class Turns:
    """Requests of running episodes and their completions, between the event loop and the engines' thread."""

    def __init__(self, shares: int, episodes: Sequence[int]) -> None:
        """`episodes`: the share of each."""
        self.changed = threading.Condition()
        self.queued: list[deque[tuple[Request, Future[Completion]]]] = [deque() for _ in range(shares)]
        self.sent: list[list[Future[Completion]]] = [[] for _ in range(shares)]
        self.unfinished = [0] * shares
        self.finished: deque[tuple[int, EpisodeRecord]] = deque()  # (row, episode)
        self.running = [episodes.count(share) for share in range(shares)]  # episodes
        self.has_begun = [False] * shares
        self.error: BaseException | None = None

    async def generate(self, share: int, request: Request) -> Completion:
        answer: Future[Completion] = Future()
        with self.changed:
            self.queued[share].append((request, answer))
            self.changed.notify()
        return await asyncio.wrap_future(answer)

    def end(self, share: int, row: int, record: EpisodeRecord) -> None:
        with self.changed:
            self.running[share] -= 1
            self.finished.append((row, record))
            self.changed.notify()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify()

    def next_requests(self, share: int) -> list[Request] | None:
        """Requests of the share's episodes, maybe none. None: all its episodes have ended."""
        with self.changed:
            if not self.has_begun[share]:  # an engine allocates for the requests that it gets first
                self.has_begun[share] = True
                self.changed.wait_for(lambda: self.error or len(self.queued[share]) >= self.running[share], BEGIN_S)
            elif not self.queued[share] and not self.unfinished[share] and self.running[share] and self.error is None:
                self.changed.wait(IDLE_S)
            if self.error is not None:
                raise self.error
            taken = [self.queued[share].popleft() for _ in range(len(self.queued[share]))]
            self.sent[share] += [answer for _, answer in taken]
            self.unfinished[share] += len(taken)
            if not self.unfinished[share] and not self.running[share]:
                return None
        return [request for request, _ in taken]

    def complete(self, share: int, index: int, completion: Completion) -> None:
        with self.changed:
            self.unfinished[share] -= 1
            answer = self.sent[share][index]
        with suppress(InvalidStateError):  # cancelled: nobody waits for it
            answer.set_result(completion)

    def take_finished(self) -> list[tuple[int, EpisodeRecord]]:
        with self.changed:
            found = list(self.finished)
            self.finished.clear()
        return found


class LimitReached(Exception):
    """An episode may not have a further answer. `answer`: the node of one that was cut short."""

    def __init__(self, ending: Ending, answer: int | None = None) -> None:
        super().__init__(ending.value)
        self.ending, self.answer = ending, answer


class Driver(Protocol):
    """Runs episodes of one kind. A user's code runs in processes of its own."""

    async def run(self, run: "RunningEpisode") -> None:
        """Record the episode. EnvironmentFailed: the user's code failed, and the episode has no score."""

    async def end(self) -> None:
        """End all processes. In the event loop that used them."""

    def close(self) -> None: ...


@dataclass
class EpisodeRunner:
    driver: Driver
    texts: Texts
    limits: Limits
    loop: EventLoop = field(default_factory=lambda: EventLoop("episodes"))

    @contextmanager
    def started(self, rows: Sequence[EpisodeRow], sampling: Sampling, shares: int) -> Iterator[Turns]:
        """Runs the episodes while the context is open; those that have not ended by then are cancelled."""
        turns = Turns(shares, [row.share for row in rows])
        try:
            for row in rows:
                self.loop.start(self.run_one(row, sampling, turns))
            yield turns
        finally:
            self.loop.cancel_all()

    def close(self) -> None:
        self.loop.cancel_all()
        self.loop.run(self.driver.end())
        self.loop.close()
        self.driver.close()

    async def run_one(self, row: EpisodeRow, sampling: Sampling, turns: Turns) -> None:
        try:
            record = await self.record(RunningEpisode(row, sampling, turns, self.limits, EpisodeWriter(self.texts)))
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of rloom: raised where the answers are waited for
            turns.fail(error)
        else:
            turns.end(row.share, row.row, record)

    async def record(self, run: "RunningEpisode") -> EpisodeRecord:
        try:
            await self.driver.run(run)
        except EnvironmentFailed as error:
            run.ending, run.failure = Ending.FAILED, str(error)
        if not run.writer.episode.nodes:  # it did not begin: a sample without turns
            run.writer.begin(run.row.prompt.messages)
        return run.record()


@dataclass(frozen=True)
class EnvironmentDriver:
    """Answers and observations in turn, until the environment or a limit ends the episode."""

    pool: EnvironmentPool
    tools: tuple[ToolSchema, ...]

    async def run(self, run: "RunningEpisode") -> None:
        async with self.pool.episode() as environment:
            try:
                async with asyncio.timeout(run.limits.episode_s):
                    await self.converse(run, environment)
            except TimeoutError:
                run.ending = Ending.TIME
            except LimitReached as reached:
                run.ending = reached.ending
            at_end = await environment.end()
            run.report = environment.report
        given = [*run.rewards, *([] if at_end is None else [at_end])]
        run.reward = sum(given) if given else None

    async def converse(self, run: "RunningEpisode", environment: RunningEnvironment) -> None:
        prompt, writer = run.row.prompt, run.writer
        messages = await environment.begin(prompt.columns, prompt.messages)
        leaf = writer.begin(messages, self.tools if environment.tools is None else environment.tools)
        while True:
            answer = await run.answer(leaf)
            began = time.monotonic()
            seen = await environment.act(writer.text(answer), writer.marked_text(answer))
            seconds = time.monotonic() - began
            run.environment_seconds += seconds
            if seen.reward is not None:
                run.rewards.append(seen.reward)
                writer.episode.replace(answer, reward=seen.reward)
            if seen.done:
                return
            run.check_turns(user_turn=True)
            leaf = writer.add(answer, seen.messages, seen.calls, seconds)

    async def end(self) -> None:
        await self.pool.end()

    def close(self) -> None:
        self.pool.close()


class RunningEpisode:
    """One episode: its record so far, and its answers within the limits."""

    def __init__(
        self, row: EpisodeRow, sampling: Sampling, turns: Turns, limits: Limits, writer: EpisodeWriter
    ) -> None:
        self.row, self.sampling, self.turns, self.limits, self.writer = row, sampling, turns, limits, writer
        self.answers = 0
        self.user_turns = 0  # of tools and of the environment
        self.prompt_tokens: int | None = None  # before the first answer
        self.ending = Ending.DONE
        self.failure: str | None = None
        self.reward: float | None = None
        self.rewards: list[float] = []  # of turns
        self.counts: Counter[str] = Counter()  # of an agent's requests; a metric each
        self.environment_seconds = 0.0
        self.report = Report()

    async def answer(self, leaf: int, max_tokens: int | None = None, stops: Sequence[str] = ()) -> int:
        """Generate the answer after a node. Returns its node; LimitReached if it was cut short, or cannot begin.

        `max_tokens` and `stops` are the agent's: an answer that ends there has not reached a limit of the episode.
        """
        self.check_turns()
        tokens = self.writer.episode.tokens(leaf)
        limit = self.budget(len(tokens))
        if limit <= 0:
            raise LimitReached(Ending.TOKENS)
        budget = limit if max_tokens is None else min(limit, max_tokens)
        seed, self.answers = self.row.seed(self.answers), self.answers + 1
        request = Request(tuple(tokens), replace(self.sampling, max_new_tokens=budget), seed)
        began = time.monotonic()
        completion = await self.turns.generate(self.row.share, request)
        node = self.writer.answer(leaf, completion, time.monotonic() - began, stops)
        if not self.writer.episode.nodes[node].finished and budget == limit:
            by_turn = self.limits.turn_tokens is not None and len(completion.tokens_L) >= self.limits.turn_tokens
            raise LimitReached(Ending.TURN_TOKENS if by_turn else Ending.TOKENS, node)
        return node

    def budget(self, tokens: int) -> int:
        """Tokens that the next answer may have, after a branch of so many."""
        if self.prompt_tokens is None:
            self.prompt_tokens = tokens
        left = min(self.limits.response_tokens, self.limits.response_tokens - (tokens - self.prompt_tokens))
        return left if self.limits.turn_tokens is None else min(left, self.limits.turn_tokens)

    def check_turns(self, *, user_turn: bool = False) -> None:
        """Before an answer; or before the environment's, which is counted."""
        if self.limits.turns is not None and self.answers >= self.limits.turns:
            raise LimitReached(Ending.TURNS)
        if user_turn and self.limits.user_turns is not None and self.user_turns >= self.limits.user_turns:
            raise LimitReached(Ending.TURNS)
        self.user_turns += user_turn

    def record(self) -> EpisodeRecord:
        writer = self.writer
        return EpisodeRecord(
            writer.episode,
            self.ending,
            self.reward,
            self.failure,
            writer.rewritten,
            writer.branched,
            self.environment_seconds,
            self.counts,
            self.report,
        )
