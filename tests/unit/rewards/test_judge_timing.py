"""Rate limits and delays between attempts, by a clock that only the code itself moves."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime

import pytest

from rloom.net.retry import Backoff, RateLimits, TokenBucket, retry_after_s


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds


def moments(count: int, make: Callable[[FakeClock], Callable[[], Awaitable[None]]]) -> list[float]:
    """When each of `count` calls went through."""
    clock, times = FakeClock(), []

    async def run() -> None:
        take = make(clock)
        for _ in range(count):
            await take()
            times.append(clock.now())

    asyncio.run(run())
    return times


def most_in_a_minute(times: list[float], amount: float = 1) -> float:
    return max(amount * sum(start <= time < start + 60 for time in times) for start in times)


@pytest.mark.parametrize("per_minute", [1, 2, 10, 60, 600])
def test_no_minute_has_more_requests_than_the_limit(per_minute: int) -> None:
    def make(clock: FakeClock) -> Callable[[], Awaitable[None]]:
        limits = RateLimits(per_minute, None, clock)
        return lambda: limits.take(1000)

    times = moments(3 * per_minute + 3, make)
    assert most_in_a_minute(times) <= per_minute
    if per_minute > 2:  # and not far fewer
        assert times[-1] < 1.15 * 60 * len(times) / per_minute


def test_ten_requests_in_a_minute_are_spread_over_it() -> None:
    def make(clock: FakeClock) -> Callable[[], Awaitable[None]]:
        limits = RateLimits(10, None, clock)
        return lambda: limits.take(0)

    # one is there at the start, and nine more in 60 seconds
    assert moments(4, make) == pytest.approx([0, 60 / 9, 120 / 9, 180 / 9])


def test_tokens_are_taken_by_estimate_and_corrected_by_the_real_count() -> None:
    clock = FakeClock()

    async def run() -> list[float]:
        limits, times = RateLimits(None, 6000, clock), []  # a bucket of 100, refilled with 98.33 a second
        for used in (100, 1000, 1000):
            await limits.take(500)
            times.append(clock.now())
            limits.correct(500, used)
        return times

    # level 100 - 100 = 0 after the first; the second waits for a full bucket, and leaves it at 100 - 1000 = -900
    per_second = (6000 - 100) / 60
    assert asyncio.run(run()) == pytest.approx([0, 100 / per_second, 100 / per_second + 1000 / per_second])


def test_waiting_calls_go_through_in_the_order_in_which_they_came() -> None:
    async def run() -> list[int]:
        bucket, order = TokenBucket(60, FakeClock()), []

        async def call(number: int) -> None:
            await bucket.take(1)
            order.append(number)

        await asyncio.gather(*(call(number) for number in range(20)))
        return order

    assert asyncio.run(run()) == list(range(20))


def test_delays_double_up_to_a_limit_with_jitter() -> None:
    backoff = Backoff(first_s=0.5, longest_s=3, randomness=random.Random(0))
    for failures, longest in ((1, 0.5), (2, 1), (3, 2), (4, 3), (9, 3)):
        delays = [backoff.delay_s(failures, None) for _ in range(200)]
        assert longest / 2 <= min(delays) < 0.55 * longest and 0.95 * longest < max(delays) <= longest


def test_retry_after_is_waited_for_in_full() -> None:
    backoff = Backoff(first_s=0.5, randomness=random.Random(0))
    assert all(7 <= backoff.delay_s(1, 7.0) <= 7.5 for _ in range(50))


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("12", 12),
        ("0.5", 0.5),
        ("-3", 0),
        ("Wed, 21 Oct 2026 07:28:30 GMT", 30),
        ("Wed, 21 Oct 2026 07:27:00 GMT", 0),
        ("soon", None),
        ("", None),
        ("²", None),
        ("٣", None),
        ("nan", None),
        ("inf", None),
        ("1e400", None),
        ("1_0", None),
        ("9" * 30, 1e30),
        ("Wed, 21 Oct 99999999999999999999 07:28:30 GMT", None),
        ("Wed, 21 Oct 2026 07:28:30 +9999999", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float | None) -> None:
    now = datetime(2026, 10, 21, 7, 28, tzinfo=UTC)
    assert retry_after_s({"retry-after": header}, now) == seconds
    assert retry_after_s(None) is None
