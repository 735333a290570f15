"""Small batches for the tests of `rloom.algos`.

A sample is written as its mask: `.` a token of the prompt, `w` one the policy wrote, `-` a tool's output.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from rloom.algos.estimators import AdvantageInputs, AdvantageSettings
from rloom.algos.kl import token_rewards
from rloom.algos.registry import ALGORITHMS
from rloom.batch import Batch, TrainBatch

a_few_examples = settings(max_examples=20, deadline=None, derandomize=True, database=None)


def batch_of(masks: Sequence[str], scores: Sequence[float | None], groups: Sequence[int] | None = None) -> Batch:
    mask_T = torch.tensor([letter == "w" for mask in masks for letter in mask], dtype=torch.bool)
    return Batch(
        tokens_T=torch.zeros(len(mask_T), dtype=torch.long),
        mask_T=mask_T,
        rollout_logprobs_T=torch.zeros(len(mask_T), dtype=torch.float64),
        length_N=torch.tensor([len(mask) for mask in masks], dtype=torch.long),
        group_N=torch.tensor([0] * len(masks) if groups is None else list(groups), dtype=torch.long),
        score_N=torch.tensor([score or 0.0 for score in scores], dtype=torch.float64),
        valid_N=torch.tensor([score is not None for score in scores], dtype=torch.bool),
    )


def outcome(
    masks: Sequence[str], scores: Sequence[float | None], groups: Sequence[int] | None = None
) -> AdvantageInputs:
    """Nothing but a score at the end of each answer."""
    batch = batch_of(masks, scores, groups)
    return AdvantageInputs(batch, token_rewards(batch, None, 0.0))


@dataclass(frozen=True)
class Sample:
    """One sample with all that an estimator or a loss may ask of it, drawn from `seed`."""

    mask: str
    group: int
    score: float | None
    seed: int

    @property
    def numbers(self) -> Tensor:
        """[kl, value, log-prob, old, reference, rollout, entropy] a token."""
        generator = torch.Generator().manual_seed(self.seed)
        noise = torch.randn(7, len(self.mask), generator=generator, dtype=torch.float64)
        base = -1 - noise[2].abs()
        return torch.stack(
            [noise[0], noise[1], base, base + noise[3] / 4, base + noise[4] / 4, base + noise[5] / 4, noise[6].abs()]
        )


@dataclass(frozen=True)
class Case:
    samples: tuple[Sample, ...]

    @property
    def batch(self) -> Batch:
        samples = self.samples
        batch = batch_of([s.mask for s in samples], [s.score for s in samples], [s.group for s in samples])
        return replace(batch, rollout_logprobs_T=self.numbers[5] * batch.mask_T)

    @property
    def numbers(self) -> Tensor:
        return torch.cat([sample.numbers for sample in self.samples], dim=1)

    def inputs(self, shift: float = 0.0) -> AdvantageInputs:
        """`shift` is added to every score."""
        batch, numbers = self.batch, self.numbers
        batch = replace(batch, score_N=batch.score_N + shift * batch.valid_N)
        greedy_N = torch.tensor([torch.nan if s.group == 2 else s.group / 4 for s in self.samples], dtype=torch.float64)
        return AdvantageInputs(batch, token_rewards(batch, numbers[0], 0.1), numbers[1], greedy_N)

    def train_batch(self, estimator: str = "rloo") -> TrainBatch:
        inputs, numbers = self.inputs(), self.numbers
        found = ALGORITHMS[estimator].estimate(inputs, AdvantageSettings(gamma=0.9))
        return TrainBatch(
            **vars(inputs.batch),
            advantages_T=found.advantages_T,
            old_logprobs_T=numbers[3],
            ref_logprobs_T=numbers[4],
            values_T=numbers[1],
            returns_T=found.returns_T,
        )


MASKS = (".w", "..ww", ".www", "..ww--w", ".w-w-ww", ".wwwww", "...")  # the last wrote nothing at all


def a_sample() -> st.SearchStrategy[Sample]:
    score = st.one_of(st.none(), st.integers(-3, 3).map(float), st.floats(-2, 2))
    return st.builds(Sample, st.sampled_from(MASKS), st.integers(0, 3), score, st.integers(0, 10**6))


def cases(min_size: int = 1) -> st.SearchStrategy[Case]:
    return st.lists(a_sample(), min_size=min_size, max_size=8).map(lambda samples: Case(tuple(samples)))


# Groups of 4, 3 and 1, two failed scores, tool output in the middle, a sample that wrote nothing.
MIXED = Case(
    tuple(
        Sample(mask, group, score, seed)
        for seed, (mask, group, score) in enumerate(
            [
                ("..www", 0, 1.0),
                (".ww--ww", 0, 0.0),
                ("..w", 0, None),
                (".wwww", 0, 0.5),
                ("..w-w-w", 1, 2.0),
                (".ww", 1, -1.0),
                ("...", 1, 0.0),
                (".www", 2, None),
                (".wwwwwww", 3, 1.0),
            ]
        )
    )
)
