"""A run of 64 workers in which much goes wrong: the weights at the end are those of an undisturbed run."""

import json
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from rloom.runs.records import EVENTS_FILE
from tests.e2e.runs import records, terminate_all
from tests.e2e.simulated import UPDATES, Fault, saved_weights, simulate

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


def numbers(directory: Path) -> list[dict[str, float]]:
    return [
        {k: v for k, v in record.items() if not k.startswith(("timing_s/", "perf/"))} for record in records(directory)
    ]


def ends(directory: Path) -> list[tuple[str, str]]:
    """The status and the message of each end of the run, also of those before the first checkpoint."""
    files = [*sorted(directory.glob(f"superseded-*/{EVENTS_FILE}")), directory / EVENTS_FILE]
    events = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    return [(event["status"], event.get("message", "")) for event in events if event["event"] == "end"]


@contextmanager
def terminated_after(directory: Path, steps: int) -> Iterator[None]:
    """As by a scheduler: SIGTERM to the run, which is in this process, and to all that it has started."""
    ended = threading.Event()

    def wait_and_terminate() -> None:
        while not ended.wait(0.02):
            if len(records(directory)) > steps:
                terminate_all(os.getpid())
                return

    thread = threading.Thread(target=wait_and_terminate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


@pytest.mark.long
@pytest.mark.slow
def test_deaths_a_hung_worker_a_full_disk_and_a_sigterm_leave_no_trace_in_the_weights(
    disk: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run, calm, faults = disk / "run", tmp_path / "calm", tmp_path / "faults"
    faults.mkdir()
    for fault in (*LOST, FILLS, KILLED_AT_START):
        fault.plan(faults)

    assert simulate(run, STEPS, faults, TOKEN_S, (*SIZES, *MANY)) == 2
    out, err = capfd.readouterr()
    assert f"Restart {len(LOST)} of 10" in out
    assert "No space left on device" in err
    assert err.rstrip().endswith("global_step_12; the same command goes on from it.")
    *lost, (status, message) = ends(run)
    assert [status for status, _ in lost] == ["WorkerError"] * len(LOST)
    for fault, (_, named) in zip(LOST, lost, strict=True):
        assert named.startswith(f"worker {fault.worker} {'died' if fault.kind == 'kill' else 'counts as dead'}"), named
        assert f"Planned fault: {fault.kind} of worker {fault.worker}" in named
    assert status == "CheckpointError" and "No space left on device" in message

    (disk / "filler").unlink()
    with terminated_after(run, 14):
        assert simulate(run, STEPS, faults, TOKEN_S, (*SIZES, *MANY)) == 130
    out, _ = capfd.readouterr()
    assert "worker 50 died" in out and "Restart 1 of 10" in out and "SIGTERM: stopping" in out
    assert [status for status, _ in ends(run)[len(LOST) + 1 :]][-1] == "interrupted"
    assert not any(faults.iterdir()), "each planned fault has happened"

    assert simulate(run, STEPS, faults, TOKEN_S, (*SIZES, *MANY)) == 0
    assert "Restart" not in capfd.readouterr().out
    assert simulate(calm, STEPS, faults, 0.0, (*SIZES, "trainer.n_gpus_per_node=1")) == 0
    found, expected = (saved_weights(one / f"global_step_{STEPS}" / "actor") for one in (run, calm))
    assert found[1] == expected[1] == STEPS * UPDATES
    assert torch.equal(found[0], expected[0])
    assert numbers(run) == numbers(calm)
