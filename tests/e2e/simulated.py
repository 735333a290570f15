"""Workers without models, for runs of many: what they compute is exact, what they take is recorded, faults are planned.

The policy is a vector of whole numbers. An answer follows from the seed of its request and from all weights, and an
update from all tokens and advantages of its mini-batch, in sums that do not depend on their order. So a row that is
lost or counted twice, or one weight that is wrong, changes every answer and all weights of later steps.

All else is the code of a run: workers are forked and called by rloom's own groups, weights are synced, checkpoints
written by threads of the workers, and the run resumes from them.
"""

import hashlib
import os
import random
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch._C._distributed_c10d import TCPStore

from rloom.batch import Batch, TrainBatch
from rloom.config.schema import Config
from rloom.engines.base import TensorSpec, Update
from rloom.engines.fingerprint import fingerprint, stacked
from rloom.engines.storage import CheckpointWriter, whole_file
from rloom.engines.weight_sync import WeightSync
from rloom.launch.worker import FILES, WEIGHT_SYNC, BaseWorker, Rendezvous
from rloom.rollout.base import Completion, Request, Rollout, report_interval_s
from rloom.runtime.placement import ACTOR, ROLLOUT, WorkerLayout, WorkerSlot

FAULTS = "RLOOM_TEST_FAULTS"  # in the environment: the folder of the planned faults
TOKEN_S = "RLOOM_TEST_TOKEN_S"  # seconds of a token of an answer
WEIGHTS, MODULUS = 2048, 1_000_003
UPDATES = 2  # mini-batches of a step
MEDIAN_TOKENS, SIGMA = 24, 0.7  # of the log-normal lengths of answers
FIRST_TOKEN, TOKENS = 20, 100  # of the vocabulary
POLL_S = 0.02
HANG_S = 3600.0


@dataclass(frozen=True)
class Fault:
    """Something that happens to a worker once: when it is at `place` of a step."""

    worker: int
    place: str  # generate, forward_backward, optim_step, save, load
    step: int
    kind: str  # kill, hang, fill

    def plan(self, folder: Path) -> None:
        (folder / self.name).write_text(self.kind)

    @property
    def name(self) -> str:
        return f"{self.place}-{self.step}-{self.worker}"


def meet_fault(worker: int, place: str, step: int, disk: Path) -> None:
    """If one is planned. Whatever becomes of this worker, the next one in its place has none."""
    file = Path(os.environ[FAULTS]) / Fault(worker, place, step, "").name
    try:
        kind = file.read_text()
    except FileNotFoundError:
        return
    file.unlink()
    print(f"Planned fault: {kind} of worker {worker} at {place} of step {step}", flush=True)
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "hang":
        time.sleep(HANG_S)
    elif kind == "fill":
        fill(disk)


def fill(disk: Path) -> None:
    """To the last byte. Files that exist keep the room they have."""
    with suppress(OSError), (disk / "filler").open("wb", buffering=0) as filler:
        while True:
            filler.write(bytes(1 << 12))


class Sums:
    """Adds vectors of all ranks, over the store of rank 0. None: there is one rank."""

    def __init__(self, rank: int, ranks: int, address: str | None) -> None:
        self.rank, self.ranks, self.count, self.store = rank, ranks, 0, None
        if address is not None and ranks > 1:
            host, port = address.rsplit(":", 1)
            self.store = TCPStore(
                host, int(port), ranks, is_master=rank == 0, wait_for_workers=False, multi_tenant=True
            )

    def total(self, own_P: Tensor) -> Tensor:
        if self.store is None:
            return own_P
        self.count += 1
        total, keys = f"{self.count}/total", [f"{self.count}/{rank}" for rank in range(self.ranks)]
        self.store.set(keys[self.rank], own_P.numpy().tobytes())
        if self.rank == 0:
            self.store.wait(keys)
            self.store.set(total, sum(map(numbers, self.store.multi_get(keys))).numpy().tobytes())
        return numbers(self.store.get(total))


def numbers(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.float64)


class WholeNumbers:
    """The engine: every rank holds all weights, and saves its part of them."""

    size, description, device = WEIGHTS, "whole numbers", torch.device("cpu")

    def __init__(self, slot: WorkerSlot, sums: Sums, disk: Path) -> None:
        self.number, self.sums, self.disk = slot.number, sums, disk
        self.part = slice(*(WEIGHTS * edge // slot.pool.size for edge in (slot.rank, slot.rank + 1)))
        self.file, self.files = f"part_{slot.rank}", [f"part_{rank}" for rank in range(slot.pool.size)]
        self.weight_P = torch.arange(WEIGHTS, dtype=torch.float64)
        self.gradient_P = torch.zeros(WEIGHTS, dtype=torch.float64)
        self.updates, self.writer = 0, CheckpointWriter()

    def meet_fault(self, place: str) -> None:
        meet_fault(self.number, place, -(-self.updates // UPDATES), self.disk)

    def score(self, batch: Batch) -> Tensor:
        return logprobs_of(batch.tokens_T) * batch.mask_T

    def forward_backward(self, batch: TrainBatch, objective: Any, counts: Any) -> None:
        """Each token adds a whole number to one element: by its place in the answer, its advantage and its id."""
        self.updates += 1
        self.meet_fault("forward_backward")
        place_T = torch.cat([torch.arange(int(length)) for length in batch.length_N])
        advantage_T = (batch.advantages_T.double() * 1024).round() * batch.mask_T
        index_T = (batch.tokens_T * 7919 + place_T * 31) % WEIGHTS
        self.gradient_P.index_add_(0, index_T, advantage_T * (1 + place_T % 97))

    def optim_step(self, learning_rate: float) -> Update:
        self.meet_fault("optim_step")
        self.weight_P = (3 * self.weight_P + self.sums.total(self.gradient_P)) % MODULUS
        self.gradient_P = torch.zeros_like(self.gradient_P)
        return Update(1.0, True)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self.weight_P

    def manifest(self) -> list[TensorSpec]:
        return [TensorSpec("weight", [WEIGHTS], "float64")]

    def fingerprints(self) -> Tensor:
        return stacked([fingerprint(self.weight_P)])

    def save(self, folder: Path, contents: frozenset[str], background: bool = False) -> list[Path]:
        saved = {"weight": self.weight_P[self.part].clone(), "updates": torch.tensor([float(self.updates)])}
        self.meet_fault("save")
        self.writer.write(folder, [whole_file(folder, self.file, saved)], background=background)
        return [folder / f"{file}.safetensors" for file in self.files]

    def check_save(self, wait: bool) -> None:
        self.writer.check(wait=wait)

    def load(self, folder: Path, contents: frozenset[str]) -> None:
        self.weight_P, self.updates = saved_weights(folder)
        self.meet_fault("load")


def saved_weights(folder: Path) -> tuple[Tensor, int]:
    """(weights, updates) of a checkpoint of any number of ranks."""
    parts = [load_file(file) for file in sorted(folder.glob("part_*"), key=lambda file: int(file.stem[5:]))]
    return torch.cat([part["weight"] for part in parts]), int(parts[0]["updates"])


def logprobs_of(tokens_T: Tensor) -> Tensor:
    return -(1 + tokens_T % 7).float() / 8


class RecordedAnswers(Rollout):
    """Answers with recorded lengths. Each takes its tokens' time, beside the others of the engine."""

    def __init__(self, number: int, most: int, disk: Path) -> None:
        self.number, self.most, self.disk = number, most, disk
        self.token_s = float(os.environ[TOKEN_S])
        self.weight_P, self.version = torch.arange(WEIGHTS, dtype=torch.float64), 0
        self.submitted = 0
        self.waiting: dict[int, Request] = {}
        self.running: dict[int, tuple[float, Completion]] = {}  # when it ends

    def submit(self, request: Request) -> int:
        self.submitted += 1
        self.waiting[self.submitted] = request
        return self.submitted

    def poll(self) -> list[Completion]:
        meet_fault(self.number, "generate", self.version + 1, self.disk)
        now = time.monotonic()
        for number in [*self.waiting][: self.most - len(self.running)]:
            answer = self.answer(number, self.waiting.pop(number))
            self.running[number] = now + len(answer.tokens_L) * self.token_s, answer
        if self.running:
            first = min(ends for ends, _ in self.running.values())
            time.sleep(min(max(first - now, 0.0), POLL_S))
        ended = [number for number, (ends, _) in self.running.items() if ends <= time.monotonic()]
        return [self.running.pop(number)[1] for number in ended]

    def answer(self, number: int, request: Request) -> Completion:
        weights = hashlib.blake2b(self.weight_P.numpy().tobytes(), digest_size=8).hexdigest()
        draw = random.Random(f"{request.seed}/{weights}/{request.tokens}")
        length = max(1, round(draw.lognormvariate(0.0, SIGMA) * MEDIAN_TOKENS))
        limit = request.sampling.max_new_tokens
        tokens_L = torch.tensor([FIRST_TOKEN + draw.randrange(TOKENS) for _ in range(min(length, limit))])
        return Completion(number, tokens_L, logprobs_of(tokens_L), length <= limit, self.version)

    def cancel(self, request: int) -> None:
        self.waiting.pop(request, None)
        self.running.pop(request, None)

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        for _, tensor in weights:
            self.weight_P = tensor.clone()
        self.version = version

    def held_weights(self) -> Mapping[str, Tensor]:
        return {"weight": self.weight_P}

    def wake(self) -> None: ...

    def max_unfinished(self) -> int:
        return 2 * self.most

    def on_device(self) -> nullcontext[None]:
        return nullcontext()


class DescribedOnly:
    """The files of the policy in a checkpoint."""

    def stop_ids(self) -> tuple[int, ...]:
        return ()

    def describe(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


class SimulatedWorker(BaseWorker[Config]):
    def __init__(self, config: Config, layout: WorkerLayout, slot: WorkerSlot) -> None:
        super().__init__(config, layout, slot)
        self.disk = Path(config.trainer.default_local_dir).parent

    def build(self, rendezvous: Rendezvous) -> dict[str, Any]:
        pool, section = self.slot.pool, self.config.actor_rollout_ref.rollout
        actor = WholeNumbers(self.slot, Sums(self.slot.rank, pool.size, rendezvous.get(pool.name)), self.disk)
        rollout = RecordedAnswers(self.slot.number, section.sequences("cpu"), self.disk)
        rollout.report_every_s = report_interval_s(pool.size)
        sync = WeightSync(actor, rollout, compares=True, setting="simulated")  # type: ignore[arg-type]
        self.roles |= {ACTOR: actor, ROLLOUT: rollout, WEIGHT_SYNC: sync, FILES: DescribedOnly()}
        return {}


def simulate(directory: Path, steps: int, faults: Path, token_s: float, overrides: Sequence[str]) -> int:
    """A run in this process; its exit status."""
    import pytest

    from tests.e2e.runs import command

    score = Path(__file__).with_name("simulated_score.py")  # without torch, which a process of rewards would import
    keys = (f"custom_reward_function.path={score}", "algorithm.adv_estimator=grpo", *overrides)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rloom.launch.workers.Worker", SimulatedWorker)
        patch.setenv(FAULTS, str(faults))
        patch.setenv(TOKEN_S, str(token_s))
        return command(directory, steps, *keys)
