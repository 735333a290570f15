"""Rules over several keys: batch sizes, workers, what an algorithm requires. They run before torch is imported.

A rule yields one sentence per fault, so that all faults are reported at once. `rloom plan` and `rloom train` check the
same rules.
"""

import logging
import os
from collections.abc import Iterator, Mapping

from rloom.algos.needs import EstimatorNeeds
from rloom.algos.ranges import unusual_values
from rloom.config.base import ACTOR, CRITIC, MODEL, ROLLOUT, RunConfig
from rloom.config.correction_checks import (
    correction_faults,
    dapo_faults,
    off_policy_faults,
    off_policy_notices,
    skip_faults,
)
from rloom.config.derived import Needs, RewardKinds, nearest_divisors, on_either_side, ranks_per_share, reward_parts
from rloom.config.effects import without_effect
from rloom.config.engine_checks import (
    count,
    kept_cache_faults,
    megatron_faults,
    megatron_notices,
    repeated_run_faults,
    replay_faults,
    separate_faults,
    server_faults,
    server_notices,
)
from rloom.config.frontends import smoke
from rloom.config.keys import value_at
from rloom.config.reward_sections import PartWeight, judge_faults, remote_faults
from rloom.config.schema import Actor, Config, Critic, Ref, SftConfig
from rloom.config.sections import RolloutSection
from rloom.episodes.kinds import chosen_kinds, episode_faults
from rloom.errors import ConfigError
from rloom.plugins import referenced
from rloom.rewards.kinds import always
from rloom.runs.run_folder import flat_config

log = logging.getLogger(__name__)


def check_and_warn(config: Config, needs: Needs) -> None:
    for notice in check(config, needs):
        log.warning(f"Note: {notice}")


def check(config: Config, needs: Needs) -> list[str]:
    """Every rule of a configuration, once: an error with all faults, or the notices about a valid one, such as keys
    that the user set and that have no effect in this run."""
    unused = without_effect(config, needs)
    faults = [*all_faults(config, needs), *unused.errors]
    if faults:
        raise ConfigError("\n".join(faults))
    return [
        *megatron_notices(config, critic=needs.estimator.needs_critic),
        *server_notices(config),
        *off_policy_notices(config, needs, config.max_staleness),
        *config.one_behaviour,
        *kl_loss_notices(config),
        *reward_notices(config),
        *unusual_notices(config),
        *unused.notices,
    ]


def unusual_notices(config: RunConfig) -> list[str]:
    """One for each value outside of the range in which it is known to work. A smoke run has another model than the one
    that the values are for."""
    values = () if smoke.is_on(os.environ) else unusual_values(flat_config(config.model_dump(mode="json")))
    return [value.sentence for value in values]


def notices_on_a_cpu(config: Config, needs: Needs) -> list[str]:
    """The further notices if trainer.device=auto is a CPU, which is known after torch is imported."""
    return without_effect(config, needs).on_a_cpu


def kl_loss_notices(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.use_kl_loss and actor.kl_loss_type in ("kl", "k1"):
        yield (
            f"actor_rollout_ref.actor.kl_loss_type={actor.kl_loss_type}: as a loss the gradient of this estimator has "
            "mean 0, so it does not keep the policy near the reference; use low_var_kl, or kl+ for the same value with "
            "the gradient of k2"
        )


def reward_notices(config: Config) -> Iterator[str]:
    """The rewards of environments and agents, where another reward is the score."""
    kinds, parts = RewardKinds.of(config), reward_parts(config)
    own = kinds.every[kinds.default]
    if own.is_default is not always and kinds.default not in {part.source for part in parts}:
        others = " and ".join(kinds.every[part.source].switch for part in parts)
        yield (
            f"{others}: rewards of the episodes themselves are not in the score; to add them, set "
            f"reward_model.composite.enable=True and +reward_model.composite.weights.{own.parts[0]}=1.0"
        )


def late_notices(config: Config, total_steps: int) -> Iterator[str]:
    """What depends on the length of the run. The data determine it, so `check` cannot report this."""
    if config.ends_with_the_data:
        yield (
            "algorithm.filter_groups.enable=True: a step takes as many batches of prompts as it needs. The run ends "
            f"with the data of trainer.total_epochs={config.trainer.total_epochs}, at the latest after step "
            f"{total_steps}, which is also the length of the learning rate's schedule"
        )


def all_faults(config: Config, needs: Needs) -> list[str]:
    by_workers = [
        *micro_batch_faults(config, needs.estimator),
        *scoring_batch_faults(config),
        *machine_faults(config),
        *parallel_faults(config),
        *sequence_parallel_faults(config, needs.estimator),
        *megatron_faults(config, critic=needs.estimator.needs_critic),
    ]
    return [
        *group_size_faults(config, needs.estimator),
        *critic_faults(config, needs.estimator),
        *mini_batch_faults(config),
        *with_source(by_workers, config),
        *replay_faults(config),
        *rollout_faults(config),
        *episode_faults(config),
        *server_faults(config),
        *validation_faults(config),
        *dapo_faults(config),
        *correction_faults(config),
        *ahead_faults(config),
        *repeated_run_faults(config),
        *separate_faults(config),
        *kept_cache_faults(config),
        *off_policy_faults(config, needs, config.max_staleness),
        *skip_faults(config, needs.loss),
        *reward_faults(config),
        *reward_model_faults(config),
        *remote_faults(config.reward_model.remote),
        *judge_faults(config.reward_model.api),
        *resume_faults(config),
        *best_faults(config),
        *warmup_faults(config),
    ]


def with_source(faults: list[str], config: RunConfig) -> list[str]:
    """Faults of a number of workers, and where the number comes from if the user did not give it."""
    return [*faults, f"The run has {config.all_visible}"] if faults and config.all_visible else faults


def group_size_faults(config: Config, algorithm: EstimatorNeeds) -> Iterator[str]:
    n = config.actor_rollout_ref.rollout.n
    if n < algorithm.min_group:
        yield (
            f"actor_rollout_ref.rollout.n={n}: {config.algorithm.adv_estimator} compares the answers to one prompt; "
            f"use {algorithm.min_group} or more, or algorithm.adv_estimator=gae"
        )


def critic_faults(config: Config, algorithm: EstimatorNeeds) -> Iterator[str]:
    estimator, warmup = config.algorithm.adv_estimator, config.trainer.critic_warmup
    if config.critic.enable is False and algorithm.needs_critic:
        yield f"critic.enable=False: algorithm.adv_estimator={estimator} needs a critic; use rloo or grpo"
    if config.critic.enable and not algorithm.needs_critic:
        yield f"critic.enable=True: algorithm.adv_estimator={estimator} does not use a critic; use gae"
    if warmup and not algorithm.needs_critic:
        yield f"trainer.critic_warmup={warmup}: algorithm.adv_estimator={estimator} trains no critic; use 0, or gae"


def mini_batch_faults(config: Config) -> Iterator[str]:
    prompts, n = config.data.train_batch_size, config.actor_rollout_ref.rollout.n
    sizes = {
        "actor_rollout_ref.actor.ppo_mini_batch_size": config.actor_rollout_ref.actor.ppo_mini_batch_size,
        "critic.ppo_mini_batch_size": config.critic.ppo_mini_batch_size,
    }
    for key, size in sizes.items():
        if size is not None and prompts % size:
            # some guides divide the samples
            samples = f". It counts prompts, not the {prompts * n} samples of rollout.n={n} answers to each"
            yield (
                f"{key}={size} (prompts) does not divide data.train_batch_size={prompts} (prompts); "
                f"use {nearest_divisors(prompts, size)}{samples if prompts * n % size == 0 else ''}"
            )


def micro_batch_faults(config: Config, algorithm: EstimatorNeeds) -> Iterator[str]:
    actor, critic, n = config.actor_rollout_ref.actor, config.critic, config.actor_rollout_ref.rollout.n
    longest = config.data.longest_sample
    yield from role_micro_batch_faults(ACTOR, actor, actor.ppo_mini_batch_size * n, longest, config.actor_workers)
    if algorithm.needs_critic:
        prompts, _ = config.critic_updates
        yield from role_micro_batch_faults(CRITIC, critic, prompts * n, longest, config.workers_of("critic"))


def role_micro_batch_faults(name: str, role: Actor | Critic, samples: int, longest: int, workers: int) -> Iterator[str]:
    """`samples`: of a mini-batch. `longest`: maximum tokens of a sample."""
    shared = role.ulysses_sequence_parallel_size  # of Megatron's ranks each has all tokens
    per_gpu, whole = role.ppo_micro_batch_size_per_gpu, role.ppo_micro_batch_size
    size, key = (whole, "ppo_micro_batch_size") if per_gpu is None else (per_gpu, "ppo_micro_batch_size_per_gpu")
    if per_gpu is not None and whole is not None:
        yield (
            f"{name}.ppo_micro_batch_size_per_gpu={per_gpu} and {name}.ppo_micro_batch_size={whole} set the same size "
            f"twice; keep ppo_micro_batch_size_per_gpu"
        )
    elif size is None and role.use_dynamic_bsz is False:
        yield f"{name}.use_dynamic_bsz=False needs a size: set {name}.ppo_micro_batch_size_per_gpu"
    elif size is None or role.use_dynamic_bsz:
        least = -(-longest // shared)
        if role.ppo_max_token_len_per_gpu < least:
            together = "" if shared == 1 else f" on ulysses_sequence_parallel_size={shared} workers"
            yield (
                f"{name}.ppo_max_token_len_per_gpu={role.ppo_max_token_len_per_gpu}: one sample may have "
                f"data.max_prompt_length + data.max_response_length (at most data.max_length) = {longest} "
                f"tokens{together}; use {least} or more"
            )
    elif samples % size:
        yield (
            f"{name}.{key}={size} (samples) does not divide the mini-batch of {samples} samples "
            f"({name}.ppo_mini_batch_size × actor_rollout_ref.rollout.n); use {nearest_divisors(samples, size)}"
        )
    elif per_gpu is None:
        shares = workers // ranks_per_share(role, workers)
        yield from division_faults(f"{name}.ppo_micro_batch_size", size, shares, samples)


def scoring_batch_faults(config: Config) -> Iterator[str]:
    """The older keys of scoring passes, which count the samples of all GPUs together."""
    roles, workers = config.actor_rollout_ref, config.actor_workers
    samples = config.data.train_batch_size * roles.rollout.n
    among: dict[str, tuple[RolloutSection | Ref, int]] = {
        "rollout": (roles.rollout, workers),
        "ref": (roles.ref, config.workers_of("ref")),
    }
    for name, (section, ranks) in among.items():
        whole = section.log_prob_micro_batch_size
        if whole is not None and section.log_prob_micro_batch_size_per_gpu is None:
            key = f"actor_rollout_ref.{name}.log_prob_micro_batch_size"
            yield from division_faults(key, whole, ranks // ranks_per_share(roles.actor, ranks), samples)


def division_faults(key: str, size: int, ranks: int, samples: int) -> Iterator[str]:
    """`size` samples per pass on all GPUs together must divide evenly among `ranks`."""
    if ranks < 1 or size % ranks == 0:
        return
    values = on_either_side([number for number in range(ranks, samples + 1, ranks) if samples % number == 0], size)
    yield (
        f"{key}={size} (samples of all GPUs together) does not divide among {ranks} GPUs; use "
        + (f"{values}, or " if values else "")
        + f"{key}_per_gpu, the samples of one GPU"
    )


def machine_faults(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.node_rank >= trainer.nnodes:
        yield (
            f"trainer.node_rank={trainer.node_rank}: with trainer.nnodes={trainer.nnodes} machines are numbered 0 to "
            f"{trainer.nnodes - 1}; use one of these"
        )
    if trainer.nnodes > 1 and trainer.master_addr is None and not config.joins_a_cluster:
        yield (
            f"trainer.nnodes={trainer.nnodes} needs trainer.master_addr, an address of machine 0 that the others can "
            "reach, or an existing Ray cluster (ray_kwargs.ray_init.address, RAY_ADDRESS)"
        )
    if trainer.backend == "processes" and config.uses_ray:
        why = "an existing cluster needs" if trainer.nnodes == 1 else f"trainer.nnodes={trainer.nnodes} machines need"
        yield f"trainer.backend=processes: {why} Ray; use trainer.backend=auto"


def parallel_faults(config: Config) -> Iterator[str]:
    actor, chosen = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    pools, workers = config.trainer.pools, config.actor_workers
    tensor_parallel, generating = chosen.tensor_model_parallel_size, config.workers_of("rollout")
    key = f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}"
    if tensor_parallel > 1 and not chosen.kind.tensor_parallel:
        yield (
            f"{key}: the {chosen.name} engine holds a whole model in each worker; use 1, or "
            "actor_rollout_ref.rollout.name=vllm"
        )
    elif generating % chosen.workers_per_engine:
        yield (
            f"{key} does not divide {generating}, the number of workers with a rollout engine; use "
            f"{nearest_divisors(generating, tensor_parallel)}"
        )
    critic_size, among = config.critic.model.fsdp_config.fsdp_size, config.workers_of("critic")
    yield from fsdp_size_faults("actor_rollout_ref.actor.fsdp_config.fsdp_size", actor.fsdp_config.fsdp_size, workers)
    yield from fsdp_size_faults("critic.model.fsdp_config.fsdp_size", critic_size, among)
    try:
        config.layout()
    except ConfigError as error:
        yield str(error)
    if pools.by_role and config.workers == 1:
        yield "trainer.pools: one worker holds every role; set trainer.n_gpus_per_node or trainer.nnodes above 1"
    if pools.ref and config.actor_rollout_ref.model.has_lora:
        yield f"trainer.pools.ref={pools.ref}: with LoRA the reference is the actor without its adapter; remove the key"
    if pools.ref and actor.use_kl_loss and actor.kl_loss_type == "full":
        yield (
            f"trainer.pools.ref={pools.ref}: a KL over the whole vocabulary needs the reference on the actor's "
            "workers; remove the key, or use another actor_rollout_ref.actor.kl_loss_type"
        )


def fsdp_size_faults(key: str, size: int, workers: int) -> Iterator[str]:
    if size != -1 and (size < 1 or workers % size):
        yield f"{key}={size} does not divide {count(workers)}; use {nearest_divisors(workers, size)}, or -1"


def sequence_parallel_faults(config: Config, algorithm: EstimatorNeeds) -> Iterator[str]:
    actor, critic, pools = config.actor_rollout_ref.actor, config.critic, config.trainer.pools
    packed = config.actor_rollout_ref.model.use_remove_padding
    workers, reference = config.actor_workers, {"workers of trainer.pools.ref": pools.ref} if pools.ref else {}
    owners = {"workers": workers, **reference}
    yield from role_sequence_parallel_faults(ACTOR, actor, owners, MODEL, packed)
    if algorithm.needs_critic:
        own = {"workers of trainer.pools.critic": pools.critic} if pools.critic else {"workers": workers}
        yield from role_sequence_parallel_faults(CRITIC, critic, own, "critic.model", critic.model.use_remove_padding)
    if actor.ulysses_sequence_parallel_size > 1 and actor.use_kl_loss and actor.kl_loss_type == "full":
        yield (
            f"actor_rollout_ref.actor.ulysses_sequence_parallel_size={actor.ulysses_sequence_parallel_size}: a KL over "
            "the whole vocabulary needs whole sequences on each worker; use 1, or another "
            "actor_rollout_ref.actor.kl_loss_type"
        )


def role_sequence_parallel_faults(
    name: str, role: Actor | Critic, owners: Mapping[str, int], model: str, packed: bool
) -> Iterator[str]:
    size = role.ulysses_sequence_parallel_size
    key = f"{name}.ulysses_sequence_parallel_size={size}"
    for whose, workers in owners.items():
        if workers % size:
            yield f"{key} does not divide {workers} {whose}; use {nearest_divisors(workers, size)}"
    if size > 1 and not packed:
        yield f"{key} needs packed sequences; set {model}.use_remove_padding=True, or use 1"


def rollout_faults(config: Config) -> Iterator[str]:
    key, chosen = ROLLOUT, config.actor_rollout_ref.rollout
    validation = chosen.val_kwargs
    if chosen.engine_kwargs and not chosen.kind.takes_engine_kwargs:
        yield (
            f"{key}.engine_kwargs={chosen.engine_kwargs}: {chosen.kind.title} takes none; remove it, or use name=hf or "
            "vllm"
        )
    if chosen.engine_kwargs and chosen.uses_servers and (chosen.server.addresses or chosen.server.command):
        yield (
            f"{key}.engine_kwargs={chosen.engine_kwargs}: {key}.server.urls and {key}.server.command name servers with "
            "arguments of their own; remove engine_kwargs, or start the servers with them"
        )
    if chosen.kind.faults is not None:
        yield from referenced(chosen.kind.faults)(config)
    if validation.do_sample and validation.temperature == 0:
        yield (
            f"{key}.val_kwargs.do_sample=True: {key}.val_kwargs.temperature=0 is greedy; "
            "use a temperature above 0, or do_sample=False"
        )
    if validation.n > 1 and not validation.do_sample:
        yield (
            f"{key}.val_kwargs.n={validation.n}: greedy answers are all the same; "
            "set val_kwargs.do_sample=True val_kwargs.temperature=1.0, or n=1"
        )


def validation_faults(config: Config) -> Iterator[str]:
    """Validation that the user set, without validation prompts. A preset may set it without prompts."""
    trainer = config.trainer
    switches = {"trainer.test_freq": max(trainer.test_freq, 0), "trainer.val_only": trainer.val_only}
    if config.has_held_out_prompts:
        return
    for key, value in switches.items():
        if value and config.is_given(key):
            yield f"{key}={value} needs validation prompts: set data.val_files=FILE"


def ahead_faults(config: Config) -> Iterator[str]:
    """What needs all answers of a step at once, or the engine's own tokens of one version of the weights."""
    rollout = config.actor_rollout_ref.rollout
    if not config.generates_ahead:
        return
    key = f"trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}"
    kind = next(iter(chosen_kinds(config).values()), None)
    if kind is not None:
        yield f"{key}: {', '.join(kind.set_keys(config))}: episodes of several turns end in their step; use sync"
    if config.ends_with_the_data:
        yield (
            f"{key}: with algorithm.filter_groups.enable=True the data would end while groups wait; set "
            "trainer.total_training_steps=N"
        )
    if config.data.gen_batch_size is not None:
        yield f"{key}: data.gen_batch_size={config.data.gen_batch_size}: groups are replaced one by one; leave it out"
    scorer = config.reward_model
    apart = "reward" in config.trainer.pools.own and not scorer.model.fsdp_config.param_offload
    if config.algorithm.filter_groups.enable and scorer.model_path is not None and not apart:
        yield (
            f"{key}: algorithm.filter_groups.enable=True needs scores while answers are generated, and the reward "
            "model scores afterwards; give it workers of its own with trainer.pools.reward=N, or use sync"
        )
    if config.replays_routing:
        yield f"{key}: router replay has the experts of one version of the weights; leave one of the two out"
    engine = rollout.kind.servers if rollout.uses_servers else rollout.kind
    if config.max_staleness and engine is not None and not engine.partial_answers:
        yield (
            f"{key}: {rollout.kind.title} does not return the tokens of an answer that it has not finished, so long "
            "answers would begin again in each step; use actor_rollout_ref.rollout.name=native, vllm or sglang"
        )


def reward_model_faults(config: Config) -> Iterator[str]:
    section, policy = config.reward_model, config.actor_rollout_ref.model.path
    path, other, tokenizer = section.path, section.model.path, section.model.input_tokenizer
    if section.enable and section.model_path is None:
        yield "reward_model.enable=True needs a reward model: reward_model.path=FOLDER, or the hub name of a classifier"
    if path is not None and other is not None and path != other:
        yield f"reward_model.path={path} and reward_model.model.path={other} are the same key; keep one"
    if tokenizer not in (None, policy):
        yield (
            f"reward_model.model.input_tokenizer={tokenizer}: answers are decoded with the policy's tokenizer, that of "
            f"actor_rollout_ref.model.path={policy}; remove the key"
        )
    if section.label_weights is not None and not any(section.label_weights):
        yield f"reward_model.label_weights={section.label_weights}: every score would be 0; give a weight above 0"
    if section.micro_batch_size is not None and section.micro_batch_size_per_gpu is None:
        samples = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        ranks = config.workers_of("reward")
        yield from division_faults("reward_model.micro_batch_size", section.micro_batch_size, ranks, samples)


def resume_faults(config: RunConfig) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "resume_path" and not trainer.resume_from_path:
        yield "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder"
    if trainer.resume_from_path and trainer.resume_mode != "resume_path":
        yield f"trainer.resume_from_path={trainer.resume_from_path} is read only with trainer.resume_mode=resume_path"


def best_faults(config: RunConfig) -> Iterator[str]:
    """Keys about the best validation need validations during training."""
    trainer = config.trainer
    chosen = {
        "trainer.keep_best_checkpoint=True": trainer.keep_best_checkpoint,
        f"trainer.early_stopping_patience={trainer.early_stopping_patience}": trainer.early_stopping_patience,
    }
    named = [name for name, value in chosen.items() if value]
    if named and trainer.test_freq < 1:
        yield f"{named[0]} needs validations during training; set trainer.test_freq=N, a number of steps"
    if named and not config.has_held_out_prompts:
        yield f"{named[0]} needs validation data; set data.val_files=FILE"
    details = {"best_metric_key": trainer.best_metric_key, "best_metric_mode": trainer.best_metric_mode}
    for name, value in details.items():
        if value is not None and not named:
            yield (
                f"trainer.{name}={value}: no effect in this run; set trainer.keep_best_checkpoint=True or "
                "trainer.early_stopping_patience=N"
            )


def warmup_faults(config: Config) -> Iterator[str]:
    optimizers = {f"{ACTOR}.optim": config.actor_rollout_ref.actor.optim, f"{CRITIC}.optim": config.critic.optim}
    for name, optim in optimizers.items():
        first, second = optim.lr_warmup_steps, optim.warmup_steps
        if first is not None and second is not None and first != second:
            yield f"{name}.lr_warmup_steps={first} and {name}.warmup_steps={second} differ; keep one"


def reward_faults(config: Config) -> Iterator[str]:
    reward = config.reward_model
    if reward.reward_manager == "batch" and config.custom_reward_function.path is None:
        yield (
            "reward_model.reward_manager=batch calls a function of yours with lists; name it with "
            "custom_reward_function.path=FILE, or use naive"
        )
    yield from composite_faults(config) if reward.composite.enable else single_faults(config)


def single_faults(config: Config) -> Iterator[str]:
    kinds = RewardKinds.of(config)
    alone = [kinds.every[name] for name in kinds.alone]
    if len(alone) > 1:
        keys = " and ".join(kind.switch for kind in alone)
        weights = " ".join(f"+reward_model.composite.weights.{kind.parts[0]}=0.5" for kind in alone)
        yield f"{keys} each set a reward; keep one, or mix them: reward_model.composite.enable=True {weights}"
    for name, kind in kinds.chosen.items():
        if not kind.alone and kind.is_default is None:
            yield (
                f"{kind.switch}={value_at(config, kind.switch)}: a {name} reward is a part of a mix; "
                f"set reward_model.composite.enable=True and +reward_model.composite.weights.{kind.parts[0]}=0.1"
            )


def composite_faults(config: Config) -> Iterator[str]:
    section, key = config.reward_model.composite, "reward_model.composite.weights"
    kinds = RewardKinds.of(config)
    if not section.weights:
        yield f"reward_model.composite.enable=True: {key} is empty; set +{key}.rule_score=0.3 and so on"
    if config.reward_model.normalize:
        yield "reward_model.normalize=True: with a mix, use reward_model.composite.normalize"
    weights = {name: weight_of(given) for name, given in section.weights.items()}
    used: set[str] = set()
    for name in weights:
        source = kinds.computing(name)
        if name not in kinds.part_names:
            yield f"{key}.{name}: there is no such part; use {', '.join(kinds.part_names)}"
        elif source is None:
            yield f"{key}.{name}={weights[name]:g}: nothing computes it; set {kinds.ways(name)}, or remove it"
        else:
            if source in used and not kinds.every[source].takes_function:
                yield f"{key}.{name}: another part is computed by the same {kinds.every[source].switch}; keep one"
            used.add(source)
    for source, kind in kinds.chosen.items():
        if source not in used and kind.is_default is None:
            yield f"{kind.switch} is set, but no weight uses it; add it to {key}, or remove the key"
    if weights and not any(weights.values()):
        yield f"{key}: all weights are 0; give one part a weight"


def weight_of(given: float | PartWeight) -> float:
    return given.weight if isinstance(given, PartWeight) else given


def check_sft(config: SftConfig) -> None:
    by_workers = with_source([*sft_batch_faults(config), *sft_worker_faults(config)], config)
    faults = [*by_workers, *resume_faults(config), *best_faults(config), *sft_output_faults(config)]
    if faults:
        raise ConfigError("\n".join(faults))
    for notice in unusual_notices(config):
        log.warning(f"Note: {notice}")


def sft_batch_faults(config: SftConfig) -> Iterator[str]:
    data, groups = config.data, config.workers // config.sequence_ranks
    per_gpu, whole = data.micro_batch_size_per_gpu, data.micro_batch_size
    least = -(-data.max_length // config.sequence_ranks)
    if data.train_batch_size < groups:
        yield (
            f"data.train_batch_size={data.train_batch_size}: {groups} workers each need a row; use {groups} or more, "
            "or fewer trainer.n_gpus_per_node"
        )
    if per_gpu is not None and whole is not None:
        yield (
            f"data.micro_batch_size_per_gpu={per_gpu} and data.micro_batch_size={whole} set the same size twice; keep "
            "data.micro_batch_size_per_gpu"
        )
    elif per_gpu is None and whole is None and data.use_dynamic_bsz is False:
        yield "data.use_dynamic_bsz=False needs a size: set data.micro_batch_size_per_gpu"
    elif (data.use_dynamic_bsz or (per_gpu is None and whole is None)) and data.max_token_len_per_gpu < least:
        yield (
            f"data.max_token_len_per_gpu={data.max_token_len_per_gpu}: one row may have data.max_length="
            f"{data.max_length} tokens; use {least} or more"
        )
    elif whole is not None and not data.use_dynamic_bsz:
        yield from division_faults("data.micro_batch_size", whole, groups, data.train_batch_size)


def sft_worker_faults(config: SftConfig) -> Iterator[str]:
    shared = config.engine.ulysses_sequence_parallel_size
    if config.workers % shared:
        yield (
            f"engine.ulysses_sequence_parallel_size={shared} does not divide the {config.workers} workers "
            f"(trainer.nnodes × trainer.n_gpus_per_node); use {nearest_divisors(config.workers, shared)}"
        )
    yield from fsdp_size_faults("engine.fsdp_size", config.engine.fsdp_size, config.workers)
    if not config.uses_torchrun:
        yield from machine_faults(config)


def sft_output_faults(config: SftConfig) -> Iterator[str]:
    folder = config.trainer.default_hdfs_dir
    if folder is not None:
        yield (
            f"trainer.default_hdfs_dir={folder}: rloom copies nothing to HDFS; remove the key, and copy "
            "trainer.default_local_dir after the run"
        )
