"""Counts, tokens, money and times of the calls."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass

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
