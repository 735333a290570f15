"""Runs episodes: asks the rollout engines for answers and the environments for what follows, many at a time.

Episodes are coroutines of one event loop. The thread that drives the engines takes their requests from `Turns` and
puts completions there, so tools run while other episodes decode.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace

import torch

from rloom.episodes.base import Limits
from rloom.episodes.episode import Episode, Node
from rloom.episodes.pool import EnvironmentFailed, EnvironmentPool, RunningEnvironment
from rloom.episodes.record import Ending, EpisodeRecord
from rloom.episodes.template import Added, TurnTemplate
from rloom.net.loop import EventLoop
from rloom.rollout.base import Completion, Request, Sampling
from rloom.types import Message, Prompt

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
        with suppress(asyncio.InvalidStateError):
            answer.set_result(completion)

    def take_finished(self) -> list[tuple[int, EpisodeRecord]]:
        with self.changed:
            found = list(self.finished)
            self.finished.clear()
        return found


@dataclass
class EpisodeRunner:
    pool: EnvironmentPool
    template: TurnTemplate
    decode: Callable[[Sequence[int]], str]  # without special tokens
    stop_texts: Mapping[int, str]  # stop token -> its text
    limits: Limits
    response_tokens: int  # of an episode, after the prompt: sampled and added ones
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
        self.loop.run(self.pool.end())
        self.loop.close()
        self.pool.close()

    async def run_one(self, row: EpisodeRow, sampling: Sampling, turns: Turns) -> None:
        try:
            record = await self.record(row, sampling, turns)
        except asyncio.CancelledError:
            raise
        except BaseException as error:  # of rloom: raised where the answers are waited for
            turns.fail(error)
        else:
            turns.end(row.share, row.row, record)

    async def record(self, row: EpisodeRow, sampling: Sampling, turns: Turns) -> EpisodeRecord:
        run = RunningEpisode(self, row, sampling, turns)
        try:
            async with self.pool.episode() as environment, asyncio.timeout(self.limits.episode_s):
                await run.run(environment)
        except TimeoutError:
            run.record.ending = Ending.TIME
        except EnvironmentFailed as error:
            run.record.ending, run.record.failure = Ending.FAILED, str(error)
        if not run.record.episode.nodes:  # it did not begin: a sample without turns
            run.begin_branch(row.prompt.messages)
        return run.record


class RunningEpisode:
    def __init__(self, runner: EpisodeRunner, row: EpisodeRow, sampling: Sampling, turns: Turns) -> None:
        self.runner, self.row, self.sampling, self.turns = runner, row, sampling, turns
        self.record = EpisodeRecord(Episode(), Ending.DONE)
        self.tokens: list[int] = []  # of the branch, so far
        self.prompt_tokens: int | None = None  # before the first answer of the episode
        self.leaf: int | None = None

    async def run(self, environment: RunningEnvironment) -> None:
        prompt, limits = self.row.prompt, self.runner.limits
        messages = await environment.begin(prompt.columns, prompt.messages)
        added = self.begin_branch(messages)
        rewards: list[float] = []
        turn = 0
        while True:
            budget = self.budget()
            if budget <= 0:
                self.record.ending = Ending.TOKENS
                break
            completion = await self.turns.generate(self.row.share, self.request(turn, budget))
            turn += 1
            text, stop = self.add_answer(completion)
            if not completion.finished:
                whole = limits.turn_tokens is None or len(completion.tokens_L) < limits.turn_tokens
                self.record.ending = Ending.TOKENS if whole else Ending.TURN_TOKENS
                break
            began = time.monotonic()
            seen = await environment.act(text)
            self.record.tool_seconds += time.monotonic() - began
            if seen.reward is not None:
                rewards.append(seen.reward)
                self.set_reward(seen.reward)
            if seen.done:
                break
            if limits.turns is not None and turn >= limits.turns:
                self.record.ending = Ending.TURNS
                break
            conversation = self.runner.template.answered(added.conversation, text)
            more = self.runner.template.add(conversation, seen.messages, stop)
            if more is None:
                self.record.rewritten += 1
                added = self.begin_branch([*conversation.messages, *seen.messages])
            else:
                added = more
                self.add_node(Node(self.leaf, seen.messages, torch.tensor(more.tokens), False, calls=seen.calls))
        at_end = await environment.end()
        rewards += [] if at_end is None else [at_end]
        self.record.reward = sum(rewards) if rewards else None

    def begin_branch(self, messages: Sequence[Message]) -> Added:
        added = self.runner.template.start(messages)
        self.tokens, self.leaf = [], None
        self.prompt_tokens = len(added.tokens) if self.prompt_tokens is None else self.prompt_tokens
        self.add_node(Node(None, tuple(messages), torch.tensor(added.tokens), False))
        return added

    def add_node(self, node: Node) -> None:
        self.leaf = self.record.episode.add(node)
        self.tokens += node.tokens_L.tolist()

    def budget(self) -> int:
        assert self.prompt_tokens is not None  # the episode has begun
        left = self.runner.response_tokens - (len(self.tokens) - self.prompt_tokens)
        return left if self.runner.limits.turn_tokens is None else min(left, self.runner.limits.turn_tokens)

    def request(self, turn: int, budget: int) -> Request:
        return Request(tuple(self.tokens), replace(self.sampling, max_new_tokens=budget), self.row.seed(turn))

    def add_answer(self, completion: Completion) -> tuple[str, str]:
        """The text of the answer without its stop token, and the text of that."""
        tokens: list[int] = completion.tokens_L.tolist()
        stop = self.runner.stop_texts[tokens[-1]] if completion.finished else ""
        text = self.runner.decode(tokens[:-1] if completion.finished else tokens)
        message = {"role": "assistant", "content": text}
        self.add_node(
            Node(
                self.leaf,
                (message,),
                completion.tokens_L,
                True,
                completion.logprobs_L,
                completion.version,
                completion.finished,
            )
        )
        return text, stop

    def set_reward(self, reward: float) -> None:
        assert self.leaf is not None
        nodes = self.record.episode.nodes
        nodes[self.leaf] = replace(nodes[self.leaf], reward=reward)
