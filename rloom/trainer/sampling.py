"""Phase one of the loop: prompts -> answers -> scores, the scoring done while other answers are still being written."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Protocol

import torch

from rloom.algos.estimators import informative_groups
from rloom.batch import Batch, Trajectory
from rloom.errors import TrainingError
from rloom.packing import share_rows
from rloom.rewards.background import ScoreQueue
from rloom.rollout.base import Completion, Request, Sampling
from rloom.runtime.group import Group
from rloom.types import Prompt, Sample, Score


class Decode(Protocol):
    def __call__(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True)
class PendingTrajectories:
    """Answers whose scores are still being computed."""

    rows: list[tuple[Prompt, Completion, Future[Score]]]

    def scored(self, progress: Callable[[int, int], None]) -> list[Trajectory]:
        """Wait for the scores that are not there yet."""
        trajectories = []
        for prompt, completion, score in self.rows:
            trajectories.append(trajectory(prompt, completion, score.result()))
            progress(len(trajectories), len(self.rows))
        return trajectories


@dataclass(frozen=True)
class Sampler:
    """Writes `n` answers to each prompt and scores them."""

    rollout: Group
    publishers: Group  # all that take part when the policy's weights go to the rollout engines
    reward: ScoreQueue
    decode: Decode
    seed: int

    def write(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        occasion: str,  # "train/12": with the seed and the row, it decides every draw
        progress: Callable[[int, int], None],
        first_row: int = 0,
    ) -> "PendingTrajectories":
        """`n` answers to each prompt, in the order of the prompts, their scores on the way."""
        asked = [prompt for prompt in prompts for _ in range(n)]
        requests = [
            Request(prompt.tokens, draw_seed(self.seed, occasion, first_row + row)) for row, prompt in enumerate(asked)
        ]
        answers: dict[int, tuple[Completion, Future[Score]]] = {}
        self.rollout.each("wake", [()] * self.rollout.size)
        shares = share(requests, self.rollout.size)
        arguments = [([requests[row] for row in rows], sampling) for rows in shares]
        for worker, (place, completion) in self.rollout.stream("generate", arguments):
            row = shares[worker][place]
            answers[row] = completion, self.reward.submit(self.sample_of(asked[row], completion))
            progress(len(answers), len(asked))
        self.rollout.each("sleep", [()] * self.rollout.size)
        return PendingTrajectories([(prompt, *answers[row]) for row, prompt in enumerate(asked)])

    def publish(self) -> None:
        """Let the rollout engines see the weights the policy has now."""
        self.publishers.each("load_weights", [()] * self.publishers.size)

    def sample_of(self, prompt: Prompt, completion: Completion) -> Sample:
        return Sample(
            data_source=prompt.data_source,
            prompt=prompt.text,
            response=self.decode(completion.tokens_L.tolist()),
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
        )

    def rows(self, trajectories: Sequence[Trajectory], step: int) -> list[dict[str, Any]]:
        """What a dump shows of them."""
        return [
            {
                "input": t.prompt.text,
                "output": self.decode(t.answer_tokens),
                "gts": t.prompt.ground_truth,
                "score": t.score.value,
                "reason": t.score.reason,
                "data_source": t.prompt.data_source,
                "step": step,
                **t.score.parts,
            }
            for t in trajectories
        ]


@dataclass(frozen=True)
class DynamicSampling:
    """DAPO's: groups whose scores are all equal teach nothing and are replaced by answers to fresh prompts."""

    groups_per_step: int
    max_rounds: int

    def fill(self, answer_once: Callable[[int], list[Trajectory]], n: int) -> list[Trajectory]:
        """`answer_once(round)` answers a step's worth of fresh prompts."""
        kept: list[Trajectory] = []
        for number in range(1, self.max_rounds + 1):
            answers = answer_once(number)
            batch = pack(answers, n)
            for group in informative_groups(batch.score_N, batch.group_N, batch.valid_N).nonzero().flatten().tolist():
                kept += answers[group * n : (group + 1) * n]
            if len(kept) >= self.groups_per_step * n:
                return kept[: self.groups_per_step * n]
        raise TrainingError(
            f"algorithm.filter_groups.max_num_gen_batches={self.max_rounds}: after so many rounds only "
            f"{len(kept) // n} of {self.groups_per_step} groups have answers of different score. Too easy or too hard "
            "for this model: change the data, raise rollout.n, or allow more rounds"
        )


def share(requests: Sequence[Request], workers: int) -> list[list[int]]:
    """Rows for each worker. The answers to one prompt stay together: its keys and values are computed once."""
    prompts = [list(rows) for _, rows in groupby(range(len(requests)), key=lambda row: requests[row].tokens)]
    shares = share_rows([len(requests[rows[0]].tokens) for rows in prompts], workers, balance=True)
    return [[row for prompt in chosen for row in prompts[prompt]] for chosen in shares]


def draw_seed(seed: int, occasion: str, row: int) -> int:
    """A seed of its own for every answer of every step: what resumes draws what it would have drawn."""
    digest = hashlib.blake2b(f"{seed}/{occasion}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes 63 bits


def trajectory(prompt: Prompt, completion: Completion, score: Score) -> Trajectory:
    before, after = len(prompt.tokens), len(completion.tokens_L)
    return Trajectory(
        prompt=prompt,
        tokens_L=torch.cat([torch.tensor(prompt.tokens), completion.tokens_L]),
        mask_L=torch.arange(before + after) >= before,
        logprobs_L=torch.cat([torch.zeros(before), completion.logprobs_L]),
        finished=completion.finished,
        score=score,
    )


def pack(trajectories: Sequence[Trajectory], n: int) -> Batch:
    return Batch.pack(trajectories, groups=[row // n for row in range(len(trajectories))])
