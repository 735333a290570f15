"""Phase one of the loop: prompts -> answers -> scores. Answers are scored while others are still being generated."""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Protocol

import torch

from rloom.algos.estimators import informative_groups
from rloom.batch import Batch, Trajectory, Turn
from rloom.errors import TrainingError
from rloom.packing import share_rows
from rloom.rewards.background import ScoreQueue
from rloom.rollout.base import Completion, Request, Sampling
from rloom.runtime.group import Group
from rloom.types import Prompt, Sample, Score

Progress = Callable[[int, int], None]  # (done, total)


class Decode(Protocol):
    def __call__(self, tokens: list[int]) -> str: ...


@dataclass(frozen=True)
class Answer:
    """An answer whose score may still be pending."""

    prompt: Prompt
    group: int
    completion: Completion
    scores: "Future[list[Score]]"  # of the samples that are scored together with it
    index: int  # of its own score among them

    def scored(self) -> Trajectory:
        prompt, completion = self.prompt, self.completion
        before, after = len(prompt.tokens), len(completion.tokens_L)
        return Trajectory(
            prompt=prompt,
            group=self.group,
            tokens_L=torch.cat([torch.tensor(prompt.tokens), completion.tokens_L]),
            logprobs_L=torch.cat([torch.zeros(before), completion.logprobs_L]),
            turns=(Turn(before, before + after, completion.version),),
            finished=completion.finished,
            score=self.scores.result()[self.index],
        )


@dataclass(frozen=True)
class PendingTrajectories:
    answers: list[Answer]

    def scored(self, progress: Progress) -> list[Trajectory]:
        """Waits for the scores."""
        trajectories = []
        for answer in self.answers:
            trajectories.append(answer.scored())
            progress(len(trajectories), len(self.answers))
        return trajectories


@dataclass
class Scoring:
    """Sends answers to the reward: each at once, or all answers to a prompt together if the reward compares them."""

    reward: ScoreQueue
    sample_of: Callable[[Prompt, Completion], Sample]
    answers_per_group: int
    scored: dict[int, Answer] = field(default_factory=dict)  # by row
    incomplete: dict[int, list[tuple[int, Prompt, Completion]]] = field(default_factory=lambda: defaultdict(list))

    def add(self, row: int, group: int, prompt: Prompt, completion: Completion) -> None:
        members = self.incomplete[group]
        members.append((row, prompt, completion))
        if self.reward.whole_groups and len(members) < self.answers_per_group:
            return
        members = sorted(self.incomplete.pop(group), key=lambda member: member[0])
        scores = self.reward.submit(tuple(self.sample_of(prompt, completion) for _, prompt, completion in members))
        for index, (row, prompt, completion) in enumerate(members):
            self.scored[row] = Answer(prompt, group, completion, scores, index)


@dataclass(frozen=True)
class Sampler:
    """Generates `n` answers to each prompt and scores them."""

    rollout: Group
    weight_sync: Group  # the workers that take part when the policy's weights go to the rollout engines
    reward: ScoreQueue
    decode: Decode
    seed: int

    def generate(
        self,
        prompts: Sequence[Prompt],
        n: int,
        sampling: Sampling,
        occasion: str,  # such as "train/12": with the seed and the row, it determines every draw
        progress: Progress,
        first_group: int = 0,  # groups are numbered from here, one for each prompt
    ) -> PendingTrajectories:
        """`n` answers to each prompt, in the order of the prompts. Their scores may be pending."""
        rows = [(first_group + index, prompt) for index, prompt in enumerate(prompts) for _ in range(n)]
        first_row = first_group * n
        requests = [
            Request(prompt.tokens, sampling, draw_seed(self.seed, occasion, first_row + row))
            for row, (_, prompt) in enumerate(rows)
        ]
        scoring = Scoring(self.reward, self.sample_of, answers_per_group=n)
        self.rollout.call("wake")
        shares = share(requests, self.rollout.shares)
        arguments = [([requests[row] for row in chosen],) for chosen in shares]
        for done, (number, (index, completion)) in enumerate(self.rollout.stream("generate", arguments), start=1):
            row = shares[number][index]
            group, prompt = rows[row]
            scoring.add(row, group, prompt, completion)
            progress(done, len(rows))
        self.rollout.call("sleep")
        return PendingTrajectories([scoring.scored[row] for row in range(len(rows))])

    def sync_weights(self, version: int) -> None:
        """The rollout engines generate with the policy's current weights from now on."""
        self.weight_sync.call("sync", version)

    def sample_of(self, prompt: Prompt, completion: Completion) -> Sample:
        tokens: list[int] = completion.tokens_L.tolist()
        return Sample(
            data_source=prompt.data_source,
            prompt=prompt.text,
            response=self.decode(tokens),
            ground_truth=prompt.ground_truth,
            extra_info=prompt.extra_info,
            messages=prompt.messages,
            prompt_tokens=prompt.tokens,
            response_tokens=tuple(tokens),
            columns=prompt.columns,
        )

    def rows(self, trajectories: Sequence[Trajectory], step: int) -> list[dict[str, Any]]:
        """The rows of a dump."""
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
    """DAPO's dynamic sampling: groups whose scores are all equal are replaced by answers to other prompts."""

    groups_per_step: int
    max_rounds: int

    def fill(self, generate_round: Callable[[int], list[Trajectory]]) -> list[Trajectory]:
        """`generate_round(number)` answers as many new prompts as a step has. Groups are numbered as they are kept."""
        kept: list[list[Trajectory]] = []
        for number in range(1, self.max_rounds + 1):
            trajectories = generate_round(number)
            batch = Batch.pack(trajectories)
            informative = informative_groups(batch.score_N, batch.group_N, batch.valid_N)
            members: dict[int, list[Trajectory]] = {group: [] for group in batch.group_N.unique()[informative].tolist()}
            for trajectory in trajectories:
                if trajectory.group in members:
                    members[trajectory.group].append(trajectory)
            kept += members.values()
            if len(kept) >= self.groups_per_step:
                chosen = enumerate(kept[: self.groups_per_step])
                return [replace(trajectory, group=group) for group, found in chosen for trajectory in found]
        raise TrainingError(
            f"algorithm.filter_groups.max_num_gen_batches={self.max_rounds}: after so many rounds only "
            f"{len(kept)} of {self.groups_per_step} groups have answers of different score. Too easy or too hard "
            "for this model: change the data, raise rollout.n, or allow more rounds"
        )


def share(requests: Sequence[Request], workers: int) -> list[list[int]]:
    """Rows for each share. The answers to one prompt stay together: its keys and values are computed once."""
    prompts = [list(rows) for _, rows in groupby(range(len(requests)), key=lambda row: requests[row].tokens)]
    shares = share_rows([len(requests[rows[0]].tokens) for rows in prompts], workers, balance=True)
    return [[row for prompt in chosen for row in prompts[prompt]] for chosen in shares]


def draw_seed(seed: int, occasion: str, row: int) -> int:
    """A seed for every answer of every step, so that a resumed run samples as an uninterrupted one."""
    digest = hashlib.blake2b(f"{seed}/{occasion}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes 63 bits
