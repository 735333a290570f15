"""What a step costs the driver: CPU seconds and peak memory, by workers and by tokens, without a model.

    python benchmarks/scale.py                        # the table of docs/measurements/workers.md
    python benchmarks/scale.py --workers 64 --tokens 4000000 --mini-batches 4

The passes of a PPO step: old log-probs, reference, values, then the mini-batches of critic and actor. The workers are
stubs: one process reads all that is sent to them. Results have the size of real ones. What the stubs do is not counted.
Each size is measured in a process of its own.
"""

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from rloom.algos.objectives import PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import Advantages, Batch, TokenOutputs, TokenRecord, TrainBatch
from rloom.engines.base import Update
from rloom.errors import WorkerError
from rloom.runtime.pickling import SharedMemory
from rloom.runtime.processes import numbered, opened
from rloom.runtime.remote import Answer, RemoteGroup
from rloom.training.learning_rate import LearningRateSchedule
from rloom.training.roles import Learner, MiniBatching, Scorer

OBJECTIVE = PolicyObjective("vanilla", LossSettings(0.2, 0.2, 3.0), "token-mean", 0.0, None, "low_var_kl")
SIZES = [(1, 2), (8, 2), (64, 2), (512, 2), (64, 1), (64, 4)]  # (workers, millions of tokens)
TARGET_TOKENS = 512 * 16 * 32768


class Sink:
    """A process that reads what the driver sends, and nothing else."""

    def __init__(self) -> None:
        own, other = socket.socketpair()
        if os.fork() == 0:
            own.close()
            connection = Connection(other.detach())
            while True:
                try:
                    connection.recv_bytes()
                except EOFError:
                    os._exit(0)
        other.close()
        self.connection = Connection(own.detach())


class Stub:
    """A worker that answers at once. Messages are those of forked workers."""

    log_file: Path | None = None
    not_counted_s = 0.0

    def __init__(self, name: str, sink: Sink) -> None:
        self.name, self.sink, self.tokens = name, sink, 0

    def put(self, value: Any) -> Any:
        return SharedMemory(value)

    def submit(self, method: str, *arguments: Any) -> Answer:
        message = numbered(1, (method, arguments))
        self.sink.connection.send_bytes(message)
        with not_counted():
            reply = numbered(1, (None, self.result(*arguments)))
        answer = Answer()
        answer.set_result(opened(bytes(reply))[1]()[1])
        return answer

    def result(self, role: str, method: str, arguments: Sequence[Any], first: bool = True) -> Any:
        if not first:
            return None
        if method == "optim_step":
            outputs = None
            if role == "actor":
                outputs = TokenOutputs(torch.zeros(self.tokens), torch.zeros(self.tokens))
            return Update(1.0, True, {}, outputs)
        batch = arguments[0].make()
        self.tokens = len(batch.tokens_T)
        return torch.zeros(self.tokens) if method == "score" else None

    def death(self, error: BaseException) -> WorkerError | None:
        return None


@contextmanager
def not_counted() -> Iterator[None]:
    began = time.process_time()
    yield
    Stub.not_counted_s += time.process_time() - began


def random_batch(samples: int, length: int) -> Batch:
    tokens = samples * length
    return Batch(
        tokens_T=torch.randint(0, 150_000, (tokens,)),
        mask_T=torch.arange(length).repeat(samples) >= length // 16,
        rollout_logprobs_T=torch.zeros(tokens),
        length_N=torch.full((samples,), length),
        group_N=torch.arange(samples) // 16,
        score_N=torch.zeros(samples),
        valid_N=torch.ones(samples, dtype=torch.bool),
    )


def learner(name: str, workers: Sequence[Stub], mini_batches: int, groups: int, per_share: int) -> Learner:
    objective: Any = OBJECTIVE if name == "actor" else ValueObjective(0.5, "token-mean")
    return Learner(
        name,
        RemoteGroup(workers, name, workers_per_share=per_share),
        objective=objective,
        mini_batching=MiniBatching(groups // mini_batches, 1, False, 1, 32768),
        schedule=LearningRateSchedule(1e-6),
        balance=True,
        max_nonfinite=1,
    )


class Watch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        began = time.process_time() - Stub.not_counted_s
        yield
        self.seconds[name] = time.process_time() - Stub.not_counted_s - began


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def measure(workers: int, tokens: int, mini_batches: int, per_share: int, length: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    sink = Sink()
    stubs = [Stub(f"worker {number}", sink) for number in range(workers)]
    groups = max(tokens // length // 16, mini_batches)
    batch = random_batch(groups * 16, length)
    policy, critic = (learner(name, stubs, mini_batches, groups, per_share) for name in ("actor", "critic"))
    reference = Scorer(RemoteGroup(stubs, "ref", workers_per_share=per_share))
    before_gb, watch = peak_gb(), Watch()
    with watch.stage("share"):
        store = policy.store(batch, 1)
    with watch.stage("score"):
        pending = [scorer.start(batch, store) for scorer in (policy.scorer, reference, critic.scorer)]
        old_T, ref_T, values_T = [one.wait() for one in pending]
    with not_counted():
        found = Advantages(torch.zeros_like(old_T), torch.zeros_like(old_T))
        given = {"old_logprobs_T": old_T, "ref_logprobs_T": ref_T, "values_T": values_T}
        train_batch = TrainBatch.of(batch, found, **given)
    with watch.stage("critic"):
        critic.learn(train_batch, 1, store=store)
    with watch.stage("actor"):
        record = TokenRecord.empty(len(batch.tokens_T))
        policy.learn(train_batch, 1, record=record, store=store)
    seconds = watch.seconds
    return {
        "workers": workers,
        "workers of a share": per_share,
        "tokens": len(batch.tokens_T),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "total": round(sum(seconds.values()), 3),
        "bytes a token": round((peak_gb() - before_gb) * 1e9 / len(batch.tokens_T), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--per-share", type=int, default=1, help="workers of one share (tensor parallelism, Ulysses)")
    parser.add_argument("--tokens", type=int, default=2 << 20)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--length", type=int, default=1024, help="tokens of an answer")
    given = parser.parse_args()
    if given.workers is not None:
        found = measure(given.workers, given.tokens, given.mini_batches, given.per_share, given.length)
        print(json.dumps(found))
        return
    for workers, millions in SIZES:
        size = ["--workers", str(workers), "--tokens", str(millions << 20)]
        subprocess.run([sys.executable, __file__, *size], check=True)


if __name__ == "__main__":
    main()
