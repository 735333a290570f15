"""A command line of OpenRLHF's train_ppo_ray.py as values of rloom's keys, with OpenRLHF's defaults."""

import math
import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from rloom.config.base import ACTOR, MODEL, RAW_TEMPLATE, REF, ROLLOUT
from rloom.config.correction_checks import KEY as CORRECTION
from rloom.config.frontends.openrlhf_flags import GivenFlags, flags, parse
from rloom.config.frontends.openrlhf_placement import (
    async_faults,
    async_values,
    placement_faults,
    placement_values,
    shares_critic,
)
from rloom.config.given_keys import real_key
from rloom.config.load import literal
from rloom.errors import ConfigError

# Log-ratios are clamped to ±20, so that no ratio exceeds e^20 = 4.9e8: this dual clip has no effect, as in OpenRLHF.
NO_DUAL_CLIP = 1.0e9
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"algorithm.adv_estimator": "gae"},
    "reinforce": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "rloo": {"algorithm.adv_estimator": "rloo"},
    "reinforce_baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
    "group_norm": {"algorithm.adv_estimator": "grpo"},
    "dr_grpo": {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
}
SCHEDULES = {"cosine_with_min_lr": "cosine", "constant_with_warmup": "constant"}  # others have the same name


@dataclass(frozen=True)
class OpenrlhfCommand:
    """Arguments of `load_config`, and the folder for the trained policy."""

    values: Mapping[str, Any]
    overrides: Sequence[str]
    save_path: str | None  # --save_path
    notices: Sequence[str]  # about flags without an effect, and results that differ from OpenRLHF's
    environment: Mapping[str, str]  # variables of the trackers
    secret: str | None  # the key of wandb, which is printed and saved nowhere

    @property
    def rloom_command(self) -> str:
        """The equivalent `rloom train`, for a shell."""
        variables = [f"{name}={shlex.quote(value)} " for name, value in self.environment.items()]
        pairs = [f"{key}={grammar(value)}" for key, value in self.values.items()]
        return "".join(variables) + shlex.join(["rloom", "train", *pairs, *self.overrides])


def translate(arguments: Sequence[str]) -> OpenrlhfCommand:
    line = parse(arguments)
    given, typed = line.given, typed_keys(line.overrides)
    faults = [*line.faults, *batch_faults(given), *algorithm_faults(given), *data_faults(given)]
    faults += [*placement_faults(given, roles(given), typed), *async_faults(given, typed), *checkpoint_faults(given)]
    if faults:
        raise ConfigError("\n".join(faults))
    values = {
        **algorithm_values(given),
        **batch_values(given),
        **data_values(given),
        **reward_values(given),
        **placement_values(given, roles(given), typed),
        **async_values(given),
        **optimizer_values(given, "actor", f"{ACTOR}.optim", ACTOR),
        **(optimizer_values(given, "critic", "critic.optim", "critic") if has_critic(given) else {}),
        **model_values(given),
        **run_values(given, typed_keys(line.overrides)),
        **plain_values(given),
    }
    notes = [*notices(given), *line.notices]
    return OpenrlhfCommand(values, line.overrides, given["save_path"], notes, environment(given), wandb_key(given))


def typed_keys(overrides: Sequence[str]) -> dict[str, str]:
    pairs = [text.lstrip("+").partition("=") for text in overrides]
    return {real_key(name): value for name, _, value in pairs}


def has_critic(given: GivenFlags) -> bool:
    return bool(given["advantage_estimator"] == "gae")


def has_kl(given: GivenFlags) -> bool:
    return bool(given["init_kl_coef"] > 0)


def roles(given: GivenFlags) -> list[str]:
    """The models beside the actor. With LoRA the reference is the actor without its adapter."""
    found = ["ref"] if has_kl(given) and not given["lora_rank"] else []
    found += ["critic"] if has_critic(given) else []
    return found + (["reward"] if "reward_pretrain" in given else [])


def notices(given: GivenFlags) -> Iterator[str]:
    reasons = idle_flags(given)
    for reason in dict.fromkeys(reasons.values()):
        names = [f"--{name}" for name in given.values if reasons.get(name) == reason]
        yield f"Note: {', '.join(names)}: no effect in this run, because {reason}"
    if given["use_dynamic_batch"] and (budget := token_budgets(given)[0]) > given["train_max_tokens_per_gpu"]:
        yield (
            f"Note: --train_max_tokens_per_gpu {given['train_max_tokens_per_gpu']}: a pass may have {budget} tokens on "
            "each GPU, those of the longest sample"
        )
    if shares_critic(given, roles(given)) and not given["colocate_all_models"]:
        yield "Note: --colocate_critic_reward: the reward model shares the GPUs of the actor, not those of the critic"
    if "reward" in roles(given) and has_critic(given) and given["critic_pretrain"] is None:
        yield (
            "Note: the critic starts from the policy's model. OpenRLHF starts it from the reward model; "
            "--critic_pretrain sets another one"
        )
    estimator = given["advantage_estimator"]
    if has_kl(given) and not given["use_kl_loss"] and estimator not in ("gae", "reinforce"):
        yield (
            f"Note: --init_kl_coef with --advantage_estimator {estimator}: the KL is a part of the reward that the "
            "answers to a prompt are compared by. OpenRLHF subtracts it afterwards. --use_kl_loss is the same in both"
        )
    if normalizes_rloo(given):
        yield (
            "Note: --advantage_estimator rloo: advantages are normalised, as in OpenRLHF up to 0.8. For releases since "
            "0.9, which do not, use --algo.advantage.estimator rloo"
        )
    if given["async_train"] and not given["enable_vllm_is_correction"]:
        yield (
            "Note: --async_train: tokens of older weights are weighted by their ratio, at most 2 "
            "(algorithm.rollout_correction). OpenRLHF does so with --enable_vllm_is_correction only"
        )


def without(name: str) -> str:
    return f"--{name} is not given"


def idle_flags(given: GivenFlags) -> dict[str, str]:
    """Given flag -> why it has no effect. OpenRLHF's scripts keep flags of models that a run does not have."""
    present, estimator = roles(given), given["advantage_estimator"]
    rules: list[tuple[bool, str, str]] = [  # (no effect, the flags, reason)
        ("critic" not in present, "critic_num_*,critic_learning_rate,critic.*,critic_pretrain,value_clip,lambd",
         f"--advantage_estimator {estimator} trains no critic"),
        (estimator == "group_norm", "reward_clip_range", "the scores of a group have a standard deviation of 1"),
        (estimator not in ("gae", "reinforce") and given["gamma"] != 1, "gamma",
         f"--advantage_estimator {estimator} has no discount"),
        ("ref" not in present, "ref_num_*,ref.*", "there is no reference model"),
        ("reward" not in present, "reward_num_*,reward.offload,normalize_reward",
         "there is no reward model (--reward_pretrain)"),
        (not has_kl(given), "use_kl_loss,kl_target,kl_estimator,kl_horizon", "--init_kl_coef 0 turns the KL off"),
        ("kl_target" not in given, "kl_horizon", without("kl_target")),
        ("overlong_buffer_len" not in given, "overlong_penalty_factor", without("overlong_buffer_len")),
        (given["use_dynamic_batch"], "micro_train_batch_size,micro_rollout_batch_size",
         "--use_dynamic_batch fills passes by tokens"),
        (not given["use_dynamic_batch"], "train_max_tokens_per_gpu,rollout_max_tokens_per_gpu",
         without("use_dynamic_batch")),
        (not given["enable_vllm_is_correction"], "vllm_is_truncated_threshold,vllm_is_correction_type",
         without("enable_vllm_is_correction")),
        (given["policy_loss_type"] == "gspo", "vllm_is_truncated_threshold,vllm_is_correction_type",
         "--policy_loss_type gspo takes its ratio to the log-probs of the rollout engine instead"),
        (not given["dynamic_filtering"], "dynamic_filtering_reward_range", without("dynamic_filtering")),
        (not given["lora_rank"], "lora_alpha,target_modules", "--lora_rank is 0"),
        (not given["vllm_num_engines"], "enable_prefix_caching", without("vllm_num_engines")),
        (not given["async_train"], "async_queue_size", without("async_train")),
        (not given["use_wandb"], "wandb_project,wandb_run_name,wandb_org,wandb_group", without("use_wandb")),
        ("prompt_data" not in given, "input_key,label_key,input_template,apply_chat_template,prompt_split",
         without("prompt_data")),
        (given["apply_chat_template"], "input_template", "--apply_chat_template formats the prompts"),
        ("prompt_data" in given and "eval_dataset" not in given and given["eval_steps"] > 0, "eval_steps",
         without("eval_dataset")),
        ("eval_dataset" not in given, "eval_temperature,eval_n_samples_per_prompt,eval_split,best_metric_key",
         without("eval_dataset")),
    ]  # fmt: skip
    found: dict[str, str] = {}
    for applies, patterns, reason in rules:
        names = [name for name in given.values if any(fnmatch(name, pattern) for pattern in patterns.split(","))]
        found |= {name: reason for name in names if applies and name not in found}
    return found


def plain_values(given: GivenFlags) -> dict[str, Any]:
    found = [flags()[name] for name in given.values if name not in idle_flags(given)]
    return {key: given[flag.name] for flag in found if flag.plain for key in flag.keys}


def batch_values(given: GivenFlags) -> dict[str, Any]:
    n = given["n_samples_per_prompt"]
    values = {
        "data.train_batch_size": given["rollout_batch_size"],
        f"{ROLLOUT}.n": n,
        f"{ACTOR}.ppo_mini_batch_size": given["train_batch_size"] // n,
        f"{ACTOR}.ppo_epochs": given["max_epochs"],
    }
    return values | (token_passes(given) if given["use_dynamic_batch"] else sample_passes(given))


def sample_passes(given: GivenFlags) -> dict[str, Any]:
    training = [ACTOR, *(["critic"] if has_critic(given) else [])]
    scoring = [ROLLOUT, *([REF] if "ref" in roles(given) else [])]
    values = {f"{section}.ppo_micro_batch_size_per_gpu": given["micro_train_batch_size"] for section in training}
    values |= {f"{section}.log_prob_micro_batch_size_per_gpu": given["micro_rollout_batch_size"] for section in scoring}
    if "reward" in roles(given):
        values["reward_model.micro_batch_size_per_gpu"] = given["micro_rollout_batch_size"]
    return values


def token_budgets(given: GivenFlags) -> tuple[int, int]:
    """Of training and of scoring. A sample that is longer has a pass of its own in OpenRLHF."""
    lengths = length_values(given)
    longest = lengths.get("data.max_length") or sum(lengths.values())
    training = given["train_max_tokens_per_gpu"]
    scoring = given["rollout_max_tokens_per_gpu"] or training
    ring = given["ring_attn_size"]
    return max(training, -(-longest // ring)), max(scoring, -(-longest // ring))


def token_passes(given: GivenFlags) -> dict[str, Any]:
    budget, scoring_budget = token_budgets(given)
    values: dict[str, Any] = {}
    for section in [ACTOR, *(["critic"] if has_critic(given) else [])]:
        values |= {f"{section}.use_dynamic_bsz": True, f"{section}.ppo_max_token_len_per_gpu": budget}
    for section in [ROLLOUT, *([REF] if "ref" in roles(given) else [])]:
        values[f"{section}.log_prob_use_dynamic_bsz"] = True
        values[f"{section}.log_prob_max_token_len_per_gpu"] = scoring_budget
    if "reward" in roles(given):
        values["reward_model.forward_max_token_len_per_gpu"] = scoring_budget
    return values


def batch_faults(given: GivenFlags) -> Iterator[str]:
    names = ("train_batch_size", "rollout_batch_size", "n_samples_per_prompt", "micro_train_batch_size")
    low = [name for name in (*names, "micro_rollout_batch_size") if given[name] < 1]
    for name in low:
        yield f"--{name} {given[name]}: use 1 or more"
    if low:
        return
    train, rollout, n = (given[name] for name in names[:3])
    if train % n:
        yield (
            f"--train_batch_size {train} (samples) is not a multiple of --n_samples_per_prompt {n}: the answers to a "
            f"prompt stay in one update; use {max(train // n, 1) * n} or {(train // n + 1) * n}"
        )
    elif rollout * n % train:
        yield (
            f"--train_batch_size {train} (samples) does not divide --rollout_batch_size {rollout} × "
            f"--n_samples_per_prompt {n} = {rollout * n} samples; change one of them"
        )


def algorithm_values(given: GivenFlags) -> dict[str, Any]:
    values = {**ESTIMATORS[given["advantage_estimator"]], **kl_values(given), **correction_values(given)}
    if normalizes_rloo(given):
        values["algorithm.normalize_advantages"] = True
    if has_critic(given):
        values["algorithm.lam"] = given["lambd"]
    if "eps_clip_low_high" in given:
        low, high = given["eps_clip_low_high"]
        values |= {f"{ACTOR}.clip_ratio_low": low, f"{ACTOR}.clip_ratio_high": high}
    if given["policy_loss_type"] == "gspo":
        values[f"{ACTOR}.policy_loss.loss_mode"] = "gspo"
    else:
        values[f"{ACTOR}.clip_ratio_c"] = given["dual_clip"] or NO_DUAL_CLIP
    if given["freezing_actor_steps"] > 0:
        values["trainer.critic_warmup"] = given["freezing_actor_steps"]
    if given["dynamic_filtering"]:
        values["algorithm.filter_groups.mean_score_range"] = list(given["dynamic_filtering_reward_range"])
    if given["advantage_estimator"] in ("gae", "reinforce"):
        values["reward_model.score_range"] = list(given["reward_clip_range"])
    if "overlong_buffer_len" in given:
        values["reward_model.overlong_buffer.enable"] = True
        values["reward_model.overlong_buffer.len"] = int(given["overlong_buffer_len"])
    return values


def normalizes_rloo(given: GivenFlags) -> bool:
    """As up to 0.8. Releases since 0.9 do not; the dotted names are theirs."""
    return given["advantage_estimator"] == "rloo" and "advantage_estimator" not in given.dotted


def correction_values(given: GivenFlags) -> dict[str, Any]:
    low, high = given["vllm_is_truncated_threshold"]
    if not given["enable_vllm_is_correction"]:
        return {}
    if given["policy_loss_type"] == "gspo":
        return {f"{CORRECTION}.bypass_mode": True}
    if given["vllm_is_correction_type"] == "icepop":
        return {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": f"{low}_{high}"}
    bounds = {f"{CORRECTION}.rollout_is_threshold": high, f"{CORRECTION}.rollout_is_threshold_lower": low}
    return {f"{CORRECTION}.rollout_is": "token", **bounds}


def correction_faults(given: GivenFlags) -> Iterator[str]:
    if not given["enable_vllm_is_correction"]:
        return
    if given["policy_loss_type"] == "gspo" and has_kl(given) and not given["use_kl_loss"]:
        yield (
            "--enable_vllm_is_correction with --policy_loss_type gspo: the KL in the reward would be that of the "
            "rollout engine's log-probs; add --use_kl_loss, or use --init_kl_coef 0"
        )
    if given["vllm_is_correction_type"] == "seq-mask-tis" and given["policy_loss_type"] == "ppo":
        low, high = given["vllm_is_truncated_threshold"]
        yield (
            "--vllm_is_correction_type seq-mask-tis: OpenRLHF counts the tokens of rejected answers in the mean of the "
            "loss, rloom does not. Use icepop, or leave --enable_vllm_is_correction out and reject with "
            f"{CORRECTION}.rollout_rs=geometric {CORRECTION}.rollout_rs_threshold={high} "
            f"{CORRECTION}.rollout_rs_threshold_lower={low} {CORRECTION}.rollout_is=token"
        )


def kl_values(given: GivenFlags) -> dict[str, Any]:
    if not has_kl(given):
        return {"algorithm.use_kl_in_reward": False}
    coefficient, estimator = given["init_kl_coef"], given["kl_estimator"]
    if given["use_kl_loss"]:
        in_loss = {f"{ACTOR}.use_kl_loss": True, f"{ACTOR}.kl_loss_coef": coefficient}
        return {"algorithm.use_kl_in_reward": False, **in_loss, f"{ACTOR}.kl_loss_type": estimator}
    values = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_penalty": estimator,
        "algorithm.kl_ctrl.kl_coef": coefficient,
    }
    if "kl_target" in given:
        values |= {"algorithm.kl_ctrl.type": "adaptive", "algorithm.kl_ctrl.target_kl": given["kl_target"]}
        values["algorithm.kl_ctrl.horizon"] = given["kl_horizon"]
    return values


def algorithm_faults(given: GivenFlags) -> Iterator[str]:
    estimator, n = given["advantage_estimator"], given["n_samples_per_prompt"]
    if estimator not in ("gae", "reinforce") and n < 2:
        yield (
            f"--n_samples_per_prompt {n}: --advantage_estimator {estimator} compares the answers to one prompt; "
            "use 2 or more, or --advantage_estimator gae"
        )
    yield from correction_faults(given)
    low, high = given["reward_clip_range"]
    largest = math.inf if estimator != "group_norm" else (n - 1) / math.sqrt(n)  # of n answers, over their std
    if "reward_clip_range" in given and estimator not in ("gae", "reinforce") and max(low, -high) > -largest:
        yield (
            f"--reward_clip_range: with --advantage_estimator {estimator} OpenRLHF limits the difference to the other "
            "answers, rloom can limit the score itself; leave it out, or use reward_model.score_range=[LOW,HIGH]"
        )
    if (factor := given["stop_properly_penalty_coef"]) is not None and factor > 1:
        yield f"--stop_properly_penalty_coef {factor:g}: use a factor of 0 to 1, or a score below 0"
    if given["use_kl_loss"] and "kl_target" in given and has_kl(given):
        yield "--kl_target: the coefficient of the KL in the loss is fixed; leave it out, or leave out --use_kl_loss"
    if "dual_clip" in given and given["policy_loss_type"] == "gspo":
        yield "--dual_clip: --policy_loss_type gspo has none; leave it out"


def optimizer_values(given: GivenFlags, role: str, optim: str, section: str) -> dict[str, Any]:
    """The embedded model has its own learning rates; OpenRLHF's defaults are set only with --pretrain."""
    schedule = given.of_role(role, "lr_scheduler", "lr_scheduler")
    rate = f"{role}_learning_rate"
    values: dict[str, Any] = {f"{optim}.lr": given[rate]} if rate in given or "pretrain" in given else {}
    values |= {
        f"{optim}.betas": list(given.of_role(role, "adam.betas", "adam_betas")),
        f"{optim}.weight_decay": given.of_role(role, "adam.weight_decay", "l2"),
        f"{optim}.lr_scheduler_type": SCHEDULES.get(schedule, schedule),
        f"{section}.grad_clip": given.of_role(role, "max_norm", "max_norm"),
    }
    if schedule != "constant":
        values[f"{optim}.lr_warmup_steps_ratio"] = given.of_role(role, "lr_warmup_ratio", "lr_warmup_ratio")
    if schedule == "cosine_with_min_lr":
        values[f"{optim}.min_lr_ratio"] = given.of_role(role, "min_lr_ratio")
    return values


def model_values(given: GivenFlags) -> dict[str, Any]:
    checkpointing = {f"{MODEL}.enable_gradient_checkpointing": given["gradient_checkpointing"]}
    values: dict[str, Any] = checkpointing
    trained = {f"{ACTOR}.fsdp_config": ACTOR}
    if has_critic(given):
        values["critic.model.enable_gradient_checkpointing"] = given["gradient_checkpointing"]
        trained["critic.model.fsdp_config"] = "critic"
    for fsdp, section in trained.items():
        values[f"{fsdp}.fsdp_size"] = 1 if given["zero_stage"] == 0 else -1
        if given["adam_offload"] or given["deepspeed_enable_sleep"]:
            values[f"{fsdp}.optimizer_offload"] = True
        if given["deepspeed_enable_sleep"]:
            values[f"{fsdp}.param_offload"] = True
        if "bf16" in given or "param_dtype" in given:
            values[f"{fsdp}.dtype"] = "bfloat16"
        if "ring_attn_size" in given:
            values[f"{section}.ulysses_sequence_parallel_size"] = given["ring_attn_size"]
    if given["ref_reward_offload"]:
        offloaded = {"ref": REF, "reward": "reward_model.model"}
        values |= {f"{offloaded[role]}.fsdp_config.param_offload": True for role in roles(given) if role in offloaded}
    if "target_modules" in given and given["lora_rank"]:
        names = given["target_modules"]
        values[f"{MODEL}.target_modules"] = "all-linear" if names == ["all-linear"] else names
    if given["enable_prefix_caching"] and given["vllm_num_engines"]:
        values[f"{ROLLOUT}.engine_kwargs"] = {"enable_prefix_caching": True}
    return values


def run_values(given: GivenFlags, typed: Collection[str]) -> dict[str, Any]:
    values = {
        "trainer.save_freq": given["save_steps"],
        "trainer.test_freq": -1 if "eval_steps" in idle_flags(given) else given["eval_steps"],
        "trainer.val_before_train": False,
        "trainer.default_local_dir": given["ckpt_path"],
        "trainer.max_actor_ckpt_to_keep": given["max_ckpt_num"],
        "trainer.resume_mode": "auto" if given["load_checkpoint"] else "disable",
        "trainer.total_epochs": given["num_episodes"],
        "data.seed": given["seed"],
    }
    if "ckpt_path" not in given and "trainer.default_local_dir" not in typed:
        values["trainer.number_runs"] = True
    if has_critic(given):
        values["trainer.max_critic_ckpt_to_keep"] = given["max_ckpt_num"]
    if "best_metric_key" in given and "eval_dataset" in given and given["best_metric_key"] != "none":
        values["trainer.keep_best_checkpoint"] = True
        if given["best_metric_key"]:
            values["trainer.best_metric_key"] = validation_metric(given["best_metric_key"])
    if given["save_hf_ckpt"]:
        resumable = [] if given["disable_ds_ckpt"] else ["model", "optimizer"]
        values[f"{ACTOR}.checkpoint.save_contents"] = [*resumable, "extra", "hf_model"]
    trackers = {"wandb": given["use_wandb"], "tensorboard": given["use_tensorboard"]}
    if any(trackers.values()):
        values["trainer.logger"] = ["console", *(name for name, wanted in trackers.items() if wanted)]
    if given["use_wandb"]:
        values["trainer.project_name"] = given["wandb_project"]
    return values


def environment(given: GivenFlags) -> dict[str, str]:
    names = {"use_tensorboard": "TENSORBOARD_DIR"}
    names |= {"wandb_org": "WANDB_ENTITY", "wandb_group": "WANDB_RUN_GROUP"} if given["use_wandb"] else {}
    return {variable: given[name] for name, variable in names.items() if given[name]}


def wandb_key(given: GivenFlags) -> str | None:
    key: str | None = given["use_wandb"]
    return None if key is None or key.lower() in ("true", "1") else key


def validation_metric(name: str) -> str:
    """rloom's name of OpenRLHF's `eval_SOURCE_pass1`; other names are unchanged."""
    found = re.fullmatch(r"eval_(.+)_pass1", name)
    return f"val-core/{found[1]}/acc/mean@1" if found else name


def checkpoint_faults(given: GivenFlags) -> Iterator[str]:
    if given["disable_ds_ckpt"] and not given["save_hf_ckpt"]:
        yield "--disable_ds_ckpt: the checkpoints would have no weights; add --save_hf_ckpt, or leave it out"
    if given["disable_ds_ckpt"] and "save_path" in given:
        yield "--disable_ds_ckpt: --save_path is written from the weights of the last checkpoint; leave one of them out"
    if given["max_ckpt_num"] < 1:
        yield f"--max_ckpt_num {given['max_ckpt_num']}: use 1 or more"
    if given["zero_stage"] not in (0, 1, 2, 3):
        yield f"--zero_stage {given['zero_stage']}: it takes 0, 1, 2 or 3"


def grammar(value: Any) -> str:
    """`value` as Hydra's grammar of `key=value` reads it."""
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, list):
        return f"[{','.join(grammar(one) for one in value)}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{name}:{grammar(one)}' for name, one in value.items())}}}"
    if isinstance(value, str):
        return value if value.replace("_", "").replace("-", "").isalnum() and value[0].isalpha() else quoted(value)
    return repr(value)


def quoted(text: str) -> str:
    """`text` in single quotes. Backslashes count before a quote only; OmegaConf resolves `${` unless it is escaped."""
    inner = re.sub(r"(\\*)'", r"\1\1\\'", literal(text))
    return "'" + re.sub(r"(\\+)$", r"\1\1", inner) + "'"


SUFFIXES = (".parquet", ".json", ".jsonl")
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w.-]+")
NO_SOURCE = "default"  # OpenRLHF's data source of rows without one
REWARD_FUNCTION, AGENT_EXECUTOR = "reward_func", "AgentExecutor"  # names in the files


def data_values(given: GivenFlags) -> dict[str, Any]:
    values: dict[str, Any] = {"data.truncation": "left", **length_values(given)}
    if "prompt_data" in given:
        values |= {
            "data.train_files": files(given["prompt_data"], given["prompt_split"]),
            "data.prompt_key": given["input_key"],
        }
        values |= {"data.default_data_source": NO_SOURCE}
        if not given["apply_chat_template"]:
            values[f"{MODEL}.custom_chat_template"] = raw_template(given["input_template"])
    if "eval_dataset" in given:
        values["data.val_files"] = files(given["eval_dataset"], given["eval_split"])
        values[f"{ROLLOUT}.val_kwargs.n"] = given["eval_n_samples_per_prompt"]
        values[f"{ROLLOUT}.val_kwargs.temperature"] = given["eval_temperature"]
        values[f"{ROLLOUT}.val_kwargs.top_p"] = given["top_p"]
        values[f"{ROLLOUT}.val_kwargs.do_sample"] = given["eval_temperature"] > 0
    return values


def length_values(given: GivenFlags) -> dict[str, Any]:
    """The embedded model has shorter lengths than OpenRLHF's defaults, which are set only with --pretrain."""
    if "max_new_tokens" in given or "max_len" in given:
        both, answer = given["max_len"], given["max_new_tokens"]
        values = {"data.max_prompt_length": both - (answer or 1), "data.max_response_length": answer or both}
        if given["agent_func_path"] is not None:  # all turns share the limit
            values["data.max_response_length"] = both
        return values if values["data.max_response_length"] < both else values | {"data.max_length": both}
    names = {"prompt_max_len": "data.max_prompt_length", "generate_max_len": "data.max_response_length"}
    return {key: given[name] for name, key in names.items() if name in given or "pretrain" in given}


def names_in(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def files(text: str, split: str) -> str | list[str]:
    """Names of data sets on the hub become the files of a split, as the hub converts them."""
    names = [f"hf://datasets/{name}@~parquet/*/{split}/*" if is_hub_name(name) else name for name in names_in(text)]
    return names[0] if len(names) == 1 else names


def is_hub_name(name: str) -> bool:
    return HUB_NAME.fullmatch(name) is not None and not name.endswith(SUFFIXES)


def raw_template(around: str | None) -> str:
    """A Jinja template that writes the prompt as it is, with the text of --input_template around it."""
    before, _, after = (around or "{}").partition("{}")
    content = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return RAW_TEMPLATE + literal_text(before) + content + literal_text(after)


def literal_text(text: str) -> str:
    escaped = text.encode("unicode_escape").decode("ascii").replace("'", "\\'")
    return f"{{{{ '{escaped}' }}}}" if text else ""


def reward_values(given: GivenFlags) -> dict[str, Any]:
    url, agent = given["remote_rm_url"], given["agent_func_path"]
    if agent is not None:
        return {f"{ROLLOUT}.agent.path": f"{agent}:{AGENT_EXECUTOR}"}
    if url is not None and url.endswith(".py"):
        return {"custom_reward_function.path": url, "custom_reward_function.name": REWARD_FUNCTION}
    if url is not None:
        return {"reward_model.remote.urls": names_in(url)}
    return {"reward_model.path": given["reward_pretrain"]} if "reward_pretrain" in given else {}


def data_faults(given: GivenFlags) -> Iterator[str]:
    for name, split in (("prompt_data", "prompt_split"), ("eval_dataset", "eval_split")):
        for file in names_in(given[name] or ""):
            if not file.endswith(SUFFIXES) and not is_hub_name(file):
                yield (
                    f"--{name} {file}: rloom reads {', '.join(SUFFIXES)} files, and OWNER/NAME from the hub; write the "
                    "data set to a file, or use `rloom data prepare NAME` for a known one"
                )
            elif given[split] != "train" and not is_hub_name(file):
                yield f"--{split} {given[split]}: {file} has one split; name the file of that split with --{name}"
    if "input_template" in given and not given["apply_chat_template"] and given["input_template"].count("{}") != 1:
        yield f"--input_template {given['input_template']}: it needs one {{}}, where the prompt is put"
    yield from length_faults(given)
    yield from reward_faults(given)


def length_faults(given: GivenFlags) -> Iterator[str]:
    if not {"max_len", "max_new_tokens"} & set(given.values):
        return
    if {"prompt_max_len", "generate_max_len"} & set(given.values):
        yield (
            "--max_len and --max_new_tokens set the same limits as --prompt_max_len and --generate_max_len; keep one "
            "pair"
        )
    elif given["max_len"] <= (given["max_new_tokens"] or 1):
        yield (
            f"--max_len {given['max_len']}: it leaves no tokens for the prompt beside --max_new_tokens "
            f"{given['max_new_tokens'] or 1}; use a larger --max_len"
        )


def reward_faults(given: GivenFlags) -> Iterator[str]:
    url, model, agent = given["remote_rm_url"], given["reward_pretrain"], given["agent_func_path"]
    if url is not None and model is not None:
        yield "--remote_rm_url and --reward_pretrain are two rewards; keep one, or mix them by reward_model.composite"
    if agent is not None and (url is not None or model is not None):
        other = "--reward_pretrain" if url is None else "--remote_rm_url"
        yield f"--agent_func_path and {other}: the agent gives the rewards; keep one"
    if agent is not None and not agent.endswith(".py"):
        yield f"--agent_func_path {agent}: give a .py file with a class {AGENT_EXECUTOR}"
    if url is not None and "," in url and any(part.endswith(".py") for part in url.split(",")):
        yield f"--remote_rm_url {url}: give one .py file, or URLs"
    if model is not None and "," in model:
        yield f"--reward_pretrain {model}: a run has one reward model; give one"
