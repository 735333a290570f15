"""Phase one of the loop: prompts -> answers -> scores, the scoring done while other answers are still being written."""

import hashlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import chain, count
from typing import Any, Protocol

import torch

from rloom.algos.dapo import informative_groups
from rloom.batch import Batch, Trajectory
from rloom.data.stream import PromptStream
from rloom.errors import TrainingError
from rloom.rewards.background import check_failures
from rloom.rollout.base import Completion, Request, Sampling
from rloom.runtime.group import Group
from rloom.types import Prompt, Sample, Score


class ScoreQueue(Protocol):
    def submit(self, sample: Sample) -> Future[Score]: ...


class Decoder(Protocol):
    def __call__(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True)
class Sampler:
    """Writes `n` answers to each prompt and scores them."""

    rollout: Group
    reward: ScoreQueue
    decode: Decoder
    seed: int

    def sample(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        occasion: str,  # "train/12": with the seed, it decides every draw
        progress: Callable[[int, int], None],
    ) -> list[Trajectory]:
        """Trajectories in the order of the prompts, `n` a prompt."""
        asked = [prompt for prompt in prompts for _ in range(n)]
        requests = [Request(p.tokens, draw_seed(self.seed, occasion, row)) for row, p in enumerate(asked)]
        answers: list[Completion | None] = [None] * len(asked)
        scores: list[Future[Score] | None] = [None] * len(asked)
        self.rollout.each("wake", [()] * self.rollout.size)
        streams = self.rollout.each("generate", share(requests, self.rollout.size, sampling))
        for done, (row, completion) in enumerate(chain.from_iterable(streams), start=1):
            answers[row] = completion
            scores[row] = self.reward.submit(self.sample_of(asked[row], completion))
            progress(done, len(asked))
        self.rollout.each("sleep", [()] * self.rollout.size)
        return [
            trajectory(prompt, completion, future.result())
            for prompt, completion, future in zip(asked, answers, scores, strict=True)
            if completion is not None and future is not None
        ]

    def publish(self) -> None:
        """Let the rollout engines see the weights the policy has now."""
        self.rollout.each("load_weights", [()] * self.rollout.size)

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
    max_rounds: int  # 0: no limit
    max_failed_share: float

    def sample(
        self,
        sampler: Sampler,
        stream: PromptStream,
        n: int,
        sampling: Sampling,
        step: int,
        progress: Callable[[int, int], None],
    ) -> list[Trajectory]:
        kept: list[Trajectory] = []
        for number in count(1):
            answers = sampler.sample(stream.next(), n, sampling, f"train/{step}/{number}", progress)
            check_failures([answer.score for answer in answers], self.max_failed_share)
            batch = pack(answers, n)
            for group in informative_groups(batch.score_N, batch.group_N, batch.valid_N).nonzero().flatten().tolist():
                kept += answers[group * n : (group + 1) * n]
            if len(kept) >= self.groups_per_step * n:
                break
            if number == self.max_rounds:
                raise TrainingError(
                    f"algorithm.filter_groups.max_num_gen_batches={self.max_rounds}: after so many rounds only "
                    f"{len(kept) // n} of {self.groups_per_step} groups have answers of different score. Too easy or "
                    "too hard for this model: change the data, raise rollout.n, or allow more rounds"
                )
        return kept[: self.groups_per_step * n]


def share(requests: list[Request], workers: int, sampling: Sampling) -> list[tuple[list[Request], Sampling]]:
    assert workers == 1, "one process has one rollout engine"
    return [(requests, sampling)]


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
