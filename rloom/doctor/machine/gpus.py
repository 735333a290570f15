"""`rloom doctor gpus`: whether several GPUs of this machine compute together what one computes.

Over NCCL; over gloo the same code runs in processes on the CPU.

First the collectives that rloom uses, on all GPUs, then short runs on two of them beside a run on one.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION
from concurrent.futures import wait as wait_for
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from math import isclose
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from rloom.engines.collectives import COLLECTIVES, Rank
from rloom.errors import ConfigError, RloomError, WorkerError
from rloom.families.family import write_expert_model
from rloom.gpus import CHOICE, device_names
from rloom.import_path import child_command
from rloom.language import translate
from rloom.runs.run_folder import RunFolder
from rloom.runtime import processes
from rloom.runtime.remote import RemoteGroup

NCCL, GLOO = "nccl", "gloo"
COLLECTIVE_S, RUN_S = 120.0, 1800.0  # after so long a check has failed
STEPS = 3
OWN_METRICS = ("timing_s/", "perf/")  # of the machine, not of the training
RELATIVE, ABSOLUTE = 5e-3, 1e-4  # float32 sums in another order, over three steps
ACTOR, CRITIC = "actor_rollout_ref.actor", "critic"
SMALL = (  # actor, critic and reference, two updates in each step
    "algorithm.adv_estimator=gae",
    f"{ACTOR}.use_kl_loss=True",
    f"{ACTOR}.ppo_mini_batch_size=2",
    f"{ACTOR}.fsdp_config.dtype=float32",
    f"{CRITIC}.model.fsdp_config.dtype=float32",
    "actor_rollout_ref.rollout.n=2",
    "data.train_batch_size=4",
    "data.train_max_samples=64",
    "data.val_max_samples=8",
    "reward_model.num_workers=1",
    "trainer.save_freq=1",
    "trainer.test_freq=-1",
    "trainer.val_before_train=False",
    f"trainer.total_training_steps={STEPS}",
)
TWO = "trainer.n_gpus_per_node=2"
MEGATRON = (TWO, f"{ACTOR}.strategy=megatron", f"{ACTOR}.megatron.dtype=float32", f"{CRITIC}.megatron.dtype=float32")
EXPERTS = "one process, experts"
# name -> keys, and the run whose metrics it must have
RUNS: Mapping[str, tuple[Sequence[str], str]] = {
    "FSDP2": ((TWO,), "one process"),
    "Ulysses": (
        (TWO, f"{ACTOR}.ulysses_sequence_parallel_size=2", f"{CRITIC}.ulysses_sequence_parallel_size=2"),
        "one process",
    ),
    "weights to a pool of its own": ((TWO, "trainer.pools.rollout=1"), "one process"),
    "Megatron, TP 2": ((*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=2"), "one process"),
    "Megatron, PP 2": ((*MEGATRON, f"{ACTOR}.megatron.pipeline_model_parallel_size=2"), "one process"),
    "Megatron, EP 2": ((*MEGATRON, f"{ACTOR}.megatron.expert_model_parallel_size=2"), EXPERTS),
}


class CheckFailed(Exception):
    """A check failed. The message is the reason."""


@dataclass(frozen=True)
class CheckedItem:
    name: str
    seconds: float
    fault: str | None  # None: it works

    @property
    def line(self) -> str:
        state = translate("ok") if self.fault is None else f"{translate('failed')}: {translate(self.fault)}"
        return f"{translate(self.name):<32} {self.seconds:7.1f} s  {state}"


@contextmanager
def joined_ranks(gpus: Sequence[str], ranks: int) -> Iterator[RemoteGroup]:
    """One process for each GPU; without GPUs, on the CPU."""
    workers = list[processes.ForkedWorker]()
    try:
        for number in range(ranks):
            variables = {CHOICE: gpus[number] if gpus else ""}
            workers.append(processes.ForkedWorker(f"rank {number}", None, variables, Rank, (), timeout_s=COLLECTIVE_S))
        addresses = [RemoteGroup(workers[:1], None).call("address")[0] for _ in range(2)]
        group = RemoteGroup(workers, "rank")
        call(group, "join", [(number, ranks, *addresses, bool(gpus), COLLECTIVE_S) for number in range(ranks)])
        yield group
    finally:
        processes.kill_workers(workers)


def call(group: RemoteGroup, method: str, arguments: Sequence[tuple[Any, ...]]) -> None:
    calls = group.start(method, arguments)
    done, running = wait_for(calls.answers, timeout=COLLECTIVE_S, return_when=FIRST_EXCEPTION)
    if running and not any(answer.exception() for answer in done):
        names = [group.workers[calls.answers.index(answer)].name for answer in running]
        raise WorkerError(f"no answer from {', '.join(sorted(names))} after {COLLECTIVE_S:.0f} s")
    calls.wait()


def check_collectives(gpus: Sequence[str], ranks: int) -> Iterator[CheckedItem]:
    """After a fault the ranks are not used again: some of them may still wait in the collective."""
    began, name = time.monotonic(), "process group"
    try:
        with joined_ranks(gpus, ranks) as group:
            for following in [*COLLECTIVES, None]:
                yield CheckedItem(name, time.monotonic() - began, None)
                if following is not None:
                    began, name = time.monotonic(), following
                    call(group, "check", [(name,)] * ranks)
    except RloomError as error:
        yield CheckedItem(name, time.monotonic() - began, str(error).splitlines()[0])


class Runs:
    """Runs in processes of their own, each in a folder below `folder` with its output beside it."""

    def __init__(self, folder: Path, *, on_gpu: bool) -> None:
        self.folder = folder
        self.keys = [*SMALL, f"trainer.device={'cuda' if on_gpu else 'cpu'}"]
        self.keys += ["actor_rollout_ref.rollout.gpu_memory_utilization=0.1"] if on_gpu else []

    def place(self, name: str) -> Path:
        return self.folder / re.sub(r"\W+", "_", name)

    def start(self, name: str, keys: Sequence[str]) -> "subprocess.Popen[bytes]":
        place = self.place(name)
        given = [*self.keys, *keys, f"trainer.default_local_dir={place}"]
        with place.with_suffix(".log").open("wb") as log:
            return subprocess.Popen(child_command("rloom.__main__", "train", *given), stdout=log, stderr=log)

    def finish(self, name: str, process: "subprocess.Popen[bytes]") -> str:
        """Wait for the run; its output."""
        try:
            status = process.wait(RUN_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise CheckFailed(f"the run has not ended after {RUN_S:.0f} s: {self.log(name)}") from None
        text = self.log(name).read_text(errors="replace")
        if status:
            errors = [line for line in text.splitlines() if line.startswith("rloom: ")] or text.splitlines()[-1:]
            raise CheckFailed(f"the run ended with {status}: {' '.join(errors[:1])} ({self.log(name)})")
        return text

    def log(self, name: str) -> Path:
        return self.place(name).with_suffix(".log")

    def train(self, name: str, keys: Sequence[str], expected: str | None) -> None:
        self.finish(name, self.start(name, keys))
        if expected is not None:
            self.compare(name, expected)

    def train_with_a_kill(self, name: str, keys: Sequence[str], expected: str) -> None:
        """SIGKILL to a worker after the first step: the run goes on from its checkpoint."""
        process, place, until = self.start(name, keys), self.place(name), time.monotonic() + RUN_S
        while process.poll() is None and not (place / "global_step_1").is_dir() and time.monotonic() < until:
            time.sleep(0.05)
        found = re.search(r"worker 1: process (\d+) ", self.log(name).read_text(errors="replace"))
        if process.poll() is None and found is not None:
            os.kill(int(found[1]), signal.SIGKILL)
        if "Restart 1 of" not in self.finish(name, process):
            raise CheckFailed(f"the run did not begin again: {self.log(name)}")
        self.compare(name, expected)

    def compare(self, name: str, expected: str) -> None:
        found, wanted = (RunFolder(self.place(one)).metrics for one in (name, expected))
        if not len(found) == len(wanted) == STEPS:
            raise CheckFailed(f"{len(found)} steps instead of {len(wanted)}")
        for row, beside in zip(found, wanted, strict=True):
            for key in sorted(key for key in row.keys() | beside.keys() if not key.startswith(OWN_METRICS)):
                one, other = row.get(key), beside.get(key)
                if one is None or other is None or not isclose(one, other, rel_tol=RELATIVE, abs_tol=ABSOLUTE):
                    raise CheckFailed(f"step {row['step']:g}: {key} is {one}, in '{expected}' {other}")


def check_runs(folder: Path, *, on_gpu: bool) -> Iterator[CheckedItem]:
    runs = Runs(folder, on_gpu=on_gpu)

    def checked(name: str, run: Callable[..., None], *arguments: Any) -> CheckedItem:
        began = time.monotonic()
        try:
            run(name, *arguments)
        except CheckFailed as error:
            return CheckedItem(name, time.monotonic() - began, str(error))
        return CheckedItem(name, time.monotonic() - began, None)

    with_megatron = find_spec("megatron") is not None
    expert_keys = write_expert_model(folder / "experts") if with_megatron else ()
    first = checked("one process", runs.train, (), None)
    yield first
    if first.fault is not None:
        return
    if with_megatron:
        yield checked(EXPERTS, runs.train, expert_keys, None)
    for name, (keys, expected) in RUNS.items():
        if with_megatron or keys[: len(MEGATRON)] != MEGATRON:
            yield checked(name, runs.train, (*keys, *(expert_keys if expected == EXPERTS else ())), expected)
    yield checked("a worker that is killed", runs.train_with_a_kill, (TWO,), "FSDP2")


def run(backend: str | None, *, as_json: bool) -> int:
    """0: all works; 1: a check has failed."""
    gpus = device_names(os.environ)
    backend = backend or (NCCL if len(gpus) > 1 else GLOO)
    if backend == NCCL and len(gpus) < 2:
        raise ConfigError(
            f"--backend nccl: this process sees {len(gpus)} GPUs, and NCCL needs two or more; --backend gloo runs the "
            "same checks on the CPU"
        )
    used = gpus if backend == NCCL else []
    if not as_json:
        print(translate(f"{len(used)} GPUs over NCCL" if used else "2 processes on the CPU over gloo"), flush=True)
    items, folder = list[CheckedItem](), Path(mkdtemp(prefix="rloom-gpus-"))
    for checks in (check_collectives(used, len(used) or 2), check_runs(folder, on_gpu=bool(used))):
        for item in checks:
            items.append(item)
            if not as_json:
                print(item.line, flush=True)
    failed = any(item.fault for item in items)
    if as_json:
        print(json.dumps({"backend": backend, "gpus": len(used), "checks": [asdict(item) for item in items]}, indent=2))
    elif failed:
        print(translate(f"The runs and their output are in {folder}"))
    if not failed:
        shutil.rmtree(folder)
    return int(failed)
