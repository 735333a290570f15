"""Keys that only some runs use: when, and which switch enables them. A key that only one switch makes useful declares
it where it is defined (`switch=`); the table has the others.

A key that the user set and that this run does not use is reported: as an error if the user would expect another result,
and as a notice if the key is about memory or speed, or if the user also set its switch. Every run uses the keys that no
row of the table names.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rloom.algos.needs import ESTIMATORS, LOSSES, EstimatorNeeds, LossNeeds
from rloom.config.base import ACTOR, CRITIC, MODEL, REF, ROLLOUT, Switch
from rloom.config.derived import Needs, measures_mismatch, needs_old_logprobs
from rloom.config.keys import Key, all_keys, value_at
from rloom.config.reward_sections import ClassifierKeys
from rloom.config.schema import Config, PolicyLossSection
from rloom.extras import TRACKERS


@dataclass(frozen=True)
class RunFacts:
    """What determines whether a key is used."""

    config: Config
    needs: Needs
    on_cpu: bool

    @property
    def has_reference_model(self) -> bool:
        """Whether a model of its own is the reference. With LoRA it is the actor without its adapter."""
        return self.config.uses_reference and not self.config.actor_rollout_ref.model.has_lora

    @property
    def scores_with_the_actor(self) -> bool:
        compares_adapter = self.config.uses_reference and self.config.actor_rollout_ref.model.has_lora
        return compares_adapter or needs_old_logprobs(self.config, self.needs.loss)


@dataclass(frozen=True)
class EffectRule:
    keys: Sequence[str]  # keys, or whole sections
    used: Callable[[RunFacts], bool]
    otherwise: str  # the reason if not used, and the way out; {key} is replaced by key=value, {key:} by the value
    error: bool = False
    switch: str | None = None  # if the user set this key too, a notice replaces the error
    harmless: Sequence[Any] = ()  # values that are not reported
    apart_from: Sequence[str] = ()


@dataclass(frozen=True)
class WithoutEffect:
    """Sentences about keys that the user set and this run does not use."""

    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    on_a_cpu: list[str] = field(default_factory=list, compare=False)  # notices if trainer.device=auto is a CPU


REWARD_MODEL = "reward_model"
REWARD_RULES: list[EffectRule] = [
    EffectRule(
        ["trainer.pools.reward"],
        lambda run: run.config.reward_model.model_path is not None,
        "there is no reward model; set reward_model.path, or remove the key",
        error=True,
    ),
    EffectRule(
        [f"{REWARD_MODEL}.{name}" for name in ClassifierKeys.model_fields],
        lambda run: run.config.reward_model.model_path is not None,
        "there is no reward model; set reward_model.path",
        error=True,
        switch=f"{REWARD_MODEL}.enable",
        harmless=(False,),
        apart_from=[f"{REWARD_MODEL}.enable"],
    ),
    EffectRule(
        ["reward_model.sandbox"],
        lambda run: run.config.custom_reward_function.path is None,
        "{custom_reward_function.path} scores every data source; the built-in rules for code read it",
    ),
    EffectRule(
        ["custom_reward_function.name"],
        lambda run: run.config.custom_reward_function.path is not None,
        "the run uses the built-in rules; set custom_reward_function.path=FILE",
        error=True,
        harmless=("compute_score",),
    ),
]
ALGORITHM = "algorithm"
OFFLOADED = ("param", "optimizer")
ESTIMATOR, LOSS_MODE = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"


def without_effect(config: Config, needs: Needs) -> WithoutEffect:
    """The keys that the user set and this run does not use: one sentence per row of the table."""
    run, found = RunFacts(config, needs, on_cpu=config.trainer.device == "cpu"), WithoutEffect()
    named: set[str] = set()
    for rule in RULES:
        only_on_cpu = rule.used(run)
        if only_on_cpu and rule.used(replace(run, on_cpu=True)):
            continue
        idle = [key for key in idle_keys(rule, config) if key not in named]
        if not idle:
            continue
        settings = ", ".join(f"{key}={value_at(config, key)}" for key in idle)
        sentence = f"{settings}: no effect in this run, because {filled(rule.otherwise, config)}"
        if only_on_cpu:
            found.on_a_cpu.append(sentence)
            continue
        named.update(idle)
        is_error = rule.error and not (rule.switch and config.is_given(rule.switch))
        (found.errors if is_error else found.notices).append(sentence)
    return found


def idle_keys(rule: EffectRule, config: Config) -> Iterator[str]:
    for key in sorted(config.given):
        covered = any(f"{key}.".startswith(f"{name}.") for name in rule.keys)
        if covered and key not in rule.apart_from and value_at(config, key) not in (None, *rule.harmless):
            yield key


def filled(sentence: str, config: Config) -> str:
    """`sentence` with every `{key}` replaced by `key=value`, and `{key:}` by the value alone."""
    parts = sentence.split("{")
    named = [(key, rest) for key, _, rest in (part.partition("}") for part in parts[1:])]
    return parts[0] + "".join(f"{shown(key, config)}{rest}" for key, rest in named)


def shown(key: str, config: Config) -> str:
    return str(value_at(config, key[:-1])) if key.endswith(":") else f"{key}={value_at(config, key)}"


def reads(name: str) -> Callable[[RunFacts], bool]:
    return lambda run: name in run.needs.estimator.reads


def loss_reads(name: str) -> Callable[[RunFacts], bool]:
    return lambda run: name in run.needs.loss.reads


def switch_rules() -> list[EffectRule]:
    """The keys that declare their switch, in the order of the tree: one row for those of a section with equal ones."""
    rows: dict[tuple[str, Switch], list[Key]] = {}
    for path, key in all_keys().items():
        if key.switch is not None:
            section = path if key.section is not None else path.rpartition(".")[0]
            rows.setdefault((f"{section}.{key.switch.name}", key.switch), []).append(key)
    return [switch_rule(switch, path, keys) for (path, switch), keys in rows.items()]


def switch_rule(switch: Switch, path: str, keys: list[Key]) -> EffectRule:
    return EffectRule(
        [key.path for key in keys],
        lambda run: switch.is_on(value_at(run.config, path)),
        f"{switch.off}; set {path}{switch.on}",
        error=True,
        switch=path,
        harmless=switch.harmless,
        apart_from=[path],
    )


def readers(table: Mapping[str, EstimatorNeeds] | Mapping[str, LossNeeds], name: str, last: str = "and") -> str:
    """The entries that read a setting: "gae, reinforce_plus_plus or remax"."""
    *others, final = [entry for entry, needs in table.items() if name in needs.reads]
    return f"{', '.join(others)} {last} {final}" if others else final


def pass_rules(section: str, size: str, dynamic: str, budget: str) -> list[EffectRule]:
    """Passes are filled by samples or by tokens: the key of the other way is not used."""
    sizes = [f"{section}.{size}_per_gpu", f"{section}.{size}"]

    def by_tokens(run: RunFacts) -> bool:
        chosen = value_at(run.config, f"{section}.{dynamic}")
        return bool(chosen) or all(value_at(run.config, key) is None for key in sizes)

    return [
        EffectRule(sizes, lambda run: not by_tokens(run), f"{{{section}.{dynamic}}} fills passes by tokens"),
        EffectRule(
            [f"{section}.{budget}"],
            by_tokens,
            f"passes are filled by samples; {section}.{dynamic}=True would fill them by tokens",
        ),
    ]


def learning_rate_rules(section: str) -> list[EffectRule]:
    def optim(run: RunFacts) -> Any:
        return value_at(run.config, section)

    return [
        EffectRule(
            [f"{section}.min_lr_ratio"],
            lambda run: optim(run).lr_scheduler_type != "constant",
            f"{{{section}.lr_scheduler_type}} keeps the learning rate; use cosine or linear",
            error=True,
            switch=f"{section}.lr_scheduler_type",
            harmless=(0,),
        ),
        EffectRule(
            [f"{section}.lr_warmup_steps_ratio"],
            lambda run: all(
                steps is None or steps < 0 for steps in (optim(run).lr_warmup_steps, optim(run).warmup_steps)
            ),
            f"{section}.lr_warmup_steps or warmup_steps overrides it with a number of steps",
            harmless=(0,),
        ),
    ]


def reads_section(role: str, section: str) -> Callable[[RunFacts], bool]:
    return lambda run: value_at(run.config, role).kind.section == section


def engine_rules(role: str, of_fsdp: list[str], of_megatron: list[str]) -> list[EffectRule]:
    """The sections of the other training engine."""
    strategy = f"{role}.strategy"
    return [
        EffectRule(
            of_fsdp,
            reads_section(role, "fsdp_config"),
            f"{{{strategy}}} does not read it; {of_megatron[0]} has its keys for offload and data type",
            harmless=(False, -1, "auto"),
        ),
        EffectRule(
            of_megatron,
            reads_section(role, "megatron"),
            f"{{{strategy}}} does not read it; set {strategy}=megatron",
            error=True,
        ),
    ]


def names_the_run(key: str) -> Callable[[RunFacts], bool]:
    """Whether project or experiment is in the name of the run directory, or used by a tracker."""

    def used(run: RunFacts) -> bool:
        trainer = run.config.trainer
        named = not {*TRACKERS, "tensorboard"}.isdisjoint(trainer.loggers)
        return named or value_at(run.config, key) in trainer.default_local_dir

    return used


def clips_by_one_range(run: RunFacts) -> bool:
    actor = run.config.actor_rollout_ref.actor
    return actor.clip_ratio_low is None or actor.clip_ratio_high is None


GPU_ONLY = "the run is on a CPU, and only runs on a GPU use it"
NO_VALIDATION = (
    "there is no validation; set data.val_files, and trainer.test_freq, trainer.val_before_train or trainer.val_only"
)
RULES: list[EffectRule] = [
    # KL
    EffectRule(
        [f"{ALGORITHM}.kl_ctrl"],
        lambda run: run.config.kl_in_reward,
        f"there is no KL in the reward; set {ALGORITHM}.use_kl_in_reward=True",
        error=True,
        switch=f"{ALGORITHM}.use_kl_in_reward",
        harmless=(0, "fixed"),
    ),
    EffectRule(
        [f"{ALGORITHM}.kl_penalty"],
        lambda run: run.config.kl_in_reward or run.config.kl_only_measured,
        f"there is no KL in the reward; set {ALGORITHM}.use_kl_in_reward=True, or {ALGORITHM}.kl_metric=True",
        error=True,
        switch=f"{ALGORITHM}.use_kl_in_reward",
    ),
    EffectRule(
        [f"{ALGORITHM}.kl_metric"],
        lambda run: run.config.kl_only_measured,
        "there is a KL in the reward or in the loss, which has a metric of its own",
        harmless=(False,),
    ),
    EffectRule(
        ["trainer.pools.ref"],
        lambda run: run.config.uses_reference,
        f"there is no reference, and these workers would be idle; set {ACTOR}.use_kl_loss=True or "
        f"{ALGORITHM}.use_kl_in_reward=True or {ALGORITHM}.kl_metric=True, or remove the key",
        error=True,
    ),
    EffectRule(
        [REF],
        lambda run: run.has_reference_model,
        f"there is no reference model; a KL to it or {ALGORITHM}.kl_metric=True builds one, unless LoRA is used",
    ),
    EffectRule(
        [f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules"],
        lambda run: run.config.actor_rollout_ref.model.lora_adapter_path is None,
        f"the adapter of {MODEL}.lora_adapter_path defines it",
    ),
    *switch_rules(),
    # estimators
    EffectRule(
        ["trainer.pools.critic"],
        lambda run: run.needs.estimator.needs_critic,
        f"{{{ESTIMATOR}}} trains no critic, and these workers would be idle; use gae, or remove the key",
        error=True,
    ),
    EffectRule(
        [CRITIC, "trainer.max_critic_ckpt_to_keep"],
        lambda run: run.needs.estimator.needs_critic,
        f"{{{ESTIMATOR}}} trains no critic; gae does",
        apart_from=[f"{CRITIC}.enable"],
    ),
    EffectRule(
        [f"{ALGORITHM}.gamma"],
        reads("gamma"),
        f"{{{ESTIMATOR}}} does not discount; use 1.0, or {readers(ESTIMATORS, 'gamma', 'or')}",
        error=True,
        harmless=(1,),
    ),
    EffectRule(
        [f"{ALGORITHM}.lam"], reads("lam"), f"{{{ESTIMATOR}}} does not read it; {readers(ESTIMATORS, 'lam')} does"
    ),
    EffectRule(
        [f"{ALGORITHM}.norm_adv_by_std_in_grpo"],
        reads("norm_adv_by_std_in_grpo"),
        f"{{{ESTIMATOR}}} does not read it; {readers(ESTIMATORS, 'norm_adv_by_std_in_grpo')} do",
        error=True,
        harmless=(True,),
    ),
    # policy losses
    *(
        EffectRule(
            [f"{ACTOR}.policy_loss.{name}"],
            loss_reads(name),
            f"{{{LOSS_MODE}}} does not read it; {readers(LOSSES, name)} does",
            error=True,
            switch=LOSS_MODE,
        )
        for name in PolicyLossSection.model_fields
        if name != "loss_mode"
    ),
    EffectRule(
        [f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"],
        loss_reads("clip_ratio"),
        f"{{{LOSS_MODE}}} does not clip; vanilla does",
    ),
    EffectRule(
        [f"{ACTOR}.clip_ratio"],
        clips_by_one_range,
        f"{ACTOR}.clip_ratio_low and clip_ratio_high are both set",
    ),
    EffectRule([f"{ACTOR}.clip_ratio_c"], loss_reads("clip_ratio_c"), f"{{{LOSS_MODE}}} has no dual clip; vanilla has"),
    # rollout
    EffectRule(
        [f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "max_num_batched_tokens")]
        + [f"{ROLLOUT}.{name}" for name in ("enforce_eager", "free_cache_engine")],
        lambda run: run.config.actor_rollout_ref.rollout.kind.reads_cache_keys,
        f"{{{ROLLOUT}.kind.title:}} does not read it; {ROLLOUT}.name=native does, and so does vllm",
    ),
    EffectRule(
        [f"{ROLLOUT}.server"],
        lambda run: run.config.actor_rollout_ref.rollout.uses_servers,
        f"no servers are used; set {ROLLOUT}.name=sglang, or name=vllm with {ROLLOUT}.server.urls or "
        f"{ROLLOUT}.server.count",
        error=True,
    ),
    EffectRule(
        [f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager")],
        lambda run: run.config.actor_rollout_ref.rollout.starts_servers is not False,
        f"{ROLLOUT}.server.urls and {ROLLOUT}.server.command name servers with arguments of their own",
    ),
    EffectRule(
        [f"{ROLLOUT}.free_cache_engine"],
        lambda run: not run.on_cpu or run.config.actor_rollout_ref.rollout.kind.sleeps_on_cpu,
        f"{{{ROLLOUT}.kind.title:}} has no sleep mode on a CPU",
        harmless=(False,),
    ),
    EffectRule(
        [f"{ROLLOUT}.free_cache_engine"],
        lambda run: (
            not run.config.actor_rollout_ref.rollout.server.addresses
            or run.config.actor_rollout_ref.rollout.server.weight_transfer == "shared"
        ),
        f"the servers of {ROLLOUT}.server.urls are on other GPUs than the trainer, unless {ROLLOUT}.server."
        "weight_transfer=shared",
        harmless=(False,),
    ),
    EffectRule(
        [f"{ROLLOUT}.log_prob_{name}" for name in ("micro_batch_size_per_gpu", "micro_batch_size")]
        + [f"{ROLLOUT}.log_prob_{name}" for name in ("use_dynamic_bsz", "max_token_len_per_gpu")],
        lambda run: run.scores_with_the_actor,
        f"one update per step ({ACTOR}.ppo_mini_batch_size = data.train_batch_size, {ACTOR}.ppo_epochs=1) needs no old "
        "log-probs",
    ),
    # sampling and rewards
    *REWARD_RULES,
    EffectRule(
        ["data.return_raw_chat"],
        lambda run: run.config.custom_reward_function.path is not None,
        "the built-in rules do not read it; custom_reward_function.path=FILE may",
        harmless=(False,),
    ),
    EffectRule(
        ["data.truncation"],
        lambda run: not run.config.data.filter_overlong_prompts,
        "data.filter_overlong_prompts=True drops the prompts that it would truncate",
        harmless=("error",),
    ),
    # validation
    EffectRule(
        [
            "data.val_files",
            "data.val_batch_size",
            "data.val_max_samples",
            f"{ROLLOUT}.val_kwargs",
            "trainer.validation_data_dir",
            "trainer.log_val_generations",
        ],
        lambda run: run.config.validates,
        NO_VALIDATION,
        harmless=(0, -1, False),
    ),
    EffectRule(
        ["trainer.val_before_train"],
        lambda run: run.config.has_held_out_prompts,
        "there are no validation prompts; set data.val_files=FILE",
        harmless=(False,),
    ),
    # models and optimizers
    *engine_rules(ACTOR, [f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config"], [f"{ACTOR}.megatron"]),
    EffectRule(
        [f"{REF}.megatron"],
        reads_section(ACTOR, "megatron"),
        f"{{{ACTOR}.strategy}} does not read it; set {ACTOR}.strategy=megatron",
    ),
    *engine_rules(CRITIC, [f"{CRITIC}.model.fsdp_config"], [f"{CRITIC}.megatron"]),
    EffectRule(
        [f"{MODEL}.use_remove_padding", f"{MODEL}.use_fused_kernels"],
        lambda run: run.config.actor_workers == 1 or not run.config.actor_rollout_ref.actor.kind.model_parallel,
        "the Megatron engine packs sequences and computes log-probs in chunks",
        harmless=(True,),
    ),
    EffectRule(
        [f"{CRITIC}.model.use_remove_padding"],
        lambda run: run.config.workers_of("critic") == 1 or not run.config.critic.kind.model_parallel,
        "the Megatron engine packs sequences",
        harmless=(True,),
    ),
    *learning_rate_rules(f"{ACTOR}.optim"),
    *learning_rate_rules(f"{CRITIC}.optim"),
    *pass_rules(ACTOR, "ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    *pass_rules(CRITIC, "ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    *pass_rules(ROLLOUT, "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    *pass_rules(REF, "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    *pass_rules(REWARD_MODEL, "micro_batch_size", "use_dynamic_bsz", "forward_max_token_len_per_gpu"),
    EffectRule(
        [f"{ROLLOUT}.gpu_memory_utilization", f"{ROLLOUT}.enforce_eager"]
        + [f"{section}.use_torch_compile" for section in (ACTOR, REF, CRITIC, REWARD_MODEL)]
        + [
            f"{section}.fsdp_config.param_offload"
            for section in (ACTOR, REF, f"{CRITIC}.model", f"{REWARD_MODEL}.model")
        ]
        + [f"{section}.fsdp_config.optimizer_offload" for section in (ACTOR, f"{CRITIC}.model")]
        + [f"{section}.megatron.{what}_offload" for section in (ACTOR, CRITIC) for what in OFFLOADED]
        + [f"{REF}.megatron.param_offload"],
        lambda run: not run.on_cpu,
        GPU_ONLY,
        harmless=(False,),
    ),
    # the run
    EffectRule(
        ["trainer.total_epochs"],
        lambda run: run.config.trainer.total_training_steps is None,
        "{trainer.total_training_steps} sets the length of the run",
    ),
    *(
        EffectRule(
            [name],
            names_the_run(name),
            "{trainer.default_local_dir} does not contain it, and no tracker uses it; trainer.logger=wandb would",
        )
        for name in ("trainer.project_name", "trainer.experiment_name")
    ),
    EffectRule(
        ["trainer.rollout_mismatch_warning"],
        lambda run: measures_mismatch(run.config),
        f"{{{ROLLOUT}.calculate_log_probs}} compares no log-probs",
    ),
    EffectRule(
        ["trainer.master_addr", "trainer.master_port"],
        lambda run: run.config.starts_a_cluster,
        "the run starts no cluster; trainer.nnodes above 1 does",
    ),
    EffectRule(
        ["ray_kwargs"], lambda run: run.config.uses_ray, "one machine needs no Ray; trainer.backend=ray uses it"
    ),
    EffectRule(
        ["trainer.backend", "trainer.start_timeout_s", "trainer.max_restarts", "trainer.balance_batch"],
        lambda run: run.config.has_workers,
        "one worker is in the process of the loop; trainer.n_gpus_per_node or trainer.nnodes above 1 is not",
        harmless=(False,),
    ),
]
