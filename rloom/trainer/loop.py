"""READ FIRST: the loop that trains a policy. Everything else in rloom is in the service of `Training.step`."""

import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import torch
from torch import Tensor

from rloom.algos.correction import CorrectionSettings, correct, mismatch
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, overlong_penalty
from rloom.algos.kl import KlControl, kl_estimator, mean_sample_kl, token_rewards
from rloom.algos.objectives import Metrics
from rloom.algos.packed import sum_by_sample
from rloom.algos.registry import Algorithm
from rloom.batch import Batch, TrainBatch, Trajectory
from rloom.data.stream import PromptStream
from rloom.errors import CheckpointError, RloomError, WorkerError
from rloom.observe.metrics import batch_metrics, part_metrics, throughput, utilisation
from rloom.observe.runlog import RunLog
from rloom.rewards.background import check_failures
from rloom.rollout.base import Sampling
from rloom.runtime.group import Group
from rloom.trainer.checkpoint import Checkpoints, read_state
from rloom.trainer.evaluate import Evaluator
from rloom.trainer.memory import explain_out_of_memory
from rloom.trainer.roles import Learner, Scorer
from rloom.trainer.sampling import DynamicSampling, Sampler, pack
from rloom.types import Prompt


@dataclass(frozen=True)
class Overlong:
    """DAPO's penalty on answers that come close to the limit."""

    max_length: int
    buffer: int
    factor: float


@dataclass(frozen=True)
class Settings:
    """What the loop itself needs to know of the configuration."""

    algorithm: Algorithm
    advantage: AdvantageSettings
    sampling: Sampling
    answers_per_prompt: int
    needs_old_logprobs: bool  # False when exactly on-policy and nothing else asks for them
    kl_in_reward: str | None  # the estimator's name
    correction: CorrectionSettings | None
    overlong: Overlong | None
    dynamic_sampling: DynamicSampling | None
    compare_logprobs: bool
    critic_warmup: int
    max_failed_share: float
    total_steps: int
    save_every: int | None
    validate_every: int | None
    validate_first: bool
    shown_answers: int
    rollout_dir: Path | None
    validation_dir: Path | None
    device: torch.device
    peak_flops: float | None  # of all devices together, where it is known


@dataclass(frozen=True)
class Roles:
    policy: Learner
    sampler: Sampler
    critic: Learner | None  # iff the algorithm needs one
    reference: Scorer | None  # iff KL is used
    evaluator: Evaluator | None  # iff there are held-out prompts
    workers: Group | None = None  # all of them, iff they are other processes than this one


@dataclass(frozen=True)
class State:
    """All of a run that is neither a weight nor a moment: with those, a checkpoint."""

    step: int
    kl: KlControl
    stream: dict[str, object]  # position in the data


@dataclass(frozen=True)
class StepResult:
    """What a step leaves for the record."""

    answers: Sequence[Trajectory]
    train_batch: TrainBatch
    rewards_T: Tensor
    metrics: Metrics


class Training:
    def __init__(
        self,
        settings: Settings,
        roles: Roles,
        stream: PromptStream,
        kl: KlControl,
        log: RunLog,
        checkpoints: Checkpoints,
        write_checkpoint: Callable[[Path], None],
        load_checkpoint: Callable[[Path], None],
    ) -> None:
        self.settings, self.roles, self.stream, self.log = settings, roles, stream, log
        self.checkpoints = checkpoints
        self.write_checkpoint, self.load_checkpoint = write_checkpoint, load_checkpoint
        self.state = State(step=0, kl=kl, stream=stream.state())
        self.interrupted = False
        self.updates_at_state = 0  # optimizer steps when `state` was set: with more, the weights are between two steps

    def run(self) -> None:
        if self.settings.validate_first and self.state.step == 0:
            self.validate(0)
        with self.finish_step_on_interrupt():
            while self.state.step < self.settings.total_steps and not self.interrupted:
                self.take_step(self.state.step + 1)
        if self.interrupted and self.state.step < self.settings.total_steps:
            raise KeyboardInterrupt

    def step(self, step: int) -> "StepResult":
        s, roles, log = self.settings, self.roles, self.log

        # 1. Sample and score: n answers to each prompt, scored while others are still being written.
        answers = self.sample(step)
        batch = pack(answers, s.answers_per_prompt)

        # 2. Turn rewards into advantages.
        old_logprobs_T = ref_logprobs_T = values_T = greedy_N = None
        if s.needs_old_logprobs:
            with self.stage("old_log_prob"):
                old_logprobs_T = roles.policy.score(batch)
        if roles.reference is not None:
            with self.stage("ref"):
                ref_logprobs_T = roles.reference.score(batch)
        if roles.critic is not None:
            with self.stage("values"):
                values_T = roles.critic.score(batch)
        if s.algorithm.needs_greedy:
            greedy_N = self.greedy_scores(answers, step)
        with log.span("adv"):
            rewards_T, kl, metrics = self.rewards(batch, old_logprobs_T, ref_logprobs_T)
            found = s.algorithm.advantage(AdvantageInputs(batch, rewards_T, values_T, greedy_N), s.advantage)
            train_batch = TrainBatch(
                **vars(batch),
                advantages_T=found.advantages_T,
                old_logprobs_T=old_logprobs_T,
                ref_logprobs_T=ref_logprobs_T,
                values_T=values_T,
                returns_T=found.returns_T if roles.critic is not None else None,
            )
            train_batch, measured = self.corrected(train_batch)

        # 3. Learn: the critic always, the policy once the critic has warmed up.
        metrics |= measured
        if roles.critic is not None:
            with self.stage("update_critic"):
                metrics |= roles.critic.learn(train_batch, step, log.advance)
        if step > s.critic_warmup:
            with self.stage("update_actor"):
                metrics |= roles.policy.learn(train_batch, step, log.advance)

        # 4. Publish the weights and look at ourselves.
        with self.stage("update_weights"):
            roles.sampler.publish()
        self.state, self.updates_at_state = State(step=step, kl=kl, stream=self.stream.state()), self.updates
        return StepResult(answers, train_batch, rewards_T, metrics)

    def sample(self, step: int) -> list[Trajectory]:
        """Answers to a step's prompts; with dynamic sampling, to as many as it takes to fill it."""
        s = self.settings

        def answer_fresh_prompts(occasion: str) -> list[Trajectory]:
            return self.answer(self.stream.next(), s.answers_per_prompt, s.sampling, occasion, "gen")

        if s.dynamic_sampling is None:
            return answer_fresh_prompts(f"train/{step}")
        return s.dynamic_sampling.fill(
            lambda number: answer_fresh_prompts(f"train/{step}/{number}"), s.answers_per_prompt
        )

    def answer(
        self, prompts: Sequence[Prompt], n: int, sampling: Sampling, occasion: str, stage: str
    ) -> list[Trajectory]:
        log = self.log
        with self.stage(stage):
            written = self.roles.sampler.write(prompts, n, sampling, occasion, log.advance)
        with log.span("reward"):
            answers = written.scored(log.advance)
        check_failures([answer.score for answer in answers], self.settings.max_failed_share)
        return answers

    def greedy_scores(self, answers: Sequence[Trajectory], step: int) -> Tensor:
        """For each sample, the reward of the greedy answer to its prompt; NaN where its score failed."""
        s = self.settings
        prompts = [answer.prompt for answer in answers[:: s.answers_per_prompt]]
        greedy = replace(s.sampling, temperature=0.0)
        batch = pack(self.answer(prompts, 1, greedy, f"greedy/{step}", "gen_greedy"), 1)
        score_N = self.penalised(batch).score_N.where(batch.valid_N, torch.nan)
        return score_N.repeat_interleave(s.answers_per_prompt)

    def penalised(self, batch: Batch) -> Batch:
        """Scores less the penalty on over-long answers, where that is asked for."""
        overlong = self.settings.overlong
        if overlong is None:
            return batch
        length_N = sum_by_sample(batch.mask_T.float(), batch.sample_T, len(batch))
        penalty_N = overlong_penalty(length_N, overlong.max_length, overlong.buffer, overlong.factor)
        return replace(batch, score_N=batch.score_N + penalty_N)

    def rewards(
        self, batch: Batch, logprobs_T: Tensor | None, ref_logprobs_T: Tensor | None
    ) -> tuple[Tensor, KlControl, Metrics]:
        """Rewards a token, the KL taken off where that is asked for, and the coefficient for the next step."""
        control, batch = self.state.kl, self.penalised(batch)
        if self.settings.kl_in_reward is None:
            return token_rewards(batch, None, 0.0), control, {}
        assert logprobs_T is not None and ref_logprobs_T is not None  # KL on: both were computed
        kl_T = kl_estimator(self.settings.kl_in_reward)(logprobs_T, ref_logprobs_T)
        kl = mean_sample_kl(batch, kl_T)
        metrics = {"actor/reward_kl_penalty": kl, "actor/kl_coef": control.coefficient}
        return token_rewards(batch, kl_T, control.coefficient), control.updated(kl, len(batch)), metrics

    def corrected(self, train_batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """The lesson weighed or thinned by how far the engine's log-probs are from the trainer's, which is measured."""
        logprobs_T, settings = train_batch.old_logprobs_T, self.settings.correction
        if logprobs_T is None or not (settings or self.settings.compare_logprobs):
            return train_batch, {}
        if settings is None:
            return train_batch, mismatch(train_batch, logprobs_T)
        found = correct(train_batch, logprobs_T, settings)
        return replace(train_batch, rollout_weights_T=found.weights_T, keep_T=found.keep_T), dict(found.metrics)

    def take_step(self, step: int) -> None:
        """One step, and what is due after it. What goes wrong on the way does not cost what was learned before."""
        last = step == self.settings.total_steps
        try:
            with self.log.span("step"):
                outcome = self.step(step)
            self.record(step, outcome)
            if due(self.settings.validate_every, step, last):
                self.validate(step)
            if last or due(self.settings.save_every, step, last):
                self.save()
        except Exception as error:
            error.add_note(self.save_after(error))
            raise

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """A timed part of a step that uses GPUs."""
        with self.log.span(name), explain_out_of_memory(name):
            yield

    @property
    def updates(self) -> int:
        """Optimizer steps that were begun, by any model."""
        return self.roles.policy.updates + (self.roles.critic.updates if self.roles.critic is not None else 0)

    def record(self, step: int, outcome: "StepResult") -> None:
        s, log, train_batch = self.settings, self.log, outcome.train_batch
        metrics = outcome.metrics | batch_metrics(
            train_batch, outcome.rewards_T, finished=[answer.finished for answer in outcome.answers]
        )
        metrics |= part_metrics([answer.score for answer in outcome.answers])
        if s.rollout_dir is not None:
            log.dump_rollouts(s.rollout_dir, step, self.roles.sampler.rows(outcome.answers, step))
        tokens = len(train_batch.tokens_T)
        metrics |= throughput(tokens=tokens, seconds=log.seconds("step"), device=s.device)
        for name, learner in (("actor", self.roles.policy), ("critic", self.roles.critic)):
            if learner is not None:  # forward and backward of a token: 6 operations a parameter
                flops = 6.0 * learner.parameters * tokens * learner.mini_batching.epochs
                metrics |= utilisation(
                    name, flops=flops, seconds=log.seconds(f"update_{name}"), peak_flops=s.peak_flops
                )
        if self.roles.workers is not None:
            for stats in self.roles.workers.each("stats", [()] * self.roles.workers.size):
                metrics |= stats
        log.step(step, metrics | {"training/global_step": step, "training/epoch": self.stream.epoch})

    def validate(self, step: int) -> dict[str, float]:
        evaluator, log = self.roles.evaluator, self.log
        if evaluator is None:
            return {}
        with self.stage("testing"):
            answers = evaluator.answer(step, log.advance)
        check_failures([t.score for t in answers], self.settings.max_failed_share)
        metrics = evaluator.metrics(answers)
        log.validation(step, metrics)
        rows = self.roles.sampler.rows(answers, step)
        if self.settings.validation_dir is not None:
            log.dump_rollouts(self.settings.validation_dir, step, rows)
        for row in rows[: self.settings.shown_answers]:
            log.message(f"  [{row['score']}] {row['input']!r} -> {row['output']!r} (expected {row['gts']!r})")
        return metrics

    def save_after(self, error: Exception) -> str:
        """Save the last completed step after an error, where that is possible; returns what the user is told of it."""
        if isinstance(error, CheckpointError):  # saving is what went wrong
            return self.last_checkpoint()
        if isinstance(error, WorkerError) or (isinstance(error, RloomError) and error.worker is not None):
            # saving needs all workers together: they would wait for the one that failed
            return f"A worker failed, so nothing was saved after it. {self.last_checkpoint()}"
        try:
            return self.save_last_step()
        except Exception as failure:  # shown after the error that came first
            return f"Saving failed as well: {type(failure).__name__}: {failure}\n{self.last_checkpoint()}"

    def save_last_step(self) -> str:
        """After a step that did not end: save what the step before left, unless weights have moved since."""
        if self.state.step == 0:
            return "No step was completed, so there is nothing to save."
        if self.updates != self.updates_at_state:
            return f"Stopped in the middle of an update. {self.last_checkpoint()}"
        return f"Stopped after step {self.state.step}, saved in {self.save()}. The same command goes on from there."

    def last_checkpoint(self) -> str:
        steps = self.checkpoints.steps()
        if not steps:
            return "No checkpoint was saved yet."
        return f"The last good checkpoint is {self.checkpoints.path(steps[-1])}; the same command goes on from it."

    def save(self) -> Path:
        path = self.checkpoints.path(self.state.step)
        if path.exists():
            return path
        state = {"step": self.state.step, "kl_coefficient": self.state.kl.coefficient, "stream": self.state.stream}
        with self.log.span("save_checkpoint"):
            return self.checkpoints.save(self.state.step, self.write_checkpoint, state)

    def resume(self, checkpoint: Path, *, keep_position: bool = True) -> None:
        """From a checkpoint that was checked. `keep_position`: in the data; False for other data."""
        saved = read_state(checkpoint)
        self.load_checkpoint(checkpoint)
        self.roles.sampler.publish()
        if keep_position:
            self.stream.load(saved["stream"])
        kl = replace(self.state.kl, coefficient=saved["kl_coefficient"])
        self.state = State(step=saved["step"], kl=kl, stream=self.stream.state())

    @contextmanager
    def finish_step_on_interrupt(self) -> Iterator[None]:
        """The first ctrl-C lets the step end, so that what is saved resumes exactly; the second does not wait."""

        def interrupt(number: int, frame: FrameType | None) -> None:
            if self.interrupted:
                raise KeyboardInterrupt
            self.interrupted = True
            self.log.message("Stopping: this step is finished and saved first. Once more stops at once.")

        previous = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def due(every: int | None, step: int, last: bool) -> bool:
    return every is not None and (last or step % every == 0)
