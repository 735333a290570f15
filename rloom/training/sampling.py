"""Phase one of the loop: prompts -> answers -> scores. Answers are scored while others are still being generated."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, Literal, NamedTuple

from rloom.algos.estimators import informative_groups
from rloom.batch import Batch, Trajectory, answers_of
from rloom.episodes.runner import EpisodeRow, EpisodeRunner
from rloom.errors import TrainingError
from rloom.rewards.composite import CompositeReward
from rloom.rollout.base import Request, Sampling
from rloom.runtime.group import Group
from rloom.training.dispatch import Dispatcher
from rloom.training.probe import WeightProbe
from rloom.training.scoring import Decode, PendingTrajectories, Progress, Scoring
from rloom.types import Prompt

# Metrics of dynamic sampling: batches of prompts that a step took, groups of different scores that it did not need
ROUNDS, SURPLUS = "rollout/num_gen_batches", "rollout/surplus_groups"


@dataclass(frozen=True)
class Sampler:
    """Generates answers to each prompt and scores them."""

    rollout: Group
    weight_sync: Group  # the workers that take part when the policy's weights go to the rollout engines
    reward: CompositeReward
    decode: Decode
    seed: int
    episodes: EpisodeRunner | None = None  # iff answers have several turns
    probe: WeightProbe | None = None  # iff the weights of the rollout engines cannot be read

    @cached_property
    def max_unfinished(self) -> int | None:
        """Requests that one engine takes at a time; the engines are all alike."""
        limit: int | None = self.rollout.call("max_unfinished")[0]
        return limit

    def generate(
        self,
        prompts: Sequence[Prompt],
        answers_per_prompt: int,
        sampling: Sampling,
        seed_scope: str,  # such as "train/12": with the seed and the row, it determines every draw
        progress: Progress,
        first_group: int = 0,  # groups are numbered from here, one for each prompt
    ) -> PendingTrajectories:
        """The answers to each prompt, in the order of the prompts. Their scores may be pending."""
        rows = [
            (first_group + index, prompt) for index, prompt in enumerate(prompts) for _ in range(answers_per_prompt)
        ]
        first_row = first_group * answers_per_prompt
        if self.episodes is not None:
            return self.run_episodes(self.episodes, rows, answers_per_prompt, first_row, sampling, seed_scope, progress)
        groups = [
            [
                Request(prompt.tokens, sampling.after(prompt.tokens), draw_seed(self.seed, seed_scope, first_row + row))
                for row in range(group * answers_per_prompt, (group + 1) * answers_per_prompt)
            ]
            for group, prompt in enumerate(prompts)
        ]
        progress(0, len(rows))
        self.wake()
        dispatcher = Dispatcher(groups, self.rollout.shares, self.max_unfinished)
        with Scoring(self.reward, self.decode, answers_per_prompt=answers_per_prompt) as scoring:
            with closing(self.rollout.stream("generate_stream", dispatcher.next_requests)) as stream:
                for share, finished in stream:
                    scoring.check()
                    for index, completion in finished:
                        row = dispatcher.finish(share, index)
                        group, prompt = rows[row]
                        scoring.add(row, group, prompt, completion)
                        progress(dispatcher.finished, len(rows))
            self.rollout.call("sleep")
        return scoring.pending()

    def run_episodes(
        self,
        runner: EpisodeRunner,
        rows: Sequence[tuple[int, Prompt]],  # (group, prompt)
        answers_per_prompt: int,
        first_row: int,
        sampling: Sampling,
        seed_scope: str,
        progress: Progress,
    ) -> PendingTrajectories:
        """As `generate`, with an environment between the answers. The episodes of a prompt share an engine."""
        shares = self.rollout.shares
        planned = [
            EpisodeRow(row, group % shares, prompt, partial(self.turn_seed, seed_scope, first_row + row))
            for row, (group, prompt) in enumerate(rows)
        ]
        progress(0, len(rows))
        self.wake()
        tokens = runner.limits.response_tokens
        self.rollout.each("expect", [expected(planned, share, tokens) for share in range(shares)])
        with Scoring(self.reward, self.decode, answers_per_prompt=answers_per_prompt) as scoring:
            done = 0
            with runner.started(planned, sampling, shares) as turns:
                with closing(self.rollout.stream("generate_stream", turns.next_requests)) as stream:
                    for share, finished in stream:
                        scoring.check()
                        for index, completion in finished:
                            turns.complete(share, index, completion)
                        for row, record in turns.take_finished():
                            scoring.add(row, *rows[row], record)
                            done += 1
                            progress(done, len(rows))
                for row, record in turns.take_finished():
                    scoring.add(row, *rows[row], record)
                progress(len(rows), len(rows))
            self.rollout.call("sleep")
        return scoring.pending()

    def turn_seed(self, seed_scope: str, row: int, turn: int) -> int:
        return draw_seed(self.seed, seed_scope if turn == 0 else f"{seed_scope}/turn {turn}", row)

    def sync_weights(self, version: int) -> None:
        """The rollout engines generate with the policy's current weights from now on."""
        self.weight_sync.call("sync", version)
        if self.probe is not None:
            self.probe.weights_changed()

    def wake(self) -> None:
        self.rollout.call("wake")
        if self.probe is not None:
            self.probe.ask()

    def rows(self, trajectories: Sequence[Trajectory], step: int) -> list[dict[str, Any]]:
        """The rows of a dump, one for each answer."""
        return [
            {
                "input": t.prompt.text,
                "output": t.text,
                "gts": t.prompt.ground_truth,
                "score": t.score.value,
                "reason": t.score.reason,
                "detail": t.score.detail,
                "data_source": t.prompt.data_source,
                "step": step,
                **t.score.parts,
            }
            for t in answers_of(trajectories)
        ]


class FilledStep(NamedTuple):
    trajectories: list[Trajectory]
    metrics: dict[str, float]


@dataclass(frozen=True)
class DynamicSampling:
    """DAPO's dynamic sampling: groups whose scores are all equal are replaced by answers to other prompts."""

    groups_per_step: int
    max_rounds: int
    mean_range: tuple[float, float] | None = None  # kept instead: groups whose mean score is between these
    by: Literal["score", "acc"] = "score"  # what has to differ

    def fill(self, generate_round: Callable[[int], list[Trajectory]]) -> FilledStep:
        """`generate_round(number)` answers as many new prompts as a step has. Groups are numbered as they are kept.

        Groups of the last round beyond those of a step are dropped: kept for the next step, they would be answers of
        an older policy.
        """
        kept: list[list[Trajectory]] = []
        for number in range(1, self.max_rounds + 1):
            trajectories = generate_round(number)
            members: dict[int, list[Trajectory]] = {group: [] for group in self.kept(trajectories)}
            for trajectory in trajectories:
                if trajectory.group in members:
                    members[trajectory.group].append(trajectory)
            kept += members.values()
            if len(kept) >= self.groups_per_step:
                chosen = enumerate(kept[: self.groups_per_step])
                filled = [replace(trajectory, group=group) for group, found in chosen for trajectory in found]
                surplus = float(len(kept) - self.groups_per_step)
                return FilledStep(filled, {ROUNDS: float(number), SURPLUS: surplus})
        raise self.too_few(len(kept))

    def kept(self, trajectories: Sequence[Trajectory]) -> list[int]:
        """The groups that a step trains."""
        if self.mean_range is None and self.by == "score":
            return with_different_scores(trajectories)
        scores: dict[int, list[float]] = {}
        for answer in answers_of(trajectories):
            if (accuracy := answer.score.accuracy) is not None:
                scores.setdefault(answer.group, []).append(accuracy)
        if self.mean_range is None:
            return sorted(group for group, found in scores.items() if min(found) < max(found))
        low, high = self.mean_range
        return sorted(group for group, found in scores.items() if low < sum(found) / len(found) < high)

    def too_few(self, kept: int) -> TrainingError:
        return TrainingError(
            f"algorithm.filter_groups.max_num_gen_batches={self.max_rounds}: after so many rounds only "
            f"{kept} of {self.groups_per_step} groups are kept by algorithm.filter_groups. Too easy or too hard "
            "for this model: change the data, raise rollout.n, or allow more rounds"
        )


def with_different_scores(trajectories: Sequence[Trajectory]) -> list[int]:
    """The groups whose advantages are not all 0."""
    batch = Batch.pack(trajectories)
    informative = informative_groups(batch.score_N, batch.group_N, batch.valid_N)
    found: list[int] = batch.group_N.unique()[informative].tolist()
    return found


def expected(rows: Sequence[EpisodeRow], share: int, tokens: int) -> tuple[int, int, int]:
    """Arguments of Rollout.expect: (episodes of a share, their prompts, tokens of an episode after its prompt)."""
    own = [row for row in rows if row.share == share]
    return len(own), len({row.prompt.index for row in own}), tokens


def draw_seed(seed: int, seed_scope: str, row: int) -> int:
    """A seed for every answer of every step, so that a resumed run samples as an uninterrupted one."""
    digest = hashlib.blake2b(f"{seed}/{seed_scope}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1  # torch takes 63 bits
