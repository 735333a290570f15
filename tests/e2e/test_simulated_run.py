"""A run of 64 workers in which much goes wrong: the weights at the end are those of an undisturbed run."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from tests.e2e import simulated
from tests.e2e.runs import records, terminate_all
from tests.e2e.simulated import Fault
from tests.ranks import forkserver
from tests.waiting import wait_until

WORKERS, STEPS, TOKEN_S = 64, 20, 0.005
SIZES = (
    *("data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=32", "actor_rollout_ref.rollout.n=4"),
    *("data.train_max_samples=1280", "actor_rollout_ref.rollout.max_num_seqs=2", "trainer.save_freq=2"),
)
# a worker that only waits for a processor must not count as one that hangs
MANY = (
    *(f"trainer.n_gpus_per_node={WORKERS}", "trainer.max_restarts=10"),
    "actor_rollout_ref.rollout.progress_timeout_s=60",
)
KILLED = [
    Fault(9, "generate", 2, "kill"),
    Fault(33, "forward_backward", 4, "kill"),
    Fault(63, "save", 6, "kill"),
    Fault(0, "optim_step", 10, "kill"),
    Fault(50, "load", 12, "kill"),
]
HANGS, FILLS = Fault(20, "generate", 8, "hang"), Fault(41, "save", 14, "fill")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk of its own, which can be filled."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip("only root can mount a file system")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def run_with_log(directory: Path, log: Path, faults: Path) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.exit(simulated.simulate(directory, STEPS, faults, TOKEN_S, (*SIZES, *MANY)))


class Runs:
    """One command, again and again."""

    def __init__(self, disk: Path, folder: Path) -> None:
        self.directory, self.folder, self.faults, self.count = disk / "run", folder, folder / "faults", 0
        self.faults.mkdir()

    def start(self) -> tuple[ForkServerProcess, Path]:
        self.count += 1
        log = self.folder / f"{self.count}.log"
        process: ForkServerProcess = forkserver().Process(
            target=run_with_log, args=(self.directory, log, self.faults)
        )
        process.start()
        return process, log

    def end(self, process: ForkServerProcess, log: Path) -> tuple[int | None, str]:
        process.join(timeout=900)
        process.kill()
        return process.exitcode, log.read_text()


@pytest.mark.long
@pytest.mark.slow
def test_deaths_a_hung_worker_a_full_disk_and_a_sigterm_leave_no_trace_in_the_weights(
    disk: Path, tmp_path: Path
) -> None:
    runs = Runs(disk, tmp_path)
    for fault in (*KILLED, HANGS, FILLS):
        fault.plan(runs.faults)
    # until a save meets the full disk
    status, said = runs.end(*runs.start())
    assert status == 2, said
    print(said)
