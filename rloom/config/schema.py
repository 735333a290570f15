"""The configuration trees of RL training and of `rloom sft`: one documented field per key. Imports no torch.

A section is a frozen, closed pydantic model: an unknown key, a wrong type or a value out of range is an error before
any model is loaded. Values derived from several keys are properties; no code changes a key. The keys of SFT are those
of verl's SFT trainers; the sections that RL training also has are the same classes.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from rloom.algos.needs import ESTIMATORS, EstimatorNeeds
from rloom.config.base import (
    EMBEDDED_NAME,
    NamedIn,
    PassKeys,
    PassSection,
    RayKwargs,
    RunConfig,
    RunTrainer,
    Section,
    Switch,
    Trainer,
    key,
    names_code,
    section,
)
from rloom.config.reward_sections import CustomRewardFunction, RewardModel
from rloom.config.sections import (
    CHAT_VARIABLES,
    KL_ESTIMATOR,
    SCORING_PASSES,
    WHERE_NEEDED,
    AlgorithmSection,
    Checkpoint,
    CriticMegatron,
    Data,
    EngineMemory,
    Megatron,
    RefMegatron,
    RolloutSection,
    RouterReplay,
    with_actor_sizes,
)
from rloom.engines.kinds import GROUP, STRATEGIES, StrategyKind, strategy_kind
from rloom.tables import read_table

GROUP_SIZE = 5  # answers to a prompt that estimators compare, as in the guides of RLOO and GRPO
AGGREGATION = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
# keys that choose a KL in the reward or in the loss, also if they switch it off
KL_SWITCHES = ("algorithm.use_kl_in_reward", "algorithm.kl_ctrl", "actor_rollout_ref.actor.use_kl_loss")
TRAINING_PASSES = PassKeys("ppo_micro_batch_size", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")
OTHER_NAMES = read_table("verl_keys")["other_names"]
IN_LOSS = Switch("use_kl_loss", "there is no KL in the loss", harmless=(0,))
ADAPTED = Switch("lora_rank", "all weights are trained", on="")
BETA = Annotated[float, Field(ge=0, lt=1)]


class Model(Section):
    path: str = key(
        EMBEDDED_NAME,
        "Hugging Face folder or hub name. `embedded`: the small model that is part of rloom; no download.",
    )
    trust_remote_code: bool = key(
        False, "Run the Python files of the model repository.", needs_consent=bool, same_run=True
    )
    enable_gradient_checkpointing: bool = key(
        True, "Recompute activations in the backward pass: less memory, more time.", same_run=True
    )
    use_remove_padding: bool = key(
        True, "Train on packed sequences without padding. False: pad each micro-batch.", same_run=True
    )
    use_fused_kernels: bool = key(
        True,
        "Compute log-probs in chunks, without the logits of a whole micro-batch in memory. False: all at once.",
        same_run=True,
    )
    lora_rank: int = key(
        0, "Rank of the LoRA adapter; 0: train all weights. With LoRA the reference is the model without adapter.", ge=0
    )
    lora_alpha: int = key(16, "Scale of the LoRA update: alpha / rank.", ge=1, switch=ADAPTED)
    target_modules: str | list[str] = key(
        "all-linear", "Modules that LoRA adapts: a list of names, or `all-linear`.", switch=ADAPTED
    )
    lora_adapter_path: str | None = key(None, "Start from this saved LoRA adapter, with its rank, alpha and modules.")
    override_config: dict[str, Any] = key({}, "Entries that replace those of the model's config.json.")
    custom_chat_template: str | None = key(None, "A Jinja chat template that replaces that of the tokenizer.")

    @property
    def has_lora(self) -> bool:
        return bool(self.lora_rank or self.lora_adapter_path)


class Optim(Section):
    lr: float = key(1e-6, "Learning rate.", ge=0)
    weight_decay: float = key(0.01, "Decoupled weight decay of AdamW.", ge=0)
    betas: tuple[BETA, BETA] = key((0.9, 0.999), "Betas of AdamW.")
    lr_warmup_steps: int | None = key(
        None, "Steps in which the learning rate rises from 0. null or -1: from `lr_warmup_steps_ratio`.", ge=-1
    )
    warmup_steps: int | None = key(None, "Another name of `lr_warmup_steps`.", ge=0)
    lr_warmup_steps_ratio: float = key(
        0.0, "Warm-up as a share of all steps, if no number of steps is given.", ge=0, le=1
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = key(
        "constant", "Learning rate schedule after the warm-up."
    )
    min_lr_ratio: float = key(0.0, "Final learning rate of cosine and linear, as a share of `lr`.", ge=0, le=1)

    @property
    def given_warmup_steps(self) -> int | None:
        given = (self.lr_warmup_steps, self.warmup_steps)
        return next((steps for steps in given if steps is not None and steps >= 0), None)

    def warmup(self, total_steps: int) -> int:
        steps = self.given_warmup_steps
        return int(self.lr_warmup_steps_ratio * total_steps) if steps is None else steps


class CriticOptim(Optim):
    lr: float = key(1e-5, "Learning rate; about ten times the actor's.", ge=0)


class Sharding(EngineMemory):
    fsdp_size: int = key(-1, "Ranks that shard one copy of the weights. -1: all.", ge=-1, same_run=True)


class Fsdp(Sharding):
    gradient_checkpointing: bool | None = key(
        None, "Another name of `model.enable_gradient_checkpointing`. null: that key's value.", same_run=True
    )


class RefFsdp(Section):
    param_offload: bool | None = key(
        None, f"Keep the reference's parameters in host memory while they are not in use. {WHERE_NEEDED}"
    )


class PolicyLossSection(Section):
    loss_mode: str = key(
        "vanilla",
        "The policy loss: vanilla, gspo, sequence_ratio, sapo, gpg, cispo, clip_cov, kl_cov, geo_mean, or your own as "
        "file.py:name.",
        needs_consent=names_code,
    )
    tau_pos: float = key(1.0, "Steepness of the soft gate for positive advantages (sapo).", gt=0)
    tau_neg: float = key(1.05, "Steepness of the soft gate for negative advantages (sapo).", gt=0)
    clip_cov_ratio: float = key(0.0002, "Share of tokens whose gradient is set to 0 (clip_cov).", ge=0, le=1)
    clip_cov_lb: float = key(1.0, "Lower bound of the covariance of these tokens (clip_cov).")
    clip_cov_ub: float = key(5.0, "Upper bound of the covariance of these tokens (clip_cov).")
    kl_cov_ratio: float = key(
        0.0002, "Share of tokens, those with the largest covariance, with a KL penalty (kl_cov).", ge=0, le=1
    )
    ppo_kl_coef: float = key(0.1, "Coefficient of that KL penalty (kl_cov).", ge=0)


STRATEGY = Annotated[str, NamedIn(STRATEGIES, GROUP)]
TRAINING_ENGINE = (
    "Training engine. fsdp, fsdp2: FSDP2; megatron: tensor, pipeline and expert parallelism of megatron-core (extra "
    "`megatron`). One worker runs neither and holds a whole model."
)


class Actor(PassSection):
    pass_keys: ClassVar[PassKeys] = TRAINING_PASSES

    strategy: STRATEGY = key("fsdp", TRAINING_ENGINE, needs_consent=names_code, same_run=True)
    ppo_mini_batch_size: int = key(256, "Prompts per optimizer step; divides `data.train_batch_size`.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward-backward pass. null: by token budget.", ge=1, same_run=True
    )
    ppo_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1, same_run=True)
    use_dynamic_bsz: bool | None = key(
        None,
        "Fill micro-batches up to `ppo_max_token_len_per_gpu` tokens. null: if no micro-batch size is given.",
        same_run=True,
    )
    ppo_max_token_len_per_gpu: int = key(16384, "Token budget of a micro-batch.", ge=1, same_run=True)
    ppo_epochs: int = key(1, "Passes over each batch in the update.", ge=1)
    clip_ratio: float = key(0.2, "PPO's clip range: the ratio is clipped to 1 ± this.", ge=0)
    clip_ratio_low: float | None = key(None, "Lower clip range. null: `clip_ratio`.", ge=0)
    clip_ratio_high: float | None = key(None, "Upper clip range (clip-higher). null: `clip_ratio`.", ge=0)
    clip_ratio_c: float = key(3.0, "Dual clip: upper bound of the loss, times |A|, for a negative advantage A.", gt=1)
    policy_loss: PolicyLossSection = section(PolicyLossSection, "The policy loss.")
    loss_agg_mode: AGGREGATION | None = key(
        None,
        "Aggregation of token losses, by counts over the whole mini-batch. null: as the policy loss is defined; "
        "token-mean for most.",
    )
    entropy_coeff: float = key(0.0, "Coefficient of the entropy bonus.")
    use_kl_loss: bool = key(False, "Add the KL to the reference to the loss.")
    kl_loss_coef: float = key(0.001, "Coefficient of the KL in the loss.", ge=0, switch=IN_LOSS)
    kl_loss_type: KL_ESTIMATOR | Literal["full"] = key(
        "low_var_kl",
        "Estimator of that KL; a trailing + uses k2's gradient. full: exact, over the whole vocabulary.",
        switch=IN_LOSS,
    )
    use_torch_compile: bool = key(
        True,
        "Compile the policy's layers on a GPU, for training and generation: seconds once, then faster.",
        same_run=True,
    )
    use_prefix_grouper: bool = key(
        True,
        "Compute a prompt that several samples of a pass begin with once; also in the reference and the critic.",
        same_run=True,
    )
    grad_clip: float = key(1.0, "Maximum norm of the gradient.", gt=0)
    shuffle: bool = key(False, "Shuffle the samples before they are split into mini-batches, in each epoch.")
    skip_zero_advantages: bool = key(
        False, "Leave answers whose advantage is 0 out of the update: less time, the same gradient.", same_run=True
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "Ranks of actor and reference that share each sequence, for longer sequences; divides the workers and the "
        "model's attention heads. Token budgets count the tokens of one rank.",
        ge=1,
        same_run=True,
    )
    optim: Optim = section(Optim, "The optimizer and its learning rate schedule.")
    fsdp_config: Fsdp = section(Fsdp, "Sharding, offload and data type, for strategy=fsdp.")
    megatron: Megatron = section(Megatron, "Parallelism, offload and data type, for strategy=megatron.")
    router_replay: RouterReplay = section(RouterReplay, "Experts of the rollout in training.")
    checkpoint: Checkpoint = section(Checkpoint, "Contents of checkpoints.", same_run=True)

    @property
    def kind(self) -> StrategyKind:
        return strategy_kind("actor_rollout_ref.actor.strategy", self.strategy)

    @property
    def engine_memory(self) -> EngineMemory:
        return {"fsdp_config": self.fsdp_config, "megatron": self.megatron}[self.kind.section]


class Ref(PassSection):
    pass_keys: ClassVar[PassKeys] = SCORING_PASSES

    log_prob_micro_batch_size_per_gpu: int | None = key(None, "Samples per forward pass. null: by token budget.", ge=1)
    log_prob_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1)
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Fill forward passes up to the token budget. null: if no micro-batch size is given."
    )
    log_prob_max_token_len_per_gpu: int = key(16384, "Token budget of a forward pass.", ge=1)
    use_torch_compile: bool | None = key(None, "Compile the reference's layers on a GPU. null: the actor's value.")
    fsdp_config: RefFsdp = section(RefFsdp, "Offload, if the actor's strategy is fsdp.")
    megatron: RefMegatron = section(RefMegatron, "Offload, if the actor's strategy is megatron.")


class ActorRolloutRef(Section):
    model: Model = section(Model, "The policy's model.")
    actor: Actor = section(Actor, "Training of the policy.")
    ref: Ref = section(Ref, "The reference policy. Built only if a KL to it is used or measured.", same_run=True)
    rollout: RolloutSection = section(RolloutSection, "Generation.")


class CriticModel(Section):
    path: str | None = key(None, "Folder or hub name of the initial critic; a value head is added. null: the actor's.")
    trust_remote_code: bool = key(
        False, "Run the Python files of the model repository.", needs_consent=bool, same_run=True
    )
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in the backward pass.", same_run=True)
    use_remove_padding: bool = key(True, "Train on packed sequences without padding.", same_run=True)
    override_config: dict[str, Any] = key({}, "Entries that replace those of the model's config.json.")
    fsdp_config: Fsdp = section(Fsdp, "Sharding, offload and data type.")


class Critic(PassSection):
    pass_keys: ClassVar[PassKeys] = TRAINING_PASSES

    enable: bool | None = key(None, "Train a critic. null: if the algorithm requires one.")
    strategy: STRATEGY = key(None, "Training engine. null: the actor's.", needs_consent=names_code, same_run=True)
    model: CriticModel = section(CriticModel, "The critic's model.")
    optim: CriticOptim = section(CriticOptim, "The optimizer and its learning rate schedule.")
    ppo_mini_batch_size: int | None = key(None, "Prompts per optimizer step. null: the actor's.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per pass. null: by token budget.", ge=1, same_run=True
    )
    ppo_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1, same_run=True)
    use_dynamic_bsz: bool | None = key(
        None,
        "Fill passes up to `ppo_max_token_len_per_gpu` tokens. null: if no micro-batch size is given.",
        same_run=True,
    )
    ppo_max_token_len_per_gpu: int = key(32768, "Token budget of a pass.", ge=1, same_run=True)
    ppo_epochs: int | None = key(None, "Passes over each batch in the update. null: the actor's.", ge=1)
    cliprange_value: float = key(0.5, "Clip range of the values: new values are clipped to the old ± this.", gt=0)
    loss_agg_mode: AGGREGATION = key("token-mean", "Aggregation of token losses.")
    ulysses_sequence_parallel_size: int = key(
        1, "As `actor_rollout_ref.actor.ulysses_sequence_parallel_size`, for the critic's ranks.", ge=1, same_run=True
    )
    use_torch_compile: bool = key(True, "Compile the critic's layers on a GPU.", same_run=True)
    grad_clip: float = key(1.0, "Maximum norm of the gradient.", gt=0)
    shuffle: bool = key(False, "Shuffle the samples before they are split into mini-batches, in each epoch.")
    megatron: CriticMegatron = section(CriticMegatron, "Parallelism, offload and data type, for strategy=megatron.")

    @property
    def kind(self) -> StrategyKind:
        return strategy_kind("critic.strategy", self.strategy)

    @property
    def engine_memory(self) -> EngineMemory:
        return {"fsdp_config": self.model.fsdp_config, "megatron": self.megatron}[self.kind.section]


def section_of(tree: Any, name: str) -> Mapping[str, Any]:
    """Before validation: a section can be missing, or another value."""
    found = tree.get(name, {})
    return found if isinstance(found, Mapping) else {}


def usual_answers(estimator: str) -> int:
    """Answers to a prompt, where no number is given."""
    return GROUP_SIZE if ESTIMATORS.get(estimator, EstimatorNeeds()).min_group > 1 else 1


class Config(RunConfig):
    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES["rl"]

    data: Data = section(Data, "Prompts.")
    actor_rollout_ref: ActorRolloutRef = section(ActorRolloutRef, "The policy: model, training, reference, rollout.")
    critic: Critic = section(Critic, "The value model.")
    reward_model: RewardModel = section(RewardModel, "How rewards are computed.")
    custom_reward_function: CustomRewardFunction = section(CustomRewardFunction, "Your own reward function.")
    algorithm: AlgorithmSection = section(AlgorithmSection, "Advantages and KL control.")
    trainer: Trainer = section(Trainer, "The run: length, checkpoints, logs, machines.", same_run=True)
    ray_kwargs: RayKwargs = section(
        RayKwargs, "Ray, which runs on several machines use, or in an existing cluster.", same_run=True
    )

    @model_validator(mode="before")
    @classmethod
    def answers_as_the_estimator_needs(cls, tree: Any) -> Any:
        """`rollout.n`, where it is null."""
        roles = section_of(tree, "actor_rollout_ref")
        rollout = section_of(roles, "rollout")
        are_sections = roles == tree.get("actor_rollout_ref", {}) and rollout == roles.get("rollout", {})
        if not are_sections or rollout.get("n") is not None:
            return tree
        answers = usual_answers(str(section_of(tree, "algorithm").get("adv_estimator")))
        return {**tree, "actor_rollout_ref": {**roles, "rollout": {**rollout, "n": answers}}}

    @model_validator(mode="before")
    @classmethod
    def critic_as_actor(cls, tree: Any) -> Any:
        """The critic's engine and its sizes, where they are null, are the actor's."""
        actor, critic = section_of(section_of(tree, "actor_rollout_ref"), "actor"), section_of(tree, "critic")
        if critic != tree.get("critic", {}):
            return tree
        sizes = with_actor_sizes(section_of(critic, "megatron"), section_of(actor, "megatron"))
        strategy = critic.get("strategy") or actor.get("strategy", Actor.model_fields["strategy"].default)
        return {**tree, "critic": {**critic, "strategy": strategy, "megatron": sizes}}

    @model_serializer(mode="wrap")
    def resolved(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write out values that depend on which keys were given, since a saved configuration does not record those."""
        tree: dict[str, Any] = serialize(self)
        if "trainer" in tree:
            tree["trainer"]["n_gpus_per_node"] = self.gpus_per_node
        if "algorithm" in tree:
            tree["algorithm"]["use_kl_in_reward"] = self.kl_in_reward
            tree["algorithm"]["kl_metric"] = self.kl_only_measured
        return tree

    @property
    def only_validates(self) -> bool:
        return self.trainer.val_only

    @property
    def model_path(self) -> str:
        return self.actor_rollout_ref.model.path

    @property
    def actor_workers(self) -> int:
        pools = self.trainer.pools
        return pools.actor or self.workers - sum(size for role, size in pools.own.items() if role != "actor")

    def workers_of(self, role: str) -> int:
        """Number of workers that hold the role."""
        found = self.trainer.pools.by_role.get(role, self.actor_workers)
        return found if isinstance(found, int) else len(found)

    @property
    def ends_with_the_data(self) -> bool:
        """Whether only the end tells the number of steps: with dynamic sampling a step takes as many batches as it
        needs."""
        return self.algorithm.filter_groups.enable and self.trainer.total_training_steps is None

    @property
    def prompts_per_round(self) -> int:
        """Of generation: those of a step, or of a round of dynamic sampling."""
        size, own = self.data.train_batch_size, self.data.gen_batch_size
        return size if own is None or not self.algorithm.filter_groups.enable else own

    @property
    def uses_reference(self) -> bool:
        return self.actor_rollout_ref.actor.use_kl_loss or self.kl_in_reward or self.kl_only_measured

    @property
    def has_reference_model(self) -> bool:
        """A frozen second copy is the reference. With LoRA there is none: the policy's adapter is switched off."""
        return self.uses_reference and not self.actor_rollout_ref.model.has_lora

    @property
    def scores_reference(self) -> bool:
        """A forward pass of the reference in each step. A KL loss over the whole vocabulary runs it in the update."""
        actor = self.actor_rollout_ref.actor
        in_update = actor.use_kl_loss and actor.kl_loss_type == "full"
        return self.uses_reference and (self.kl_in_reward or not in_update)

    @property
    def replays_routing(self) -> bool:
        """Whether tokens go, in training, to the experts that the rollout engine chose for them."""
        roles = self.actor_rollout_ref
        return roles.actor.router_replay.mode == "R3" or roles.rollout.enable_rollout_routing_replay

    @property
    def kl_in_reward(self) -> bool:
        chosen, control = self.algorithm.use_kl_in_reward, self.algorithm.kl_ctrl
        if chosen is not None:
            return chosen
        is_zero = control.type == "fixed" and control.kl_coef == 0
        return self.is_given("algorithm.kl_ctrl") and not is_zero

    @property
    def kl_only_measured(self) -> bool:
        """The KL to the reference is a metric of each step, and neither in the reward nor in the loss."""
        chosen = self.algorithm.kl_metric
        if self.kl_in_reward or self.actor_rollout_ref.actor.use_kl_loss:
            return False
        if chosen is not None:
            return chosen
        return self.is_given("actor_rollout_ref.ref") and not any(self.is_given(name) for name in KL_SWITCHES)

    @property
    def validates(self) -> bool:
        trainer = self.trainer
        return self.has_held_out_prompts and (trainer.test_freq > 0 or trainer.val_before_train or trainer.val_only)

    @property
    def updates_once(self) -> bool:
        """A step has one update of the policy: the weights at its beginning are those of the update."""
        actor = self.actor_rollout_ref.actor
        return self.data.train_batch_size // actor.ppo_mini_batch_size == 1 and actor.ppo_epochs == 1

    @property
    def generates_ahead(self) -> bool:
        """A step trains the groups that are complete first."""
        return self.trainer.v1.trainer_mode != "sync"

    @property
    def max_staleness(self) -> int:
        return self.trainer.v1.max_staleness

    @property
    def critic_updates(self) -> tuple[int, int]:
        """(prompts of a mini-batch, epochs): the critic's keys, or the actor's where they are null."""
        critic, actor = self.critic, self.actor_rollout_ref.actor
        return critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs or actor.ppo_epochs


TORCHRUN = "LOCAL_WORLD_SIZE"  # torchrun sets it: ranks on this machine


class MultiTurn(Section):
    enable: bool | None = key(
        None, "True: rows are chats in `data.messages_key`. False: prompt and response. null: chats if a row has them."
    )


class SftData(PassSection):
    pass_keys: ClassVar[PassKeys] = PassKeys("micro_batch_size", "use_dynamic_bsz", "max_token_len_per_gpu")

    train_files: str | list[str] = key(
        EMBEDDED_NAME,
        "Training rows: one file or a list; parquet, json, jsonl. `embedded`: the arithmetic data of rloom.",
    )
    val_files: str | list[str] | None = key(
        None,
        "Validation rows, in the same formats. null: none, or the embedded ones if trained on embedded data.",
        same_run=True,
    )
    train_batch_size: int = key(256, "Rows per step, over all workers: one optimizer step.", ge=1)
    micro_batch_size_per_gpu: int | None = key(
        None, "Rows per forward-backward pass. null: by token budget.", ge=1, same_run=True
    )
    micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1, same_run=True)
    use_dynamic_bsz: bool | None = key(
        None,
        "Fill micro-batches up to `max_token_len_per_gpu` tokens. null: if no micro-batch size is given.",
        same_run=True,
    )
    max_token_len_per_gpu: int = key(8192, "Token budget of a micro-batch.", ge=1, same_run=True)
    prompt_key: str | None = key(
        None, "Column with the prompt: text or chat messages. null: `prompt`, `question` or `extra_info.question`."
    )
    response_key: str | None = key(
        None, "Column with the answer. null: `response`, `answer` or `extra_info.answer`, the first that a row has."
    )
    prompt_dict_keys: list[str] | None = key(None, "Keys below `prompt_key`, such as [question] for extra_info.")
    response_dict_keys: list[str] | None = key(None, "Keys below `response_key`, such as [answer] for extra_info.")
    messages_key: str = key("messages", "Column with a whole chat, whose assistant turns are the answers.")
    tools_key: str = key("tools", "Column with the tools of a chat, which the chat template renders.")
    multiturn: MultiTurn = section(MultiTurn, "Rows that are chats.")
    max_length: int = key(1024, "Maximum tokens of a row: prompt and answer together.", ge=2)
    truncation: Literal["error", "left", "right"] = key(
        "error", "For rows over the maximum: stop with an error, or remove tokens on that side."
    )
    apply_chat_template_kwargs: dict[str, Any] = key({}, CHAT_VARIABLES)
    train_max_samples: int = key(-1, "Use only the first N training rows. -1: all.", ge=-1)
    val_max_samples: int = key(-1, "Use only the first N validation rows. -1: all.", ge=-1, same_run=True)
    shuffle: bool = key(True, "Shuffle the rows in each epoch; the order depends only on `seed` and the epoch.")
    seed: int = key(1, "Seed of the order of the rows and of a new LoRA adapter.", ge=0)


class SftOptim(Optim):
    lr: float = key(1e-5, "Learning rate.", ge=0)
    betas: tuple[BETA, BETA] = key((0.9, 0.95), "Betas of AdamW.")
    lr_warmup_steps_ratio: float = key(
        0.1, "Warm-up as a share of all steps, if no number of steps is given.", ge=0, le=1
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = key(
        "cosine", "Learning rate schedule after the warm-up."
    )
    clip_grad: float = key(1.0, "Maximum norm of the gradient.", gt=0)


class SftEngine(Sharding):
    strategy: Literal["fsdp", "fsdp2"] = key(
        "fsdp2", "Training engine. One process runs the same code unsharded.", same_run=True
    )
    ulysses_sequence_parallel_size: int = key(
        1,
        "Ranks that share each sequence, for longer sequences; divides the workers and the model's attention heads. "
        "Token budgets count the tokens of one rank.",
        ge=1,
        same_run=True,
    )
    use_torch_compile: bool = key(
        True, "Compile the model's layers on a GPU: seconds once, then faster.", same_run=True
    )


class SftTrainer(RunTrainer):
    project_name: str = key("rloom_sft", "Project, for trackers and the default directory.")
    experiment_name: str = key(
        "${experiment_name:model.path,sft,data.train_files}",
        "Experiment, for trackers and the default directory. The default is the model, `sft` and the data: "
        "qwen2.5-0.5b_sft_gsm8k.",
    )
    total_epochs: int = key(4, "Passes over the training data.", ge=1)
    max_ckpt_to_keep: int | None = key(None, "Number of checkpoints to keep. null: all.", ge=1)
    checkpoint: Checkpoint = section(Checkpoint, "Contents of checkpoints.")
    default_hdfs_dir: str | None = key(None, "Only null: rloom copies nothing to HDFS.")


class SftConfig(RunConfig):
    other_names: ClassVar[Mapping[str, str]] = OTHER_NAMES["sft"]
    listing: ClassVar[str] = "rloom config --sft"

    data: SftData = section(SftData, "Rows: prompts with their answers.")
    model: Model = section(Model, "The model.")
    optim: SftOptim = section(SftOptim, "The optimizer and its learning rate schedule.")
    engine: SftEngine = section(SftEngine, "Sharding, offload and data type.")
    trainer: SftTrainer = section(SftTrainer, "The run: length, checkpoints, logs, machines.", same_run=True)
    ray_kwargs: RayKwargs = section(
        RayKwargs, "Ray, which runs on several machines use, or in an existing cluster.", same_run=True
    )

    @property
    def model_path(self) -> str:
        return self.model.path

    @property
    def uses_torchrun(self) -> bool:
        """torchrun has started the workers."""
        return TORCHRUN in os.environ

    @property
    def uses_ray(self) -> bool:
        return super().uses_ray and not self.uses_torchrun

    @property
    def uses_processes(self) -> bool:
        return super().uses_processes and not self.uses_torchrun

    @property
    def sequence_ranks(self) -> int:
        """Ranks that divide a sequence."""
        return 1 if self.workers == 1 else self.engine.ulysses_sequence_parallel_size
