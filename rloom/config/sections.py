"""The sections of data, algorithm and engines: Megatron, rollout, inference servers."""

from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, ClassVar, Literal

from rloom.config.base import EMBEDDED_NAME, NamedIn, PassKeys, PassSection, Section, Switch, key, names_code, section
from rloom.config.episode_sections import AgentSection, MultiTurnSection
from rloom.config.reward_sections import separate_urls
from rloom.rollout.kinds import GROUP, ROLLOUTS, RolloutKind, rollout_kind
from rloom.tables import read_table

CHAT_VARIABLES = "Variables of the chat template, such as {enable_thinking: False} for Qwen3."


class Data(Section):
    train_files: str | list[str] = key(
        EMBEDDED_NAME,
        "Training prompts: one file or a list; parquet, json, jsonl. On the hub: hf://datasets/OWNER/NAME/FILE, with * "
        "for any text; with NAME@~parquet the hub's parquet files: CONFIGURATION/SPLIT/*. `embedded`: the arithmetic "
        "problems of rloom.",
    )
    val_files: str | list[str] | None = key(
        None,
        "Validation prompts, in the same formats. null: none, or the embedded ones if trained on embedded data.",
        same_run=True,
    )
    train_batch_size: int = key(1024, "Prompts per step. A step trains on this many times `rollout.n` samples.", ge=1)
    gen_batch_size: int | None = key(
        None,
        "Prompts of a round of generation in dynamic sampling, `algorithm.filter_groups`. null: as many as a step has.",
        ge=1,
    )
    val_batch_size: int | None = key(
        None, "Prompts per generation batch in validation. null: all of them.", ge=1, same_run=True
    )
    max_prompt_length: int = key(512, "Maximum prompt length in tokens.", ge=1)
    max_response_length: int = key(512, "Maximum answer length in tokens.", ge=1)
    max_length: int | None = key(
        None,
        "Maximum tokens of prompt and answer together: an answer may have what its prompt leaves, up to "
        "`max_response_length`. null: the sum of the two maxima.",
        ge=2,
    )
    filter_overlong_prompts: bool = key(False, "Drop prompts over `max_prompt_length` instead of truncating them.")
    truncation: Literal["error", "left", "right", "middle"] = key(
        "error",
        "For prompts over the maximum that are not filtered: stop with an error, or remove tokens on that side.",
    )
    apply_chat_template_kwargs: dict[str, Any] = key({}, CHAT_VARIABLES)
    shuffle: bool = key(True, "Shuffle the prompts in each epoch; the order depends only on `seed` and the epoch.")
    seed: int = key(
        1, "Seed of the prompt order, the sampled answers and the shuffling of mini-batches. null: 1.", ge=0
    )
    prompt_key: str = key("prompt", "Column with the prompt: chat messages or a plain string.")
    reward_fn_key: str = key("data_source", "Column that selects the reward rule.")
    default_data_source: str | None = key(
        None, "Data source of rows without the column `reward_fn_key`. null: such a row is an error."
    )
    label_key: str | None = key(
        None, "Column with the ground truth. null: `reward_model.ground_truth`, or the column `ground_truth`."
    )
    train_max_samples: int = key(-1, "Use only the first N training rows. -1: all.", ge=-1)
    val_max_samples: int = key(-1, "Use only the first N validation rows. -1: all.", ge=-1, same_run=True)
    dataloader_num_workers: int = key(
        0, "Threads that render and tokenize the prompts at start. 0: none extra.", ge=0, same_run=True
    )
    return_raw_chat: bool = key(False, "Pass the chat messages to reward functions as `extra_info['raw_prompt']`.")

    @property
    def longest_sample(self) -> int:
        longest = self.max_prompt_length + self.max_response_length
        return longest if self.max_length is None else min(longest, self.max_length)

    @property
    def longest_answer(self) -> int:
        return min(self.max_response_length, self.longest_sample - 1)  # a prompt has a token


KL_ESTIMATOR = Literal[
    "kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3", "kl+", "k1+", "abs+", "mse+", "k2+", "low_var_kl+", "k3+"
]


ADAPTIVE = Switch(
    "type", "{algorithm.kl_ctrl.type} keeps the coefficient", on="=adaptive", is_on=lambda kind: kind == "adaptive"
)
WEIGHTED = Switch("rollout_is", "losses are not weighted", on="=token or sequence", harmless=(False,))
REJECTED = Switch("rollout_rs", "nothing is rejected", on="=token, sequence or geometric")


class KlCtrl(Section):
    type: Literal["fixed", "adaptive"] = key("fixed", "adaptive: change the coefficient until the KL is `target_kl`.")
    kl_coef: float = key(0.001, "Coefficient of the KL in the reward; the initial value if adaptive.", ge=0)
    horizon: int = key(10000, "Samples over which the adaptive coefficient changes.", ge=1, switch=ADAPTIVE)
    target_kl: float = key(0.1, "Target of the adaptive coefficient.", gt=0, switch=ADAPTIVE)


class RolloutCorrection(Section):
    rollout_is: Literal["token", "sequence"] | None = key(
        None, "Weight the loss by the ratio of trainer to engine probability, of a token or of a whole answer."
    )
    bypass_mode: bool = key(
        False,
        "Take the rollout engine's log-probs as those of the old policy, which saves a scoring pass. The clipped ratio "
        "then corrects for the gap between engine and trainer.",
    )
    loss_type: Literal["ppo_clip", "reinforce"] = key(
        "ppo_clip",
        "In bypass mode: the clipped loss, or reinforce, log-probs times advantages without a ratio, weighted by the "
        "truncated ratio of the current policy to the rollout engine (`rollout_is`).",
        switch=Switch("bypass_mode", "the old log-probs are the trainer's"),
    )
    rollout_is_threshold: float | str = key(
        2.0,
        "Upper bound of the weights. `0.5_5.0` (with both decimal points): two bounds, and weights outside of them are "
        "0, as in IcePop.",
        switch=WEIGHTED,
    )
    rollout_is_threshold_lower: float | None = key(
        None, "Lower bound of the weights: smaller ones are raised to it. null: none.", gt=0, switch=WEIGHTED
    )
    rollout_is_batch_normalize: bool = key(False, "Scale the weights to mean 1 over the batch.", switch=WEIGHTED)
    rollout_rs: str | None = key(
        None,
        "Reject tokens (token), or answers by the product (sequence) or geometric mean (geometric) of their ratios, if "
        "it is out of bounds. Or verl's criteria, one or a list with commas: token_, seq_sum_ and seq_mean_ with k1, "
        "k2 or k3, seq_max_ with k2 or k3.",
    )
    rollout_rs_threshold: float | str | None = key(
        None,
        "Upper bound of the ratio. For verl's criteria one value, or one for each with commas; for k1 an upper bound, "
        "whose inverse is the lower one, or both as `0.5_2.0`.",
        switch=REJECTED,
    )
    rollout_rs_threshold_lower: float | None = key(
        None, "Lower bound of the ratio. null: 1 / the upper bound.", gt=0, switch=REJECTED
    )
    rollout_token_veto_threshold: float | None = key(
        None, "Reject an answer if one of its tokens has a ratio below this.", gt=0
    )
    off_policy_mask_threshold: float | None = key(
        None,
        "Reject tokens of negative advantage in answers whose mean of log(engine probability / trainer probability) is "
        "above this: the off-policy sequence mask of DeepSeek-V3.2.",
        gt=0,
    )

    @property
    def enabled(self) -> bool:
        chosen = (self.rollout_is, self.rollout_rs, self.rollout_token_veto_threshold, self.off_policy_mask_threshold)
        return any(value is not None for value in chosen)


class FilterGroups(Section):
    enable: bool = key(False, "Replace groups with equal scores by further prompts (DAPO's dynamic sampling).")
    mean_score_range: list[float] | None = key(
        None,
        "Bounds of a group's mean score, [low, high]: groups between the two, and equal to neither, are kept, whether "
        "or not their scores differ. The score is `acc`, where the reward gives one. null: keep groups with different "
        "scores.",
        min_length=2,
        max_length=2,
    )
    metric: Literal["score", "acc"] = key(
        "score", "What has to differ: the scores before penalties, or the `acc` of the reward, where it gives one."
    )
    max_num_gen_batches: int = key(10, "Stop the run if this many rounds of generation do not fill a step.", ge=1)


class AlgorithmSection(Section):
    adv_estimator: str = key(
        "gae",
        "The advantage estimator: gae (PPO, with a critic), rloo, grpo, reinforce_plus_plus, "
        "reinforce_plus_plus_baseline, remax, opo, gpg, grpo_passk, or your own as file.py:name.",
        needs_consent=names_code,
    )
    gamma: float = key(1.0, "Discount of later rewards.", ge=0, le=1)
    lam: float = key(0.95, "GAE's lambda. 0: one-step TD errors; 1: Monte Carlo returns.", ge=0, le=1)
    norm_adv_by_std_in_grpo: bool | Literal["batch"] = key(
        True,
        "Divide the advantages of a group by their standard deviation. False: Dr. GRPO. batch: divide by that of the "
        "scores of the whole step.",
    )
    normalize_advantages: bool | None = key(
        None,
        "After the estimator: subtract the mean of the advantages and divide by their standard deviation, over the "
        "tokens of the whole step. null: as the estimator is defined; on for gae, reinforce_plus_plus and "
        "reinforce_plus_plus_baseline, off for the others.",
    )
    use_kl_in_reward: bool | None = key(
        None,
        "Subtract the KL to the reference from each token's reward. null: if a key of `kl_ctrl` is set, unless it is "
        "a fixed coefficient of 0.",
    )
    kl_penalty: KL_ESTIMATOR = key("kl", "Estimator of the KL in the reward, or of the KL that is only measured.")
    kl_metric: bool | None = key(
        None,
        "Without a KL in reward and loss: measure the KL to the reference, the model at the start, in each step, as "
        "`kl_divergence`. It costs a forward pass and, unless LoRA is used, the memory of the reference. null: if a "
        "key of `actor_rollout_ref.ref` is set and no key that chooses a KL.",
        same_run=True,
    )
    kl_ctrl: KlCtrl = section(KlCtrl, "Coefficient of the KL in the reward.")
    rollout_correction: RolloutCorrection = section(
        RolloutCorrection, "Correction of the difference between the engine's log-probs and the trainer's."
    )
    mask_truncated_answers: bool = key(
        False,
        "Leave answers that were cut off at the length limit, and episodes that ended at a limit, out of the loss and "
        "its denominators. Their scores count for the other answers to the prompt.",
    )
    filter_groups: FilterGroups = section(
        FilterGroups, "Dynamic sampling.", switch=Switch("enable", "groups are not filtered")
    )


SIZES = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
)
WHERE_NEEDED = "null: off; `rloom train` switches it on if the run certainly does not fit without it, and prints that."
RECOMPUTE = ("recompute_granularity", "recompute_method", "recompute_num_layers")


@cache
def transformer_entries() -> Mapping[str, Any]:
    """Entries of megatron-core's TransformerConfig that other keys define, or that have no effect here."""
    entries: Mapping[str, Any] = read_table("transformer_config")
    return entries


class EngineMemory(Section):
    """What every training engine has."""

    param_offload: bool | None = key(
        None,
        f"Keep the parameters in host memory while they are not in use. No effect on a CPU. {WHERE_NEEDED}",
        same_run=True,
    )
    optimizer_offload: bool | None = key(
        None, f"Keep the optimizer state in host memory between updates. {WHERE_NEEDED}", same_run=True
    )
    dtype: Literal["auto", "float32", "bfloat16"] = key(
        "auto",
        "Data type of weights and computation; the optimizer keeps float32 copies. auto: bfloat16 on a GPU, float32 on "
        "a CPU.",
    )


class Megatron(EngineMemory):
    tensor_model_parallel_size: int = key(
        1, "Ranks that divide every layer (TP). Divides the model's attention heads and MLP.", ge=1, same_run=True
    )
    pipeline_model_parallel_size: int = key(
        1,
        "Pipeline stages (PP): ranks that each hold an equal number of layers. TP × PP divides the workers.",
        ge=1,
        same_run=True,
    )
    expert_model_parallel_size: int = key(
        1,
        "Ranks that divide the experts of a mixture-of-experts model (EP). Divides their number.",
        ge=1,
        same_run=True,
    )
    expert_tensor_parallel_size: int | None = key(
        None, "Ranks that divide each expert: 1, or the TP of the other layers. null: that TP.", ge=1, same_run=True
    )
    sequence_parallel: bool = key(
        True,
        "Divide the tokens between layers over the TP ranks: less activation memory. No effect with TP 1.",
        same_run=True,
    )
    override_transformer_config: dict[str, Any] = key(
        {},
        "Entries of megatron-core's TransformerConfig, such as recompute_granularity. Without a recompute_granularity, "
        "`model.enable_gradient_checkpointing` recomputes every layer (full, uniform, 1).",
    )

    @property
    def model_ranks(self) -> int:
        """Ranks that hold one copy of the model and get the same samples."""
        return self.tensor_model_parallel_size * self.pipeline_model_parallel_size

    @property
    def expert_tensor_ranks(self) -> int:
        return self.expert_tensor_parallel_size or self.tensor_model_parallel_size

    @property
    def divides_tokens(self) -> bool:
        """Sequence parallelism: between layers a rank has only its part of the tokens."""
        return self.sequence_parallel and self.tensor_model_parallel_size > 1

    @property
    def offloaded(self) -> list[str]:
        """What is in host memory while it is not in use."""
        switches = {"parameters": self.param_offload, "optimizer state": self.optimizer_offload}
        return [what for what, is_on in switches.items() if is_on]

    def transformer_config(self) -> dict[str, Any]:
        """The entries of megatron-core's TransformerConfig that the user set and that have an effect."""
        own = RECOMPUTE if self.recompute_granularity == "full" else ()
        without = {*transformer_entries()["one_implementation"], *own}
        return {name: value for name, value in self.override_transformer_config.items() if name not in without}

    @property
    def recompute_granularity(self) -> str | None:
        granularity: str | None = self.override_transformer_config.get("recompute_granularity")
        return granularity

    def recomputes_layers(self, *, checkpointing: bool) -> bool:
        """Only the inputs of layers are saved for the backward pass. rloom's layers do it themselves."""
        return checkpointing if self.recompute_granularity is None else self.recompute_granularity == "full"


class CriticMegatron(Megatron):
    """Validation replaces null by the actor's size: `with_actor_sizes`."""

    tensor_model_parallel_size: int = key(
        None, "As the actor's, for the critic's ranks. null: the actor's.", ge=1, same_run=True
    )
    pipeline_model_parallel_size: int = key(
        None, "As the actor's, for the critic's ranks. null: the actor's.", ge=1, same_run=True
    )
    expert_model_parallel_size: int = key(
        None, "As the actor's, for the critic's ranks. null: the actor's.", ge=1, same_run=True
    )
    expert_tensor_parallel_size: int | None = key(None, "As the actor's, for the critic's ranks.", ge=1, same_run=True)


def with_actor_sizes(critic: Mapping[str, Any], actor: Mapping[str, Any]) -> dict[str, Any]:
    """The critic's section with the actor's sizes where it has none. Actor and critic often share workers, which can be
    divided in one way only."""
    filled = dict(critic)
    for name in SIZES:
        if filled.get(name) is None:
            filled[name] = actor.get(name, Megatron.model_fields[name].default)
    return filled


class RefMegatron(Section):
    """Sizes that verl's scripts repeat for the reference."""

    tensor_model_parallel_size: int | None = key(None, "Only null or the actor's.", ge=1)
    pipeline_model_parallel_size: int | None = key(None, "Only null or the actor's.", ge=1)
    expert_model_parallel_size: int | None = key(None, "Only null or the actor's.", ge=1)
    expert_tensor_parallel_size: int | None = key(None, "Only null or the actor's.", ge=1)
    param_offload: bool | None = key(
        None, f"Keep the reference's parameters in host memory while they are not in use. {WHERE_NEEDED}"
    )


class RouterReplay(Section):
    mode: Literal["disabled", "R3"] = key(
        "disabled",
        "R3: in training, tokens go to the experts that the rollout engine chose for them (mixture-of-experts models). "
        "disabled: the trainer's router chooses again.",
    )


class ServerSection(Section):
    urls: str | list[str] = key(
        [],
        "Generate with the servers at these URLs, which the user starts: one, a list, or one text with commas. "
        "Empty: rloom starts them.",
        needs_consent=bool,
    )
    count: int | None = key(
        None,
        "Servers that rloom starts on this machine. null: one for each `tensor_model_parallel_size` workers; one with "
        "name=trtllm; with name=vllm, an engine in each worker's process and no server.",
        ge=1,
    )
    command: str | None = key(
        None,
        "Command that starts a server, in place of the engine's own. `{model}` and `{port}` are replaced.",
        needs_consent=bool,
    )
    start_timeout_s: float = key(
        600.0, "Time limit for a server to start, and of the wait for one while none can be used.", gt=0
    )
    request_timeout_s: float = key(
        3600.0, "Time limit of one request, from when it is sent. A server that exceeds it counts as down.", gt=0
    )
    health_interval_s: float = key(10.0, "Time between health checks of a server that has requests.", gt=0)
    max_restarts: int = key(
        3,
        "How often rloom starts a server again that has failed. With `urls`: how often a server may fail without an "
        "answer in between.",
        ge=0,
    )
    weight_transfer: Literal["auto", "collective", "shared"] = key(
        "auto",
        "How weights are sent. collective: by broadcast in a process group, to other GPUs or machines; shared: by "
        "handles of the memory, on the trainer's own GPU. auto: shared for name=trtllm and for servers that rloom "
        "starts on the trainer's GPU, otherwise collective.",
    )
    key_env: str | None = key(
        None,
        "Name of the environment variable that has the servers' API key. trtllm: the key that signs control requests.",
        needs_consent=bool,
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(url.rstrip("/") for url in separate_urls(self.urls))


SCORING_PASSES = PassKeys("log_prob_micro_batch_size", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")


def sampled(harmless: float) -> Switch:
    return Switch("do_sample", "validation is greedy", harmless=(harmless,))


class ValKwargs(Section):
    n: int = key(1, "Answers per validation prompt.", ge=1)
    temperature: float = key(0.0, "Sampling temperature in validation. 0: greedy.", ge=0, switch=sampled(0))
    top_p: float = key(1.0, "Nucleus sampling in validation.", gt=0, le=1, switch=sampled(1))
    top_k: int = key(-1, "Top-k sampling in validation. -1: off.", ge=-1, switch=sampled(-1))
    do_sample: bool = key(False, "False: greedy at any temperature.")


class RolloutSection(PassSection):
    pass_keys: ClassVar[PassKeys] = SCORING_PASSES

    name: Annotated[str, NamedIn(ROLLOUTS, GROUP)] = key(
        "native",
        "Engine. native: part of rloom, with continuous batching; hf: generate() of transformers; vllm: vLLM in each "
        "worker's own process (extra `vllm`), or its servers; sglang, trtllm: servers of SGLang and TensorRT-LLM.",
        needs_consent=names_code,
        same_run=True,
    )
    n: int = key(
        None,
        "Answers per prompt. null: 5 if the estimator compares the answers to one prompt (rloo, grpo), else 1.",
        ge=1,
    )
    temperature: float = key(1.0, "Sampling temperature; log-probs are computed at this temperature.", gt=0)
    top_p: float = key(1.0, "Nucleus sampling.", gt=0, le=1)
    top_k: int = key(-1, "Top-k sampling. -1: off.", ge=-1)
    tensor_model_parallel_size: int = key(
        1,
        "Workers, or GPUs of a server, that share one engine. Above 1, the engine is vllm unless `name` is given.",
        ge=1,
        same_run=True,
    )
    gpu_memory_utilization: float = key(
        0.5,
        "Share of a GPU's memory in use, at most, once the key-value cache is allocated. vllm: by vLLM itself.",
        gt=0,
        le=1,
        same_run=True,
    )
    max_num_seqs: int | None = key(
        None,
        "Maximum concurrent sequences. null: 256; 1024 for native on a GPU. A server gets twice as many requests.",
        ge=1,
        same_run=True,
    )
    max_num_batched_tokens: int = key(
        8192,
        "Maximum prompt tokens in one prefill pass of native; maximum tokens of a step of vllm.",
        ge=1,
        same_run=True,
    )
    enforce_eager: bool = key(
        False,
        "Run each decode step from Python. False: native and vllm use CUDA graphs. No effect on a CPU.",
        same_run=True,
    )
    free_cache_engine: bool = key(
        True, "Free the key-value cache while training; vllm: its weights, too.", same_run=True
    )
    request_seeds: bool = key(
        False,
        "Send vllm a seed with each request, so that the same request gets the same answer. Slower: vLLM's sampler "
        "then draws for one request after the other. The other engines get seeds in any case.",
        same_run=True,
    )
    progress_timeout_s: float = key(
        3600.0,
        "Time limit of a worker that generates, from when it reported last. One that exceeds it counts as dead, and "
        "the run goes on from the last checkpoint (`trainer.max_restarts`).",
        gt=0,
        same_run=True,
    )
    ignore_eos: bool = key(False, "Ignore stop tokens and generate to the length limit. For measurements.")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward pass that computes old log-probs. null: by token budget.", ge=1, same_run=True
    )
    log_prob_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1, same_run=True)
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Fill these passes up to the token budget. null: if no micro-batch size is given.", same_run=True
    )
    log_prob_max_token_len_per_gpu: int = key(16384, "Token budget of such a pass.", ge=1, same_run=True)
    calculate_log_probs: bool = key(
        True,
        "Report the difference between the engine's log-probs and the trainer's, if the trainer computes them.",
        same_run=True,
    )
    enable_rollout_routing_replay: bool = key(
        False, "Another name of `actor_rollout_ref.actor.router_replay.mode=R3`, which verl's commands set beside it."
    )
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling in validation.", same_run=True)
    engine_kwargs: dict[str, Any] = key(
        {},
        "Further arguments of the engine. hf: of `generate`; vllm: of EngineArgs; sglang: of ServerArgs; trtllm: of "
        "TorchLlmArgs.",
        needs_consent=bool,  # generate() of transformers takes code as custom_generate
    )
    multi_turn: MultiTurnSection = section(MultiTurnSection, "Several turns: an environment or tools between answers.")
    agent: AgentSection = section(AgentSection, "Several turns: an agent that asks the policy for its answers.")
    server: ServerSection = section(
        ServerSection, "Inference servers, for name=vllm, sglang and trtllm.", same_run=True
    )

    @property
    def kind(self) -> RolloutKind:
        return rollout_kind(self.name)

    def sequences(self, device: str) -> int:
        """Sequences at the same time, at most."""
        return self.max_num_seqs or (self.kind.gpu_sequences if device == "cuda" else self.kind.cpu_sequences)

    @property
    def uses_servers(self) -> bool:
        kind, server = self.kind, self.server
        asked_for = bool(server.addresses) or server.count is not None or server.command is not None
        return kind.build is None or (kind.servers is not None and asked_for)

    @property
    def repeats(self) -> bool:
        """Whether a run that generates ahead of training can be repeated."""
        return self.kind.repeats and not self.uses_servers

    @property
    def generates_elsewhere(self) -> bool:
        """On servers of the user's, with GPUs of their own."""
        return self.uses_servers and bool(self.server.addresses)

    @property
    def starts_servers(self) -> bool | None:
        """Whether rloom starts the servers with the engine's own command. None: no servers."""
        return None if not self.uses_servers else not self.server.addresses and self.server.command is None

    def engines(self, workers: int) -> int:
        """Engines, or servers, of so many workers."""
        if not self.uses_servers:
            return workers // self.tensor_model_parallel_size
        if self.server.addresses:
            return len(self.server.addresses)
        if self.on_first_gpu:
            return 1
        return self.server.count or max(1, workers // self.tensor_model_parallel_size)

    @property
    def workers_per_engine(self) -> int:
        """Workers whose processes are the ranks of one engine. Servers have processes of their own."""
        return 1 if self.uses_servers else self.tensor_model_parallel_size

    @property
    def on_first_gpu(self) -> bool:
        """The server reads new weights from the memory of its own GPU, which is the first worker's."""
        return self.kind.servers is not None and self.kind.servers.takes_handles


class Checkpoint(Section):
    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        ["model", "optimizer", "extra"],
        "Contents of a checkpoint; hf_model: a Hugging Face folder. The position of the run (extra) is always saved.",
    )
    load_contents: list[Literal["model", "optimizer", "extra"]] = key(
        ["model", "optimizer", "extra"], "What a resume loads. The position of the run (extra) is always loaded."
    )
    async_save: bool = key(
        True, "Write a checkpoint while the next step runs, from a copy in host memory (`rloom plan`)."
    )
