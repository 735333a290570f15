"""The parts of a run, from its configuration. Only this folder imports both the configuration and the backends."""

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rloom.algos.correction import CorrectionSettings
from rloom.algos.estimators import AdvantageSettings, Overlong, Shaping
from rloom.algos.kl import KlControl
from rloom.algos.objectives import PolicyObjective, ValueObjective
from rloom.algos.off_policy import Denominator, RatioChoice, choose
from rloom.algos.policy_losses import LossSettings
from rloom.algos.registry import resolve_algorithm, resolve_policy_loss
from rloom.batch import answers_of
from rloom.config.base import RunConfig, RunTrainer
from rloom.config.checks import check, check_and_warn
from rloom.config.correction_checks import ratio_settings
from rloom.config.derived import Needs, brings_own_algorithm, loss_mode
from rloom.config.from_checkpoint import config_text, load_saved, run_directory_of, saved_root
from rloom.config.load import expand
from rloom.config.schema import Config, Optim, SftConfig
from rloom.config.sections import Checkpoint
from rloom.data.stream import PromptStream
from rloom.episodes.runner import EpisodeRunner
from rloom.errors import CheckpointError, ConfigError
from rloom.launch.directory import IDENTITY_FILE, open_checkpoint, run_directory
from rloom.launch.episodes import open_episodes
from rloom.launch.identity import Record
from rloom.launch.inputs import HELD_OUT, TRAIN, Inputs, RunData, as_prompts, held_out_rows, read_inputs
from rloom.launch.job import best_settings
from rloom.launch.model_sources import policy_tokenizer
from rloom.launch.models import (
    check_policy_family,
    check_rollout,
    pick_device,
    policy_engine,
    policy_network,
    rollout_engine,
)
from rloom.launch.rewards import check_reward_model, in_process_model, open_queues, reward_mix, scores_during_generation
from rloom.launch.servers import gpus_of_workers
from rloom.launch.worker import ModelFiles
from rloom.launch.workers import BuiltWorkers, WorkerGroups, open_groups
from rloom.rewards.composite import CompositeReward, check_failures
from rloom.rollout.base import Sampling
from rloom.rollout.kinds import KEY as ROLLOUT_KEY
from rloom.runs.metrics import ModelWork
from rloom.runs.records import SCHEDULE_FILE
from rloom.runs.run_folder import CONFIG_FILE
from rloom.runtime.group import Group, LocalGroup
from rloom.runtime.placement import WorkerLayout
from rloom.training.ahead import AheadSampler, AheadSettings
from rloom.training.checkpoint import Writing, read_state
from rloom.training.evaluate import Evaluator
from rloom.training.learning_rate import LearningRateSchedule
from rloom.training.loop import OldLogprobs, Roles, Settings
from rloom.training.probe import ProbeRequests, WeightProbe
from rloom.training.roles import Learner, MiniBatching, Scorer
from rloom.training.sampling import DynamicSampling, Sampler
from rloom.training.schedule import RecordedRun, ScheduleWriter
from rloom.training.separate import SeparateSampler
from rloom.training.steps import StepSettings
from rloom.types import Prompt


def check_own_algorithm(config: Config) -> None:
    """Check the keys of a run with an estimator or a loss of the user's own: its requirements are known after its file
    is loaded. Those of other runs are checked before torch is imported."""
    if brings_own_algorithm(config):
        check_and_warn(config, resolved_needs(config))


def resolved_needs(config: Config) -> Needs:
    """Of the entries themselves, those of the user's own files too."""
    loss = resolve_policy_loss(loss_mode(config))
    return Needs(resolve_algorithm(config.algorithm.adv_estimator), loss)


@dataclass(frozen=True)
class RunParts:
    """What every kind of training saves and loads."""

    config: RunConfig
    checkpoint: Checkpoint  # what to save and load
    learners: Sequence[Learner]
    files: Group
    identity: Record

    def write_checkpoint(self, folder: Path, background: bool = False) -> Writing:
        """`background`: the workers write while the caller goes on, unless the configuration says otherwise."""
        contents = frozenset(self.checkpoint.save_contents)
        background = background and self.checkpoint.async_save
        (folder / CONFIG_FILE).write_text(config_text(self.config))
        (folder / IDENTITY_FILE).write_text(json.dumps(self.identity, indent=1))
        (folder / "actor").mkdir()
        self.files.call("describe", folder / "actor")  # before others write there: it syncs that whole folder
        if "hf_model" in contents:
            self.files.call("write_pretrained", folder / "actor" / "huggingface")
        files = [file for learner in self.learners for file in learner.save(folder, contents, background)]
        return Writing(files, self.check_save)

    def check_save(self, wait: bool) -> None:
        for learner in self.learners:
            learner.check_save(wait)

    def load_checkpoint(self, folder: Path) -> None:
        for learner in self.learners:
            learner.load(folder, frozenset(self.checkpoint.load_contents))


@dataclass(frozen=True)
class PolicyParts(RunParts):
    """Everything of a run of RL training except its directory."""

    config: Config
    settings: Settings
    roles: Roles
    stream: PromptStream
    kl: KlControl
    tokenizer: PreTrainedTokenizerBase

    def save_tokenizer(self, file: Path) -> None:
        """As one file that needs no transformers to be read. A tokenizer that is written in Python has none."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is not None:
            backend.save(str(file))


def prepare(config: Config, data: RunData) -> Inputs:
    """Check device and model family, and make prompts of the rows, before a model is loaded."""
    if not config.has_workers:
        pick_device(config)  # fails at once if there is no GPU
    check_policy_family(config)
    check_reward_model(config)
    return read_inputs(config, data)


@contextmanager
def open_parts(
    config: Config, layout: WorkerLayout, inputs: Inputs, identity: Record, logs: Path | None = None
) -> Iterator[PolicyParts]:
    """Build everything; what fails fast comes first: prompts, reward, models."""
    tokenizer, prompts, held_out = inputs.tokenizer, inputs.prompts, inputs.held_out
    stream = PromptStream(
        prompts,
        batch_size=config.prompts_per_round,
        size_key=f"data.{'gen' if config.prompts_per_round == config.data.gen_batch_size else 'train'}_batch_size",
        shuffle=config.data.shuffle,
        seed=config.data.seed,
        epochs=config.trainer.total_epochs if config.ends_with_the_data else None,
    )
    total = config.trainer.total_training_steps or config.trainer.total_epochs * stream.steps_per_epoch
    with (
        open_queues(config, [one for one in (prompts, held_out) if one is not None], inputs.data.functions) as queues,
        open_episodes(config, tokenizer, inputs.data.episodes, {TRAIN: prompts, HELD_OUT: held_out or ()}) as episodes,
        open_groups(config, layout, logs) as groups,
        ExitStack() as stack,
    ):
        at_once = scores_during_generation(config, layout)
        reward = reward_mix(config, queues, elsewhere=groups.scorers, model=groups.reward, during_generation=at_once)
        sampler = answer_sampler(config, groups.rollout, groups.weight_sync, tokenizer, reward, episodes)
        sampler = replace(sampler, probe=weight_probe(config, groups.rollout))
        chosen = settings(config, total, groups)
        ahead = stack.enter_context(ahead_sampler(config, sampler, stream, chosen)) if config.generates_ahead else None
        roles = Roles(
            policy=policy_learner(config, groups.policy, groups.workers.work.get("actor"), total),
            sampler=sampler,
            critic=None
            if groups.critic is None
            else critic_learner(config, groups.critic, groups.workers.work.get("critic"), total),
            reference=reference_scorer(config, groups.policy, groups.reference, groups.workers.work.get("actor")),
            evaluator=evaluator(config, sampler, groups.stop_ids, held_out) if held_out else None,
            ahead=ahead,
            workers=groups.workers.all_workers,
        )
        yield PolicyParts(
            config,
            config.actor_rollout_ref.actor.checkpoint,
            [roles.policy] if roles.critic is None else [roles.policy, roles.critic],
            groups.files,
            identity,
            chosen,
            roles,
            stream,
            kl_control(config),
            tokenizer,
        )


@contextmanager
def open_evaluation(config: Config, checkpoint: Path) -> Iterator[Evaluator]:
    """What validation needs: no critic, no optimizer, no training prompts."""
    check(config, resolved_needs(config))
    tokenizer = policy_tokenizer(config)
    check_policy_family(config)
    check_reward_model(config)
    rows = held_out_rows(config)
    if rows is None:
        raise ConfigError("data.val_files is not set: name the prompts to answer, data.val_files=FILE")
    held_out = as_prompts(config, tokenizer, rows, HELD_OUT)
    with (
        open_queues(config, [held_out]) as queues,
        open_episodes(config, tokenizer, rows={HELD_OUT: held_out}) as episodes,
    ):
        check_rollout(config)
        network = policy_network(config)
        engine = policy_engine(config, network, trained=False)
        engine.load(checkpoint / "actor", frozenset({"model"}))
        rollout = rollout_engine(config, network, engine, tokenizer, gpus_of_workers())
        if config.actor_rollout_ref.rollout.kind.own_model:
            rollout.load_weights(engine.weights(), version=0)
        reward = reward_mix(config, queues, model=in_process_model(config))
        sampler = answer_sampler(config, LocalGroup([rollout]), LocalGroup([]), tokenizer, reward, episodes)
        try:
            yield evaluator(config, sampler, ModelFiles(network, tokenizer).stop_ids(), held_out)
        finally:
            rollout.close()


def answer_sampler(
    config: Config,
    rollout: Group,
    weight_sync: Group,
    tokenizer: PreTrainedTokenizerBase,
    reward: CompositeReward,
    episodes: EpisodeRunner | None,
) -> Sampler:
    def decode(answers: Sequence[Sequence[int]]) -> list[str]:
        # batch_decode takes an empty list for one empty answer
        return tokenizer.batch_decode(answers, skip_special_tokens=True) if answers else []

    return Sampler(rollout, weight_sync, reward, decode, config.data.seed, episodes)


def ahead_sampler(config: Config, sampler: Sampler, stream: PromptStream, chosen: Settings) -> AheadSampler:
    section = config.trainer.v1
    ahead = AheadSettings(
        groups_per_step=config.data.train_batch_size,
        batches_ahead=section.batches_ahead,
        max_staleness=config.max_staleness,
        drop=section.sampler.max_off_policy_strategy == "drop",
        separate=section.is_separate,
        keeps_cache=section.keeps_cache,
    )
    repeats = config.actor_rollout_ref.rollout.repeats and chosen.dynamic_sampling is None and not section.keeps_cache
    schedule = ScheduleWriter(run_directory(config) / SCHEDULE_FILE) if repeats else None
    replay = None if config.trainer.replay is None else RecordedRun(expand(config.trainer.replay))
    make = SeparateSampler if section.is_separate else AheadSampler
    return make(
        sampler,
        stream,
        ahead,
        chosen.sampling,
        chosen.answers_per_prompt,
        chosen.total_steps,
        chosen.dynamic_sampling,
        schedule,
        replay,
    )


def weight_probe(config: Config, rollout: Group) -> WeightProbe | None:
    """None: the weights of the engine are the actor's own, or are compared after each sync."""
    section = config.actor_rollout_ref.rollout
    if not section.kind.own_model:
        return None
    longest = config.data.longest_sample
    engines = section.engines(config.workers) if section.uses_servers else 1  # all servers have one client
    return WeightProbe(rollout, ProbeRequests(longest, section.temperature, engines), f"{ROLLOUT_KEY}={section.name}")


def evaluator(config: Config, sampler: Sampler, stop_ids: tuple[int, ...], held_out: Sequence[Prompt]) -> Evaluator:
    val = config.actor_rollout_ref.rollout.val_kwargs
    sampling = Sampling(
        max_new_tokens=config.data.max_response_length,
        max_length=config.data.max_length,
        temperature=val.temperature if val.do_sample else 0.0,
        top_p=val.top_p,
        top_k=val.top_k,
        stop_ids=stop_ids,
    )
    return Evaluator(held_out, sampler, sampling, val.n, config.data.val_batch_size)


def settings(config: Config, total_steps: int, groups: WorkerGroups) -> Settings:
    rollout, trainer, algorithm = config.actor_rollout_ref.rollout, config.trainer, config.algorithm
    return Settings(
        algorithm=resolve_algorithm(algorithm.adv_estimator),
        advantage=advantage_settings(config),
        sampling=Sampling(
            max_new_tokens=config.data.max_response_length,
            max_length=config.data.max_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_ids=groups.stop_ids,
            ignore_eos=rollout.ignore_eos,
        ),
        answers_per_prompt=rollout.n,
        old_logprobs=old_logprobs(config),
        kl_in_reward=config.kl_in_reward,
        kl_estimator=algorithm.kl_penalty if config.kl_in_reward or config.kl_only_measured else None,
        correction=correction(config),
        mask_truncated=algorithm.mask_truncated_answers,
        shaping=shaping(config),
        dynamic_sampling=dynamic_sampling(config),
        compare_logprobs=rollout.calculate_log_probs,
        # answers of older weights differ from the trainer's by more than the engine does
        mismatch_warning=None if config.max_staleness else trainer.rollout_mismatch_warning,
        critic_warmup=trainer.critic_warmup,
        max_failed_share=config.reward_model.max_failed_share,
        shown_answers=trainer.log_val_generations,
        rollout_dir=expand(trainer.rollout_data_dir) if trainer.rollout_data_dir else None,
        validation_dir=expand(trainer.validation_data_dir) if trainer.validation_data_dir else None,
        **vars(step_settings(trainer, total_steps, groups.workers)),
    )


def step_settings(trainer: RunTrainer, total_steps: int, workers: BuiltWorkers) -> StepSettings:
    return StepSettings(
        total_steps=total_steps,
        save_every=trainer.save_freq if trainer.save_freq > 0 else None,
        validate_every=trainer.test_freq if trainer.test_freq > 0 else None,
        validate_first=trainer.val_before_train,
        best=best_settings(trainer),
        device=workers.device,
        devices=workers.devices,
        peak_flops=workers.peak_flops,
    )


def advantage_settings(config: Config) -> AdvantageSettings:
    section = config.algorithm
    return AdvantageSettings(
        gamma=section.gamma,
        lam=section.lam,
        norm_by_std=section.norm_adv_by_std_in_grpo,
        normalize=section.normalize_advantages,
    )


def ratio_choice(config: Config) -> RatioChoice:
    return choose(ratio_settings(config, resolved_needs(config)), config.max_staleness)


def old_logprobs(config: Config) -> OldLogprobs | None:
    source = ratio_choice(config).denominator
    return None if source is Denominator.UPDATE else OldLogprobs(source.value)


def correction(config: Config) -> CorrectionSettings | None:
    section = config.algorithm.rollout_correction
    keys = section.model_dump(exclude={"bypass_mode", "loss_type"})
    if not section.bypass_mode:
        keys["rollout_is"] = ratio_choice(config).rollout_is
    return CorrectionSettings(**keys) if section.enabled or keys["rollout_is"] else None


def shaping(config: Config) -> Shaping:
    section = config.reward_model
    buffer, bounds = section.overlong_buffer, section.score_range
    overlong = Overlong(config.data.max_response_length, buffer.len, buffer.penalty_factor) if buffer.enable else None
    return Shaping(overlong, section.truncated_score, None if bounds is None else (bounds[0], bounds[1]))


def dynamic_sampling(config: Config) -> DynamicSampling | None:
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return None
    bounds = groups.mean_score_range
    means = None if bounds is None else (bounds[0], bounds[1])
    return DynamicSampling(config.data.train_batch_size, groups.max_num_gen_batches, means, by=groups.metric)


def kl_control(config: Config) -> KlControl:
    control = config.algorithm.kl_ctrl
    return KlControl(control.kl_coef, control.type == "adaptive", control.target_kl, control.horizon)


def schedule(optim: Optim, total_steps: int) -> LearningRateSchedule:
    return LearningRateSchedule(
        optim.lr, optim.warmup(total_steps), total_steps, optim.lr_scheduler_type, optim.min_lr_ratio
    )


def policy_learner(config: Config, group: Group, work: ModelWork | None, total_steps: int) -> Learner:
    actor = config.actor_rollout_ref.actor
    entry = resolve_policy_loss(loss_mode(config))
    return Learner(
        "actor",
        group,
        objective=PolicyObjective(
            loss_mode=loss_mode(config),
            loss_settings=loss_settings(config),
            aggregation=actor.loss_agg_mode or entry.aggregation or "token-mean",
            entropy_coefficient=actor.entropy_coeff,
            kl_coefficient=actor.kl_loss_coef if actor.use_kl_loss else None,
            kl_estimator=actor.kl_loss_type,
            measures_gap=config.actor_rollout_ref.rollout.calculate_log_probs,
            bypass=config.algorithm.rollout_correction.bypass_mode,
            # without a pass of the trainer before the update, the update computes the ratios
            correction=None if old_logprobs(config) is OldLogprobs.TRAINER else correction(config),
            records_tokens=config.trainer.log_rollouts,
            skips_zero_advantages=actor.skip_zero_advantages,
        ),
        mini_batching=mini_batching(config, actor.ppo_mini_batch_size, actor.ppo_epochs, actor.shuffle),
        schedule=schedule(actor.optim, total_steps),
        balance=config.trainer.balance_batch,
        max_nonfinite=config.trainer.max_nonfinite_updates,
        work=work,
        equal_rows=not actor.fills_by_tokens,
    )


def loss_settings(config: Config) -> LossSettings:
    actor = config.actor_rollout_ref.actor
    return LossSettings(
        clip_low=actor.clip_ratio if actor.clip_ratio_low is None else actor.clip_ratio_low,
        clip_high=actor.clip_ratio if actor.clip_ratio_high is None else actor.clip_ratio_high,
        clip_dual=actor.clip_ratio_c,
        **actor.policy_loss.model_dump(exclude={"loss_mode"}),
    )


def critic_learner(config: Config, group: Group, work: ModelWork | None, total_steps: int) -> Learner:
    critic, (prompts, epochs) = config.critic, config.critic_updates
    return Learner(
        "critic",
        group,
        objective=ValueObjective(critic.cliprange_value, critic.loss_agg_mode),
        mini_batching=mini_batching(config, prompts, epochs, critic.shuffle),
        schedule=schedule(critic.optim, total_steps),
        balance=config.trainer.balance_batch,
        max_nonfinite=config.trainer.max_nonfinite_updates,
        work=work,
        equal_rows=not critic.fills_by_tokens,
    )


def reference_scorer(config: Config, policy: Group, reference: Group | None, work: ModelWork | None) -> Scorer | None:
    """None if the loop does not use the reference's log-probs."""
    if not config.scores_reference:
        return None
    group = policy if reference is None else reference
    return Scorer(
        group,
        config.trainer.balance_batch,
        reference=reference is None,
        work=work,
        equal_rows=not config.actor_rollout_ref.ref.fills_by_tokens,
    )


def mini_batching(config: Config, prompts: int, epochs: int, shuffle: bool) -> MiniBatching:
    return MiniBatching(prompts, epochs, shuffle, config.data.seed, horizon=config.data.max_response_length)


class Evaluation(NamedTuple):
    metrics: dict[str, float]
    measures: dict[str, str]  # accuracy or score, by data source


def evaluate_checkpoint(checkpoint: Path, overrides: Sequence[str] = ()) -> Evaluation:
    state = read_state(open_checkpoint(checkpoint))
    if saved_root(checkpoint) is SftConfig:
        raise CheckpointError(
            f"{checkpoint} is a checkpoint of `rloom sft`, which has no reward; export it with `rloom export "
            f"{checkpoint} DIR`, and validate it with `rloom train actor_rollout_ref.model.path=DIR "
            "trainer.val_only=True`"
        )
    config = load_saved(checkpoint, overrides, settings=[run_directory_of(checkpoint)])
    with open_evaluation(config, checkpoint) as evaluator:
        answers = evaluator.answer(state["step"], progress=lambda done, total: None)
        check_failures([answer.score for answer in answers_of(answers)], config.reward_model.max_failed_share)
        return Evaluation(evaluator.metrics(answers), evaluator.measures(answers))
