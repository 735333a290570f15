"""Seconds that a step waits for its programs, where some never end; and whether all reference solutions pass.

    python benchmarks/programs.py --mbpp mbpp.jsonl [--humaneval HumanEval.jsonl.gz] [--answers 512] [--stuck 0 1 5]

Answers are reference solutions of MBPP and others with an operator changed; a stuck one loops or sleeps for ever. They
arrive over two seconds, as from generation, and the seconds are from the last one to the last score. `--verify` runs
all reference solutions instead, `--busy` adds as many processes that compute.
"""

import argparse
import ast
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from rloom.config.reward_sections import SandboxSection
from rloom.data.prepare.code import humaneval_splits, mbpp_splits
from rloom.rewards.pool import RulePool
from rloom.rewards.score_queue import BackgroundScorer
from rloom.types import Sample, Score

GENERATION_S = 2.0
STUCK = ("while True: pass", "import time\ntime.sleep(1e6)")
OTHER = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Eq: ast.NotEq, ast.Lt: ast.GtE, ast.Gt: ast.LtE}


def sample_of(row: dict[str, Any], program: str) -> Sample:
    truth, info = row["reward_model"]["ground_truth"], row["extra_info"]
    return Sample(row["data_source"], "", f"```python\n{program}\n```", truth, info)


def changed(program: str) -> str:
    """With its first operator changed. Unchanged if it has a loop that may not end."""
    tree = ast.parse(program)
    for node in ast.walk(tree):
        if isinstance(node, ast.While):
            return program
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and type(node.op) in OTHER:
            node.op = OTHER[type(node.op)]()
            break
        if isinstance(node, ast.Compare) and type(node.ops[0]) in OTHER:
            node.ops[0] = OTHER[type(node.ops[0])]()
            break
    return ast.unparse(tree)


def step(rows: Sequence[dict[str, Any]], answers: int, stuck: int, seed: int) -> list[Sample]:
    draw = random.Random(seed)
    chosen = draw.choices(rows, k=answers)
    programs = [row["extra_info"]["answer"] for row in chosen]
    programs = [changed(program) if draw.random() < 0.5 else program for program in programs]
    for number, place in enumerate(draw.sample(range(answers), stuck)):
        programs[place] = STUCK[number % len(STUCK)]
    return [sample_of(row, program) for row, program in zip(chosen, programs, strict=True)]


@contextmanager
def scorer(workers: int, partial_credit: bool) -> Iterator[BackgroundScorer]:
    keys = SandboxSection().model_dump() | {"partial_credit": partial_credit}
    with closing(BackgroundScorer(RulePool(num_workers=workers, timeout_s=10, sandbox=keys))) as found:
        yield found


def wait_s(queue: BackgroundScorer, samples: Sequence[Sample]) -> float:
    begun, futures = time.monotonic(), []
    for number, sample in enumerate(samples, start=1):
        futures.append(queue.submit([(sample,)]))
        time.sleep(max(0.0, begun + GENERATION_S * number / len(samples) - time.monotonic()))
    last = time.monotonic()
    for future in futures:
        future.result()
    return time.monotonic() - last


def verify(queue: BackgroundScorer, rows: Sequence[dict[str, Any]]) -> None:
    begun = time.monotonic()
    pending = [queue.submit([(sample_of(row, row["extra_info"]["answer"]),)]) for row in rows]
    scores: list[Score] = [future.result()[0][0] for future in pending]
    wrong = [
        f"{row['data_source']} {row['extra_info']['task_id']}: {score.detail or score.reason}"
        for row, score in zip(rows, scores, strict=True)
        if score.value != 1
    ]
    print(f"{len(rows) - len(wrong)} of {len(rows)} pass, {time.monotonic() - begun:.0f} s", *wrong, sep="\n  ")


@contextmanager
def busy(processes: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mbpp", type=Path, required=True)
    parser.add_argument("--humaneval", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=int, nargs="+", default=[512])
    parser.add_argument("--stuck", type=int, nargs="+", default=[0, 1, 5])
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--partial_credit", action="store_true")
    parser.add_argument("--verify", action="store_true")
    parser.add_argument("--busy", type=int, default=0)
    given = parser.parse_args()
    train, test = mbpp_splits(given.mbpp)
    with busy(given.busy), scorer(given.workers, given.partial_credit) as queue:
        if given.verify:
            others = humaneval_splits(given.humaneval)[1] if given.humaneval else []
            return verify(queue, [*train, *test, *others])
        wait_s(queue, step(train, 16 * given.workers, 0, seed=0))  # starts the processes
        for answers in given.answers:
            for stuck in given.stuck:
                found = [wait_s(queue, step(train, answers, stuck, seed)) for seed in range(given.steps)]
                print(
                    f"{answers} answers, {stuck} stuck: median {median(found):.2f} s, most {max(found):.2f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
