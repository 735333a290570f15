"""Small real runs on the embedded model, for the end-to-end tests."""

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch import Tensor

from rloom.trainer import main_ppo
from tests.ranks import forkserver
from tests.waiting import is_running

SMALL = (
    "data.train_batch_size=4",
    "data.train_max_samples=64",
    "data.val_max_samples=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.rollout.n=2",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    "trainer.max_actor_ckpt_to_keep=null",
    "trainer.max_critic_ckpt_to_keep=null",
    "reward_model.num_workers=1",
    "trainer.device=cpu",
)


def arguments(directory: Path, steps: int, *overrides: str) -> list[str]:
    where = [f"trainer.default_local_dir={directory}", f"trainer.total_training_steps={steps}"]
    return [*SMALL, *where, *overrides]


def command(directory: Path, steps: int, *overrides: str, picture: bool = False) -> int:
    """In this process; its exit status. The learning curve takes as long as a step and is left out."""
    with pytest.MonkeyPatch.context() as patch:
        if not picture:
            patch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)
        return main_ppo.main(arguments(directory, steps, *overrides))


def train(directory: Path, steps: int, *overrides: str, picture: bool = False) -> None:
    assert command(directory, steps, *overrides, picture=picture) == 0


def fork(directory: Path, steps: int, *overrides: str) -> ForkServerProcess:
    """In a process of its own, its output in a file beside its directory; its exit status is the command's."""
    process: ForkServerProcess = forkserver().Process(target=run_with_log, args=(directory, steps, *overrides))
    process.start()
    return process


def run_with_log(directory: Path, steps: int, *overrides: str) -> None:
    log = os.open(directory.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    sys.exit(command(directory, steps, *overrides))


def below(*parents: int) -> list[int]:
    """Ids of the processes that these have started, and theirs."""
    listed = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    pairs = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found, above = list[int](), list(parents)
    while above := [process for process, parent in pairs if parent in above]:
        found += above
    return [process for process in found if is_running(process)]  # without `ps`


def terminate_all(*parents: int) -> list[int]:
    """SIGTERM to these processes and to all below them, as by a scheduler. Returns their ids."""
    found = [*parents, *below(*parents)]
    for process in found:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGTERM)
    return found


def weights(directory: Path, step: int, role: str = "actor", file: str = "model.safetensors") -> dict[str, Tensor]:
    return load_file(directory / f"global_step_{step}" / role / file)


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(bool((one[name] == other[name]).all()) for name in one)


def records(directory: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
