"""When a request may be sent, and sent again: back-off, the header Retry-After, rate limits, a replaceable clock."""

import asyncio
import email.utils
import random
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Protocol

MINUTE_S = 60.0
# ASCII digits only: str.isdigit also holds for characters such as "²", which float() refuses
NUMBER = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")


class Clock(Protocol):
    def now(self) -> float: ...

    async def sleep(self, seconds: float) -> None: ...


class SystemClock:
    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


class TokenBucket:
    """At most `per_minute` in any minute, spread over it: the bucket holds a second's share, at least 1.

    An amount over the capacity waits for a full bucket and leaves it below zero.
    """

    def __init__(self, per_minute: float, clock: Clock) -> None:
        self._capacity = max(1.0, per_minute / MINUTE_S)
        # what the bucket holds at the start of a minute is part of that minute's limit
        self._per_second = max(per_minute - self._capacity, per_minute / 2) / MINUTE_S
        self._level = self._capacity
        self._clock, self._updated = clock, clock.now()
        self._turn = asyncio.Lock()  # first come, first served

    async def take(self, amount: float) -> None:
        needed = min(amount, self._capacity)
        async with self._turn:
            while (missing := needed - self._refilled()) > 1e-9:
                await self._clock.sleep(missing / self._per_second)
            self._level -= amount

    def give_back(self, amount: float) -> None:
        """Correct an estimate. Negative: more was used than taken."""
        self._level = min(self._capacity, self._refilled() + amount)

    def _refilled(self) -> float:
        now = self._clock.now()
        self._level = min(self._capacity, self._level + (now - self._updated) * self._per_second)
        self._updated = now
        return self._level


class RateLimits:
    def __init__(self, requests_per_minute: int | None, tokens_per_minute: int | None, clock: Clock) -> None:
        self._requests = TokenBucket(requests_per_minute, clock) if requests_per_minute else None
        self._tokens = TokenBucket(tokens_per_minute, clock) if tokens_per_minute else None

    async def take(self, tokens: int) -> None:
        """Wait until one request of about `tokens` may be sent."""
        if self._requests is not None:
            await self._requests.take(1)
        if self._tokens is not None:
            await self._tokens.take(tokens)

    def correct(self, estimated: int, used: int) -> None:
        if self._tokens is not None:
            self._tokens.give_back(estimated - used)


@dataclass(frozen=True)
class Backoff:
    """Delays that double, with jitter so that many failed calls do not return together."""

    first_s: float = 0.5
    longest_s: float = 30.0
    longest_retry_after_s: float = 300.0  # a provider that requires more fails the sample
    # not the global generator, whose state belongs to the run and is saved with it
    randomness: random.Random = field(default_factory=random.Random)

    def delay_s(self, failures: int, retry_after_s: float | None) -> float:
        """Before the next attempt after `failures` of them."""
        delay = min(self.longest_s, self.first_s * 2.0 ** min(failures - 1, 30))
        if retry_after_s is not None:
            return retry_after_s + self.randomness.uniform(0, self.first_s)
        return self.randomness.uniform(delay / 2, delay)


def retry_after_s(headers: Mapping[str, str] | None, now: datetime | None = None) -> float | None:
    """Seconds, from a number of them or a date. None: no header, or one that is neither."""
    value = ((headers or {}).get("retry-after") or (headers or {}).get("Retry-After") or "").strip()
    if NUMBER.fullmatch(value):
        return max(0.0, float(value))
    try:
        moment = email.utils.parsedate_to_datetime(value)
    except (ValueError, TypeError, IndexError, OverflowError):  # OverflowError: a year of 20 digits
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0.0, (moment - (now or datetime.now(UTC))).total_seconds())
