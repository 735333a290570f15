"""Rules that no single key can check: batch arithmetic, and what an algorithm needs. Run before anything loads."""

from collections.abc import Iterable
from typing import Protocol

from rloom.config.schema import Actor, Config, Critic
from rloom.errors import ConfigError


class Needs(Protocol):
    """What an algorithm's entry in the catalogue declares."""

    @property
    def needs_critic(self) -> bool: ...
    @property
    def min_group(self) -> int: ...


def known(key: str, value: str, names: Iterable[str]) -> None:
    if value not in (known_names := list(names)):
        raise ConfigError(f"{key}={value}: there is no such entry; use one of {', '.join(known_names)}")


def check(config: Config, algorithm: Needs) -> None:
    check_group_size(config, algorithm)
    check_critic(config, algorithm)
    check_mini_batches(config)
    check_micro_batches(config)
    check_one_process(config)
    check_rollout(config)
    check_run(config)


def check_group_size(config: Config, algorithm: Needs) -> None:
    n = config.actor_rollout_ref.rollout.n
    if n < algorithm.min_group:
        raise ConfigError(
            f"actor_rollout_ref.rollout.n={n}: {config.algorithm.adv_estimator} compares the answers to one prompt; "
            f"use {algorithm.min_group} or more, or algorithm.adv_estimator=gae"
        )


def check_critic(config: Config, algorithm: Needs) -> None:
    estimator = config.algorithm.adv_estimator
    if config.critic.enable is False and algorithm.needs_critic:
        raise ConfigError(f"critic.enable=False: algorithm.adv_estimator={estimator} needs a critic; use rloo or grpo")
    if config.critic.enable and not algorithm.needs_critic:
        raise ConfigError(f"critic.enable=True: algorithm.adv_estimator={estimator} has no use for a critic; use gae")
    if config.trainer.critic_warmup and not algorithm.needs_critic:
        raise ConfigError(
            f"trainer.critic_warmup={config.trainer.critic_warmup}: {estimator} trains no critic; use 0, or gae"
        )


def check_mini_batches(config: Config) -> None:
    prompts = config.data.train_batch_size
    sizes = {"actor_rollout_ref.actor.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size}
    if config.critic.ppo_mini_batch_size is not None:
        sizes["critic.ppo_mini_batch_size"] = config.critic.ppo_mini_batch_size
    for key, size in sizes.items():
        if prompts % size:
            raise ConfigError(
                f"{key}={size} (prompts) does not divide data.train_batch_size={prompts} (prompts); "
                f"use {nearest_divisors(prompts, size)}"
            )


def check_micro_batches(config: Config) -> None:
    actor, critic, n = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.rollout.n
    check_micro_batch("actor_rollout_ref.actor", actor, actor.ppo_mini_batch_size * n)
    check_micro_batch("critic", critic, (critic.ppo_mini_batch_size or actor.ppo_mini_batch_size) * n)
    longest = config.data.max_prompt_length + config.data.max_response_length
    for name, role in (("actor_rollout_ref.actor", actor), ("critic", critic)):
        if role.ppo_max_token_len_per_gpu < longest:
            raise ConfigError(
                f"{name}.ppo_max_token_len_per_gpu={role.ppo_max_token_len_per_gpu}: one sample may have "
                f"data.max_prompt_length + data.max_response_length = {longest} tokens; use {longest} or more"
            )


def check_micro_batch(name: str, role: Actor | Critic, samples: int) -> None:
    per_gpu, whole = role.ppo_micro_batch_size_per_gpu, role.ppo_micro_batch_size
    if per_gpu is not None and whole is not None:
        raise ConfigError(
            f"{name}.ppo_micro_batch_size_per_gpu={per_gpu} and {name}.ppo_micro_batch_size={whole} say the same thing "
            f"twice; keep ppo_micro_batch_size_per_gpu"
        )
    size = per_gpu or whole
    if size is None and role.use_dynamic_bsz is False:
        raise ConfigError(f"{name}.use_dynamic_bsz=False needs {name}.ppo_micro_batch_size_per_gpu")
    if size is not None and not role.use_dynamic_bsz and samples % size:
        raise ConfigError(
            f"{name}.ppo_micro_batch_size_per_gpu={size} does not divide the mini-batch of {samples} samples "
            f"(ppo_mini_batch_size × rollout.n); use {nearest_divisors(samples, size)}"
        )


def check_one_process(config: Config) -> None:
    trainer, actor, rollout = config.trainer, config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    parallel = {
        "trainer.nnodes": trainer.nnodes,
        "trainer.n_gpus_per_node": trainer.n_gpus_per_node,
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size": actor.ulysses_sequence_parallel_size,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": rollout.tensor_model_parallel_size,
        "actor_rollout_ref.actor.fsdp_config.fsdp_size": max(actor.fsdp_config.fsdp_size, 1),
        "critic.model.fsdp_config.fsdp_size": max(config.critic.model.fsdp_config.fsdp_size, 1),
    }
    for key, value in parallel.items():
        if value != 1:
            raise ConfigError(f"{key}={value}: this version of rloom trains in one process on one device; use 1")


def check_rollout(config: Config) -> None:
    rollout = config.actor_rollout_ref.rollout
    if not rollout.enforce_eager:
        raise ConfigError(
            "actor_rollout_ref.rollout.enforce_eager=False: no engine of this version captures graphs; use True"
        )
    if rollout.engine_kwargs and rollout.name == "native":
        raise ConfigError(
            f"actor_rollout_ref.rollout.engine_kwargs={rollout.engine_kwargs}: the native engine takes none; remove it"
        )
    if rollout.val_kwargs.do_sample and rollout.val_kwargs.temperature == 0:
        raise ConfigError(
            "actor_rollout_ref.rollout.val_kwargs.do_sample=True with temperature=0 is greedy; set one above 0"
        )
    if rollout.val_kwargs.n > 1 and not rollout.val_kwargs.do_sample:
        raise ConfigError(
            f"actor_rollout_ref.rollout.val_kwargs.n={rollout.val_kwargs.n}: greedy answers are all the same; "
            "set val_kwargs.do_sample=True val_kwargs.temperature=1.0, or n=1"
        )


def check_run(config: Config) -> None:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        raise ConfigError("trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder")
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        raise ConfigError(
            f"trainer.resume_from_path={trainer.resume_from_path} is read only with trainer.resume_mode=resume_path"
        )
    for name, optim in (
        ("actor_rollout_ref.actor", config.actor_rollout_ref.actor.optim),
        ("critic", config.critic.optim),
    ):
        both = (optim.lr_warmup_steps, optim.warmup_steps)
        if None not in both and both[0] != both[1]:
            raise ConfigError(f"{name}.optim.lr_warmup_steps={both[0]} and warmup_steps={both[1]} disagree; keep one")


def nearest_divisors(whole: int, wanted: int) -> str:
    """ "64 or 128": the divisors of `whole` on either side of `wanted`."""
    divisors = [d for d in range(1, whole + 1) if whole % d == 0]
    below = [d for d in divisors if d < wanted][-1:]
    above = [d for d in divisors if d > wanted][:1]
    return " or ".join(str(d) for d in below + above)
