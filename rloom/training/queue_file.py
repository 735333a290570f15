"""The file of a checkpoint with the groups that generation has begun: `queue.parquet`, a row for each answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rloom.errors import CheckpointError
from rloom.rollout.base import Completion
from rloom.training.ahead import Queue, QueuedAnswer, QueuedGroup
from rloom.types import Prompt

QUEUE_FILE = "queue.parquet"
SCHEMA = pa.schema(
    {
        "group": pa.int64(),
        "prompt": pa.int64(),  # its row in the data
        "tokens": pa.list_(pa.int32()),
        "logprobs": pa.list_(pa.float32()),
        "run_tokens": pa.list_(pa.int32()),  # of the runs that one version of the weights sampled, in order
        "run_versions": pa.list_(pa.int64()),
        "complete": pa.bool_(),
        "stopped": pa.bool_(),  # by a stop token
    }
)


def write_queue(folder: Path, queue: Queue) -> None:
    rows = [answer_row(group, answer) for group in queue.groups for answer in group.answers]
    counts = {"admitted": str(queue.admitted), "dropped": str(queue.dropped)}
    table = pa.Table.from_pylist(rows, SCHEMA).replace_schema_metadata(counts)
    pq.write_table(table, folder / QUEUE_FILE)


def answer_row(group: QueuedGroup, answer: QueuedAnswer) -> dict[str, Any]:
    so_far = answer.so_far
    return {
        "group": group.number,
        "prompt": group.prompt.index,
        "tokens": [] if so_far is None else so_far.tokens_L.tolist(),
        "logprobs": [] if so_far is None else so_far.logprobs_L.tolist(),
        "run_tokens": [tokens for tokens, _ in answer.runs],
        "run_versions": [version for _, version in answer.runs],
        "complete": answer.complete,
        "stopped": so_far is not None and so_far.finished,
    }


@dataclass(frozen=True)
class QueueReader:
    """What the run has of the rows: its prompts by their row in the data, and its answers to each."""

    prompts: Mapping[int, Prompt]
    answers_per_prompt: int

    def read(self, checkpoint: Path) -> Queue | None:
        """None: the run that saved it did not generate ahead."""
        file = checkpoint / QUEUE_FILE
        if not file.exists():
            return None
        try:
            table = pq.read_table(file)
            counts = {name: int((table.schema.metadata or {})[name.encode()]) for name in ("admitted", "dropped")}
            groups: dict[int, list[dict[str, Any]]] = {}
            for row in table.cast(SCHEMA).to_pylist():
                groups.setdefault(row["group"], []).append(row)
            return Queue(tuple(self.group(number, rows) for number, rows in sorted(groups.items())), **counts)
        except (pa.ArrowException, KeyError, TypeError, ValueError, OSError) as error:
            raise CheckpointError(
                f"{file}: the unfinished answers cannot be read ({type(error).__name__}: {error}); resume from another "
                "checkpoint"
            ) from error

    def group(self, number: int, rows: list[dict[str, Any]]) -> QueuedGroup:
        if len(rows) != self.answers_per_prompt:
            raise ValueError(f"{len(rows)} answers to a prompt; actor_rollout_ref.rollout.n={self.answers_per_prompt}")
        return QueuedGroup(number, self.prompts[rows[0]["prompt"]], tuple(map(queued_answer, rows)))


def queued_answer(row: Mapping[str, Any]) -> QueuedAnswer:
    tokens, logprobs = row["tokens"], row["logprobs"]
    runs = tuple(zip(row["run_tokens"], row["run_versions"], strict=True))
    counts, versions = row["run_tokens"], row["run_versions"]
    if not len(tokens) == len(logprobs) == sum(counts) or min(counts, default=1) < 1 or versions != sorted(versions):
        raise ValueError(f"{len(tokens)} tokens, {len(logprobs)} log-probs, {counts} tokens of the versions {versions}")
    if not tokens:
        return QueuedAnswer()
    so_far = Completion(
        request=0,
        tokens_L=torch.tensor(tokens),
        logprobs_L=torch.tensor(logprobs),
        finished=row["stopped"],
        version=runs[-1][1],
        interrupted=not row["complete"],
    )
    return QueuedAnswer(so_far, runs)
