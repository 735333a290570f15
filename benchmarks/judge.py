"""Wall time of samples through the API judge, beside the ideal of `samples × latency / concurrency`.

    python benchmarks/judge.py [--samples 640] [--latency_s 0.5] [--concurrency 32] [--type openai]

The server is local and answers each request after the given latency. It runs in this process too, so at high rates the
time includes its own work.
"""

import argparse
import asyncio
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.judge_server import serving
from tests.judging import TYPES, judge_for, worth


def measure(type: str, samples: int, latency_s: float, concurrency: int) -> float:
    """Seconds, without the time to connect for the first time."""
    groups = [(worth(1 + number % 10, prompt=f"Question {number}"),) for number in range(samples)]

    async def run() -> float:
        await reward.score([(worth(1, prompt="first"),)])
        started = time.perf_counter()
        scores = await reward.score(groups)
        seconds = time.perf_counter() - started
        assert all(score.ok for group in scores for score in group)
        await reward.close_async()
        return seconds

    with serving(latency_s=latency_s) as server:
        reward = judge_for(server, type, concurrency=concurrency)
        reward.check()
        return asyncio.run(run())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=640)
    parser.add_argument("--latency_s", type=float, default=0.5)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--type", choices=TYPES, action="append")
    given = parser.parse_args()
    ideal = given.samples * given.latency_s / given.concurrency
    print(f"{given.samples} samples, {given.latency_s:g} s a call, {given.concurrency} at once: ideal {ideal:.2f} s")
    for type in given.type or TYPES:
        seconds = measure(type, given.samples, given.latency_s, given.concurrency)
        print(f"{type:<10} {seconds:6.2f} s  {seconds / ideal:.2f} × the ideal")


if __name__ == "__main__":
    main()
