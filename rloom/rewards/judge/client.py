"""Calls of the judge: cached, limited, repeated when they fail, counted and paid."""

import asyncio
import hashlib
import json
import logging
import textwrap
import threading
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from rloom.errors import RewardError
from rloom.net.retry import Backoff, Clock, RateLimits
from rloom.rewards.judge.api import ChatRequest, JudgeApi, JudgeCallFailed, Reply
from rloom.rewards.judge.parsing import Malformed, Verdict
from rloom.rewards.judge.settings import KEY, JudgeSettings, Secret, redact, without_key
from rloom.rewards.judge.store import AnswerStore
from rloom.types import plain_text

MILLION = 1_000_000
COUNTED = (
    "requests",  # sent to the API
    "cached",  # answers from the cache, or from an identical request
    "retries",
    "failed",  # calls without a score
    "input_tokens",
    "output_tokens",
)


@dataclass(frozen=True)
class Prices:
    """Of a million tokens."""

    input: float
    output: float

    def cost(self, input_tokens: int, output_tokens: int) -> float:
        return (input_tokens * self.input + output_tokens * self.output) / MILLION


class Usage:
    """Filled by the event loop, read by another thread."""

    def __init__(self, *, with_cost: bool) -> None:
        self._names = (*COUNTED, "cost") if with_cost else COUNTED
        self._lock = threading.Lock()
        self._sums = dict.fromkeys(self._names, 0.0)
        self._latencies_s: list[float] = []

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._sums[name] += amount

    def add_latency(self, seconds: float) -> None:
        with self._lock:
            self._latencies_s.append(seconds)

    def metrics(self) -> Mapping[str, float]:
        """Of the time since the last call of this method."""
        with self._lock:
            found, latencies_s = self._sums, self._latencies_s
            self._sums, self._latencies_s = dict.fromkeys(self._names, 0.0), []
        if latencies_s:
            found["latency_s"] = sum(latencies_s) / len(latencies_s)
        return found


log = logging.getLogger(__name__)

# For estimates, in UTF-8. Tokenizers make about 4 bytes of English, and 3 or more of code and Chinese, one token: the
# estimate is rather too high than too low.
BYTES_PER_TOKEN = 2
BAD_REQUEST = 400
LONGEST_REASON = 400
LONGEST_MESSAGE = 20_000  # characters of an error that are searched for a key
LONGEST_TEXT = 1_000_000  # characters of an answer; no verdict is that long, and it would be cached
Parse = Callable[[str], Verdict]


@dataclass(frozen=True)
class JudgeAnswer:
    verdict: Verdict
    reply: Reply


class Failed(Exception):
    """No usable answer after all attempts, and why."""


class BudgetSpent(Exception):
    """No further request is sent."""


class JudgeClient:
    """Used in one event loop, the API's."""

    def __init__(
        self,
        api: JudgeApi,
        settings: JudgeSettings,
        *,
        address: str,  # provider and URL: part of the identity of a request
        key: Secret | None,
        rates: RateLimits,
        backoff: Backoff,
        clock: Clock,
        store: AnswerStore | None,
        prices: Prices | None,
        usage: Usage,
    ) -> None:
        self._api, self._address, self._key = api, address, key
        self._settings, self._rates, self._backoff, self._clock = settings, rates, backoff, clock
        self._store, self._prices, self._usage = store, prices, usage
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._running: dict[str, asyncio.Task[JudgeAnswer]] = {}
        self._sent: set[asyncio.Task[Any]] = set()  # of these, the ones that wait for an answer or record it
        self._spent: float | None = None  # None: not read yet
        self._refuses_schemas = self._does_not_count = False

    async def answer(self, request: ChatRequest, parse: Parse) -> JudgeAnswer:
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
            f"{KEY}.budget={self._settings.budget:g}: spent {self._spent:.4g}; raise it to go on. The answers so far "
            f"are in {KEY}.cache_dir and cost nothing again"
        )

    async def close(self) -> None:
        await self._api.close()

    def _ended(self, identity: str, task: "asyncio.Task[JudgeAnswer]") -> None:
        del self._running[identity]
        self._sent.discard(task)
        if not task.cancelled():
            task.exception()  # retrieved, also if no caller waits for it any more

    async def _find_or_call(self, identity: str, request: ChatRequest, parse: Parse) -> JudgeAnswer:
        cached = await self._store.find(identity) if self._store else None
        if cached is not None:
            try:
                verdict = verdict_in(cached.text, parse)
            except Malformed:
                pass  # written by another version
            else:
                self._usage.add(cached=1)
                return JudgeAnswer(verdict, cached)
        async with self._slots:
            found = await self._attempts(request, parse)
        if self._store:
            await self._store.add(identity, found.reply)
        return found

    async def _attempts(self, request: ChatRequest, parse: Parse) -> JudgeAnswer:
        """The slot is kept during the delays: a provider that is overloaded gets fewer requests."""
        failures = 0
        while True:
            try:
                return self._parsed(await self._send(request), parse, request)
            except JudgeCallFailed as error:
                self._sent.discard(current_task())
                failures += 1
                delay_s = self._delay_s(error, failures)
                if delay_s is None:
                    self._usage.add(failed=1)
                    times = f" ({failures} attempts)" if failures > 1 else ""
                    raise Failed(self._shown(error.reason) + times) from None
            self._usage.add(retries=1)
            await self._clock.sleep(delay_s)

    def _delay_s(self, error: JudgeCallFailed, failures: int) -> float | None:
        """None: no further attempt."""
        too_long = (error.retry_after_s or 0) > self._backoff.longest_retry_after_s
        if not error.retryable or too_long or failures > self._settings.max_retries:
            return None
        return self._backoff.delay_s(failures, error.retry_after_s)

    def _parsed(self, reply: Reply, parse: Parse, request: ChatRequest) -> JudgeAnswer:
        if reply.cut_off:
            raise JudgeCallFailed(
                f"the answer was cut off at {KEY}.max_tokens={request.max_tokens}; raise it", retryable=False
            )
        try:
            return JudgeAnswer(verdict_in(reply.text, parse), reply)
        except Malformed as error:
            raise JudgeCallFailed(str(error), retryable=True) from error

    async def _send(self, request: ChatRequest) -> Reply:
        """With structured output, or without it if the server refuses that."""
        if self._refuses_schemas or request.schema is None:
            return await self._attempt(replace(request, schema=None))
        try:
            return await self._attempt(request)
        except JudgeCallFailed as error:
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
        estimated = tokens_in(request.system + request.user) + request.max_tokens
        await self._rates.take(estimated)
        await self._check_budget()
        self._sent.add(current_task())
        self._usage.add(requests=1)
        started = self._clock.now()
        try:
            found = await asyncio.wait_for(self._api.complete(request), self._settings.timeout_s)
            reply = self._counted(found, request)
        except JudgeCallFailed:
            raise
        except TimeoutError as error:
            raise JudgeCallFailed(
                f"no answer within {KEY}.timeout_s={self._settings.timeout_s:g}", retryable=True
            ) from error
        except Exception as error:  # no JSON, or a text that is not Unicode: only this call fails
            reason = f"no answer that can be read: {type(error).__name__}: {error}"
            raise JudgeCallFailed(reason, retryable=True) from error
        if found.input_tokens and found.output_tokens:
            self._rates.correct(estimated, found.input_tokens + found.output_tokens)
        await self._record(reply, self._clock.now() - started)
        return self._checked(reply)

    def _checked(self, reply: Reply) -> Reply:
        """Its text can be cached, dumped and quoted."""
        if len(reply.text) > LONGEST_TEXT:
            raise JudgeCallFailed(
                f"the answer has {len(reply.text):,} characters, and {LONGEST_TEXT:,} are allowed", retryable=True
            )
        return replace(reply, text=without_key(plain_text(reply.text), self._key))

    def _counted(self, reply: Reply, request: ChatRequest) -> Reply:
        """With estimates in place of counts that the server did not send."""
        counts = (reply.input_tokens, reply.output_tokens)
        estimates = (tokens_in(request.system + request.user), tokens_in(reply.text))
        if None in counts and not self._does_not_count:
            self._does_not_count = True
            log.warning(
                "The judge's server sends no usable count of tokens. Tokens, and the cost if there are prices, are "
                "estimated: one token for every %d bytes of text.",
                BYTES_PER_TOKEN,
            )
        used = [estimate if count is None else count for count, estimate in zip(counts, estimates, strict=True)]
        return replace(reply, input_tokens=used[0], output_tokens=used[1], is_estimated=None in counts)

    def _shown(self, reason: str) -> str:
        if len(reason) > LONGEST_MESSAGE:  # without the last word, which may be a part of a key
            reason = reason[:LONGEST_MESSAGE].rpartition(" ")[0] or f"a message of {len(reason):,} characters"
        return textwrap.shorten(plain_text(redact(reason, self._key)), LONGEST_REASON, placeholder=" …")

    async def _record(self, reply: Reply, seconds: float) -> None:
        assert reply.input_tokens is not None and reply.output_tokens is not None  # counted or estimated
        tokens = {"input_tokens": reply.input_tokens, "output_tokens": reply.output_tokens}
        self._usage.add(**tokens)
        self._usage.add_latency(seconds)
        if self._prices is not None:
            cost = self._prices.cost(**tokens)
            self._usage.add(cost=cost)
            if self._store is not None:
                self._spent = await self._store.spend(cost)

    async def _check_budget(self) -> None:
        budget = self._settings.budget
        if budget is None:
            return
        assert self._store is not None  # a budget requires a cache folder
        if self._spent is None:
            self._spent = await self._store.spend(0)
        if self._spent >= budget:
            raise BudgetSpent


def verdict_in(text: str, parse: Parse) -> Verdict:
    """Malformed: no verdict, also after an error that was not foreseen: whatever the text is, only this call fails."""
    try:
        return parse(text)
    except Malformed:
        raise
    except Exception as error:
        raise Malformed(f"the answer cannot be read: {type(error).__name__}: {error}") from error


def tokens_in(text: str) -> int:
    """An estimate."""
    return -(-len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN)


def current_task() -> "asyncio.Task[Any]":
    task = asyncio.current_task()
    assert task is not None  # within a coroutine
    return task


def identity_of(address: str, request: ChatRequest) -> str:
    """A hash of all that determines the answer."""
    text = json.dumps([address, asdict(request)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
