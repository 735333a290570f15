"""Runs episodes: asks the rollout engines for answers and the environments for what follows, many at a time.

Episodes are coroutines of one event loop. The thread that drives the engines takes their requests from `Turns` and
puts completions there, so tools run while other episodes decode.
"""

import asyncio
import hashlib
import re
import threading
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol

import torch

from rloom.episodes.base import EnvironmentReport, EpisodeLimits, ToolSchema
from rloom.episodes.episode import Episode, Node
from rloom.episodes.pool import EnvironmentPool, RunningEnvironment
from rloom.episodes.record import Ending, EpisodeRecord
from rloom.episodes.replies import EnvironmentFailed, read_reply
from rloom.episodes.template import RenderedConversation
from rloom.episodes.writer import EpisodeWriter, Texts
from rloom.errors import DataError, TrainingError
from rloom.net.loop import EventLoop
from rloom.rollout.base import CancelledRequest, Completion, EndedConversation, Request, Sampling, StreamItem
from rloom.types import Message, Prompt

STOP_S = 30.0  # after Ctrl-C or SIGTERM: how long a step waits for environments while there is nothing to generate
STOP_CHECK_TOKENS = 64  # an answer that a text may end is generated in pieces of so many tokens
IDLE_S = 0.5  # the engines' thread waits at most so long for the next request when they have none

NO_REWARD_AT_TIME = (
    "the environment was in a call when actor_rollout_ref.rollout.multi_turn.episode_timeout_s ended the episode, so "
    "its reward could not be asked for; raise it, or lower tool_timeout_s"
)


@dataclass(frozen=True)
class EpisodeRow:
    """One episode that is to run."""

    row: int
    share: int
    prompt: Prompt
    seed: Callable[[int], int]  # of a request by its number, see `request_number`; 0: the first one


class PendingRequest(NamedTuple):
    """A request of an episode without an answer."""

    request: Request
    answer: Future[Completion]


class Turns:
    """Requests of running episodes and their completions, between the event loop and the engines' thread."""

    def __init__(
        self, shares: int, episodes: Sequence[int], is_interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        """`episodes`: the share of each. `is_interrupted`: the run is to stop after this step."""
        self.is_interrupted = is_interrupted
        self.idle_since: float | None = None  # since when an interrupted run has nothing to generate
        self.changed = threading.Condition()
        self.queued: list[deque[PendingRequest]] = [deque() for _ in range(shares)]
        # what no longer needs the engine, which does not know it yet
        self.ended: list[list[EndedConversation | CancelledRequest]] = [[] for _ in range(shares)]
        self.sent = [0] * shares  # requests
        self.unfinished: list[dict[int, PendingRequest]] = [{} for _ in range(shares)]  # those sent, by their index
        self.finished: deque[tuple[int, EpisodeRecord]] = deque()  # (row, episode)
        self.running = [episodes.count(share) for share in range(shares)]  # episodes
        self.error: BaseException | None = None

    async def generate(self, share: int, request: Request) -> Completion:
        pending = PendingRequest(request, Future())
        with self.changed:
            self.queued[share].append(pending)
            self.changed.notify()
        try:
            return await asyncio.wrap_future(pending.answer)
        except asyncio.CancelledError:
            self.cancel(share, pending)
            raise

    def cancel(self, share: int, pending: PendingRequest) -> None:
        """The engine ends a request that it was sent; one that is queued is not sent."""
        with self.changed:
            sent = [index for index, one in self.unfinished[share].items() if one is pending]
            for index in sent:
                del self.unfinished[share][index]
                self.ended[share].append(CancelledRequest(index))
            self.changed.notify()

    def end(self, share: int, row: int, record: EpisodeRecord) -> None:
        """Also of an episode whose last answer is still being generated: the engine cancels it."""
        with self.changed:
            self.running[share] -= 1
            self.finished.append((row, record))
            self.ended[share].append(EndedConversation(row))
            self.queued[share] = deque(one for one in self.queued[share] if one.request.conversation != row)
            left = self.unfinished[share].items()
            self.unfinished[share] = {index: one for index, one in left if one.request.conversation != row}
            self.changed.notify()

    def fail(self, error: BaseException) -> None:
        with self.changed:
            self.error = error
            self.changed.notify()

    def next_requests(self, share: int) -> list[StreamItem] | None:
        """Requests of the share's episodes, maybe none. None: all its episodes have ended."""
        with self.changed:
            if self.running[share]:
                self.changed.wait_for(
                    lambda: self.error or any(self.unfinished) or any(self.queued) or any(self.ended), IDLE_S
                )
            if self.error is not None:
                raise self.error
            if not self.running[share]:
                return None
            self.check_progress()
            taken = [pending for pending in self.queued[share] if not pending.answer.cancelled()]
            ended = self.ended[share]
            self.queued[share].clear()
            self.ended[share] = []
            self.unfinished[share] |= dict(enumerate(taken, start=self.sent[share]))
            self.sent[share] += len(taken)
        return [*ended, *(pending.request for pending in taken)]

    def check_progress(self) -> None:
        """A run that is to stop does not wait for ever for an environment that does not answer."""
        if not self.is_interrupted() or any(self.unfinished) or any(self.queued) or any(self.ended):
            self.idle_since = None
        elif self.idle_since is None:
            self.idle_since = time.monotonic()
        elif time.monotonic() - self.idle_since > STOP_S:
            raise TrainingError(
                f"stopped in the middle of a step: for {STOP_S:g} s its {sum(self.running)} unfinished episodes have "
                "waited for their environments or agents"
            )

    def complete(self, share: int, index: int, completion: Completion) -> None:
        with self.changed:
            pending = self.unfinished[share].pop(index, None)
        if pending is not None:  # else its episode has ended
            with suppress(InvalidStateError):  # cancelled: nobody waits for it
                pending.answer.set_result(completion)

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
    limits: EpisodeLimits
    loop: EventLoop = field(default_factory=lambda: EventLoop("episodes"))
    interrupted: bool = False  # the run is to stop after this step

    @contextmanager
    def started(self, rows: Sequence[EpisodeRow], sampling: Sampling, shares: int) -> Iterator[Turns]:
        """Runs the episodes while the context is open; those that have not ended by then are cancelled."""
        turns = Turns(shares, [row.share for row in rows], lambda: self.interrupted)
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
            run.ending, run.failure = error.ending, str(error)
        except DataError as error:
            run.ending, run.failure = Ending.REFUSED, str(error)
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
        if environment.busy and at_end is None:
            run.no_reward = NO_REWARD_AT_TIME
            return
        given = [*run.rewards, *([] if at_end is None else [at_end])]
        run.reward = sum(given) if given else None

    async def converse(self, run: "RunningEpisode", environment: RunningEnvironment) -> None:
        prompt, writer = run.row.prompt, run.writer
        messages = await environment.begin(prompt.columns, prompt.messages, run.row.seed(0))
        tools = self.tools if environment.tools is None else environment.tools
        leaf = read_reply(partial(writer.begin, tools=tools), messages)
        run.first_request = tuple(writer.episode.tokens(leaf))
        while True:
            past = writer.episode.nodes[leaf].conversation
            answer = await run.answer(leaf, stops=writer.texts.template.ends_of_calls(past))
            began = time.monotonic()
            seen = await environment.act(writer.text(answer), writer.marked_text(answer))
            seconds = time.monotonic() - began
            run.environment_seconds += seconds
            if seen.reward is not None:
                run.rewards.append(seen.reward)
            writer.episode.replace(answer, reward=seen.reward, calls=seen.calls)
            if seen.done:
                return
            run.check_turns()
            run.check_replies()
            run.check_length(seen.messages)
            leaf = read_reply(partial(writer.add, answer, seconds=seconds), seen.messages)

    async def end(self) -> None:
        """Its processes have ended with their episodes."""

    def close(self) -> None:
        self.pool.close()


class RunningEpisode:
    """One episode: its record so far, and its answers within the limits."""

    def __init__(
        self, row: EpisodeRow, sampling: Sampling, turns: Turns, limits: EpisodeLimits, writer: EpisodeWriter
    ) -> None:
        self.row, self.sampling, self.turns, self.limits, self.writer = row, sampling, turns, limits, writer
        writer.check = self.room
        self.answers = 0
        self.requests = 0
        self.drawn: dict[bytes, set[int]] = {}  # digest of a request's tokens -> numbers of its draws
        self.first_request = row.prompt.tokens  # its first draw has the seed of an answer of one turn
        self.replies = 0  # of tools and of the environment
        self.prompt_tokens: int | None = None  # before the first answer
        self.ending = Ending.DONE
        self.failure: str | None = None
        self.no_reward = ""  # why the environment's reward is not known
        self.in_loss = True  # False: the agent wants none of its answers trained
        self.reward: float | None = None
        self.rewards: list[float] = []  # of turns
        self.counts: Counter[str] = Counter()  # of an agent's requests; a metric each
        self.environment_seconds = 0.0
        self.report = EnvironmentReport()
        self.generating = 0  # answers, at this moment
        self.budgets: dict[int, tuple[int, int]] = {}  # number of a request that is generated -> its node, its tokens
        self.released = asyncio.Event()  # one of them has ended
        self.idle_since = time.monotonic()  # since when none was
        self.requested_tokens = self.reused_tokens = 0

    async def answer(
        self,
        leaf: int,
        max_tokens: int | None = None,
        stops: Sequence[re.Pattern[str]] = (),
        stop_tokens: Set[int] = frozenset(),
    ) -> int:
        """Generate the answer after a node. Returns its node; LimitReached if it was cut short, or cannot begin.

        `max_tokens`: the agent's. An answer that ends there, at one of `stops` or at one of `stop_tokens` has reached
        no limit of the episode.
        """
        further = stop_tokens - {*self.sampling.stop_ids}
        is_stopped = partial(self.writer.stopped, stops=stops, tokens=further)
        self.room(leaf)
        tokens = tuple(self.writer.episode.tokens(leaf))
        number = self.requests = self.requests + 1
        began = time.monotonic()
        self.generating += 1
        try:
            budget, most, limit = await self.budget(leaf, max_tokens)
            self.budgets[number] = leaf, budget
            completion = await self.generate(tokens, budget, is_stopped if stops or further else None)
        finally:
            self.budgets.pop(number, None)
            self.released.set()
            self.generating -= 1
            self.idle_since = time.monotonic()
        self.answers += 1
        self.requested_tokens += len(tokens)
        self.reused_tokens += completion.reused_tokens
        stopped = is_stopped(completion)
        node = self.writer.answer(leaf, completion, time.monotonic() - began, stopped, number)
        if not self.writer.episode.nodes[node].finished and budget == most:
            raise LimitReached(limit, node)
        return node

    async def budget(self, leaf: int, max_tokens: int | None) -> tuple[int, int, Ending]:
        """Tokens of an answer, how many it may have without `max_tokens`, and which limit is the first.

        Concurrent answers share the tokens of the episode: an answer waits while others might use those it needs.
        """
        while True:
            most, limit = self.room_of_tokens(leaf)
            budget = most if max_tokens is None else min(most, max_tokens)
            taken = sum(budget for _, budget in self.budgets.values())
            left = self.left_of_episode(leaf)
            if left is None or budget <= left - taken:
                return budget, most, limit
            self.released.clear()
            await self.released.wait()

    async def generate(
        self, tokens: tuple[int, ...], budget: int, is_stopped: Callable[[Completion], object] | None
    ) -> Completion:
        """In pieces, if a text or an agent's token may end it: engines know neither, and would generate up to the
        limit."""
        if is_stopped is None:
            return await self.draw(tokens, budget)
        found = await self.draw(tokens, min(budget, STOP_CHECK_TOKENS))
        while not found.finished and len(found.tokens_L) < budget and not is_stopped(found):
            size = min(budget - len(found.tokens_L), STOP_CHECK_TOKENS)
            found = joined(found, await self.draw((*tokens, *found.tokens_L.tolist()), size))
        return found

    async def draw(self, tokens: tuple[int, ...], max_tokens: int) -> Completion:
        """One request. Equal ones have different numbers; one that nobody waits for any more returns its number."""
        digest = hashlib.blake2b(array("q", tokens), digest_size=16).digest()
        taken = self.drawn.setdefault(digest, set())
        number = next(one for one in count() if one not in taken)
        taken.add(number)
        is_first = number == 0 and tokens == self.first_request
        seed = self.row.seed(0 if is_first else request_number(digest, number))
        request = Request(tokens, replace(self.sampling, max_new_tokens=max_tokens), seed, self.row.row)
        try:
            completion = await self.turns.generate(self.row.share, request)
        except asyncio.CancelledError:
            taken.discard(number)
            raise
        if not len(completion.tokens_L):
            raise EnvironmentFailed("the rollout engine returned an answer without tokens")
        return completion

    def room(self, leaf: int | None, added: int = 0) -> tuple[int, Ending]:
        """How many tokens an answer may have after this node and so many further tokens, and which limit is the first.

        LimitReached: it may have none. EnvironmentFailed: the first prompt is too long.
        """
        self.check_turns()
        return self.room_of_tokens(leaf, added)

    def room_of_tokens(self, leaf: int | None, added: int = 0) -> tuple[int, Ending]:
        """As `room`, whatever the number of turns."""
        nodes, limits = self.writer.episode.nodes, self.limits
        path = [] if leaf is None else self.writer.episode.path(leaf)
        tokens = sum(len(nodes[index].tokens_L) for index in path) + added
        self.check_prompt(tokens)
        longest_prompt = tokens if self.prompt_tokens is None else self.prompt_tokens
        left = {Ending.TOKENS: limits.response_tokens - max(0, tokens - longest_prompt)}
        if limits.total_tokens is not None:
            left[Ending.TOKENS] = min(left[Ending.TOKENS], limits.total_tokens - tokens)
        if (of_episode := self.left_of_episode(leaf, added)) is not None:
            left[Ending.EPISODE_TOKENS] = of_episode
        if limits.turn_tokens is not None:
            left[Ending.TURN_TOKENS] = limits.turn_tokens
        ending = min(left, key=left.__getitem__)
        if left[ending] <= 0:
            raise LimitReached(ending)
        self.prompt_tokens = longest_prompt
        return left[ending], ending

    def left_of_episode(self, leaf: int | None, added: int = 0) -> int | None:
        """Tokens that all its branches may have beyond those recorded, and what answers that are generated follow."""
        if self.limits.episode_tokens is None:
            return None
        nodes = self.writer.episode.nodes
        leaves = [] if leaf is None else [leaf]
        known = sorted(self.writer.episode.answered([*leaves, *(one for one, _ in self.budgets.values())]))
        used = [len(nodes[index].tokens_L) for index in known] + [added]  # the first prompt is not counted
        return self.limits.episode_tokens - sum(used[1:])

    def check_length(self, messages: Sequence[Message]) -> None:
        """A text that cannot fit is not encoded: 10 MB take 10 s, in which no other episode goes on."""
        characters = sum(len(str(message.get("content") or "")) for message in messages)
        tokens = (self.prompt_tokens or 0) + self.limits.response_tokens
        if self.prompt_tokens is not None and characters > tokens * self.writer.texts.template.longest_token:
            raise LimitReached(Ending.TOKENS)

    def check_prompt(self, tokens: int) -> None:
        longest = self.limits.prompt_tokens
        if self.prompt_tokens is None and longest is not None and tokens > longest:
            raise EnvironmentFailed(
                f"the first prompt has {tokens} tokens, with tools and what the environment added, more than "
                f"data.max_prompt_length={longest}; raise it",
                Ending.PROMPT,
            )

    def check_turns(self) -> None:
        if self.limits.turns is not None and self.answers + self.generating >= self.limits.turns:
            raise LimitReached(Ending.TURNS)

    def check_replies(self) -> None:
        """Before a reply of a tool or of the environment is added. The answer to the last one is generated."""
        if self.limits.user_turns is not None and self.replies >= self.limits.user_turns:
            raise LimitReached(Ending.USER_TURNS)
        self.replies += 1

    def record(self) -> EpisodeRecord:
        """An episode without an answer has no score, whatever it was given: nothing of it can be trained."""
        writer = self.writer
        episode, failure = writer.episode.without_unanswered(), self.failure
        if not episode.nodes:
            episode = Episode([prompt_node(self.row.prompt, self.limits.prompt_tokens)])
            failure = failure or f"the episode has no answer, it ended before the first ({self.ending.value})"
        return EpisodeRecord(
            episode,
            self.ending,
            self.reward,
            failure,
            writer.rewritten,
            writer.branched,
            self.environment_seconds,
            self.limits.at_limit,
            self.counts,
            self.requested_tokens,
            self.reused_tokens,
            self.report,
            self.in_loss,
            self.no_reward,
            writer.texts.template.call_format,
        )


def request_number(digest: bytes, draw: int) -> int:
    """A request by its tokens and by how many equal ones there are: the same whenever it arrives beside others."""
    found = hashlib.blake2b(digest + draw.to_bytes(8, "little"), digest_size=8).digest()
    return int.from_bytes(found, "little")


def joined(first: Completion, rest: Completion) -> Completion:
    """An answer and its continuation, whose request began with the tokens of the first."""
    return replace(
        rest,
        tokens_L=torch.cat([first.tokens_L, rest.tokens_L]),
        logprobs_L=torch.cat([first.logprobs_L, rest.logprobs_L]),
        reused_tokens=first.reused_tokens,
    )


def prompt_node(prompt: Prompt, max_tokens: int | None) -> Node:
    """What is recorded of an episode without an answer: the row's prompt, which every model can read."""
    conversation = RenderedConversation(tuple(prompt.messages), (), prompt.text)
    return Node(None, tuple(prompt.messages), torch.tensor(prompt.tokens[:max_tokens], dtype=torch.int64), conversation)
