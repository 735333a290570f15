"""Keys that only some runs use: when, and which switch enables them.

A key that the user set and that this run does not use is reported: as an error if the user would expect another result,
and as a notice if the key is about memory or speed, or if the user also set its switch. Every run uses the keys that no
row of the table names.
"""

from collections.abc import Callable, Iterator
from typing import Any

from rloom.config.algorithm_needs import Needs, measures_mismatch
from rloom.config.keys import value_at
from rloom.config.reward_uses import REWARD_MODEL, REWARD_USES
from rloom.config.schema import Config
from rloom.config.use import Run, Use, WithoutEffect
from rloom.extras import TRACKERS

ALGORITHM, ACTOR, CRITIC, MODEL = "algorithm", "actor_rollout_ref.actor", "critic", "actor_rollout_ref.model"
ROLLOUT, REF = "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
OFFLOADED = ("param", "optimizer")
ESTIMATOR, LOSS_MODE = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"


def without_effect(config: Config, needs: Needs, *, on_cpu: bool = False) -> WithoutEffect:
    """The keys that the user set and this run does not use: one sentence per row of the table.

    `on_cpu`: with trainer.device=auto, known only after torch is imported.
    """
    run, found = Run(config, needs, on_cpu or config.trainer.device == "cpu"), WithoutEffect()
    named: set[str] = set()
    for use in USES:
        idle = [] if use.used(run) else [key for key in idle_keys(use, config) if key not in named]
        if not idle:
            continue
        named.update(idle)
        settings = ", ".join(f"{key}={value_at(config, key)}" for key in idle)
        sentence = f"{settings}: no effect in this run, because {filled(use.otherwise, config)}"
        is_error = use.error and not (use.switch and config.is_given(use.switch))
        (found.errors if is_error else found.notices).append(sentence)
    return found


def idle_keys(use: Use, config: Config) -> Iterator[str]:
    for key in sorted(config.given):
        covered = any(f"{key}.".startswith(f"{name}.") for name in use.keys)
        if covered and key not in use.apart_from and value_at(config, key) not in (None, *use.harmless):
            yield key


def filled(sentence: str, config: Config) -> str:
    """`sentence` with every `{key}` replaced by `key=value`."""
    parts = sentence.split("{")
    named = [(key, rest) for key, _, rest in (part.partition("}") for part in parts[1:])]
    return parts[0] + "".join(f"{key}={value_at(config, key)}{rest}" for key, rest in named)


def reads(name: str) -> Callable[[Run], bool]:
    return lambda run: name in run.needs.estimator.reads


def loss_reads(name: str) -> Callable[[Run], bool]:
    return lambda run: name in run.needs.loss.reads


def pass_size_uses(section: str, size: str, dynamic: str, budget: str) -> list[Use]:
    """Passes are filled by samples or by tokens: the key of the other way is not used."""
    sizes = [f"{section}.{size}_per_gpu", f"{section}.{size}"]

    def by_tokens(run: Run) -> bool:
        chosen = value_at(run.config, f"{section}.{dynamic}")
        return bool(chosen) or all(value_at(run.config, key) is None for key in sizes)

    return [
        Use(sizes, lambda run: not by_tokens(run), f"{{{section}.{dynamic}}} fills passes by tokens"),
        Use(
            [f"{section}.{budget}"],
            by_tokens,
            f"passes are filled by samples; {section}.{dynamic}=True would fill them by tokens",
        ),
    ]


def learning_rate_uses(section: str) -> list[Use]:
    def optim(run: Run) -> Any:
        return value_at(run.config, section)

    return [
        Use(
            [f"{section}.min_lr_ratio"],
            lambda run: optim(run).lr_scheduler_type != "constant",
            f"{{{section}.lr_scheduler_type}} keeps the learning rate; use cosine or linear",
            error=True,
            switch=f"{section}.lr_scheduler_type",
            harmless=(0,),
        ),
        Use(
            [f"{section}.lr_warmup_steps_ratio"],
            lambda run: all(
                steps is None or steps < 0 for steps in (optim(run).lr_warmup_steps, optim(run).warmup_steps)
            ),
            f"{section}.lr_warmup_steps or warmup_steps overrides it with a number of steps",
            harmless=(0,),
        ),
    ]


def engine_uses(strategy: str, of_fsdp: list[str], of_megatron: list[str]) -> list[Use]:
    """The sections of the other training engine."""

    def is_megatron(run: Run) -> bool:
        return bool(value_at(run.config, strategy) == "megatron")

    return [
        Use(
            of_fsdp,
            lambda run: not is_megatron(run),
            f"{{{strategy}}} does not read it; {of_megatron[0]} has its keys for offload and data type",
            harmless=(False, -1, "auto"),
        ),
        Use(
            of_megatron,
            is_megatron,
            f"{{{strategy}}} does not read it; set {strategy}=megatron",
            error=True,
        ),
    ]


def names_the_run(key: str) -> Callable[[Run], bool]:
    """For project and experiment: used in the name of the run directory or by a tracker."""

    def used(run: Run) -> bool:
        trainer = run.config.trainer
        named = not {*TRACKERS, "tensorboard"}.isdisjoint(trainer.loggers)
        return named or value_at(run.config, key) in trainer.default_local_dir

    return used


def clips_by_one_range(run: Run) -> bool:
    actor = run.config.actor_rollout_ref.actor
    return actor.clip_ratio_low is None or actor.clip_ratio_high is None


CORRECTION = f"{ALGORITHM}.rollout_correction"
GPU_ONLY = "the run is on a CPU, and only runs on a GPU use it"
NO_VALIDATION = (
    "there is no validation; set data.val_files, and trainer.test_freq, trainer.val_before_train or trainer.val_only"
)

USES: list[Use] = [
    # KL
    Use(
        [f"{ACTOR}.kl_loss_coef", f"{ACTOR}.kl_loss_type"],
        lambda run: run.config.actor_rollout_ref.actor.use_kl_loss,
        f"there is no KL in the loss; set {ACTOR}.use_kl_loss=True",
        error=True,
        switch=f"{ACTOR}.use_kl_loss",
        harmless=(0,),
    ),
    Use(
        [f"{ALGORITHM}.kl_ctrl"],
        lambda run: run.config.kl_in_reward,
        f"there is no KL in the reward; set {ALGORITHM}.use_kl_in_reward=True",
        error=True,
        switch=f"{ALGORITHM}.use_kl_in_reward",
        harmless=(0, "fixed"),
    ),
    Use(
        [f"{ALGORITHM}.kl_penalty"],
        lambda run: run.config.kl_in_reward or run.config.kl_only_measured,
        f"there is no KL in the reward; set {ALGORITHM}.use_kl_in_reward=True, or {ALGORITHM}.kl_metric=True",
        error=True,
        switch=f"{ALGORITHM}.use_kl_in_reward",
    ),
    Use(
        [f"{ALGORITHM}.kl_metric"],
        lambda run: run.config.kl_only_measured,
        "there is a KL in the reward or in the loss, which has a metric of its own",
        harmless=(False,),
    ),
    Use(
        [f"{ALGORITHM}.kl_ctrl.horizon", f"{ALGORITHM}.kl_ctrl.target_kl"],
        lambda run: run.config.algorithm.kl_ctrl.type == "adaptive",
        f"{{{ALGORITHM}.kl_ctrl.type}} keeps the coefficient; set {ALGORITHM}.kl_ctrl.type=adaptive",
        error=True,
        switch=f"{ALGORITHM}.kl_ctrl.type",
    ),
    Use(
        ["trainer.pools.ref"],
        lambda run: run.config.uses_reference,
        f"there is no reference, and these workers would be idle; set {ACTOR}.use_kl_loss=True or "
        f"{ALGORITHM}.use_kl_in_reward=True or {ALGORITHM}.kl_metric=True, or remove the key",
        error=True,
    ),
    Use(
        [REF],
        lambda run: run.has_reference_model,
        f"there is no reference model; a KL to it or {ALGORITHM}.kl_metric=True builds one, unless LoRA is used",
    ),
    # estimators
    Use(
        ["trainer.pools.critic"],
        lambda run: run.needs.estimator.needs_critic,
        f"{{{ESTIMATOR}}} trains no critic, and these workers would be idle; use gae, or remove the key",
        error=True,
    ),
    Use(
        [CRITIC, "trainer.max_critic_ckpt_to_keep"],
        lambda run: run.needs.estimator.needs_critic,
        f"{{{ESTIMATOR}}} trains no critic; gae does",
        apart_from=[f"{CRITIC}.enable"],
    ),
    Use(
        [f"{ALGORITHM}.gamma"],
        reads("gamma"),
        f"{{{ESTIMATOR}}} does not discount; use 1.0, or gae, reinforce_plus_plus or remax",
        error=True,
        harmless=(1,),
    ),
    Use([f"{ALGORITHM}.lam"], reads("lam"), f"{{{ESTIMATOR}}} does not read it; gae does"),
    Use(
        [f"{ALGORITHM}.norm_adv_by_std_in_grpo"],
        reads("norm_adv_by_std_in_grpo"),
        f"{{{ESTIMATOR}}} does not read it; grpo and grpo_passk do",
        error=True,
        harmless=(True,),
    ),
    # policy losses
    *(
        Use(
            [f"{ACTOR}.policy_loss.{name}"],
            loss_reads(name),
            f"{{{LOSS_MODE}}} does not read it; {reader} does",
            error=True,
            switch=LOSS_MODE,
        )
        for reader, names in {
            "sapo": ("tau_pos", "tau_neg"),
            "clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
            "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
        }.items()
        for name in names
    ),
    Use(
        [f"{ACTOR}.clip_ratio", f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"],
        loss_reads("clip_ratio"),
        f"{{{LOSS_MODE}}} does not clip; vanilla does",
    ),
    Use(
        [f"{ACTOR}.clip_ratio"],
        clips_by_one_range,
        f"{ACTOR}.clip_ratio_low and clip_ratio_high are both set",
    ),
    Use([f"{ACTOR}.clip_ratio_c"], loss_reads("clip_ratio_c"), f"{{{LOSS_MODE}}} has no dual clip; vanilla has"),
    # rollout
    Use(
        [f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "max_num_batched_tokens")]
        + [f"{ROLLOUT}.{name}" for name in ("enforce_eager", "free_cache_engine")],
        lambda run: run.config.actor_rollout_ref.rollout.name != "hf",
        f"the hf engine does not read it; {ROLLOUT}.name=native does, and so does vllm",
    ),
    Use(
        [f"{ROLLOUT}.server"],
        lambda run: run.config.actor_rollout_ref.rollout.uses_servers,
        f"no servers are used; set {ROLLOUT}.name=sglang, or name=vllm with {ROLLOUT}.server.urls or "
        f"{ROLLOUT}.server.count",
        error=True,
    ),
    Use(
        [f"{ROLLOUT}.{name}" for name in ("gpu_memory_utilization", "max_num_batched_tokens", "enforce_eager")],
        lambda run: run.config.actor_rollout_ref.rollout.starts_servers is not False,
        f"{ROLLOUT}.server.urls and {ROLLOUT}.server.command name servers with arguments of their own",
    ),
    Use(
        [f"{ROLLOUT}.free_cache_engine"],
        lambda run: not (run.on_cpu and run.config.actor_rollout_ref.rollout.name == "vllm"),
        "vLLM has no sleep mode on a CPU",
        harmless=(False,),
    ),
    Use(
        [f"{ROLLOUT}.free_cache_engine"],
        lambda run: (
            not run.config.actor_rollout_ref.rollout.server.addresses
            or run.config.actor_rollout_ref.rollout.server.weight_transfer == "shared"
        ),
        f"the servers of {ROLLOUT}.server.urls are on other GPUs than the trainer, unless {ROLLOUT}.server."
        "weight_transfer=shared",
        harmless=(False,),
    ),
    Use(
        [f"{ROLLOUT}.log_prob_{name}" for name in ("micro_batch_size_per_gpu", "micro_batch_size")]
        + [f"{ROLLOUT}.log_prob_{name}" for name in ("use_dynamic_bsz", "max_token_len_per_gpu")],
        lambda run: run.scores_with_the_actor,
        f"one update per step ({ACTOR}.ppo_mini_batch_size = data.train_batch_size, {ACTOR}.ppo_epochs=1) needs no old "
        "log-probs",
    ),
    *(
        Use(
            [f"{ROLLOUT}.val_kwargs.{name}"],
            lambda run: run.config.actor_rollout_ref.rollout.val_kwargs.do_sample,
            f"validation is greedy; set {ROLLOUT}.val_kwargs.do_sample=True",
            error=True,
            switch=f"{ROLLOUT}.val_kwargs.do_sample",
            harmless=(off,),
        )
        for name, off in {"temperature": 0, "top_p": 1, "top_k": -1}.items()
    ),
    Use(
        [f"{CORRECTION}.rollout_is_threshold", f"{CORRECTION}.rollout_is_batch_normalize"],
        lambda run: run.config.algorithm.rollout_correction.rollout_is is not None,
        f"losses are not weighted; set {CORRECTION}.rollout_is=token or sequence",
        error=True,
        switch=f"{CORRECTION}.rollout_is",
        harmless=(False,),
    ),
    Use(
        [f"{CORRECTION}.rollout_rs_threshold", f"{CORRECTION}.rollout_rs_threshold_lower"],
        lambda run: run.config.algorithm.rollout_correction.rollout_rs is not None,
        f"nothing is rejected; set {CORRECTION}.rollout_rs=token, sequence or geometric",
        error=True,
        switch=f"{CORRECTION}.rollout_rs",
    ),
    # sampling and rewards
    Use(
        [f"{ALGORITHM}.filter_groups"],
        lambda run: run.config.algorithm.filter_groups.enable,
        f"groups are not filtered; set {ALGORITHM}.filter_groups.enable=True",
        error=True,
        switch=f"{ALGORITHM}.filter_groups.enable",
        apart_from=[f"{ALGORITHM}.filter_groups.enable"],
    ),
    *REWARD_USES,
    Use(
        ["data.return_raw_chat"],
        lambda run: run.config.custom_reward_function.path is not None,
        "the built-in rules do not read it; custom_reward_function.path=FILE may",
        harmless=(False,),
    ),
    Use(
        ["data.truncation"],
        lambda run: not run.config.data.filter_overlong_prompts,
        "data.filter_overlong_prompts=True drops the prompts that it would truncate",
        harmless=("error",),
    ),
    # validation
    Use(
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
    Use(
        ["trainer.val_before_train"],
        lambda run: run.config.has_held_out_prompts,
        "there are no validation prompts; set data.val_files=FILE",
        harmless=(False,),
    ),
    # models and optimizers
    Use(
        [f"{MODEL}.lora_rank", f"{MODEL}.lora_alpha", f"{MODEL}.target_modules"],
        lambda run: run.config.actor_rollout_ref.model.lora_adapter_path is None,
        f"the adapter of {MODEL}.lora_adapter_path defines it",
    ),
    Use(
        [f"{MODEL}.lora_alpha", f"{MODEL}.target_modules"],
        lambda run: run.config.actor_rollout_ref.model.has_lora,
        f"all weights are trained; set {MODEL}.lora_rank",
        error=True,
        switch=f"{MODEL}.lora_rank",
    ),
    *engine_uses(f"{ACTOR}.strategy", [f"{ACTOR}.fsdp_config", f"{REF}.fsdp_config"], [f"{ACTOR}.megatron"]),
    Use(
        [f"{REF}.megatron"],
        lambda run: run.config.actor_rollout_ref.actor.strategy == "megatron",
        f"{{{ACTOR}.strategy}} does not read it; set {ACTOR}.strategy=megatron",
    ),
    *engine_uses(f"{CRITIC}.strategy", [f"{CRITIC}.model.fsdp_config"], [f"{CRITIC}.megatron"]),
    Use(
        [f"{MODEL}.use_remove_padding", f"{MODEL}.use_fused_kernels"],
        lambda run: run.config.actor_workers == 1 or run.config.actor_rollout_ref.actor.strategy != "megatron",
        "the Megatron engine packs sequences and computes log-probs in chunks",
        harmless=(True,),
    ),
    Use(
        [f"{CRITIC}.model.use_remove_padding"],
        lambda run: run.config.workers_of("critic") == 1 or run.config.critic.strategy != "megatron",
        "the Megatron engine packs sequences",
        harmless=(True,),
    ),
    *learning_rate_uses(f"{ACTOR}.optim"),
    *learning_rate_uses(f"{CRITIC}.optim"),
    *pass_size_uses(ACTOR, "ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    *pass_size_uses(CRITIC, "ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu"),
    *pass_size_uses(ROLLOUT, "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    *pass_size_uses(REF, "log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu"),
    *pass_size_uses(REWARD_MODEL, "micro_batch_size", "use_dynamic_bsz", "forward_max_token_len_per_gpu"),
    Use(
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
    Use(
        ["trainer.total_epochs"],
        lambda run: run.config.trainer.total_training_steps is None,
        "{trainer.total_training_steps} sets the length of the run",
    ),
    *(
        Use(
            [name],
            names_the_run(name),
            "{trainer.default_local_dir} does not contain it, and no tracker uses it; trainer.logger=wandb would",
        )
        for name in ("trainer.project_name", "trainer.experiment_name")
    ),
    Use(
        ["trainer.rollout_mismatch_warning"],
        lambda run: measures_mismatch(run.config),
        f"{{{ROLLOUT}.calculate_log_probs}} compares no log-probs",
    ),
    Use(
        ["trainer.master_addr", "trainer.master_port"],
        lambda run: run.config.starts_a_cluster,
        "the run starts no cluster; trainer.nnodes above 1 does",
    ),
    Use(["ray_kwargs"], lambda run: run.config.uses_ray, "one machine needs no Ray; trainer.backend=ray uses it"),
    Use(
        ["trainer.backend", "trainer.start_timeout_s", "trainer.max_restarts", "trainer.balance_batch"],
        lambda run: run.config.has_workers,
        "one worker is in the process of the loop; trainer.n_gpus_per_node or trainer.nnodes above 1 is not",
        harmless=(False,),
    ),
]
