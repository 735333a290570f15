"""READ FIRST: the loop that trains a policy. `Training.step` is one step; all else in rloom is called from it."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rloom.algos.correction import CorrectionSettings, correct, mismatch
from rloom.algos.estimators import AdvantageInputs, AdvantageSettings, Shaping
from rloom.algos.kl import KlControl, kl_estimator, mean_sample_kl, token_rewards
from rloom.algos.objectives import Metrics
from rloom.algos.registry import Algorithm
from rloom.batch import Batch, TokenRecord, TrainBatch, Trajectory, answers_of
from rloom.data.stream import PromptStream
from rloom.doctor.run.live import LiveDiagnosis
from rloom.episodes.record import episode_metrics
from rloom.errors import CheckpointError, TrainingError
from rloom.rewards.composite import check_failures, common_reasons
from rloom.rollout.base import Sampling
from rloom.runs.dumps.writer import DumpSample, DumpWriter, training_table, validation_table
from rloom.runs.metrics import batch_metrics, part_metrics, throughput, utilisation
from rloom.runs.mismatch import MismatchMonitor
from rloom.runs.runlog import RunLog
from rloom.runtime.group import Group
from rloom.training.ahead import AheadSampler, Queue, can_train_all
from rloom.training.batch_store import BatchStore
from rloom.training.checkpoint import Checkpoints, Writing, read_state
from rloom.training.evaluate import Evaluator
from rloom.training.queue_file import QueueReader, write_queue
from rloom.training.roles import Learner, Scorer
from rloom.training.sampling import DynamicSampling, Sampler
from rloom.training.steps import (
    AfterStep,
    CompletedStep,
    StepLoop,
    StepSettings,
    WriteCheckpoint,
    always_continue,
    worker_metrics,
)
from rloom.types import Prompt

# Metrics of a step: seconds in which it waited for groups, and in which the rollout engines had no request of a queue
WAIT, IDLE = "training/wait_s", "rollout/idle_s"


class OldLogprobs(Enum):
    """Where the log-probs of the policy that generated the answers come from."""

    TRAINER = "trainer"  # a scoring pass over the batch
    ROLLOUT = "rollout"  # the rollout engine reported them


@dataclass(frozen=True, kw_only=True)
class Settings(StepSettings):
    """The part of the configuration that the loop itself uses."""

    algorithm: Algorithm
    advantage: AdvantageSettings
    sampling: Sampling
    answers_per_prompt: int
    old_logprobs: OldLogprobs | None  # None: those of the update are used, and nothing else needs them
    kl_in_reward: bool
    kl_estimator: str | None  # its name; None: the step measures no KL to the reference
    correction: CorrectionSettings | None
    shaping: Shaping
    mask_truncated: bool  # answers that ended at a limit are not in the loss
    dynamic_sampling: DynamicSampling | None
    compare_logprobs: bool
    mismatch_warning: float | None  # threshold
    critic_warmup: int
    max_failed_share: float
    shown_answers: int
    rollout_dir: Path | None
    validation_dir: Path | None


@dataclass(frozen=True)
class Roles:
    policy: Learner
    sampler: Sampler
    critic: Learner | None  # iff the algorithm needs one
    reference: Scorer | None  # iff KL is used or measured
    evaluator: Evaluator | None  # iff there are held-out prompts
    ahead: AheadSampler | None = None  # iff answers are generated ahead of the step that trains them
    workers: Group | None = None  # all of them, iff they are other processes


@dataclass(frozen=True)
class State:
    """What a checkpoint holds beside weights and optimizer moments."""

    step: int
    kl: KlControl
    stream: dict[str, object]  # position in the data
    reward: dict[str, Any]  # running moments
    queue: Queue | None = None  # iff answers are generated ahead; in a file of its own

    def saved(self) -> dict[str, Any]:
        """As JSON."""
        return {
            "step": self.step,
            "kl_coefficient": self.kl.coefficient,
            "stream": self.stream,
            "reward": self.reward,
        }


@dataclass(frozen=True)
class StepResult:
    """What is logged of a step."""

    trajectories: Sequence[Trajectory]
    train_batch: TrainBatch
    rewards_T: Tensor
    metrics: Metrics
    record: TokenRecord | None = None  # iff the policy was updated and its tokens are dumped
    dumped: DumpSample | None = None  # iff a part of the answers is dumped


class Training(StepLoop):
    settings: Settings
    state: State

    def __init__(
        self,
        settings: Settings,
        roles: Roles,
        stream: PromptStream,
        kl: KlControl,
        log: RunLog,
        checkpoints: Checkpoints,
        write_checkpoint: WriteCheckpoint,
        load_checkpoint: Callable[[Path], None],
        after_step: AfterStep = always_continue,
        diagnosis: LiveDiagnosis | None = None,
        dumps: DumpWriter | None = None,
    ) -> None:
        queue = None if roles.ahead is None else roles.ahead.queue
        state = State(0, kl, stream.state(), roles.sampler.reward.state(), queue)
        super().__init__(settings, state, log, checkpoints, write_checkpoint, after_step, diagnosis)
        self.roles, self.stream, self.load_checkpoint, self.dumps = roles, stream, load_checkpoint, dumps
        self.mismatch_monitor = MismatchMonitor(settings.mismatch_warning)
        self.has_sampled_dumps = False  # the log has said so

    def interrupt(self, number: int) -> None:
        if self.roles.sampler.episodes is not None:
            self.roles.sampler.episodes.interrupted = True
        super().interrupt(number)

    def step(self, step: int) -> "StepResult":
        s, roles, log = self.settings, self.roles, self.log

        # 1. Generate and score: n answers to each prompt, scored while others are still being generated.
        trajectories, metrics = self.sample(step)
        metrics |= self.probed()
        batch = Batch.pack(trajectories, mask_truncated=s.mask_truncated)
        store = roles.policy.store(batch, step)

        # 2. Turn scores into advantages.
        old_logprobs_T, ref_logprobs_T, values_T = self.model_outputs(batch, store)
        greedy_N = self.greedy_scores(trajectories, step) if s.algorithm.needs_greedy else None
        with log.span("adv"):
            rewards_T, kl, reward_metrics = self.rewards(batch, old_logprobs_T, ref_logprobs_T)
            inputs = AdvantageInputs(self.penalised(batch), rewards_T, values_T, greedy_N)
            found = s.algorithm.estimate(inputs, s.advantage)
            train_batch = TrainBatch.of(
                batch, found, old_logprobs_T=old_logprobs_T, ref_logprobs_T=ref_logprobs_T, values_T=values_T
            )
            train_batch, mismatch_metrics = self.corrected(train_batch)
            dumped = None if self.dumps is None else self.dumps.sample("train", step, trajectories)
            if dumped is not None:
                recorded_N = torch.zeros(len(batch), dtype=torch.bool)
                recorded_N[dumped.rows] = True
                train_batch = replace(train_batch, recorded_N=recorded_N)

        # 3. Update: the critic in every step, the policy once the critic's warm-up is over.
        metrics |= reward_metrics | mismatch_metrics
        if roles.critic is not None:
            with self.stage("update_critic"):
                metrics |= roles.critic.learn(train_batch.without_experts(), step, log.advance, store=store)
        record = None if self.dumps is None or step <= s.critic_warmup else TokenRecord.empty(train_batch)
        if step > s.critic_warmup:
            with self.stage("update_actor"):
                metrics |= roles.policy.learn(train_batch, step, log.advance, record, store)

        # 4. Send the new weights to the rollout engines.
        with self.stage("update_weights"), self.generation_paused(next_step=step + 1):
            roles.sampler.sync_weights(version=step)
            self.state, self.updates_at_state = self.state_after(step, kl), self.updates
        return StepResult(trajectories, train_batch, rewards_T, metrics, record, dumped)

    def state_after(self, step: int, kl: KlControl) -> State:
        queue = None if self.roles.ahead is None else self.roles.ahead.queue
        return State(step, kl, self.stream.state(), self.roles.sampler.reward.state(), queue)

    def sample(self, step: int) -> tuple[list[Trajectory], Metrics]:
        """Answers to a step's prompts; with dynamic sampling, to as many prompts as are needed."""
        s = self.settings
        if self.roles.ahead is not None:
            return self.sample_ahead(self.roles.ahead, step)

        def answer_new_prompts(seed_scope: str) -> list[Trajectory]:
            prompts = self.stream.next()
            return self.answer(prompts, s.answers_per_prompt, s.sampling, seed_scope, "gen", update_moments=True)

        if s.dynamic_sampling is None:
            return answer_new_prompts(f"train/{step}"), {}
        return s.dynamic_sampling.fill(lambda number: answer_new_prompts(f"train/{step}/{number}"))

    def sample_ahead(self, ahead: AheadSampler, step: int) -> tuple[list[Trajectory], Metrics]:
        """The groups that are complete and scored first; the others go on in the next step."""
        try:
            with self.stage("gen"):
                ahead.generate(step, self.log.advance)
        except TrainingError:  # rewards that fail are the reason, if they do
            self.report_failures(ahead.removed)
            raise
        with self.stage("reward"):
            pending, metrics = ahead.take(step)
            trajectories = pending.scored(self.log.advance, update_moments=True)
        self.report_failures([*trajectories, *ahead.removed])
        return trajectories, metrics | {WAIT: self.log.seconds("gen") + self.log.seconds("reward")}

    def generation_paused(self, next_step: int | None = None) -> AbstractContextManager[None]:
        """Nothing is generated ahead meanwhile. `next_step`: afterwards with its weights."""
        ahead = self.roles.ahead
        return nullcontext() if ahead is None else ahead.paused(next_step)

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        if self.roles.ahead is not None:
            self.roles.ahead.check()  # a step may take long
        with super().stage(name):
            yield

    def probed(self) -> Metrics:
        """How far the log-probs of engines and policy differ on the probe, if the engines were asked."""
        probe = self.roles.sampler.probe
        if probe is None or probe.asked is None:
            return {}
        with self.stage("probe"):
            return probe.compare(self.roles.policy.scorer)

    def answer(
        self,
        prompts: Sequence[Prompt],
        answers_per_prompt: int,
        sampling: Sampling,
        seed_scope: str,
        stage: str,
        *,
        update_moments: bool = False,
    ) -> list[Trajectory]:
        log = self.log
        with self.stage(stage):
            pending = self.roles.sampler.generate(prompts, answers_per_prompt, sampling, seed_scope, log.advance)
        with self.stage("reward"):
            trajectories = pending.scored(log.advance, update_moments=update_moments)
        self.report_failures(trajectories)
        return trajectories

    def report_failures(self, trajectories: Sequence[Trajectory]) -> None:
        """Log failed rewards with their reasons; too many of them stop the run."""
        scores = [answer.score for answer in answers_of(trajectories)]
        check_failures(scores, self.settings.max_failed_share)
        if reasons := common_reasons(scores):
            failed = sum(not score.ok for score in scores)
            self.log.message(f"{failed} of {len(scores)} rewards failed: {'; '.join(reasons)}")

    def model_outputs(self, batch: Batch, store: BatchStore) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Log-probs of the old policy, log-probs of the reference, values of the critic: those that the step uses.

        All are started before the first is waited for: models on workers of their own run at the same time.
        """
        roles, source = self.roles, self.settings.old_logprobs
        scorers = {
            "old_log_prob": roles.policy.scorer if source is OldLogprobs.TRAINER else None,
            "ref": roles.reference,
            "values": roles.critic.scorer if roles.critic is not None else None,
        }
        others = batch.without_experts()  # only the policy repeats the rollout's routing
        pending = {
            stage: scorer.start(batch if stage == "old_log_prob" else others, store)
            for stage, scorer in scorers.items()
            if scorer is not None
        }
        found: dict[str, Tensor] = {}
        if source is OldLogprobs.ROLLOUT:
            found["old_log_prob"] = batch.rollout_logprobs_T
        for stage, outputs in pending.items():
            with self.stage(stage):
                found[stage] = outputs.wait()
        return found.get("old_log_prob"), found.get("ref"), found.get("values")

    def greedy_scores(self, trajectories: Sequence[Trajectory], step: int) -> Tensor:
        """For each trajectory, the score of the greedy answer to its prompt; NaN where that score failed."""
        prompts = {trajectory.group: trajectory.prompt for trajectory in trajectories}
        greedy = replace(self.settings.sampling, temperature=0.0)
        with self.generation_paused():
            batch = Batch.pack(self.answer(list(prompts.values()), 1, greedy, f"greedy/{step}", "gen_greedy"))
        score_G = self.penalised(batch).score_N.where(batch.valid_N, torch.nan)[batch.counted_N]
        index_of = {group: index for index, group in enumerate(prompts)}
        return score_G[torch.tensor([index_of[trajectory.group] for trajectory in trajectories])]

    def penalised(self, batch: Batch) -> Batch:
        return replace(batch, score_N=self.settings.shaping.scores(batch))

    def rewards(
        self, batch: Batch, logprobs_T: Tensor | None, ref_logprobs_T: Tensor | None
    ) -> tuple[Tensor, KlControl, Metrics]:
        """Rewards of each token, less the KL if that is configured, and the KL coefficient of the next step."""
        control, shaping = self.state.kl, self.settings.shaping
        metrics = {"reward/overlong": float(shaping.penalty(batch)[batch.counted_N].mean())} if shaping.overlong else {}
        batch = self.penalised(batch)
        if self.settings.kl_estimator is None:
            return token_rewards(batch, None, 0.0), control, metrics
        assert logprobs_T is not None and ref_logprobs_T is not None  # KL on: both were computed
        kl_T = kl_estimator(self.settings.kl_estimator)(logprobs_T, ref_logprobs_T)
        kl = mean_sample_kl(batch, kl_T)
        if not self.settings.kl_in_reward:
            return token_rewards(batch, None, 0.0), control, metrics | {"actor/kl_divergence": kl}
        metrics |= {"actor/reward_kl_penalty": kl, "actor/kl_coef": control.coefficient}
        return token_rewards(batch, kl_T, control.coefficient), control.updated(kl, int(batch.counted_N.sum())), metrics

    def corrected(self, train_batch: TrainBatch) -> tuple[TrainBatch, Metrics]:
        """The batch with the weights and rejections of rollout correction, and how far the log-probs of trainer and
        rollout engine differ."""
        logprobs_T, settings = train_batch.old_logprobs_T, self.settings.correction
        measured = settings is not None or self.settings.compare_logprobs
        if logprobs_T is None or self.settings.old_logprobs is OldLogprobs.ROLLOUT or not measured:
            return train_batch, {}
        if settings is None:
            return train_batch, mismatch(train_batch, logprobs_T)
        found = correct(train_batch, logprobs_T, settings, train_batch.advantages_T)
        return replace(train_batch, rollout_weights_T=found.weights_T, keep_T=found.keep_T), dict(found.metrics)

    def warn_of_mismatch(self, step: int, result: StepResult) -> None:
        turns = [turn for trajectory in result.trajectories for turn in trajectory.turns]
        versions = {version for turn in turns for version in turn.versions}
        if self.roles.ahead is not None and versions != {step - 1}:
            return  # the figure has the difference between the versions, too
        found = self.mismatch_monitor.check(result.metrics, engine_versions=versions, trainer_version=step - 1)
        if found is not None:
            self.log.warning(**found.fields)

    @property
    def updates(self) -> int:
        """Optimizer steps begun, of both models."""
        return self.roles.policy.updates + (self.roles.critic.updates if self.roles.critic is not None else 0)

    def train_step(self, step: int) -> CompletedStep:
        with self.log.span("step"):
            result = self.step(step)
        if self.roles.ahead is not None:
            result.metrics[IDLE] = self.idle_s(self.roles.ahead.generated(), step)
        metrics = self.record(step, result)
        return CompletedStep(metrics, partial(self.roles.sampler.rows, result.trajectories, step))

    def idle_s(self, generated: Sequence[tuple[float, float]], step: int) -> float:
        """Seconds of the step, which has just ended, in which the engines had no request. `generated`: since the end
        of the step before, when they had some."""
        self.log.events.write("generation", step=step, spans=generated)
        seconds = self.log.seconds("step")
        started = time.time() - seconds
        busy_s = sum(max(0.0, end - max(begin, started)) for begin, end in generated)
        return max(0.0, seconds - busy_s - self.log.seconds("gen_greedy"))

    def saved_state(self) -> dict[str, Any]:
        return self.state.saved()

    def write(self, folder: Path, background: bool) -> Writing | None:
        writing = super().write(folder, background)
        if self.state.queue is not None:
            write_queue(folder, self.state.queue)
        return writing

    def record(self, step: int, result: StepResult) -> Metrics:
        s, log, train_batch = self.settings, self.log, result.train_batch
        answers = answers_of(result.trajectories)
        metrics = result.metrics | batch_metrics(
            train_batch,
            result.rewards_T,
            finished=[answer.finished for answer in answers],
            shaped_N=self.penalised(train_batch).score_N,
        )
        metrics |= part_metrics([answer.score for answer in answers])
        metrics |= self.roles.sampler.reward.metrics() | episode_metrics(result.trajectories)
        log.show_first_rewards([(answer.prompt.data_source, answer.score) for answer in answers])
        if s.rollout_dir is not None:
            log.dump_rollouts(s.rollout_dir, step, self.roles.sampler.rows(result.trajectories, step))
        self.dump(step, result)
        tokens = len(train_batch.tokens_T)
        metrics |= throughput(tokens=tokens, seconds=log.seconds("step"), device=s.device, devices=s.devices)
        for name, learner in (("actor", self.roles.policy), ("critic", self.roles.critic)):
            if learner is not None and learner.work is not None:
                flops, seconds = learner.update_flops(train_batch, learner.work), log.seconds(f"update_{name}")
                metrics |= utilisation(name, flops=flops, seconds=seconds, peak_flops=s.peak_flops)
        if self.roles.workers is not None:
            metrics |= worker_metrics(self.roles.workers)
        logged = log.step(step, metrics | {"training/global_step": step, "training/epoch": self.stream.epoch})
        self.warn_of_mismatch(step, result)
        return logged

    def dump(self, step: int, result: StepResult) -> None:
        if self.dumps is None:
            return
        answers, batch, dumped = result.trajectories, result.train_batch, result.dumped
        if dumped is None:
            self.dumps.write("train", step, partial(training_table, answers, batch, result.record))
            return
        if not self.has_sampled_dumps:
            self.has_sampled_dumps = True
            self.log.message(dumped.message)
        # selected now: what the thread waits with is as large as the dump
        table = partial(training_table, [answers[row] for row in dumped.rows], batch.select(dumped.rows), result.record)
        self.dumps.write("train", step, table, dumped.groups_of_step)

    def validate(self, step: int) -> dict[str, float]:
        evaluator, log = self.roles.evaluator, self.log
        if evaluator is None:
            return {}
        with self.stage("testing"), self.generation_paused():
            answers = evaluator.answer(step, log.advance)
        self.report_failures(answers)
        metrics = evaluator.metrics(answers)
        log.validation(step, metrics, evaluator.measures(answers))
        if self.dumps is not None:
            dumped = self.dumps.sample("validation", step, answers)
            kept = answers if dumped is None else [answers[row] for row in dumped.rows]
            self.dumps.write(
                "validation", step, partial(validation_table, kept), None if dumped is None else dumped.groups_of_step
            )
        rows = self.roles.sampler.rows(answers, step)
        if self.settings.validation_dir is not None:
            log.dump_rollouts(self.settings.validation_dir, step, rows)
        log.validation_answers(step, rows[: self.settings.shown_answers])
        return metrics

    def resume(self, checkpoint: Path, *, keep_position: bool = True) -> None:
        """From a checkpoint that was checked. `keep_position`: whether to continue in the data where it stopped."""
        saved = read_state(checkpoint)
        self.load_checkpoint(checkpoint)
        self.roles.sampler.sync_weights(version=saved["step"])
        if keep_position:
            self.stream.load(saved["stream"])
        self.load_queue(checkpoint if keep_position else None, saved["step"])
        self.roles.sampler.reward.load(saved["reward"])
        self.state = self.state_after(saved["step"], replace(self.state.kl, coefficient=saved["kl_coefficient"]))

    def load_queue(self, checkpoint: Path | None, step: int) -> None:
        """The groups of a checkpoint. None: the data are others, and so are their prompts."""
        ahead = self.roles.ahead
        reader = QueueReader(self.stream.rows, self.settings.answers_per_prompt)
        queue = None if checkpoint is None else reader.read(checkpoint)
        if ahead is not None and queue is not None and not can_train_all(queue.groups, step + 1, ahead.settings):
            raise CheckpointError(
                f"{checkpoint} has groups of answers that are too old for trainer.v1.sampler.max_off_policy_threshold="
                f"{ahead.settings.max_staleness} and data.train_batch_size={ahead.settings.groups_per_step}; resume "
                "with the values of the run that saved it, or with trainer.v1.sampler.max_off_policy_strategy=drop"
            )
        if ahead is not None:
            ahead.load(Queue(admitted=step * ahead.settings.groups_per_step) if queue is None else queue, step)
        elif queue is not None and queue.groups:
            raise CheckpointError(
                f"{checkpoint} has {len(queue.groups)} groups of answers that were generated ahead, which would be "
                "lost with trainer.v1.trainer_mode=sync; resume with colocate_async or separate_async"
            )
