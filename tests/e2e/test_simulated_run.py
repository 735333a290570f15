"""A run of 64 workers in which much goes wrong: the weights at the end are those of an undisturbed run."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from rloom.runs.records import EVENTS_FILE
from tests.e2e import simulated
from tests.e2e.runs import records, terminate_all
from tests.e2e.simulated import UPDATES, Fault, saved_weights
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
LOST = [  # each restarts the run from its last checkpoint
    Fault(9, "generate", 2, "kill"),
    Fault(33, "forward_backward", 4, "kill"),
    Fault(63, "save", 6, "kill"),
    Fault(20, "generate", 8, "hang"),
    Fault(0, "optim_step", 10, "kill"),
]
FILLS, KILLED_AT_START = Fault(41, "save", 14, "fill"), Fault(50, "load", 12, "kill")


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


def run_with_log(directory: Path, log: Path, faults: Path, token_s: float, keys: tuple[str, ...]) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(file, descriptor)
    sys.exit(simulated.simulate(directory, STEPS, faults, token_s, (*SIZES, *keys)))


def start(directory: Path, log: Path, faults: Path, token_s: float = TOKEN_S, keys: tuple[str, ...] = MANY) -> Any:
    process = forkserver().Process(target=run_with_log, args=(directory, log, faults, token_s, keys))
    process.start()
    return process


def numbers(directory: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in record.items() if not k.startswith(("timing_s/", "perf/"))} for record in records(directory)
    ]


def ends(directory: Path) -> list[tuple[str, str]]:
    """The status and the message of each end of the run."""
    events = map(json.loads, (directory / EVENTS_FILE).read_text().splitlines())
    return [(event["status"], event.get("message", "")) for event in events if event["event"] == "end"]


@pytest.mark.long
@pytest.mark.slow
def test_deaths_a_hung_worker_a_full_disk_and_a_sigterm_leave_no_trace_in_the_weights(
    disk: Path, tmp_path: Path
) -> None:
    run, calm, faults = disk / "run", tmp_path / "calm", tmp_path / "faults"
    faults.mkdir()
    alone = start(calm, tmp_path / "calm.log", faults, 0.0, ("trainer.n_gpus_per_node=1",))
    alone.join()
    assert alone.exitcode == 0, (tmp_path / "calm.log").read_text()
    for fault in (*LOST, FILLS, KILLED_AT_START):
        fault.plan(faults)

    log = tmp_path / "full_disk.log"
    first = start(run, log, faults)
    first.join()
    said = log.read_text()
    assert first.exitcode == 2, said
    assert f"Restart {len(LOST)} of 10" in said
    assert "cannot be written" in said and "No space left on device" in said
    assert said.rstrip().endswith("global_step_12; the same command goes on from it.")
    *lost, (status, message) = ends(run)
    assert [status for status, _ in lost] == ["WorkerError"] * len(LOST)
    for fault, (_, named) in zip(LOST, lost, strict=True):
        assert named.startswith(f"worker {fault.worker} {'died' if fault.kind == 'kill' else 'counts as dead'}"), named
        assert f"Planned fault: {fault.kind} of worker {fault.worker}" in named
    assert status == "CheckpointError" and "global_step_14 cannot be written" in message

    (disk / "filler").unlink()
    log = tmp_path / "sigterm.log"
    second = start(run, log, faults)
    wait_until(lambda: len(records(run)) > 14 or not second.is_alive(), 900)
    assert second.is_alive(), log.read_text()
    terminate_all(second.pid)
    second.join()
    said = log.read_text()
    assert second.exitcode == 130, said
    assert "worker 50 died" in said and "Restart 1 of 10" in said and "SIGTERM: stopping" in said
    assert [status for status, _ in ends(run)[-2:]] == ["WorkerError", "interrupted"]
    assert not any(faults.iterdir()), "each planned fault has happened"

    log = tmp_path / "last.log"
    last = start(run, log, faults)
    last.join()
    assert last.exitcode == 0, log.read_text()
    assert "Restart" not in log.read_text()
    found, expected = (saved_weights(one / f"global_step_{STEPS}" / "actor") for one in (run, calm))
    assert found[1] == expected[1] == STEPS * UPDATES
    assert torch.equal(found[0], expected[0])
    assert numbers(run) == numbers(calm)
