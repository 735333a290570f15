"""What a PPO step costs the driver: CPU seconds and peak memory, by workers and by tokens, without a model.

    python benchmarks/scale.py                        # the table of docs/measurements/workers.md
    python benchmarks/scale.py --plot docs/images/driver_cpu.svg
    python benchmarks/scale.py --workers 64 --tokens 4000000 --mini-batches 4

The stages are all that the driver does for each token, but for the text of an answer (the tokenizer and the reward).
The driver's side of the workers is that of forked ones. Their other sides are threads of one process, which computes
nothing: its results have the size of real ones, and its CPU is not counted. Each size is measured in a process of its
own.
"""

import argparse
import json
import os
import resource
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.correction import mismatch
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, gae, normalized
from rloom.algos.kl import token_rewards
from rloom.algos.objectives import PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import Batch, TokenOutputs, TokenRecord, TrainBatch, Trajectory
from rloom.engines.base import Update
from rloom.rollout.base import Completion
from rloom.runs.dumps.writer import DumpWriter, training_table
from rloom.runs.metrics import batch_metrics
from rloom.runtime.processes import BEGIN, ForkedHost, ForkedWorker, answer
from rloom.runtime.remote import RemoteGroup
from rloom.training.learning_rate import LearningRateSchedule
from rloom.training.roles import Learner, MiniBatching, Scorer
from rloom.training.scoring import PendingAnswer, answer_tokens
from rloom.types import Prompt, Score

OBJECTIVE = PolicyObjective("vanilla", LossSettings(0.2, 0.2, 3.0), "token-mean", 0.0, None, "low_var_kl")
WORKERS, MILLIONS = (1, 8, 64, 512), (1, 2, 4, 8)  # of tokens, for 64 workers
TARGET_TOKENS = 512 * 16 * 32768
PROMPT = Prompt(0, (), "1 + 1 =", tuple(range(128)), "data", "2")
SEND, ANSWERS = 4, 16  # answers of a message, of a prompt
COLOURS = {
    "answers": "#4e79a7", "score": "#f28e2b", "advantages": "#e15759", "critic": "#76b7b2",
    "actor": "#59a14f", "metrics": "#edc948", "dump": "#b07aa1",
}  # fmt: skip


class StubRole:
    """A model's role on a worker."""

    def __init__(self, name: str) -> None:
        self.name, self.tokens = name, 0

    def score(self, batch: Batch) -> Tensor:
        return torch.zeros(len(batch.tokens_T))

    def forward_backward(self, batch: TrainBatch, objective: Any, counts: Counts) -> None:
        self.tokens = len(batch.tokens_T)

    def optim_step(self, learning_rate: float) -> Update:
        outputs = TokenOutputs(*torch.zeros(2, self.tokens)) if self.name == "actor" else None
        return Update(1.0, True, {}, outputs)

    def generate_stream(self) -> Generator[list[tuple[int, Completion]], Sequence[tuple[int, int]], None]:
        """Is sent the number and the length of each answer."""
        items = yield []
        while True:
            found = [(n, Completion(n, torch.randint(0, 150_000, (of,)), torch.zeros(of), True, 0)) for n, of in items]
            items = yield found


class StubHost(ForkedHost):
    def __init__(self) -> None:
        self.number, self.unopened, self.stream = BEGIN, [], None
        self.object = SimpleNamespace(roles={name: StubRole(name) for name in ("actor", "critic", "ref", "rollout")})


class Stub(ForkedWorker):
    """The driver's side of a worker whose other side is a thread of another process."""

    def __init__(self, name: str, connection: Connection) -> None:
        self.name, self.log_file, self.connection = name, None, connection
        self.calls = self.loaded = BEGIN
        self.pending, self.lock, self.alive = {}, threading.Lock(), True
        self.outgoing = SimpleQueue()
        for work in (self.send, self.receive):
            threading.Thread(target=work, daemon=True).start()


def started(workers: int) -> list[Stub]:
    pairs = [socket.socketpair() for _ in range(workers)]
    if os.fork() == 0:
        torch.set_num_threads(1)
        for own, _ in pairs:
            own.close()
        threads = [threading.Thread(target=serve, args=(Connection(other.detach()),)) for _, other in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        os._exit(0)
    for _, other in pairs:
        other.close()
    return [Stub(f"worker {number}", Connection(own.detach())) for number, (own, _) in enumerate(pairs)]


def serve(connection: Connection) -> None:
    host = StubHost()
    with suppress(EOFError, OSError):
        while True:
            answer(connection, host, connection.recv_bytes())


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
        began = time.process_time()
        yield
        self.seconds[name] = time.process_time() - began


def peak_gb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


def generated(rollout: RemoteGroup, samples: int, length: int) -> list[Trajectory]:
    """The answers as they arrive, their tokens as the tokenizer takes them, and scored trajectories."""
    unsent = [list(range(share, samples, rollout.shares)) for share in range(rollout.shares)]

    def next_items(share: int) -> list[tuple[int, int]] | None:
        own, unsent[share] = unsent[share][:SEND], unsent[share][SEND:]
        return [(number, length - len(PROMPT.tokens)) for number in own] or None

    found: list[Trajectory] = []
    for _, finished in rollout.stream("generate_stream", next_items):
        for number, completion in finished:
            answer_tokens(completion)
            pending = PendingAnswer(PROMPT, number // ANSWERS, completion, "", [])
            found += pending.trajectories(Score(float(number % 2)), 0.0)
    return sorted(found, key=lambda trajectory: trajectory.group)


def measure(workers: int, tokens: int, mini_batches: int, per_share: int, length: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    stubs = started(workers)
    groups = max(tokens // length // ANSWERS, mini_batches)
    policy, critic = (learner(name, stubs, mini_batches, groups, per_share) for name in ("actor", "critic"))
    reference = Scorer(RemoteGroup(stubs, "ref", workers_per_share=per_share))
    before_gb, watch = peak_gb(), Watch()
    with watch.stage("answers"):
        trajectories = generated(RemoteGroup(stubs, "rollout", workers_per_share=per_share), groups * ANSWERS, length)
        batch = Batch.pack(trajectories)
    with watch.stage("score"):
        store = policy.store(batch, 1)
        pending = [scorer.start(batch, store) for scorer in (policy.scorer, reference, critic.scorer)]
        old_T, ref_T, values_T = [one.wait() for one in pending]
    with watch.stage("advantages"):
        rewards_T = token_rewards(batch)
        found = normalized(gae(AdvantageInputs(batch, rewards_T, values_T), AdvantageSettings()), batch)
        given = {"old_logprobs_T": old_T, "ref_logprobs_T": ref_T, "values_T": values_T}
        train_batch = TrainBatch.of(batch, found, **given)
        mismatch(train_batch, old_T)
    with watch.stage("critic"):
        critic.learn(train_batch, 1, store=store)
    with watch.stage("actor"):
        record = TokenRecord.empty(train_batch)
        policy.learn(train_batch, 1, record=record, store=store)
    with watch.stage("metrics"):
        batch_metrics(train_batch, rewards_T, finished=[True] * len(batch))
    with watch.stage("dump"), tempfile.TemporaryDirectory() as folder:
        writer = DumpWriter(Path(folder), limit=1e12, seed=0, report=sys.exit)
        writer.write("train", 1, partial(training_table, trajectories, train_batch, record))
        writer.close()
    seconds = watch.seconds
    return {
        "workers": workers,
        "workers of a share": per_share,
        "tokens": len(batch.tokens_T),
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "total": round(sum(seconds.values()), 3),
        "bytes a token": round((peak_gb() - before_gb) * 1e9 / len(batch.tokens_T), 1),
    }


def measured(workers: int, tokens: int, length: int, times: int) -> dict[str, Any]:
    runs = []
    for _ in range(times):
        with ProcessPoolExecutor(1, get_context("fork")) as process:
            runs.append(process.submit(measure, workers, tokens, 4, 1, length).result())
    least = min(runs, key=lambda run: run["total"])
    print(json.dumps(least), flush=True)
    return least


def plot(by_workers: Sequence[dict[str, Any]], by_tokens: Sequence[dict[str, Any]]) -> str:
    """Two bar charts of the stages in SVG; both have the same scale of seconds."""
    panels = [
        (
            f"{by_workers[0]['tokens'] / 2**20:.0f} million tokens",
            "workers",
            by_workers,
            [str(one["workers"]) for one in by_workers],
        ),
        (
            f"{by_tokens[0]['workers']} workers",
            "million tokens",
            by_tokens,
            [f"{one['tokens'] / 2**20:.0f}" for one in by_tokens],
        ),
    ]
    most = max(one["total"] for one in [*by_workers, *by_tokens])
    heading = "CPU seconds of the driver in a PPO step"
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 860 400" font-family="sans-serif" font-size="13">']
    parts.append(f'<rect width="860" height="400" fill="white"/><text x="20" y="24" font-size="16">{heading}</text>')
    for number, (title, axis, runs, names) in enumerate(panels):
        left = 60 + 350 * number
        parts.append(f'<text x="{left + 140}" y="52" text-anchor="middle">{title}</text>')
        parts.append(f'<text x="{left + 140}" y="385" text-anchor="middle">{axis}</text>')
        parts.append(f'<line x1="{left}" y1="340" x2="{left + 290}" y2="340" stroke="black"/>')
        for place, (run, name) in enumerate(zip(runs, names, strict=True)):
            x, y = left + 12 + place * 280 / len(runs), 340.0
            for stage, colour in COLOURS.items():
                height = run["seconds"][stage] / most * 260
                y -= height
                parts.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="36" height="{height:.1f}" fill="{colour}"/>')
            parts.append(f'<text x="{x + 18:.1f}" y="{y - 5:.1f}" text-anchor="middle">{run["total"]:.2g}</text>')
            parts.append(f'<text x="{x + 18:.1f}" y="360" text-anchor="middle">{name}</text>')
    for place, (stage, colour) in enumerate(reversed(COLOURS.items())):
        parts.append(f'<rect x="760" y="{90 + 24 * place}" width="14" height="14" fill="{colour}"/>')
        parts.append(f'<text x="780" y="{102 + 24 * place}">{stage}</text>')
    return "\n".join([*parts, "</svg>\n"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int)
    parser.add_argument("--per-share", type=int, default=1, help="workers of one share (tensor parallelism, Ulysses)")
    parser.add_argument("--tokens", type=int, default=2 << 20)
    parser.add_argument("--mini-batches", type=int, default=4)
    parser.add_argument("--length", type=int, default=2048, help="tokens of an answer and its prompt")
    parser.add_argument("--runs", type=int, default=3, help="of each size, of which the least counts")
    parser.add_argument("--plot", type=Path, help="an SVG of all sizes")
    given = parser.parse_args()
    if given.workers is not None:
        found = measure(given.workers, given.tokens, given.mini_batches, given.per_share, given.length)
        print(json.dumps(found))
        return
    torch.set_num_threads(1)
    by_workers = [measured(workers, given.tokens, given.length, given.runs) for workers in WORKERS]
    by_tokens = [
        next(one for one in by_workers if one["workers"] == 64)
        if millions << 20 == given.tokens
        else measured(64, millions << 20, given.length, given.runs)
        for millions in MILLIONS
    ]
    if given.plot is not None:
        given.plot.write_text(plot(by_workers, by_tokens))


if __name__ == "__main__":
    main()
