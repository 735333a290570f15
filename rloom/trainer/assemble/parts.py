"""The whole run from its configuration. Only this folder knows both the keys and the backends."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import yaml
from transformers import PreTrainedTokenizerBase

from rloom.algos.advantages import AdvantageSettings
from rloom.algos.correction import CorrectionSettings
from rloom.algos.kl import KlControl
from rloom.algos.registry import resolve_algorithm, resolve_policy_loss
from rloom.config import checks
from rloom.config.load import CONFIG_FILE, expand
from rloom.config.schema import Config
from rloom.data.chat import stop_token_ids
from rloom.data.stream import PromptStream
from rloom.engines.local import LocalEngine
from rloom.errors import ConfigError
from rloom.models.load import load_tokenizer
from rloom.models.network import PolicyNetwork
from rloom.models.save import save_description, save_pretrained
from rloom.rewards.background import BackgroundScorer
from rloom.rollout.base import Sampling
from rloom.runtime.group import LocalGroup
from rloom.trainer.assemble.inputs import check_reward, held_out_prompts, policy_source, train_prompts
from rloom.trainer.assemble.learners import critic_learner, policy_learner
from rloom.trainer.assemble.models import (
    pick_device,
    policy_engine,
    policy_network,
    reference_engine,
    reference_scorer,
    rollout_engine,
)
from rloom.trainer.evaluate import Evaluator
from rloom.trainer.loop import Overlong, Roles, Settings
from rloom.trainer.sampling import DynamicSampling, Sampler
from rloom.types import Prompt


def check_config(config: Config) -> None:
    """Names first, then what they need; an error costs no loading."""
    resolve_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    checks.check(config, resolve_algorithm(config.algorithm.adv_estimator))
    correction(config)


@dataclass(frozen=True)
class Parts:
    """Everything of a run but its directory."""

    config: Config
    settings: Settings
    roles: Roles
    stream: PromptStream
    kl: KlControl
    network: PolicyNetwork
    tokenizer: PreTrainedTokenizerBase

    def write_checkpoint(self, folder: Path) -> None:
        contents = frozenset(self.config.actor_rollout_ref.actor.checkpoint.save_contents)
        self.roles.policy.save(folder, contents)
        if self.roles.critic is not None:
            self.roles.critic.save(folder, contents)
        (folder / CONFIG_FILE).write_text(config_text(self.config))
        save_description(self.network, self.tokenizer, folder / "actor")
        if "hf_model" in contents:
            save_pretrained(self.network, self.tokenizer, folder / "actor" / "huggingface")

    def load_checkpoint(self, folder: Path) -> None:
        contents = frozenset(self.config.actor_rollout_ref.actor.checkpoint.load_contents)
        self.roles.policy.load(folder, contents)
        if self.roles.critic is not None:
            self.roles.critic.load(folder, contents)


@contextmanager
def open_parts(config: Config) -> Iterator[Parts]:
    """Build everything in the order in which it can fail cheaply: keys, prompts, reward, models."""
    check_config(config)
    device = pick_device(config)
    torch.manual_seed(config.data.seed)
    tokenizer = load_tokenizer(policy_source(config))
    prompts, held_out = train_prompts(config, tokenizer), held_out_prompts(config, tokenizer)
    stream = PromptStream(
        prompts, batch_size=config.data.train_batch_size, shuffle=config.data.shuffle, seed=config.data.seed
    )
    if not held_out and (config.trainer.test_freq > 0 or config.trainer.val_only):
        raise ConfigError(
            "data.val_files is not set, and trainer.test_freq or trainer.val_only asks for validation: name a file"
        )
    total = config.trainer.total_training_steps or config.trainer.total_epochs * stream.steps_per_epoch
    with closing(BackgroundScorer(check_reward(config, [*prompts, *held_out]))) as scorer:
        network = policy_network(config)
        frozen = reference_engine(config)
        engine = policy_engine(config, network, reference=frozen)
        sampler = answer_sampler(config, network, engine, tokenizer, scorer)
        roles = Roles(
            policy=policy_learner(config, engine, total),
            sampler=sampler,
            critic=critic_learner(config, total) if needs_critic(config) else None,
            reference=reference_scorer(config, engine, frozen),
            evaluator=evaluator(config, sampler, network, tokenizer, held_out) if held_out else None,
        )
        yield Parts(
            config,
            settings(config, total, device, network, tokenizer),
            roles,
            stream,
            kl_control(config),
            network,
            tokenizer,
        )


@contextmanager
def open_evaluation(config: Config, checkpoint: Path) -> Iterator[Evaluator]:
    """Only what validation needs: no critic, no optimizer, no training prompts."""
    check_config(config)
    tokenizer = load_tokenizer(policy_source(config))
    held_out = held_out_prompts(config, tokenizer)
    if not held_out:
        raise ConfigError("data.val_files is not set: name the prompts to answer, data.val_files=FILE")
    with closing(BackgroundScorer(check_reward(config, held_out))) as scorer:
        network = policy_network(config)
        engine = policy_engine(config, network, trained=False)
        engine.load(checkpoint / "actor", frozenset({"model"}))
        sampler = answer_sampler(config, network, engine, tokenizer, scorer)
        yield evaluator(config, sampler, network, tokenizer, held_out)


def needs_critic(config: Config) -> bool:
    return resolve_algorithm(config.algorithm.adv_estimator).needs_critic


def answer_sampler(
    config: Config,
    network: PolicyNetwork,
    engine: LocalEngine,
    tokenizer: PreTrainedTokenizerBase,
    scorer: BackgroundScorer,
) -> Sampler:
    def decode(tokens: list[int]) -> str:
        return str(tokenizer.decode(tokens, skip_special_tokens=True))

    group = LocalGroup([rollout_engine(config, network, engine, tokenizer)])
    return Sampler(group, scorer, decode, config.data.seed)


def stop_ids(network: PolicyNetwork, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    return stop_token_ids(tokenizer, network.decoder.base.generation_config.eos_token_id)


def evaluator(
    config: Config,
    sampler: Sampler,
    network: PolicyNetwork,
    tokenizer: PreTrainedTokenizerBase,
    held_out: list[Prompt],
) -> Evaluator:
    val = config.actor_rollout_ref.rollout.val_kwargs
    sampling = Sampling(
        max_new_tokens=config.data.max_response_length,
        temperature=val.temperature if val.do_sample else 0.0,
        top_p=val.top_p,
        top_k=val.top_k,
        stop_ids=stop_ids(network, tokenizer),
    )
    return Evaluator(held_out, sampler, sampling, val.n, config.data.val_batch_size)


def settings(
    config: Config,
    total_steps: int,
    device: torch.device,
    network: PolicyNetwork,
    tokenizer: PreTrainedTokenizerBase,
) -> Settings:
    rollout, trainer, algorithm = config.actor_rollout_ref.rollout, config.trainer, config.algorithm
    return Settings(
        algorithm=resolve_algorithm(algorithm.adv_estimator),
        advantage=AdvantageSettings(algorithm.gamma, algorithm.lam, algorithm.norm_adv_by_std_in_grpo),
        sampling=Sampling(
            max_new_tokens=config.data.max_response_length,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            stop_ids=stop_ids(network, tokenizer),
            ignore_eos=rollout.ignore_eos,
        ),
        answers_per_prompt=rollout.n,
        needs_old_logprobs=needs_old_logprobs(config),
        kl_in_reward=algorithm.kl_penalty if algorithm.use_kl_in_reward else None,
        correction=correction(config),
        overlong=overlong(config),
        dynamic_sampling=dynamic_sampling(config),
        compare_logprobs=rollout.calculate_log_probs,
        critic_warmup=trainer.critic_warmup,
        max_failed_share=config.reward_model.max_failed_share,
        total_steps=total_steps,
        save_every=trainer.save_freq if trainer.save_freq > 0 else None,
        validate_every=trainer.test_freq if trainer.test_freq > 0 else None,
        validate_first=trainer.val_before_train,
        shown_answers=trainer.log_val_generations,
        rollout_dir=expand(trainer.rollout_data_dir) if trainer.rollout_data_dir else None,
        validation_dir=expand(trainer.validation_data_dir) if trainer.validation_data_dir else None,
        device=device,
    )


def needs_old_logprobs(config: Config) -> bool:
    """Not when the policy that learns is exactly the one that wrote, unless something else looks at them."""
    entry = resolve_policy_loss(config.actor_rollout_ref.actor.policy_loss.loss_mode)
    asked = config.algorithm.use_kl_in_reward or config.algorithm.rollout_correction.enabled
    return not config.on_policy or entry.needs_old_logprobs or asked


def correction(config: Config) -> CorrectionSettings | None:
    section = config.algorithm.rollout_correction
    return CorrectionSettings(**section.model_dump()) if section.enabled else None


def overlong(config: Config) -> Overlong | None:
    buffer = config.reward_model.overlong_buffer
    return Overlong(config.data.max_response_length, buffer.len, buffer.penalty_factor) if buffer.enable else None


def dynamic_sampling(config: Config) -> DynamicSampling | None:
    groups = config.algorithm.filter_groups
    if not groups.enable:
        return None
    return DynamicSampling(config.data.train_batch_size, groups.max_num_gen_batches)


def kl_control(config: Config) -> KlControl:
    control = config.algorithm.kl_ctrl
    return KlControl(control.kl_coef, control.type == "adaptive", control.target_kl, control.horizon)


def config_text(config: Config) -> str:
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
