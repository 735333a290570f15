"""Asynchronous runs that are killed at random, and what holds of them when they have ended.

    python -m tests.e2e.test_kills [--kills 18 18 7 7] [--seed 1] [--out DIR]

Where a run has workers, two of three kills are of one of them: the run goes on in its process. All other kills are of
the run's own process, and the same command goes on. The moment is drawn: before a step, in it, or while its checkpoint
is written.
"""

import argparse
import json
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from rloom.runs.records import METRICS_FILE, read_metrics
from rloom.training.checkpoint import Checkpoints
from tests.e2e.runs import below, fork, records, weights
from tests.e2e.test_ahead import AHEAD, SPANS, WORST, start, versions_of
from tests.e2e.test_replay import check_same
from tests.e2e.test_separate import SEPARATE
from tests.waiting import is_running, wait_until

BOUND, LIMIT_S, STEP_S = 2, 1200.0, "perf/time_per_step"
COLOCATE = (*AHEAD, "actor_rollout_ref.rollout.free_cache_engine=False", "actor_rollout_ref.rollout.max_num_seqs=4")
APART = (*SEPARATE, "trainer.test_freq=3", "actor_rollout_ref.rollout.max_num_seqs=2")
VARIED = ("actor_rollout_ref.rollout.temperature=1.6", "data.max_response_length=48")  # answers of 5 to 48 tokens
ASKED = ("trainer.max_restarts=50", f"trainer.v1.sampler.max_off_policy_threshold={BOUND}", *VARIED)
# Without a learning rate all answers are those of the synchronous run. With `keep` there is no replay to compare with
CACHES = {"refill": (), "keep": ("trainer.v1.kv_on_update=keep", "actor_rollout_ref.actor.optim.lr=0")}
CASES = {
    (mode, cache): (*keys, *ASKED, *CACHES[cache])
    for mode, keys in (("colocate_async", COLOCATE), ("separate_async", APART))
    for cache in CACHES
}
WORKER_LOST, KILLED = 3, -signal.SIGKILL  # exit statuses of runs that go on
CHILDREN = threading.Lock()  # multiprocessing's list of them is for one thread at a time


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for file in folder.glob("*.jsonl") for line in file.read_text().splitlines()]


def alive(process: ForkServerProcess) -> bool:
    with CHILDREN:
        return process.is_alive()


def finish(run: Path, process: ForkServerProcess) -> None:
    wait_until(lambda: not alive(process), LIMIT_S)
    assert process.exitcode == 0, run.with_suffix(".log").read_text()


def train_whole(run: Path, steps: int, *keys: str) -> None:
    with CHILDREN:
        process = fork(run, steps, *keys)
    finish(run, process)


def train_synchronous(folder: Path, steps: int) -> None:
    """What is expected of all cases: the prompts, and the answers of the weights that it begins with."""
    keys = (AHEAD[0], *VARIED, *CACHES["keep"][1:], "trainer.save_freq=-1")
    train_whole(folder / "sync", steps, *keys, f"trainer.rollout_data_dir={folder / 'expected'}")


def train_killed(run: Path, steps: int, kills: int, seed: int, keys: Sequence[str]) -> Counter[str]:
    """To its end. Returns how often its own process and its workers were killed."""
    rng, killed, process = random.Random(seed), Counter[str](), going_on(None, run, steps, keys)
    while killed.total() < kills:
        if wait_for_moment(run, process, rng):
            killed[kill_one(run, process, rng)] += 1
        process = going_on(process, run, steps, keys)
    finish(run, process)
    return killed


def going_on(process: ForkServerProcess | None, run: Path, steps: int, keys: Sequence[str]) -> ForkServerProcess:
    """The process, or another one with the same command."""
    if process is not None and alive(process):
        return process
    assert process is None or process.exitcode in (WORKER_LOST, KILLED), run.with_suffix(".log").read_text()
    with CHILDREN:
        return start(run, steps, *keys)


def wait_for_moment(run: Path, process: ForkServerProcess, rng: random.Random) -> bool:
    """False: the process has ended before, without a worker that it lost."""
    step = max(Checkpoints(run, keep=None).steps(), default=0) + rng.randint(0, 1)
    written, begun = run / f"global_step_{step}", run / f".writing-global_step_{step}"
    while_writing, share_of_a_step = rng.random() < 1 / 3, rng.random()
    wait_until(
        lambda: step == 0 or written.exists() or (while_writing and begun.exists()) or not alive(process),
        LIMIT_S,
        poll_s=0.001,
    )
    if written.exists() or step == 0:
        measured = read_metrics(run / METRICS_FILE)  # without a line that a kill has cut short
        time.sleep(share_of_a_step * min((record[STEP_S] for record in measured if STEP_S in record), default=5.0))
    return alive(process)


def kill_one(run: Path, process: ForkServerProcess, rng: random.Random) -> str:
    """Of the run's processes. All others end with its own."""
    assert process.pid is not None
    listed = subprocess.run(["ps", "-e", "-o", "ppid=,args="], capture_output=True, text=True, check=True).stdout
    with_log = {int(line.split()[0]) for line in listed.splitlines() if f"tee -a {run}/logs/worker_" in line}
    others = below(process.pid)
    workers = [other for other in others if other in with_log]  # a `tee` whose worker has ended is another's child
    if workers and rng.random() < 2 / 3:
        os.kill(rng.choice(workers), signal.SIGKILL)
        return "worker"
    os.kill(process.pid, signal.SIGKILL)
    wait_until(lambda: not alive(process) and not any(map(is_running, others)), LIMIT_S)
    return "run"


def check(folder: Path, run: Path, steps: int, cache: str, keys: Sequence[str]) -> None:
    """`folder`: of the synchronous run."""
    found = rows(run.with_name(f"{run.name}-found"))
    expected = [row for row in rows(folder / "expected") if row["step"] in range(1, steps + 1)]
    assert Counter(row["step"] for row in found) == dict.fromkeys(range(1, steps + 1), 8)
    assert Counter(row["input"] for row in found) == Counter(row["input"] for row in expected)
    if cache == "keep":
        assert answers(found) == answers(expected), "whatever their length, and wherever they were interrupted"
    measured = [record for record in records(run) if WORST in record]
    assert [record["training/global_step"] for record in measured] == list(range(1, steps + 1))
    assert max(record[SPANS] for record in measured) > 1, "answers were interrupted"
    assert 1 <= max(record[WORST] for record in measured) <= BOUND
    versions = [found for step in range(1, steps + 1) for found in versions_of(run, step)]
    assert len(versions) == 8 * steps and all(list(found) == sorted(found) for found in versions)
    assert not list(run.glob(".writing-*"))
    if cache == "refill":
        replay = run.with_name(f"{run.name}-replay")
        train_whole(replay, steps, *keys, f"trainer.replay={run}")
        check_same(run, replay, steps)


def answers(found: Sequence[Mapping[str, object]]) -> Counter[tuple[object, object]]:
    return Counter((row["input"], row["output"]) for row in found)


def steps_for(kills: int) -> int:
    """Enough that the run has not ended before the last kill."""
    return 2 * kills + 2


def with_rows(run: Path, keys: Sequence[str]) -> tuple[str, ...]:
    return (*keys, f"trainer.rollout_data_dir={run.with_name(f'{run.name}-found')}")


@pytest.mark.long
@pytest.mark.parametrize(("mode", "cache"), CASES)
def test_a_run_that_is_killed_three_times_trains_each_prompt_once_and_is_repeated(
    tmp_path: Path, mode: str, cache: str
) -> None:
    kills, run = 3, tmp_path / "run"
    steps, keys = steps_for(kills), with_rows(run, CASES[mode, cache])
    train_synchronous(tmp_path, steps)
    train_killed(run, steps, kills, 5, keys)
    check(tmp_path, run, steps, cache, keys)


def digest(run: Path, step: int) -> str:
    """Of the policy's tensors."""
    found = sha256()
    for name, tensor in sorted(weights(run, step).items()):
        found.update(name.encode() + tensor.contiguous().numpy().tobytes())
    return found.hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, nargs=len(CASES), default=[18, 18, 7, 7], help="(%(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path, help="(a new folder)")
    given = parser.parse_args()
    folder = given.out or Path(tempfile.mkdtemp(prefix="rloom-kills-"))
    folder.mkdir(parents=True, exist_ok=True)

    def one(place: int) -> str:
        (case, keys), kills = [*CASES.items()][place], given.kills[place]
        run, steps = folder / "-".join(case), steps_for(kills)
        keys = with_rows(run, keys)
        killed = train_killed(run, steps, kills, given.seed + place, keys)
        expected.result()
        check(folder, run, steps, case[1], keys)
        replay = run.with_name(f"{run.name}-replay")
        equal = digest(replay, steps) if replay.exists() else "answers of `sync`"
        return f"| {run.name} | {steps} | {killed['run']}, {killed['worker']} | {digest(run, steps)} | {equal} |"

    with ThreadPoolExecutor(1 + len(CASES)) as pool:
        expected = pool.submit(train_synchronous, folder, steps_for(max(given.kills)))
        lines = list(pool.map(one, range(len(CASES))))
    head = ["| run | steps | kills of the run, of a worker | weights | replay |", "| --- | --- | --- | --- | --- |"]
    print(*head, *lines, sep="\n")


if __name__ == "__main__":
    main()
