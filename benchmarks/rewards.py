"""Samples per second through the reward queue, beside the same rule in one process and in a process pool.

    python benchmarks/rewards.py [--samples 10000] [--workers 2] [--sources openai/gsm8k lighteval/MATH]

The queue is what a training run uses: a RulePool behind a BackgroundScorer, each answer submitted on its own. A loop
in this process has neither a time limit nor protection from a crash. verl's `prime` reward manager gives each answer to
a ProcessPoolExecutor with one call per sample, without a limit that ends a hanging call. Imports are not timed.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path

from rloom.rewards.pool import RulePool
from rloom.rewards.routing import rule_for
from rloom.rewards.score_queue import BackgroundScorer
from rloom.types import Sample

WARM_UP = 200
DECODED_TOGETHER = 32  # answers that arrive while others are decoded
STEP = "Each of the {} boxes has {} pens, so that makes {} more; we add them to the sum of the line above.\n"
MATH_FORMS = (  # the answer and the ground truth; every second answer is written in another way than its truth
    (r"{a}", "{a}"),
    (r"\dfrac{{{a}}}{{{b}}}", r"\frac{{{a}}}{{{b}}}"),
    (r"{a}\sqrt{{{b}}}", r"\sqrt{{{b}}}\cdot {a}"),
    (r"(x+{a})(x-{b})", r"x^2 + {a}x - {b}x - {a}\cdot {b}"),
    (r"\left({a}, \frac{{\pi}}{{{b}}}\right)", r"({a}, \frac\pi{{{b}}})"),
)


def answers(data_source: str, count: int) -> list[Sample]:
    draw = random.Random(0)
    return [_answer(data_source, draw) for _ in range(count)]


def _answer(data_source: str, draw: random.Random) -> Sample:
    a, b = draw.randint(2, 9999), draw.randint(2, 99)
    reasoning = "".join(STEP.format(draw.randint(2, 99), draw.randint(2, 99), a) for _ in range(6))
    if data_source == "openai/gsm8k":
        return Sample(data_source, "How many pens?", f"{reasoning}#### {a:,}", str(draw.choice((a, b))))
    answer, truth = draw.choice(MATH_FORMS)
    return Sample(data_source, "Find it.", rf"{reasoning}\boxed{{{answer.format(a=a, b=b)}}}", truth.format(a=a, b=b))


def in_a_loop(samples: Sequence[Sample]) -> list[float]:
    rule = rule_for(samples[0].data_source)
    assert rule is not None
    rule.prepare()
    return [float(rule.compute_score(s.data_source, s.response, s.ground_truth)["score"] or 0) for s in samples]


def one_score(sample: Sample) -> float:
    return in_a_loop([sample])[0]


@contextmanager
def process_pool(workers: int) -> Iterator[Callable[[Sequence[Sample]], list[float]]]:
    with ProcessPoolExecutor(workers) as pool:
        yield lambda samples: [future.result() for future in [pool.submit(one_score, sample) for sample in samples]]


@contextmanager
def queue(workers: int) -> Iterator[Callable[[Sequence[Sample]], list[float]]]:
    with closing(BackgroundScorer(RulePool(num_workers=workers, timeout_s=10))) as scorer:

        def score(samples: Sequence[Sample]) -> list[float]:
            arriving = [samples[first : first + DECODED_TOGETHER] for first in range(0, len(samples), DECODED_TOGETHER)]
            futures = [scorer.submit([(sample,) for sample in some]) for some in arriving]
            return [score.value for future in futures for [score] in future.result() if score.value is not None]

        yield score


def resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096 / 2**20


def timed(name: str, score: Callable[[Sequence[Sample]], list[float]], samples: Sequence[Sample]) -> list[float]:
    score(samples[:WARM_UP])
    gc.collect()
    before, start, cpu_start = resident_mib(), time.perf_counter(), time.process_time()
    scores = score(samples)
    took_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    gc.collect()
    print(
        f"  {name:<34} {len(samples) / took_s:8,.0f} samples/s   {1e6 * cpu_s / len(samples):5.0f} us of this process "
        f"per sample   memory {before:.0f} -> {resident_mib():.0f} MiB",
        flush=True,
    )
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=10_000)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--sources", nargs="+", default=["openai/gsm8k", "lighteval/MATH"])
    arguments = parser.parse_args()
    for source in arguments.sources:
        samples = answers(source, arguments.samples)
        print(f"{source}, {len(samples)} answers, {arguments.workers} workers")
        with queue(arguments.workers) as score:
            timed("the queue, first time", score, samples)
            found = timed("the queue, again", score, samples)
        with process_pool(arguments.workers) as score:
            timed("a process pool, a call per sample", score, samples)
        expected = timed("a loop in this process", in_a_loop, samples)
        assert found == expected, "the queue and the loop disagree"


if __name__ == "__main__":
    main()
