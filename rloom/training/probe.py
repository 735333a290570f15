"""The probe: a fixed request, whose answer's log-probs in rollout engine and actor are compared. For engines whose
weights cannot be read: servers, and engines with a layout of their own.

An engine that never gets new weights agrees with a slowly changing actor for a long time. Its log-probs of the probe
stay the same, though, while the actor's change: this is found before the two are far apart.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from rloom.algos.objectives import Metrics
from rloom.batch import Batch, Trajectory
from rloom.errors import ModelError
from rloom.rollout.base import Completion, Request, Sampling
from rloom.runtime.group import Group
from rloom.training.roles import Scorer
from rloom.training.scoring import PendingAnswer
from rloom.types import Prompt, Score

TOKENS = 8  # of the prompt and of the answer
FIRST_TOKEN = 3  # lower ones are special tokens in many vocabularies
# mean difference of log-probs; bfloat16 kernels differ by 0.01 to 0.05, wrong weights by more than 1
LARGEST_DIFFERENCE = 0.3
EVERY = 10  # weight syncs: a probe takes about a tenth of a second
# An engine's log-probs stay if they change by less than this share of the actor's change, once that is so large
SMALL_SHARE, LARGE_CHANGE = 0.2, 0.1
FEWEST_TOKENS = 4  # that two answers begin with, to be compared
METRIC = "training/probe_logprobs_diff"
OTHER_ENGINE = "actor_rollout_ref.rollout.name=native or hf"


@dataclass(frozen=True)
class ProbeRequests:
    """Requests that are equal at all times: one for each engine that a worker calls."""

    longest: int  # prompt and answer
    temperature: float
    engines: int = 1

    def all(self) -> list[Request]:
        length = min(TOKENS, self.longest - 1)
        sampling = Sampling(min(TOKENS, self.longest - length), temperature=self.temperature, ignore_eos=True)
        return [Request(self.prompt(number % length, length), sampling, seed=0) for number in range(self.engines)]

    def prompt(self, shift: int, length: int) -> tuple[int, ...]:
        """Rotated: a server gets the requests that begin as an earlier one of its own."""
        tokens = tuple(range(FIRST_TOKEN, FIRST_TOKEN + length))
        return tokens[shift:] + tokens[:shift]

    def trajectories(self, completions: Sequence[Completion]) -> list[Trajectory]:
        return [
            PendingAnswer(Prompt(0, (), "", request.tokens, ""), 0, completion, "", ()).trajectory(
                completion, Score(1.0)
            )
            for request, completion in zip(self.all(), completions, strict=True)
        ]


@dataclass(frozen=True)
class Probed:
    """The answer of an engine, and its log-probs in both."""

    version: int
    tokens_L: Tensor
    engine_L: Tensor
    actor_L: Tensor

    @property
    def difference(self) -> float:
        return mean_difference(self.actor_L, self.engine_L)

    def changes_since(self, first: "Probed") -> tuple[float, float] | None:
        """Mean changes of the log-probs of actor and engine, over the tokens that both answers begin with."""
        differ_L = (self.tokens_L != first.tokens_L).nonzero()
        equal = slice(int(differ_L[0]) if len(differ_L) else len(self.tokens_L))
        if len(self.tokens_L[equal]) < min(FEWEST_TOKENS, len(self.tokens_L)):
            return None
        actor = mean_difference(self.actor_L[equal], first.actor_L[equal])
        return actor, mean_difference(self.engine_L[equal], first.engine_L[equal])


def mean_difference(one_L: Tensor, other_L: Tensor) -> float:
    return float((one_L - other_L).abs().mean())


def compared(trajectories: Sequence[Trajectory], actor_T: Tensor) -> list[Probed]:
    """`actor_T` begins with the log-probs of these trajectories."""
    lengths = [len(trajectory.tokens_L) for trajectory in trajectories]
    actor = actor_T[: sum(lengths)].split(lengths)
    return [
        Probed(t.turns[0].version, t.tokens_L[t.mask_L], t.logprobs_L[t.mask_L], actor_L[t.mask_L])
        for t, actor_L in zip(trajectories, actor, strict=True)
    ]


def farthest(probed: Sequence[Probed]) -> Probed:
    """The one that differs most; nan is more than any number."""
    return max(probed, key=lambda one: math.inf if math.isnan(one.difference) else one.difference)


class WeightProbe:
    """Asks the engines when the next answers are generated, and the actor before its next update."""

    def __init__(self, rollout: Group, probe: ProbeRequests, setting: str, every: int = EVERY) -> None:
        self.rollout, self.probe, self.setting, self.every = rollout, probe, setting, every
        self.left = 0  # weight syncs until the next probe
        self.asked: list[list[Completion]] | None = None  # of each share of the engines; not yet compared
        self.first: dict[int, Probed] = {}  # by the number of the answer
        self.suspect = True  # the last probe was too far from the actor; before the first, no difference is allowed

    def weights_changed(self) -> None:
        """The engines were sent new weights."""
        self.left = 0 if self.asked is not None else max(0, self.left - 1)
        self.asked = None  # the actor has other weights now

    def ask(self) -> None:
        """If a probe is due. The engines are awake, and have no request."""
        if self.left == 0 and self.asked is None:
            self.asked = self.rollout.call("generate_all", self.probe.all())

    def compare(self, scorer: Scorer) -> Metrics:
        """With the weights that the engines were sent last."""
        if self.asked is None:
            return {}
        trajectories = [found for share in self.asked for found in self.probe.trajectories(share)]
        copies = -(-scorer.group.shares // len(trajectories))  # every worker of the actor gets one
        found = compared(trajectories, scorer.score(Batch.pack(trajectories * copies)))
        self.asked, self.left = None, self.every
        for number, probed in enumerate(found):
            self.check_change(number, probed)
        largest = farthest(found)
        self.check_difference(largest)
        return {METRIC: largest.difference}

    def check_difference(self, probed: Probed) -> None:
        """An error if twice in a row, or the first: a router that chooses other experts can move a few tokens far."""
        is_far = not probed.difference <= LARGEST_DIFFERENCE  # nan, too
        if is_far and self.suspect:
            raise ModelError(
                f"{self.setting}: with the weights of step {probed.version} the engine's log-probs of a fixed text "
                f"differ from the actor's by {probed.difference:.2g} on average: it does not have the actor's "
                "weights, or does not compute this model as the trainer does; continue from the last checkpoint with "
                f"{OTHER_ENGINE}"
            )
        self.suspect = is_far
        if is_far:
            self.left = 1

    def check_change(self, number: int, probed: Probed) -> None:
        first = self.first.setdefault(number, probed)
        changes = probed.changes_since(first)
        if changes is None:  # another answer: later ones are compared with this
            self.first[number] = probed
            return
        actor, engine = changes
        if actor > LARGE_CHANGE and engine < SMALL_SHARE * actor:
            raise ModelError(
                f"{self.setting}: from step {first.version} to step {probed.version} the actor's log-probs of a fixed "
                f"text have changed by {actor:.2g} on average, and the engine's by {engine:.2g}: the engine does not "
                "get the actor's weights, or does not use the LoRA adapter that it gets; continue from the last "
                f"checkpoint with {OTHER_ENGINE}"
            )


def check_first(probed: Sequence[Probed], setting: str) -> None:
    """Before the first step: wrong weights are not the only cause."""
    difference = farthest(probed).difference
    if not difference <= LARGEST_DIFFERENCE:  # nan, too
        raise ModelError(
            f"{setting}: its log-probs differ from the trainer's by {difference:.2g} on "
            "average, with the same weights: it does not compute this model as the trainer does; use "
            f"{OTHER_ENGINE}"
        )
