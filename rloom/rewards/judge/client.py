"""Calls of the judge: cached, limited, repeated when they fail, counted and paid."""

import asyncio
import hashlib
import json
import logging
import textwrap
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.judge.parsing import Malformed, Verdict
from rloom.rewards.judge.providers.base import CallFailed, ChatRequest, Provider, Reply
from rloom.rewards.judge.secret import Secret, redact, without_key
from rloom.rewards.judge.settings import KEY
from rloom.rewards.judge.store import AnswerStore
from rloom.rewards.judge.timing import Backoff, Clock, RateLimits
from rloom.rewards.judge.usage import Prices, Usage

log = logging.getLogger(__name__)

CHARACTERS_PER_TOKEN = 3  # for estimates; real counts correct them
BAD_REQUEST = 400
LONGEST_REASON = 400
Parse = Callable[[str], Verdict]


@dataclass(frozen=True)
class Answer:
    verdict: Verdict
    reply: Reply


class Failed(Exception):
    """No usable answer after all attempts, and why."""


class BudgetSpent(Exception):
    """No further request is sent."""


@dataclass(frozen=True)
class CallLimits:
    concurrency: int
    timeout_s: float  # of one attempt
    max_retries: int
    budget: float | None


class JudgeClient:
    """Used in one event loop, the provider's."""

    def __init__(
        self,
        provider: Provider,
        *,
        address: str,  # provider and URL: part of the identity of a request
        key: Secret | None,
        limits: CallLimits,
        rates: RateLimits,
        backoff: Backoff,
        clock: Clock,
        store: AnswerStore | None,
        prices: Prices | None,
        usage: Usage,
    ) -> None:
        self._provider, self._address, self._key = provider, address, key
        self._limits, self._rates, self._backoff, self._clock = limits, rates, backoff, clock
        self._store, self._prices, self._usage = store, prices, usage
        self._slots = asyncio.Semaphore(limits.concurrency)
        self._running: dict[str, asyncio.Task[Answer]] = {}
        self._sent: set[asyncio.Task[Any]] = set()  # of these, the ones that wait for an answer or record it
        self._spent: float | None = None  # None: not read yet
        self._refuses_schemas = False

    async def answer(self, request: ChatRequest, parse: Parse) -> Answer:
        """Failed: no usable answer. BudgetSpent: not sent. RewardError: the cache cannot be written."""
        identity = identity_of(self._address, request)
        task = self._running.get(identity)
        if task is None:
            task = asyncio.create_task(self._find_or_call(identity, request, parse))
            self._running[identity] = task
            task.add_done_callback(lambda done: self._ended(identity, done))
        else:
            self._usage.add(cached=1)
        # cancelling one of several callers must not cancel the call
        return await asyncio.shield(task)

    async def finish_sent(self) -> None:
        """Wait for the requests that were sent, so that their answers and costs are recorded."""
        await asyncio.gather(*self._sent, return_exceptions=True)

    def budget_error(self) -> RewardError:
        return RewardError(
            f"{KEY}.budget={self._limits.budget:g}: spent {self._spent:.4g}; raise it to go on. The answers so far are "
            f"in {KEY}.cache_dir and cost nothing again"
        )

    async def close(self) -> None:
        await self._provider.close()

    def _ended(self, identity: str, task: "asyncio.Task[Answer]") -> None:
        del self._running[identity]
        self._sent.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, also if no caller waits for it any more

    async def _find_or_call(self, identity: str, request: ChatRequest, parse: Parse) -> Answer:
        cached = await self._store.find(identity) if self._store else None
        if cached is not None:
            try:
                verdict = parse(cached.text)
            except Malformed:
                pass  # written by another version
            else:
                self._usage.add(cached=1)
                return Answer(verdict, cached)
        async with self._slots:
            found = await self._attempts(request, parse)
        if self._store:
            await self._store.add(identity, found.reply)
        return found

    async def _attempts(self, request: ChatRequest, parse: Parse) -> Answer:
        """The slot is kept during the delays: a provider that is overloaded gets fewer requests."""
        failures = 0
        while True:
            try:
                return await self._parsed(await self._send(request), parse, request)
            except CallFailed as error:
                self._sent.discard(current_task())
                failures += 1
                delay_s = self._delay_s(error, failures)
                if delay_s is None:
                    self._usage.add(failed=1)
                    times = f" ({failures} attempts)" if failures > 1 else ""
                    raise Failed(self._shown(error.reason) + times) from None
            self._usage.add(retries=1)
            await self._clock.sleep(delay_s)

    def _delay_s(self, error: CallFailed, failures: int) -> float | None:
        """None: no further attempt."""
        too_long = (error.retry_after_s or 0) > self._backoff.longest_retry_after_s
        if not error.retryable or too_long or failures > self._limits.max_retries:
            return None
        return self._backoff.delay_s(failures, error.retry_after_s)

    async def _parsed(self, reply: Reply, parse: Parse, request: ChatRequest) -> Answer:
        if reply.cut_off:
            raise CallFailed(
                f"the answer was cut off at {KEY}.max_tokens={request.max_tokens}; raise it", retryable=False
            )
        try:
            return Answer(parse(reply.text), reply)
        except Malformed as error:
            raise CallFailed(str(error), retryable=True) from error

    async def _send(self, request: ChatRequest) -> Reply:
        """With structured output, or without it if the server refuses that."""
        if self._refuses_schemas or request.schema is None:
            return await self._attempt(replace(request, schema=None))
        try:
            return await self._attempt(request)
        except CallFailed as error:
            if error.status != BAD_REQUEST:
                raise
            self._usage.add(retries=1)
            reply = await self._attempt(replace(request, schema=None))
            if not self._refuses_schemas:
                log.warning(
                    "the judge's server refuses structured output and is used without it: %s",
                    self._shown(error.reason),
                )
            self._refuses_schemas = True
            return reply

    async def _attempt(self, request: ChatRequest) -> Reply:
        estimated = (len(request.system) + len(request.user)) // CHARACTERS_PER_TOKEN + request.max_tokens
        await self._rates.take(estimated)
        await self._check_budget()
        self._sent.add(current_task())
        self._usage.add(requests=1)
        started = self._clock.now()
        try:
            reply = await asyncio.wait_for(self._provider.complete(request), self._limits.timeout_s)
        except CallFailed:
            raise
        except TimeoutError as error:
            raise CallFailed(f"no answer within {KEY}.timeout_s={self._limits.timeout_s:g}", retryable=True) from error
        except Exception as error:  # whatever an SDK makes of a broken answer
            raise CallFailed(f"{type(error).__name__}: {error}", retryable=True) from error
        await self._record(reply, estimated, self._clock.now() - started)
        return replace(reply, text=without_key(reply.text, self._key))  # it is cached, dumped and quoted

    def _shown(self, reason: str) -> str:
        return textwrap.shorten(redact(reason, self._key), LONGEST_REASON, placeholder=" …")

    async def _record(self, reply: Reply, estimated: int, seconds: float) -> None:
        tokens = {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens}
        self._usage.add(**tokens)
        self._usage.add_latency(seconds)
        if reply.input_tokens:  # a server may not count
            self._rates.correct(estimated, reply.input_tokens + reply.output_tokens)
        if self._prices is not None:
            cost = self._prices.cost(**tokens)
            self._usage.add(cost=cost)
            if self._store is not None:
                self._spent = await self._store.spend(cost)

    async def _check_budget(self) -> None:
        budget = self._limits.budget
        if budget is None:
            return
        assert self._store is not None  # a budget requires a cache folder
        if self._spent is None:
            self._spent = await self._store.spend(0)
        if self._spent >= budget:
            raise BudgetSpent


def current_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None  # within a coroutine
    return task


def identity_of(address: str, request: ChatRequest) -> str:
    """A hash of all that determines the answer."""
    text = json.dumps([address, asdict(request)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
