"""The pieces of a step, for a loop of one's own."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

from rloom.algos.estimators import AdvantageInputs, AdvantageSettings
from rloom.algos.kl import token_rewards
from rloom.algos.registry import ALGORITHMS
from rloom.api.arguments import Given, Rows, configured
from rloom.api.config import ShortKeys, Source
from rloom.api.episodes import EnvironmentArgument
from rloom.api.rewards import RewardArgument
from rloom.batch import Advantages, Batch, TrainBatch, Trajectory
from rloom.config.schema import Config
from rloom.launch.build import PolicyParts, check_own_algorithm, open_parts, prepare
from rloom.launch.directory import claimed, run_directory, set_aside_later
from rloom.launch.early_checks import layout_of
from rloom.launch.identity import describe
from rloom.launch.job import LOGS, open_cluster_if_needed
from rloom.launch.models import needs_critic
from rloom.training.checkpoint import Checkpoints
from rloom.training.loop import State
from rloom.training.roles import Learner, Scorer, no_progress
from rloom.types import Prompt, Score

__all__ = [
    "ALGORITHMS",
    "AdvantageInputs",
    "AdvantageSettings",
    "Advantages",
    "Batch",
    "Learner",
    "Prompt",
    "Run",
    "Score",
    "Scorer",
    "TrainBatch",
    "Trajectory",
    "open_run",
    "token_rewards",
]


@dataclass(frozen=True)
class Run:
    """Models, data and reward of a run, ready for steps."""

    parts: PolicyParts
    checkpoints: Checkpoints

    @property
    def config(self) -> Config:
        return self.parts.config

    @property
    def policy(self) -> Learner:
        return self.parts.roles.policy

    @property
    def critic(self) -> Learner | None:
        """If the algorithm of the configuration needs one."""
        return self.parts.roles.critic

    @property
    def reference(self) -> Scorer | None:
        """If the configuration uses KL."""
        return self.parts.roles.reference

    @property
    def advantage_settings(self) -> AdvantageSettings:
        return self.parts.settings.advantage

    def next_prompts(self) -> list[Prompt]:
        """The prompts of the next step: data.train_batch_size of them, in the seeded order."""
        return self.parts.stream.next()

    def answer(self, prompts: Sequence[Prompt], step: int) -> list[Trajectory]:
        """rollout.n scored answers to each prompt. The seed of each answer depends on data.seed and `step`."""
        settings = self.parts.settings
        pending = self.parts.roles.sampler.generate(
            prompts, settings.answers_per_prompt, settings.sampling, f"train/{step}", no_progress
        )
        return pending.scored(no_progress, update_moments=True)

    def texts(self, trajectories: Sequence[Trajectory]) -> list[str]:
        """The answers as text."""
        return self.parts.roles.sampler.decode([trajectory.answer_tokens for trajectory in trajectories])

    def sync_weights(self, step: int) -> None:
        """The rollout engine generates with the policy's current weights from now on."""
        self.parts.roles.sampler.sync_weights(version=step)

    def validate(self, step: int) -> dict[str, float]:
        """The metrics on the validation prompts; empty if there are none."""
        evaluator = self.parts.roles.evaluator
        return {} if evaluator is None else evaluator.metrics(evaluator.answer(step, no_progress))

    def save(self, step: int) -> Path:
        """A checkpoint in the run directory, for `rloom eval`, `export` and `chat`, and to resume from."""
        parts = self.parts
        state = State(step, parts.kl, parts.stream.state(), parts.roles.sampler.reward.state())
        return self.checkpoints.save(step, parts.write_checkpoint, state.saved())


@contextmanager
def open_run(
    config: Source = None,
    *,
    reward: RewardArgument | None = None,
    reward_weights: Sequence[float] | None = None,
    train: Rows | None = None,
    validation: Rows | None = None,
    environment: EnvironmentArgument | None = None,
    tools: Sequence[Callable[..., Any]] = (),
    args: Any = None,
    **short: Unpack[ShortKeys],
) -> Iterator[Run]:
    """Load everything that a run needs and train nothing. The arguments are those of `rloom.train`.

    Checkpoints of an earlier run in the same directory are set aside.
    """
    given = Given(train, validation, reward, reward_weights, args, environment, tools)
    checked, data, _ = configured(config, given, short, "open_run")
    with claimed(checked, data.content) as own, open_cluster_if_needed(own, directory := run_directory(own)):
        check_own_algorithm(own)
        inputs = prepare(own, data)
        identity = describe(own, inputs)
        roles = ("actor", "critic") if needs_critic(own) else ("actor",)
        checkpoints = Checkpoints(directory, keep=dict.fromkeys(roles))
        with open_parts(own, layout_of(own), inputs, identity, directory / LOGS) as parts:
            set_aside_later(checkpoints, None)
            yield Run(parts, checkpoints)
