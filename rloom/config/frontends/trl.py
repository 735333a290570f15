"""The fields of TRL's GRPOConfig, RLOOConfig and SFTConfig, as values of rloom's keys. Imports no torch and no TRL."""

import difflib
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any

from rloom.config.frontends.short_names import KL_LOSS, KL_LOSS_COEF, SHORT_NAMES
from rloom.config.keys import all_keys
from rloom.config.schema import Config, SftConfig
from rloom.errors import ConfigError
from rloom.gpus import visible_gpus

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
LOGGERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio")
DEFAULT_FOLDER = "trainer_output"  # of TRL
# fields of TrainingArguments, and of TRL, that change files, speed or what is printed, or that it fills in itself
HARMLESS = re.compile(
    r"_.*|(do|log|logging|hub|push_to_hub|ddp|fsdp|dataloader|deepspeed|include|skip_memory|tpu|torch_compile|ray|wandb|"
    r"trackio)(_.*)?|(bf16|fp16|half_precision|mp|jit_mode)_.*|accelerator_config|auto_find_batch_size|"
    r"average_tokens_across_devices|batch_eval_metrics|cast_lm_head_to_fp32|data_seed|debug|disable_tqdm|"
    r"ds3_gather_for_generation|enable_jit_checkpointing|eval_accumulation_steps|eval_do_concat_batches|"
    r"eval_use_gather_object|full_determinism|gradient_checkpointing_kwargs|greater_is_better|group_by_length|"
    r"ignore_data_skip|label_names|length_column_name|liger_kernel_config|local_rank|no_cuda|"
    r"num_completions_to_print|optim_target_modules|overwrite_output_dir|parallelism_config|past_index|"
    r"per_device_eval_batch_size|per_gpu_(train|eval)_batch_size|prediction_loss_only|project|"
    r"restore_callback_states_from_checkpoint|save_(on_each_node|only_model|safetensors)|tf32|torchdynamo|"
    r"train_sampling_strategy|use_cache|use_cpu|use_ipex|use_legacy_prediction_loop|use_mps_device|"
    r"activation_offloading|cache_implementation|dataset_num_proc|eval_packing|pad_to_multiple_of|pad_token|"
    r"packing_strategy|torch_empty_cache_steps|transformers_continuous_batching_config|"
    r"use_transformers_(continuous_batching|paged)|vllm_(enable_sleep_mode|group_port|max_model_length|model_impl)|"
    # read only with a field that is refused, or by `find_together`
    r"entropy_(coef_(min|max|delta)|target)|ref_model_(mixup_alpha|sync_steps)|vespo_.*|vllm_server_(host|port|timeout)"
)
NO_DUAL_CLIP, SMALLEST_RATIO, LARGEST_RATIO = 1e6, 1e-9, 1e9  # ratios are clamped to e^20
LOSS_MODE, AGGREGATION = f"{ACTOR}.policy_loss.loss_mode", f"{ACTOR}.loss_agg_mode"
CORRECTION = "algorithm.rollout_correction"
# TRL counts updates, rloom steps
COUNTED = ("trainer.total_training_steps", "trainer.save_freq", "trainer.test_freq", f"{ACTOR}.optim.lr_warmup_steps")
# TRL's defaults for the fields that a mapping does not have; the defaults of further fields are rloom's
BOTH = {
    **{"num_train_epochs": 3, "save_steps": 500, "seed": 42, "weight_decay": 0.0, "lr_scheduler_type": "linear"},
    "per_device_train_batch_size": 8,
}
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "grpo": {
        **BOTH,
        **{"num_generations": 8, "loss_type": "dapo"},
        **{"vllm_importance_sampling_mode": "sequence_mask", "vllm_importance_sampling_clip_max": 3.0},
    },
    "rloo": {**BOTH, "num_generations": 2, "beta": 0.05},
}
Values = Mapping[str, Any]


@dataclass(frozen=True)
class TrlField:
    """`key` gets the value itself; `convert` returns the keys of a value, or None where `reason` says what to do
    instead; without both, only the `harmless` values are accepted."""

    key: str | None = None
    convert: Callable[[Any], Values | None] | None = None
    reason: str = ""
    harmless: tuple[Any, ...] = (None,)

    def values(self, name: str, value: Any) -> Values:
        direct = {self.key: value} if self.key else None
        found = direct if self.convert is None else self.convert(value)
        if found is None:
            raise ConfigError(f"{name}={value!r}: {self.reason}")
        return found


def one_of(choices: Mapping[Any, Values]) -> Callable[[Any], Values | None]:
    return lambda value: choices.get(value)


def whole(key: str) -> Callable[[Any], Values | None]:
    """A number that TRL has as a float, or -1 for none."""
    return lambda value: {} if value < 0 else {key: int(value)} if value == int(value) else None


def refused(reason: str, *harmless: Any) -> TrlField:
    return TrlField(reason=reason, harmless=(None, *harmless))


def without_effect(reason: str) -> TrlField:
    return TrlField(convert=lambda value: {}, reason=reason)


def loggers(value: Any) -> Values | None:
    names = [value] if isinstance(value, str) else list(value)
    names = [name for name in names if name not in ("none", "all")]
    return {"trainer.logger": ["console", *names]} if set(names) <= set(LOGGERS) else None


def server(url: Any) -> Values:
    return {f"{ROLLOUT}.name": "vllm", f"{ROLLOUT}.server.urls": [url]}


NOT_HERE = "not in this version; leave it out"
CHOSEN_HERE = {"attn_implementation", "device_map", "dtype", "low_cpu_mem_usage", "torch_dtype", "use_cache"}
STRATEGY = "checkpoints and validations are counted in steps; use 'steps' with save_steps and eval_steps, or 'no'"
# fields that all three have, beside those of the optimizer
RUN = {
    "num_train_epochs": TrlField(
        "trainer.total_epochs", whole("trainer.total_epochs"), "epochs are whole numbers here; use max_steps"
    ),
    "max_steps": TrlField("trainer.total_training_steps", whole("trainer.total_training_steps"), "use a whole number"),
    "save_steps": TrlField("trainer.save_freq", whole("trainer.save_freq"), "use a whole number of steps"),
    "eval_steps": TrlField("trainer.test_freq", whole("trainer.test_freq"), "use a whole number of steps"),
    "save_strategy": TrlField("trainer.save_freq", one_of({"steps": {}, "no": {"trainer.save_freq": -1}}), STRATEGY),
    "eval_strategy": TrlField("trainer.test_freq", one_of({"steps": {}, "no": {"trainer.test_freq": -1}}), STRATEGY),
    "output_dir": TrlField("trainer.default_local_dir", lambda v: {"trainer.default_local_dir": str(v)} if v else {}),
    "run_name": TrlField("trainer.experiment_name"),
    "report_to": TrlField("trainer.logger", loggers, f"trainer.logger takes {', '.join(LOGGERS)}"),
    "seed": TrlField("data.seed"),
    "shuffle_dataset": TrlField("data.shuffle"),
    "load_best_model_at_end": TrlField("trainer.keep_best_checkpoint"),
    "fp16": refused("bfloat16 on a GPU, float32 on a CPU; leave it out", False),
    "use_liger_kernel": without_effect("fused kernels are on by default"),
    "logging_steps": without_effect("every step is logged"),
    "disable_dropout": without_effect("rloom trains without dropout"),
    "remove_unused_columns": without_effect("reward functions get every column"),
    "dataloader_num_workers": without_effect("prompts are read at the start"),
    "adam_epsilon": refused("AdamW's epsilon is 1e-8; leave it out", 1e-8),
    "neftune_noise_alpha": refused(NOT_HERE),
    "label_smoothing_factor": refused(NOT_HERE, 0.0),
    "router_aux_loss_coef": refused("the loss has no term for the load of experts; use 0.0", 0.0),
    "optim": refused("the optimizer is AdamW; leave it out", "adamw_torch", "adamw_torch_fused"),
    "model_init_kwargs": TrlField(
        convert=lambda value: {} if {*value} <= CHOSEN_HERE else None,
        reason=f"attention and data types are chosen by rloom; for others use the keys below {MODEL}, such as "
        f"{MODEL}.override_config",
        harmless=(None, {}),
    ),
    "deepspeed": refused("rloom shards with FSDP2; leave it out"),
    "peft_config": refused("use lora_rank= and the keys model.lora_alpha, model.target_modules"),
    "metric_for_best_model": refused("the mean validation score decides; trainer.best_metric_key names another metric"),
    "push_to_hub": TrlField(
        convert=lambda value: {}, reason="rloom export CKPT DIR --push_to_hub NAME does it", harmless=(None, False)
    ),
}


def optimizer(optim: str, clip: str, dtype: str) -> dict[str, TrlField]:
    """`optim`: the section of the optimizer."""
    return {
        "bf16": TrlField(dtype, one_of({True: {}, False: {dtype: "float32"}})),
        "learning_rate": TrlField(f"{optim}.lr"),
        "weight_decay": TrlField(f"{optim}.weight_decay"),
        "lr_scheduler_type": TrlField(
            f"{optim}.lr_scheduler_type",
            one_of(
                {
                    **{name: {f"{optim}.lr_scheduler_type": name} for name in ("constant", "cosine", "linear")},
                    "constant_with_warmup": {f"{optim}.lr_scheduler_type": "constant"},
                    "cosine_with_min_lr": {f"{optim}.lr_scheduler_type": "cosine"},
                }
            ),
            "schedules here are constant, cosine and linear",
        ),
        "lr_scheduler_kwargs": TrlField(
            f"{optim}.min_lr_ratio",
            lambda v: {f"{optim}.min_lr_ratio": v["min_lr_rate"]} if [*v] == ["min_lr_rate"] else None if v else {},
            f"schedules here have {optim}.min_lr_ratio, which is min_lr_rate; leave the others out",
        ),
        "warmup_steps": TrlField(f"{optim}.lr_warmup_steps", whole(f"{optim}.lr_warmup_steps"), "use warmup_ratio"),
        "warmup_ratio": TrlField(f"{optim}.lr_warmup_steps_ratio"),
        "max_grad_norm": TrlField(clip),
    }


RL: Mapping[str, TrlField] = {
    **RUN,
    **optimizer(f"{ACTOR}.optim", f"{ACTOR}.grad_clip", f"{ACTOR}.fsdp_config.dtype"),
    "num_generations": TrlField(f"{ROLLOUT}.n"),
    "num_generations_eval": TrlField(
        f"{ROLLOUT}.val_kwargs.n",
        lambda v: {f"{ROLLOUT}.val_kwargs.n": v, f"{ROLLOUT}.val_kwargs.do_sample": True},
    ),
    "max_completion_length": TrlField("data.max_response_length"),
    "max_tool_calling_iterations": TrlField(f"{ROLLOUT}.multi_turn.max_user_turns"),
    "max_prompt_length": TrlField(
        "data.max_prompt_length", lambda v: {"data.max_prompt_length": v, "data.truncation": "left"}
    ),
    "temperature": TrlField(f"{ROLLOUT}.temperature"),
    "top_p": TrlField(f"{ROLLOUT}.top_p"),
    "top_k": TrlField(f"{ROLLOUT}.top_k", lambda v: {f"{ROLLOUT}.top_k": v or -1}),
    "epsilon": TrlField(f"{ACTOR}.clip_ratio"),
    "epsilon_high": TrlField(f"{ACTOR}.clip_ratio_high"),
    "delta": TrlField(f"{ACTOR}.clip_ratio_c"),
    "num_iterations": TrlField(f"{ACTOR}.ppo_epochs"),
    "mask_truncated_completions": TrlField("algorithm.mask_truncated_answers"),
    "entropy_coef": TrlField(f"{ACTOR}.entropy_coeff"),
    "gradient_checkpointing": TrlField(f"{MODEL}.enable_gradient_checkpointing"),
    "trust_remote_code": TrlField(f"{MODEL}.trust_remote_code"),
    "save_total_limit": TrlField("trainer.max_actor_ckpt_to_keep"),
    "loss_type": TrlField(
        AGGREGATION,
        one_of(
            {
                **{name: {AGGREGATION: "token-mean"} for name in ("dapo", "bnpo")},
                "grpo": {AGGREGATION: "seq-mean-token-mean"},
                "dr_grpo": {AGGREGATION: "seq-mean-token-sum-norm"},
                "cispo": {LOSS_MODE: "cispo", AGGREGATION: "token-mean"},
                "sapo": {LOSS_MODE: "sapo", AGGREGATION: "seq-mean-token-mean"},
                "luspo": {AGGREGATION: "seq-mean-token-sum"},
            }
        ),
        "use dapo, bnpo, grpo, dr_grpo, cispo, sapo or luspo",
    ),
    "scale_rewards": TrlField(
        "algorithm.norm_adv_by_std_in_grpo",
        one_of(
            {
                name: {"algorithm.norm_adv_by_std_in_grpo": value}
                for name, value in {True: True, "group": True, False: False, "none": False, "batch": "batch"}.items()
            }
        ),
        "use group, batch or none",
    ),
    "importance_sampling_level": TrlField(
        LOSS_MODE, one_of({"token": {}, "sequence": {LOSS_MODE: "gspo"}}), "use token or sequence"
    ),
    "off_policy_mask_threshold": TrlField(f"{CORRECTION}.off_policy_mask_threshold"),
    "sapo_temperature_pos": TrlField(f"{ACTOR}.policy_loss.tau_pos"),
    "sapo_temperature_neg": TrlField(f"{ACTOR}.policy_loss.tau_neg"),
    "use_vllm": TrlField(f"{ROLLOUT}.name", one_of({False: {}, True: {f"{ROLLOUT}.name": "vllm"}})),
    "vllm_server_base_url": TrlField(f"{ROLLOUT}.server.urls", server),
    "vllm_gpu_memory_utilization": TrlField(f"{ROLLOUT}.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": TrlField(f"{ROLLOUT}.tensor_model_parallel_size"),
    "log_completions": without_effect("every answer is recorded; `rloom view` shows them"),
    "vllm_mode": TrlField(f"{ROLLOUT}.server.urls", lambda value: {}),  # with the host: `find_together`
    "min_p": refused(NOT_HERE),
    "repetition_penalty": refused(NOT_HERE, 1.0),
    "sync_ref_model": refused("the reference is the initial policy; leave it out", False),
    "reward_clip_range": TrlField("reward_model.score_range", lambda v: {"reward_model.score_range": [*v]}),
    "normalize_advantages": refused(
        "leave it out, or set the key algorithm.normalize_advantages, which normalises over tokens, not over answers",
        False,
    ),
    "use_bias_correction_kl": refused(NOT_HERE, False),
    "vllm_structured_outputs_regex": refused(NOT_HERE),
    "multi_objective_aggregation": refused("rewards are summed, then normalised; leave it out", "sum_then_normalize"),
    "top_entropy_quantile": refused(NOT_HERE, 1.0),
    "use_adaptive_entropy": refused(NOT_HERE, False),
    "chat_template_kwargs": TrlField("data.apply_chat_template_kwargs", harmless=(None, {})),
    "generation_kwargs": refused(f"{ROLLOUT}.engine_kwargs has further arguments of an engine", {}),
}
SFT: Mapping[str, TrlField] = {
    **RUN,
    **optimizer("optim", "optim.clip_grad", "engine.dtype"),
    "max_length": TrlField("data.max_length"),
    "truncation_mode": TrlField(
        "data.truncation",
        one_of({"keep_start": {"data.truncation": "right"}, "keep_end": {"data.truncation": "left"}}),
        "use keep_start or keep_end",
    ),
    "gradient_checkpointing": TrlField("model.enable_gradient_checkpointing"),
    "trust_remote_code": TrlField("model.trust_remote_code"),
    "save_total_limit": TrlField("trainer.max_ckpt_to_keep"),
    "packing": without_effect(
        "rows are packed without padding, and none sees another; a batch counts rows, in TRL packed sequences"
    ),
    "padding_free": without_effect("sequences are packed without padding"),
    "completion_only_loss": refused("the loss is on the answers; leave it out", True),
    "assistant_only_loss": refused("the loss of a chat is on the assistant's turns; use True", True, False),
    "loss_type": refused("the loss is the mean negative log-prob; use nll", "nll", "chunked_nll"),
    "chat_template_path": refused("model.custom_chat_template is the template itself; leave it out"),
    "eos_token": refused("the token that ends a turn is the chat template's; leave it out"),
    "dataset_text_field": refused("rows are chats, or prompts with answers (docs/sft.md); leave it out", "text"),
}
# fields that set several keys together, and what they become
TOGETHER = {
    "beta": f"with grpo {KL_LOSS}=True and {KL_LOSS_COEF}, with rloo algorithm.kl_ctrl.kl_coef",
    "per_device_train_batch_size": f"{ACTOR}.ppo_micro_batch_size_per_gpu; together with the other numbers "
    f"data.train_batch_size and {ACTOR}.ppo_mini_batch_size, which count prompts",
    "gradient_accumulation_steps": f"{ACTOR}.ppo_mini_batch_size, which counts prompts",
    "steps_per_generation": "data.train_batch_size, which counts prompts",
    "generation_batch_size": "data.train_batch_size, which counts prompts",
    "vllm_importance_sampling_correction": f"{CORRECTION}.rollout_is, in a run with use_vllm",
    "vllm_importance_sampling_mode": f"{CORRECTION}.rollout_is and {CORRECTION}.rollout_is_threshold",
    "vllm_importance_sampling_clip_max": f"{CORRECTION}.rollout_is_threshold",
    "vllm_importance_sampling_clip_min": f"{CORRECTION}.rollout_is_threshold",
    "vllm_importance_sampling_cap": f"{CORRECTION}.rollout_is_threshold",
    "adam_beta1": f"{ACTOR}.optim.betas",
    "adam_beta2": f"{ACTOR}.optim.betas",
    "reward_weights": "the argument reward_weights of rloom.train, or reward_model.composite.weights",
}
# arguments of TRL's trainers -> those of rloom.train
TRAINER_ARGUMENTS = {
    "reward_funcs": "reward",
    "train_dataset": "train",
    "eval_dataset": "validation",
    "environment_factory": "environment",
}


@dataclass(frozen=True)
class TrlSettings:
    values: dict[str, Any] = field(default_factory=dict)  # key -> value
    notices: list[str] = field(default_factory=list)  # fields without effect, with the reason
    reward_weights: list[float] | None = None


def answer(name: str, *, sft: bool = False) -> str | None:
    """What a field of TRL is here: its key, or why there is none. None: TRL has no such field. `sft`: of SFTConfig."""
    if name in TOGETHER and not sft:
        return TOGETHER[name]
    found = SFT.get(name) if sft else RL.get(name) or SFT.get(name)
    return None if found is None else found.key or found.reason


def translate(args: Any, *, algorithm: str | None = None, devices: int | None = None) -> TrlSettings:
    """`args`: an object of TRL, or a mapping of its fields, which are then GRPOConfig's, or with algorithm="rloo"
    RLOOConfig's. `devices`: by default the visible GPUs, or 1."""
    kind = "mapping" if isinstance(args, Mapping) else type(args).__name__
    own = {"RLOOConfig": "rloo", "GRPOConfig": "grpo"}.get(kind, "grpo")
    algorithm = algorithm or own
    given, chosen = read_fields(args, DEFAULTS["rloo" if algorithm == "rloo" else "grpo"])
    given = with_warmup(given)
    table = SFT if kind.startswith("SFT") else RL
    found = TrlSettings(reward_weights=given.pop("reward_weights", None))
    if table is RL:
        found.values["algorithm.adv_estimator"] = algorithm
    note_unknown(found, [name for name in given if name in chosen and name not in table], kind == "mapping", table)
    for name, one in table.items():
        if name not in given or given[name] in one.harmless or (name not in chosen and is_unused(name, one)):
            continue
        values = one.values(name, given[name])
        if name in chosen and one.key is None:
            found.notices.append(f"{name}={given[name]!r} has no effect: {one.reason}")
        found.values.update({key: value for key, value in values.items() if name in chosen or differs(key, value)})
    find_together(found, given, sft=table is SFT, loss_kl=algorithm != "rloo", devices=devices)
    if table is SFT:
        if given.get("assistant_only_loss") is False:
            found.notices.append("the loss of a chat is on the assistant's turns, as with assistant_only_loss=True")
        return found
    find_loss(found, given, algorithm)
    find_correction(found, given)
    count_steps(found, given, chosen)
    return found


def note_unknown(found: TrlSettings, names: list[str], is_mapping: bool, table: Mapping[str, TrlField]) -> None:
    """`names`: fields that were set and are not in the table. Those of a mapping may be misspelt."""
    names = [name for name in names if name not in TOGETHER and not HARMLESS.fullmatch(name)]
    if names and is_mapping:
        raise ConfigError(unknown_field(names[0], table))
    if names:
        found.notices.append(f"fields of TRL that rloom does not know have no effect: {', '.join(sorted(names))}")


def find_loss(found: TrlSettings, given: Values, algorithm: str) -> None:
    """The policy loss that several fields determine together."""
    values, kind, by_answer = found.values, given.get("loss_type"), given.get("importance_sampling_level") == "sequence"
    if kind is None and algorithm == "rloo":
        values[LOSS_MODE] = "sequence_ratio"
    if (kind in ("cispo", "sapo") and by_answer) or (kind == "luspo" and not by_answer):
        level = "token" if by_answer else "sequence"
        raise ConfigError(f"loss_type={kind!r}: use importance_sampling_level={level!r} with it")
    mode = values.get(LOSS_MODE, "vanilla")
    if mode == "vanilla":
        values.setdefault(f"{ACTOR}.clip_ratio_c", NO_DUAL_CLIP)
    elif given.get("delta") is not None:
        raise ConfigError(f"delta={given['delta']}: {LOSS_MODE}={mode} has no such bound; leave it out")
    if kind == "cispo":
        low, high = given.get("epsilon", 0.2), given.get("epsilon_high")
        largest = low if high is None else high
        if largest < 1:
            raise ConfigError(
                f"epsilon_high={largest}: with loss_type='cispo' it is the largest ratio; use 1 or more, such as 5.0"
            )
        values.pop(f"{ACTOR}.clip_ratio", None)
        values.update({f"{ACTOR}.clip_ratio_low": 1.0, f"{ACTOR}.clip_ratio_high": largest - 1})
    if kind == "bnpo":
        found.notices.append("loss_type='bnpo' is dapo: the divisor is the tokens of an update, not those of a pass")
    if given.get("mask_truncated_completions") and kind not in ("dapo", "bnpo", "cispo"):
        found.notices.append(
            "mask_truncated_completions=True: the loss is divided by the number of answers that are not truncated, in "
            "TRL by that of all answers"
        )
    if given.get("entropy_coef") and values.get(AGGREGATION, "token-mean") != "token-mean":
        raise ConfigError(
            f"entropy_coef={given['entropy_coef']}: the entropy is aggregated by {AGGREGATION}={values[AGGREGATION]}, "
            f"in TRL it is the mean over tokens; use loss_type='dapo', or set {ACTOR}.entropy_coeff"
        )


def find_correction(found: TrlSettings, given: Values) -> None:
    """With vLLM, TRL weighs the loss by the ratio of trainer and engine, unless it is told not to; RLOO does not."""
    mode = given.get("vllm_importance_sampling_mode")
    if not given.get("use_vllm") or mode is None or not given.get("vllm_importance_sampling_correction", True):
        return
    level, _, form = mode.partition("_")
    low = given.get("vllm_importance_sampling_clip_min")
    high = given.get("vllm_importance_sampling_cap") or given.get("vllm_importance_sampling_clip_max")
    if form not in ("mask", "truncate") or level not in ("token", "sequence"):
        raise ConfigError(
            f"vllm_importance_sampling_mode={mode!r}: use token_truncate, token_mask, sequence_truncate or "
            "sequence_mask"
        )
    if form == "truncate" and (low is not None or high is None):
        raise ConfigError(
            f"vllm_importance_sampling_clip_min={low}: weights are truncated at vllm_importance_sampling_clip_max "
            "alone; give it alone, or use a mode that masks"
        )
    bounds = high if form == "truncate" else f"{low or SMALLEST_RATIO}_{high or LARGEST_RATIO}"
    found.values.update({f"{CORRECTION}.rollout_is": level, f"{CORRECTION}.rollout_is_threshold": bounds})


def count_steps(found: TrlSettings, given: Values, chosen: set[str]) -> None:
    """A step of rloom generates once and may have several updates, which are TRL's steps."""
    values = found.values
    prompts, mini_batch = values.get("data.train_batch_size", 1), values.get(f"{ACTOR}.ppo_mini_batch_size", 1)
    updates = prompts // mini_batch * (given.get("num_iterations") or 1)
    for key in COUNTED:
        if updates > 1 and (values.get(key) or 0) > 0:
            values[key] = -(-values[key] // updates)
    if "trainer.total_training_steps" in values and "num_train_epochs" not in chosen:
        values.pop("trainer.total_epochs", None)
    counted = [name for name in ("max_steps", "save_steps", "eval_steps", "warmup_steps") if name in chosen]
    if updates > 1 and counted:
        found.notices.append(f"a step has {updates} updates, which TRL counts: {', '.join(counted)} / {updates}")


def is_unused(name: str, one: TrlField) -> bool:
    """Whether a field's default needs no key: TRL trains with vLLM only if the user chooses so."""
    return one.key is None or name.startswith("vllm_")


def differs(key: str, value: Any) -> bool:
    """Whether a default of TRL is another than that of the key."""
    known = all_keys(Config).get(key) or all_keys(SftConfig)[key]
    return bool(known.default != value)


def read_fields(args: Any, defaults_of_mapping: Values) -> tuple[dict[str, Any], set[str]]:
    """(fields with their values, those that the user has set). In an object, a field with its default value is not
    known to be set; TRL's default is its value all the same."""
    if isinstance(args, Mapping):
        fields_given = {str(name): plain(value) for name, value in args.items()}
        if fields_given.get("eval_strategy") == "steps":
            fields_given.setdefault("eval_steps", fields_given.get("logging_steps", 10))
        return {**defaults_of_mapping, **fields_given}, {*fields_given}
    if not is_dataclass(args) or isinstance(args, type):
        raise ConfigError(f"args is {type(args).__name__}; give a GRPOConfig, a RLOOConfig, or a dict of their fields")
    given = {one.name: plain(getattr(args, one.name)) for one in fields(args) if one.name != "output_dir"}
    folder = getattr(args, "output_dir", None)
    if folder and folder != DEFAULT_FOLDER:
        given["output_dir"] = folder
    if given.get("run_name") in (folder, DEFAULT_FOLDER):  # TrainingArguments fills it in
        given.pop("run_name", None)
    defaults = {one.name: default_of(one) for one in fields(args)}
    return given, {name for name, value in given.items() if value != defaults[name]}


def default_of(one: Field[Any]) -> Any:
    return plain(one.default if one.default_factory is MISSING else one.default_factory())


def with_warmup(given: dict[str, Any]) -> dict[str, Any]:
    """As transformers reads both fields: steps above 0 come before the ratio, and steps below 1 are a ratio."""
    steps, ratio = given.get("warmup_steps") or 0, given.get("warmup_ratio") or 0
    if 0 < steps < 1:
        ratio = steps
    elif steps or not ratio:
        return given
    return {**{name: value for name, value in given.items() if name != "warmup_steps"}, "warmup_ratio": ratio}


def plain(value: Any) -> Any:
    return value.value if isinstance(value, Enum) else value


def find_together(found: TrlSettings, given: Values, *, sft: bool, loss_kl: bool, devices: int | None) -> None:
    """Keys that several fields determine."""
    optim = "optim" if sft else f"{ACTOR}.optim"
    if "adam_beta1" in given or "adam_beta2" in given:
        found.values[f"{optim}.betas"] = [given.get("adam_beta1", 0.9), given.get("adam_beta2", 0.999)]
    if given.get("vllm_mode") == "server" and given.get("use_vllm") and not given.get("vllm_server_base_url"):
        host, port = given.get("vllm_server_host", "0.0.0.0"), given.get("vllm_server_port", 8000)
        found.values.update(server(f"http://{host}:{port}"))
    samples = given.get("per_device_train_batch_size")
    accumulated = given.get("gradient_accumulation_steps", 1)
    if sft and samples is not None:
        rows = samples * accumulated * (devices or visible())
        found.values.update({"data.micro_batch_size_per_gpu": samples, "data.train_batch_size": rows})
    if sft:
        return
    if given.get("beta"):
        in_loss = {KL_LOSS: True, KL_LOSS_COEF: given["beta"]}
        found.values.update(in_loss if loss_kl else {"algorithm.kl_ctrl.kl_coef": given["beta"]})
    if samples is not None:
        found.values.update(batches(given, samples * (devices or visible()), accumulated))


def batches(given: Values, samples: int, accumulated: int) -> dict[str, Any]:
    """Prompts of a step and of an update. TRL counts answers. `samples`: of one pass, on all devices."""
    n = given["num_generations"]
    update = samples * accumulated
    # steps_per_generation first: a GRPOConfig fills in both fields, generation_batch_size for one device
    passes = given.get("steps_per_generation")
    step = samples * passes if passes else given.get("generation_batch_size") or update
    if update % step == 0 and given.get("num_iterations") in (None, 1):
        step = update  # TRL generates several times before an update, with the same weights
    if step % update:
        raise ConfigError(
            f"a step of {step} answers is not a whole number of updates of {update}; steps_per_generation has to be a "
            "multiple of gradient_accumulation_steps"
        )
    if update % n:
        raise ConfigError(
            f"num_generations={n}: an update of {update} answers, of {step} in a step, has no whole number of prompts; "
            "per_device_train_batch_size × devices × gradient_accumulation_steps has to be a multiple of it"
        )
    return {
        "data.train_batch_size": step // n,
        f"{ACTOR}.ppo_mini_batch_size": update // n,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": given["per_device_train_batch_size"],
    }


def visible() -> int:
    return max(1, len(visible_gpus(os.environ)))


def unknown_field(name: str, table: Mapping[str, TrlField]) -> str:
    guess = difflib.get_close_matches(name, [*table, *TOGETHER], n=1, cutoff=0.7)
    hint = f"; did you mean {guess[0]}?" if guess else ""
    return f"args: {name} is not a field of TRL that rloom knows{hint} (docs/coming_from_trl.md lists them)"


def unknown_argument(name: str, names: list[str]) -> str:
    """For a keyword that `rloom.train` does not have."""
    known = answer(name)
    short = next((own for own, one in SHORT_NAMES.items() if known == one.key), None)
    instead = TRAINER_ARGUMENTS.get(name) or short or (known if known in all_keys() else None)
    if instead is not None:
        return f"there is no argument {name}, which is TRL's name; here it is {instead}"
    if known is not None:
        return f"there is no argument {name}; TRL's field of that name: {known}"
    guess = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    hint = f"; did you mean {guess[0]}?" if guess else ";"
    return f'there is no argument {name}{hint} a key goes into the first argument: {{"data.seed": 1}}'
