"""The file of a checkpoint with the groups that generation has begun: `queue.safetensors`.

A: answers, T: tokens of all answers, R: runs of tokens that one version of the weights sampled.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from rloom.errors import CheckpointError
from rloom.rollout.base import Completion
from rloom.training.ahead import Queue, QueuedAnswer, QueuedGroup
from rloom.types import Prompt

QUEUE_FILE = "queue.safetensors"
ADMITTED = "admitted"  # groups in all, in the metadata


def write_queue(folder: Path, queue: Queue) -> None:
    answers = [(group, answer) for group in queue.groups for answer in group.answers]
    begun = [answer.so_far for _, answer in answers if answer.so_far is not None]
    runs = [run for _, answer in answers for run in answer.runs]
    tensors = {
        "group_A": torch.tensor([group.number for group, _ in answers], dtype=torch.long),
        "prompt_A": torch.tensor([group.prompt.index for group, _ in answers], dtype=torch.long),  # row in the data
        "tokens_A": torch.tensor([sum(tokens for tokens, _ in answer.runs) for _, answer in answers], dtype=torch.long),
        "runs_A": torch.tensor([len(answer.runs) for _, answer in answers], dtype=torch.long),
        "complete_A": torch.tensor([answer.complete for _, answer in answers], dtype=torch.bool),
        "stopped_A": torch.tensor([answer.stopped for _, answer in answers], dtype=torch.bool),
        "token_T": torch.cat([torch.empty(0, dtype=torch.long), *(one.tokens_L for one in begun)]).int(),
        "logprob_T": torch.cat([torch.empty(0), *(one.logprobs_L for one in begun)]),
        "tokens_R": torch.tensor([tokens for tokens, _ in runs], dtype=torch.long),
        "version_R": torch.tensor([version for _, version in runs], dtype=torch.long),
    }
    save_file(tensors, folder / QUEUE_FILE, {ADMITTED: str(queue.admitted)})


@dataclass(frozen=True)
class QueueReader:
    """What the run has of the rows: its prompts, in the order of their rows in the data, and its answers to each."""

    prompts: Sequence[Prompt]
    answers_per_prompt: int

    def read(self, checkpoint: Path) -> Queue | None:
        """None: the run that saved it did not generate ahead."""
        file = checkpoint / QUEUE_FILE
        if not file.exists():
            return None
        try:
            with safe_open(file, framework="pt") as found:
                tensors = {name: found.get_tensor(name) for name in found.keys()}  # noqa: SIM118  it is no mapping
                admitted = int((found.metadata() or {})[ADMITTED])
            return Queue(tuple(self.groups(tensors)), admitted)
        except (SafetensorError, KeyError, ValueError, TypeError, RuntimeError, OSError) as error:
            raise CheckpointError(
                f"{file}: the unfinished answers cannot be read ({type(error).__name__}: {error}); resume from another "
                "checkpoint"
            ) from error

    def groups(self, tensors: Mapping[str, Tensor]) -> list[QueuedGroup]:
        found = zip(tensors["group_A"].tolist(), tensors["prompt_A"].tolist(), queued_answers(tensors), strict=True)
        groups = []
        for (number, prompt), rows in groupby(found, key=lambda row: row[:2]):
            answers = tuple(answer for _, _, answer in rows)
            if len(answers) != self.answers_per_prompt:
                raise ValueError(
                    f"{len(answers)} answers to a prompt; actor_rollout_ref.rollout.n={self.answers_per_prompt}"
                )
            groups.append(QueuedGroup(number, self.prompt_of(prompt), answers))
        return groups

    def prompt_of(self, row: int) -> Prompt:
        place = bisect_left(self.prompts, row, key=lambda prompt: prompt.index)
        if place == len(self.prompts) or self.prompts[place].index != row:
            raise ValueError(f"the data have no row {row}")
        return self.prompts[place]


def queued_answers(tensors: Mapping[str, Tensor]) -> list[QueuedAnswer]:
    token_L = tensors["token_T"].long().split(tensors["tokens_A"].tolist())
    logprob_L = tensors["logprob_T"].split(tensors["tokens_A"].tolist())
    sizes = tensors["runs_A"].tolist()
    runs = zip(tensors["tokens_R"].split(sizes), tensors["version_R"].split(sizes), strict=True)
    return [
        queued_answer(tokens, logprobs, list(zip(counts.tolist(), versions.tolist(), strict=True)), complete, stopped)
        for tokens, logprobs, (counts, versions), complete, stopped in zip(
            token_L, logprob_L, runs, tensors["complete_A"].tolist(), tensors["stopped_A"].tolist(), strict=True
        )
    ]


def queued_answer(
    tokens_L: Tensor, logprobs_L: Tensor, runs: Sequence[tuple[int, int]], complete: bool, stopped: bool
) -> QueuedAnswer:
    counts, versions = [tokens for tokens, _ in runs], [version for _, version in runs]
    if sum(counts) != len(tokens_L) or min(counts, default=1) < 1 or versions != sorted(versions):
        raise ValueError(f"an answer has {len(tokens_L)} tokens, {counts} of them of the versions {versions}")
    if not runs:
        return QueuedAnswer()
    so_far = Completion(0, tokens_L, logprobs_L, finished=stopped, version=versions[-1], interrupted=not complete)
    return QueuedAnswer(so_far, tuple(runs))
