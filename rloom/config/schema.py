"""The whole configuration tree, one documented field a key. No torch here.

A section is a frozen, closed pydantic model: an unknown key, a wrong type or a value out of range is an error before
anything loads. Values derived from several keys are properties; nothing ever rewrites a key.
"""

import os
from typing import Annotated, Any, Literal

from pydantic import Field, PrivateAttr, SerializerFunctionWrapHandler, model_serializer

from rloom.config.reward_section import CustomRewardFunction, RewardModel
from rloom.config.section import Section, key, section
from rloom.config.trainer_section import RayKwargs, Trainer

EMBEDDED = "embedded"  # names the model and the data that come with rloom
AGGREGATION = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]
TRUNCATION = Literal["error", "left", "right", "middle"]
KL_ESTIMATOR = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]
BETA = Annotated[float, Field(ge=0, lt=1)]


class Data(Section):
    train_files: str | list[str] = key(
        "embedded",
        "Training prompts: one file or a list; parquet, json, jsonl. `embedded`: rloom's own arithmetic set.",
    )
    val_files: str | list[str] | None = key(
        None, "Held-out prompts, in the same formats. null: none, or the embedded ones when training on them."
    )
    train_batch_size: int = key(1024, "Prompts a step. The step trains on this many times `rollout.n` samples.", ge=1)
    val_batch_size: int | None = key(None, "Prompts generated at a time in validation. null: all of them.", ge=1)
    max_prompt_length: int = key(512, "Longest prompt, in tokens.", ge=1)
    max_response_length: int = key(512, "Longest answer, in tokens.", ge=1)
    filter_overlong_prompts: bool = key(False, "Drop prompts over `max_prompt_length` instead of truncating them.")
    truncation: TRUNCATION = key(
        "error", "What becomes of an over-long prompt that is not filtered: stop, or cut tokens on that side."
    )
    shuffle: bool = key(True, "A fresh order each epoch, decided by `seed` and the epoch alone.")
    seed: int = key(1, "Decides the order of the prompts, the sampled answers and the shuffling of mini-batches.", ge=0)
    prompt_key: str = key("prompt", "Column with the prompt: chat messages or a plain string.")
    reward_fn_key: str = key("data_source", "Column that chooses the reward rule.")
    train_max_samples: int = key(-1, "Use only the first so many training rows. -1: all.", ge=-1)
    val_max_samples: int = key(-1, "Use only the first so many validation rows. -1: all.", ge=-1)
    dataloader_num_workers: int = key(0, "Threads that render and tokenize the prompts at start. 0: none extra.", ge=0)
    return_raw_chat: bool = key(False, "Hand the chat messages to reward functions as `extra_info['raw_prompt']`.")


class Model(Section):
    path: str = key(
        "embedded", "Hugging Face folder or hub name. `embedded` is the small model that comes with rloom; no download."
    )
    trust_remote_code: bool = key(False, "Run the Python files that a model brings along.")
    enable_gradient_checkpointing: bool = key(
        True, "Recompute activations in the backward pass: less memory, more time."
    )
    use_remove_padding: bool = key(True, "Train on packed sequences without padding. False pads each micro-batch.")
    use_fused_kernels: bool = key(
        True, "Compute log-probs in chunks that never hold the logits of a whole micro-batch. False: all at once."
    )
    lora_rank: int = key(
        0, "Rank of LoRA adapters; 0 trains all weights. With LoRA the reference is the adapter switched off.", ge=0
    )
    lora_alpha: int = key(16, "Scale of the LoRA update: alpha / rank.", ge=1)
    target_modules: str | list[str] = key("all-linear", "Which modules LoRA adapts: a list of names, or `all-linear`.")
    lora_adapter_path: str | None = key(
        None, "Start from this saved LoRA adapter; its own rank, alpha and modules count."
    )
    override_config: dict[str, Any] = key({}, "Entries that replace those of the model's config.json.")
    custom_chat_template: str | None = key(None, "A Jinja chat template instead of the tokenizer's own.")

    @property
    def has_lora(self) -> bool:
        return bool(self.lora_rank or self.lora_adapter_path)


class Optim(Section):
    lr: float = key(1e-6, "Learning rate.", ge=0)
    weight_decay: float = key(0.01, "Decoupled weight decay of AdamW.", ge=0)
    betas: tuple[BETA, BETA] = key((0.9, 0.999), "AdamW's running-average factors.")
    lr_warmup_steps: int | None = key(
        None, "Steps over which the rate rises from 0. null or -1: from `lr_warmup_steps_ratio`.", ge=-1
    )
    warmup_steps: int | None = key(None, "Another name of `lr_warmup_steps`.", ge=0)
    lr_warmup_steps_ratio: float = key(
        0.0, "Warm-up as a share of all steps, where no number of steps is given.", ge=0, le=1
    )
    lr_scheduler_type: Literal["constant", "cosine", "linear"] = key(
        "constant", "How the rate falls after the warm-up."
    )
    min_lr_ratio: float = key(0.0, "Where cosine and linear end, as a share of `lr`.", ge=0, le=1)

    def warmup(self, total_steps: int) -> int:
        for steps in (self.lr_warmup_steps, self.warmup_steps):
            if steps is not None and steps >= 0:
                return steps
        return int(self.lr_warmup_steps_ratio * total_steps)


class CriticOptim(Optim):
    lr: float = key(1e-5, "Learning rate; about ten times the actor's.", ge=0)


class Fsdp(Section):
    param_offload: bool = key(
        False, "Keep the parameters in host memory while they are not in use. On a CPU they are there anyway."
    )
    optimizer_offload: bool = key(False, "Keep the optimizer's state in host memory between updates.")
    gradient_checkpointing: bool | None = key(
        None, "Another place for `model.enable_gradient_checkpointing`. null: as there."
    )
    fsdp_size: int = key(-1, "Ranks that share one copy of the weights. -1: all.", ge=-1)
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "Precision of weights and arithmetic; the optimizer keeps float32 copies. auto: bfloat16 on a GPU, or float32.",
    )


class RefFsdp(Section):
    param_offload: bool = key(False, "Keep the reference's parameters in host memory while they are not in use.")


class PolicyLoss(Section):
    loss_mode: str = key(
        "vanilla",
        "The policy loss: vanilla, gspo, sapo, gpg, cispo, clip_cov, kl_cov, geo_mean, or your own as file.py:name.",
    )
    tau_pos: float = key(1.0, "Steepness of the soft gate for positive advantages (sapo).", gt=0)
    tau_neg: float = key(1.05, "Steepness of the soft gate for negative advantages (sapo).", gt=0)
    clip_cov_ratio: float = key(0.0002, "Share of tokens whose gradient is cut (clip_cov).", ge=0, le=1)
    clip_cov_lb: float = key(1.0, "Smallest covariance of a token that may be cut (clip_cov).")
    clip_cov_ub: float = key(5.0, "Largest covariance of a token that may be cut (clip_cov).")
    kl_cov_ratio: float = key(
        0.0002, "Share of tokens, those of largest covariance, that pay a KL (kl_cov).", ge=0, le=1
    )
    ppo_kl_coef: float = key(0.1, "Weight of that KL (kl_cov).", ge=0)


class Checkpoint(Section):
    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"],
        "What a checkpoint holds; hf_model adds a Hugging Face folder. The run's position (extra) is always in it.",
    )
    load_contents: list[Literal["model", "optimizer", "extra"]] = key(
        ["model", "optimizer", "extra"], "What a resume takes from it; the run's position always."
    )


class Actor(Section):
    strategy: Literal["fsdp", "fsdp2"] = key("fsdp", "Training engine. One process runs the same code unsharded.")
    ppo_mini_batch_size: int = key(256, "Prompts an optimizer step; divides `data.train_batch_size`.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Samples a forward-backward pass. null: by token budget.", ge=1
    )
    ppo_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1)
    use_dynamic_bsz: bool | None = key(
        None, "Fill micro-batches up to `ppo_max_token_len_per_gpu` tokens. null: when no micro-batch size is given."
    )
    ppo_max_token_len_per_gpu: int = key(16384, "Token budget of a micro-batch.", ge=1)
    ppo_epochs: int = key(1, "Times each batch is learned from.", ge=1)
    clip_ratio: float = key(0.2, "PPO's clip range: the ratio is held within 1 ± this.", ge=0)
    clip_ratio_low: float | None = key(None, "Lower clip range. null: `clip_ratio`.", ge=0)
    clip_ratio_high: float | None = key(None, "Upper clip range (clip-higher). null: `clip_ratio`.", ge=0)
    clip_ratio_c: float = key(3.0, "Dual clip: a negative advantage's loss is at most this times the advantage.", gt=1)
    policy_loss: PolicyLoss = section(PolicyLoss, "Which policy loss.")
    loss_agg_mode: AGGREGATION | None = key(
        None,
        "How token losses become one number, by counts of the whole mini-batch. null: as the policy loss is defined; "
        "token-mean for most.",
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    use_kl_loss: bool = key(False, "Add the KL to the reference to the loss.")
    kl_loss_coef: float = key(0.001, "Its weight.", ge=0)
    kl_loss_type: KL_ESTIMATOR | Literal["full"] = key(
        "low_var_kl", "Its estimator; a trailing + takes k2's gradient. full: exact, over the whole vocabulary."
    )
    use_torch_compile: bool = key(
        True, "Compile the policy's layers on a GPU, for training and generation: seconds once, then faster."
    )
    grad_clip: float = key(1.0, "Largest norm of the gradient.", gt=0)
    shuffle: bool = key(False, "Draw mini-batches in a new order each epoch.")
    ulysses_sequence_parallel_size: int = key(
        1,
        "Ranks, of actor and reference, that share each sequence, so that longer ones fit; divides the workers and the "
        "model's attention heads. Token budgets count what one of them holds.",
        ge=1,
    )
    optim: Optim = section(Optim, "The optimizer and its schedule.")
    fsdp_config: Fsdp = section(Fsdp, "Sharding, offload and precision.")
    checkpoint: Checkpoint = section(Checkpoint, "What checkpoints hold.")


class Ref(Section):
    log_prob_micro_batch_size_per_gpu: int | None = key(None, "Samples a forward pass. null: by token budget.", ge=1)
    log_prob_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1)
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Fill forward passes up to the token budget. null: as the key above says."
    )
    log_prob_max_token_len_per_gpu: int = key(16384, "Token budget of a forward pass.", ge=1)
    use_torch_compile: bool | None = key(None, "Compile the reference's layers on a GPU. null: as the actor's.")
    fsdp_config: RefFsdp = section(RefFsdp, "Offload.")


class ValKwargs(Section):
    n: int = key(1, "Answers to each validation prompt.", ge=1)
    temperature: float = key(0.0, "0 is greedy.", ge=0)
    top_p: float = key(1.0, "Nucleus sampling in validation.", gt=0, le=1)
    top_k: int = key(-1, "Top-k sampling in validation. -1: off.", ge=-1)
    do_sample: bool = key(False, "False is greedy, whatever the temperature.")


class Rollout(Section):
    name: Literal["native", "hf"] = key(
        "native", "Engine. native: rloom's own, continuous batching; hf: generate() of transformers."
    )
    n: int = key(1, "Answers to each prompt.", ge=1)
    temperature: float = key(1.0, "Sampling temperature; log-probs are taken at it.", gt=0)
    top_p: float = key(1.0, "Nucleus sampling.", gt=0, le=1)
    top_k: int = key(-1, "Top-k sampling. -1: off.", ge=-1)
    tensor_model_parallel_size: int = key(1, "GPUs that share one engine.", ge=1)
    gpu_memory_utilization: float = key(
        0.5, "Share of a GPU's memory that the key-value cache may fill up to.", gt=0, le=1
    )
    max_num_seqs: int | None = key(None, "Most sequences at a time. null: 256; 1024 for native on a GPU.", ge=1)
    max_num_batched_tokens: int = key(8192, "Most prompt tokens in one prefill pass of the native engine.", ge=1)
    enforce_eager: bool = key(
        False,
        "Run each decode step from Python. False: the native engine captures it as a CUDA graph; no matter on a CPU.",
    )
    free_cache_engine: bool = key(True, "Free the key-value cache while training.")
    ignore_eos: bool = key(False, "Generate to the length limit whatever is written. For measurements.")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Samples a forward pass when the policy's old log-probs are computed. null: by token budget.", ge=1
    )
    log_prob_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1)
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Fill those passes up to the token budget. null: as the key above says."
    )
    log_prob_max_token_len_per_gpu: int = key(16384, "Token budget of such a pass.", ge=1)
    calculate_log_probs: bool = key(
        True, "Compare the engine's log-probs with the trainer's, where the trainer computes them, and report the gap."
    )
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling in validation.")
    engine_kwargs: dict[str, Any] = key({}, "Further arguments of the engine. hf: of `generate`.")


class ActorRolloutRef(Section):
    model: Model = section(Model, "The policy's model.")
    actor: Actor = section(Actor, "How the policy learns.")
    ref: Ref = section(Ref, "The reference; there only when KL is used.")
    rollout: Rollout = section(Rollout, "How answers are generated.")


class CriticModel(Section):
    path: str | None = key(None, "Folder or hub name the critic starts from; it gets a value head. null: the actor's.")
    trust_remote_code: bool = key(False, "Run the Python files that a model brings along.")
    enable_gradient_checkpointing: bool = key(True, "Recompute activations in the backward pass.")
    use_remove_padding: bool = key(True, "Packed sequences, no padding.")
    override_config: dict[str, Any] = key({}, "Entries that replace those of the model's config.json.")
    fsdp_config: Fsdp = section(Fsdp, "Sharding, offload and precision.")


class Critic(Section):
    enable: bool | None = key(None, "null: when the algorithm needs one.")
    strategy: Literal["fsdp", "fsdp2"] = key("fsdp", "Training engine.")
    model: CriticModel = section(CriticModel, "The critic's model.")
    optim: CriticOptim = section(CriticOptim, "The optimizer and its schedule.")
    ppo_mini_batch_size: int | None = key(None, "Prompts an optimizer step. null: the actor's.", ge=1)
    ppo_micro_batch_size_per_gpu: int | None = key(None, "Samples a pass. null: by token budget.", ge=1)
    ppo_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1)
    use_dynamic_bsz: bool | None = key(
        None, "Fill passes up to `ppo_max_token_len_per_gpu` tokens. null: when no size is given."
    )
    ppo_max_token_len_per_gpu: int = key(32768, "Token budget of a pass.", ge=1)
    ppo_epochs: int | None = key(None, "Times each batch is learned from. null: the actor's.", ge=1)
    cliprange_value: float = key(0.5, "How far a new value may leave the old one before its gradient is cut.", gt=0)
    loss_agg_mode: AGGREGATION = key("token-mean", "How token losses become one number.")
    ulysses_sequence_parallel_size: int = key(
        1, "As `actor_rollout_ref.actor.ulysses_sequence_parallel_size`, for the critic's ranks.", ge=1
    )
    use_torch_compile: bool = key(True, "Compile the critic's layers on a GPU.")
    grad_clip: float = key(1.0, "Largest norm of the gradient.", gt=0)
    shuffle: bool = key(False, "Draw mini-batches in a new order each epoch.")


class KlCtrl(Section):
    type: Literal["fixed", "adaptive"] = key("fixed", "adaptive steers the coefficient towards `target_kl`.")
    kl_coef: float = key(0.001, "Coefficient of the KL in the reward, or where the adaptive one starts.", ge=0)
    horizon: int = key(10000, "Samples over which the adaptive coefficient reacts.", ge=1)
    target_kl: float = key(0.1, "What the adaptive coefficient aims at.", gt=0)


class RolloutCorrection(Section):
    rollout_is: Literal["token", "sequence"] | None = key(
        None, "Weigh the loss by how much likelier the trainer finds a token, or a whole answer, than the engine did."
    )
    bypass_mode: bool = key(
        False,
        "Take the rollout engine's log-probs as those of the old policy, which saves a scoring pass. The clipped ratio "
        "then corrects for the gap between engine and trainer.",
    )
    rollout_is_threshold: float = key(2.0, "Weights are truncated here.", gt=0)
    rollout_is_batch_normalize: bool = key(False, "Scale the weights to mean 1 over the batch.")
    rollout_rs: Literal["token", "sequence", "geometric"] | None = key(
        None, "Leave out tokens, or answers by their product or geometric mean, whose ratio is out of bounds."
    )
    rollout_rs_threshold: float | None = key(None, "Largest ratio kept.", gt=0)
    rollout_rs_threshold_lower: float | None = key(None, "Smallest ratio kept. null: 1 / the largest.", gt=0)
    rollout_token_veto_threshold: float | None = key(
        None, "One token with a ratio below this leaves its whole answer out.", gt=0
    )

    @property
    def enabled(self) -> bool:
        return any(value is not None for value in (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold))


class FilterGroups(Section):
    enable: bool = key(False, "Replace groups whose scores are all equal by fresh prompts (DAPO's dynamic sampling).")
    max_num_gen_batches: int = key(10, "Stop when so many rounds of generation have not filled a step.", ge=1)


class AlgorithmSection(Section):
    adv_estimator: str = key(
        "gae",
        "The advantage estimator: gae (PPO, with a critic), rloo, grpo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, remax, opo, gpg, grpo_passk, or your own as file.py:name.",
    )
    gamma: float = key(1.0, "Discount of later rewards.", ge=0, le=1)
    lam: float = key(0.95, "GAE's lambda: 0 trusts the critic, 1 the rewards.", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool = key(
        True, "Divide a group's advantages by their standard deviation. False is Dr. GRPO's way."
    )
    use_kl_in_reward: bool | None = key(
        None,
        "Subtract the KL to the reference from each token's reward. null: when a key of `kl_ctrl` is set, unless it is "
        "a fixed coefficient of 0.",
    )
    kl_penalty: KL_ESTIMATOR = key("kl", "Its estimator.")
    kl_ctrl: KlCtrl = section(KlCtrl, "Its coefficient.")
    rollout_correction: RolloutCorrection = section(
        RolloutCorrection, "What to do about the gap between the engine's log-probs and the trainer's."
    )
    filter_groups: FilterGroups = section(FilterGroups, "Dynamic sampling.")


class Config(Section):
    data: Data = section(Data, "Prompts.")
    actor_rollout_ref: ActorRolloutRef = section(
        ActorRolloutRef, "The policy: its model, its learning, its reference, its rollout."
    )
    critic: Critic = section(Critic, "The value model.")
    reward_model: RewardModel = section(RewardModel, "How rewards are computed.")
    custom_reward_function: CustomRewardFunction = section(CustomRewardFunction, "A reward function of your own.")
    algorithm: AlgorithmSection = section(AlgorithmSection, "Advantages and KL control.")
    trainer: Trainer = section(Trainer, "The run: length, checkpoints, logs, machines.")
    ray_kwargs: RayKwargs = section(RayKwargs, "How to reach Ray, where there is more than one worker.")

    _given: frozenset[str] = PrivateAttr(default=frozenset())

    def model_post_init(self, context: Any) -> None:
        self._given = frozenset((context or {}).get("given", ()))

    @property
    def given(self) -> frozenset[str]:
        """The keys that the user set, on the command line or in a YAML file; not those of defaults and presets."""
        return self._given

    def is_given(self, name: str) -> bool:
        """Whether the user set that key, or a key of that section."""
        return any(f"{path}.".startswith(f"{name}.") for path in self._given)

    @model_serializer(mode="wrap")
    def resolved(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What follows from the given keys is written out: a saved configuration no longer knows which were given."""
        tree: dict[str, Any] = serialize(self)
        if "algorithm" in tree:
            tree["algorithm"]["use_kl_in_reward"] = self.kl_in_reward
        return tree

    @property
    def workers(self) -> int:
        return self.trainer.nnodes * self.trainer.n_gpus_per_node

    @property
    def uses_ray(self) -> bool:
        """One worker needs no Ray, unless it is to live in a cluster that is there."""
        return self.workers > 1 or self.joins_a_cluster

    @property
    def starts_a_cluster(self) -> bool:
        """Of several machines; one machine alone needs no meeting place."""
        return self.trainer.nnodes > 1 and not self.joins_a_cluster

    @property
    def joins_a_cluster(self) -> bool:
        return "address" in self.ray_kwargs.ray_init or bool(os.environ.get("RAY_ADDRESS"))

    @property
    def uses_reference(self) -> bool:
        return self.actor_rollout_ref.actor.use_kl_loss or self.kl_in_reward

    @property
    def kl_in_reward(self) -> bool:
        chosen, control = self.algorithm.use_kl_in_reward, self.algorithm.kl_ctrl
        if chosen is not None:
            return chosen
        asks_for_none = control.type == "fixed" and control.kl_coef == 0
        return self.is_given("algorithm.kl_ctrl") and not asks_for_none

    @property
    def has_held_out_prompts(self) -> bool:
        return bool(self.data.val_files) or self.data.train_files == EMBEDDED

    @property
    def validates(self) -> bool:
        trainer = self.trainer
        return self.has_held_out_prompts and (trainer.test_freq > 0 or trainer.val_before_train or trainer.val_only)

    @property
    def on_policy(self) -> bool:
        """One update a batch: the policy that learns is the one that wrote the answers."""
        actor = self.actor_rollout_ref.actor
        return self.data.train_batch_size // actor.ppo_mini_batch_size == 1 and actor.ppo_epochs == 1

    @property
    def critic_updates(self) -> tuple[int, int]:
        """(prompts of a mini-batch, epochs): the critic's keys, or the actor's where they are null."""
        critic, actor = self.critic, self.actor_rollout_ref.actor
        return critic.ppo_mini_batch_size or actor.ppo_mini_batch_size, critic.ppo_epochs or actor.ppo_epochs
