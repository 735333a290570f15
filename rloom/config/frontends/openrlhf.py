"""A command line of OpenRLHF's train_ppo_ray.py as values of rloom's keys, with OpenRLHF's defaults."""

import re
import shlex
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.config.base import ACTOR, MODEL, REF, ROLLOUT
from rloom.config.frontends.openrlhf_flags import GivenFlags, flags, parse
from rloom.config.given_keys import real_key
from rloom.config.load import literal
from rloom.errors import ConfigError

# Log-ratios are clamped to ±20, so that no ratio exceeds e^20 = 4.9e8: this dual clip has no effect, as in OpenRLHF.
NO_DUAL_CLIP = 1.0e9
ESTIMATORS: dict[str, dict[str, Any]] = {
    "gae": {"algorithm.adv_estimator": "gae"},
    "reinforce": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "rloo": {"algorithm.adv_estimator": "rloo", "algorithm.normalize_advantages": True},
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
    notices: Sequence[str]  # about flags of models that the run does not have

    @property
    def rloom_command(self) -> str:
        """The equivalent `rloom train`, for a shell."""
        pairs = [f"{key}={grammar(value)}" for key, value in self.values.items()]
        return shlex.join(["rloom", "train", *pairs, *self.overrides])


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
    return OpenrlhfCommand(values, line.overrides, given["save_path"], list(notices(given)))


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
    """OpenRLHF's scripts keep the flags of all models, whichever of them a run has."""
    reasons = {
        "critic": f"--advantage_estimator {given['advantage_estimator']} trains no critic",
        "ref": "there is no reference model",
        "reward": "there is no reward model (--reward_pretrain)",
    }
    for role in [role for role in reasons if role not in roles(given)]:
        starts = (f"{role}_num_", f"{role}_learning_rate", f"{role}.")
        idle = [f"--{name}" for name in given.values if name.startswith(starts) and not flags()[name].plain]
        if idle:
            yield f"Note: {', '.join(idle)}: no effect in this run, because {reasons[role]}"


def plain_values(given: GivenFlags) -> dict[str, Any]:
    found = [flags()[name] for name in given.values]
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


def token_passes(given: GivenFlags) -> dict[str, Any]:
    budget = given["train_max_tokens_per_gpu"]
    scoring_budget = given["rollout_max_tokens_per_gpu"] or budget
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
    dynamic = ("train_max_tokens_per_gpu", "rollout_max_tokens_per_gpu")
    idle = ("micro_train_batch_size", "micro_rollout_batch_size") if given["use_dynamic_batch"] else dynamic
    for name in idle:
        if name in given:
            way = "with" if given["use_dynamic_batch"] else "without"
            yield f"--{name}: no effect {way} --use_dynamic_batch"


def algorithm_values(given: GivenFlags) -> dict[str, Any]:
    values = {**ESTIMATORS[given["advantage_estimator"]], **kl_values(given)}
    if has_critic(given) or "lambd" in given:
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
    if "overlong_buffer_len" in given:
        values["reward_model.overlong_buffer.enable"] = True
        values["reward_model.overlong_buffer.len"] = int(given["overlong_buffer_len"])
    return values


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
    if given["use_kl_loss"] and "kl_target" in given:
        yield "--kl_target: the coefficient of the KL in the loss is fixed; leave it out, or leave out --use_kl_loss"
    if "kl_horizon" in given and "kl_target" not in given:
        yield "--kl_horizon: no effect without --kl_target, which makes the coefficient adaptive"
    if not has_kl(given):
        for name in ("use_kl_loss", "kl_target", "kl_estimator"):
            if name in given:
                yield f"--{name}: no effect with --init_kl_coef {given['init_kl_coef']:g}, which turns the KL off"
    if "overlong_penalty_factor" in given and "overlong_buffer_len" not in given:
        yield "--overlong_penalty_factor: no effect without --overlong_buffer_len"
    if "dual_clip" in given and given["policy_loss_type"] == "gspo":
        yield "--dual_clip: --policy_loss_type gspo has none; leave it out"
    if "use_wandb" in given and given["use_wandb"].lower() not in ("true", "1"):
        yield (
            "--use_wandb: a key on the command line is visible to others (it is not shown here); put it into the "
            "environment variable WANDB_API_KEY and use --use_wandb True"
        )


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
    if "target_modules" in given:
        names = given["target_modules"]
        values[f"{MODEL}.target_modules"] = "all-linear" if names == ["all-linear"] else names
    if given["enable_prefix_caching"]:
        values[f"{ROLLOUT}.engine_kwargs"] = {"enable_prefix_caching": True}
    return values


def run_values(given: GivenFlags, typed: Collection[str]) -> dict[str, Any]:
    values = {
        "trainer.save_freq": given["save_steps"],
        "trainer.test_freq": given["eval_steps"],
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
    if "best_metric_key" in given and given["best_metric_key"] != "none":
        values["trainer.keep_best_checkpoint"] = True
        if given["best_metric_key"]:
            values["trainer.best_metric_key"] = validation_metric(given["best_metric_key"])
    if given["save_hf_ckpt"]:
        resumable = [] if given["disable_ds_ckpt"] else ["model", "optimizer"]
        values[f"{ACTOR}.checkpoint.save_contents"] = [*resumable, "extra", "hf_model"]
    if "use_wandb" in given:
        values |= {"trainer.logger": ["console", "wandb"], "trainer.project_name": given["wandb_project"]}
    return values


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
    for name in ("wandb_project", "wandb_run_name"):
        if name in given and "use_wandb" not in given:
            yield f"--{name}: no effect without --use_wandb"
    if given["zero_stage"] not in (0, 1, 2, 3):
        yield f"--zero_stage {given['zero_stage']}: it takes 0, 1, 2 or 3"
    if given["enable_prefix_caching"] and not given["vllm_num_engines"]:
        yield "--enable_prefix_caching: it is a setting of vLLM; add --vllm_num_engines, or leave it out"


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
NO_SOURCE = "default"  # OpenRLHF's data source of rows without one
REWARD_FUNCTION, AGENT_EXECUTOR = "reward_func", "AgentExecutor"  # names in the files


def data_values(given: GivenFlags) -> dict[str, Any]:
    values: dict[str, Any] = {"data.truncation": "left", **length_values(given)}
    if "prompt_data" in given:
        values |= {"data.train_files": files(given["prompt_data"]), "data.prompt_key": given["input_key"]}
        values |= {"data.default_data_source": NO_SOURCE}
        if not given["apply_chat_template"]:
            values[f"{MODEL}.custom_chat_template"] = raw_template(given["input_template"])
    if "eval_dataset" in given:
        values["data.val_files"] = files(given["eval_dataset"])
        values[f"{ROLLOUT}.val_kwargs.n"] = given["eval_n_samples_per_prompt"]
        values[f"{ROLLOUT}.val_kwargs.temperature"] = given["eval_temperature"]
        values[f"{ROLLOUT}.val_kwargs.do_sample"] = given["eval_temperature"] > 0
    return values


def length_values(given: GivenFlags) -> dict[str, Any]:
    """The embedded model has shorter lengths than OpenRLHF's defaults, which are set only with --pretrain."""
    if "max_new_tokens" in given and "max_len" in given:
        answer = given["max_new_tokens"]
        return {"data.max_prompt_length": given["max_len"] - answer, "data.max_response_length": answer}
    names = {"prompt_max_len": "data.max_prompt_length", "generate_max_len": "data.max_response_length"}
    return {key: given[name] for name, key in names.items() if name in given or "pretrain" in given}


def files(text: str) -> str | list[str]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    return names[0] if len(names) == 1 else names


def raw_template(around: str | None) -> str:
    """A Jinja template that writes the prompt as it is, with the text of --input_template around it."""
    before, _, after = (around or "{}").partition("{}")
    content = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    return literal_text(before) + content + literal_text(after)


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
        return {"reward_model.remote.urls": files(url)}
    return {"reward_model.path": given["reward_pretrain"]} if "reward_pretrain" in given else {}


def data_faults(given: GivenFlags) -> Iterator[str]:
    for name in ("prompt_data", "eval_dataset"):
        found = files(given[name] or "")
        for file in [found] if isinstance(found, str) else found:
            if file and not file.endswith(SUFFIXES):
                yield (
                    f"--{name} {file}: rloom reads {', '.join(SUFFIXES)} files; write the data set to one, or use "
                    "`rloom data prepare NAME` for a known one"
                )
    for name in ("input_key", "label_key", "input_template", "apply_chat_template"):
        if name in given and "prompt_data" not in given:
            yield f"--{name}: no effect without --prompt_data"
    for name in ("eval_temperature", "eval_n_samples_per_prompt"):
        if name in given and "eval_dataset" not in given:
            yield f"--{name}: no effect without --eval_dataset"
    if "input_template" in given and given["apply_chat_template"]:
        yield "--input_template: no effect with --apply_chat_template, which formats the prompts; keep one"
    elif "input_template" in given and given["input_template"].count("{}") != 1:
        yield f"--input_template {given['input_template']}: it needs one {{}}, where the prompt is put"
    yield from length_faults(given)
    yield from reward_faults(given)


def length_faults(given: GivenFlags) -> Iterator[str]:
    if ("max_len" in given) != ("max_new_tokens" in given):
        yield (
            "--max_len and --max_new_tokens: rloom limits prompt and answer apart; give both, or --prompt_max_len and "
            "--generate_max_len"
        )
    elif "max_len" in given and {"prompt_max_len", "generate_max_len"} & set(given.values):
        yield (
            "--max_len and --max_new_tokens set the same limits as --prompt_max_len and --generate_max_len; keep one "
            "pair"
        )
    elif "max_len" in given and given["max_len"] <= given["max_new_tokens"]:
        yield (
            f"--max_len {given['max_len']}: it leaves no tokens for the prompt beside --max_new_tokens "
            f"{given['max_new_tokens']}; use a larger --max_len"
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


GPUS_OF_A_MACHINE = 8  # OpenRLHF's default for every role
ROLES = ("actor", "ref", "critic", "reward")
FLAGS = (
    *(f"{role}_num_{what}" for role in ROLES for what in ("nodes", "gpus_per_node")),
    *("colocate_actor_ref", "colocate_critic_reward", "colocate_all_models", "vllm_num_engines"),
    "vllm_tensor_parallel_size",
)


def gpus_of(given: GivenFlags, role: str) -> int:
    return int(given[f"{role}_num_nodes"] * given[f"{role}_num_gpus_per_node"])


def pools(given: GivenFlags, roles: Collection[str]) -> dict[str, int]:
    """Roles with GPUs of their own -> how many. `roles`: those of this run beside the actor."""
    if given["colocate_all_models"]:
        return {}
    own = {role: gpus_of(given, role) for role in roles if role != "ref" or not given["colocate_actor_ref"]}
    engines = given["vllm_num_engines"] or 0
    return own | ({"rollout": engines * given["vllm_tensor_parallel_size"]} if engines else {})


def placement_values(given: GivenFlags, roles: Collection[str], overrides: Collection[str]) -> dict[str, Any]:
    """Without a placement flag: one worker with all roles, rloom's default. `overrides`: keys of the command line."""
    values: dict[str, Any] = {}
    if "vllm_gpu_memory_utilization" in given or given["vllm_num_engines"]:
        values[f"{ROLLOUT}.gpu_memory_utilization"] = given["vllm_gpu_memory_utilization"]
    if not any(name in given for name in FLAGS):
        return values
    own = pools(given, roles)
    values |= {f"trainer.pools.{role}": size for role, size in own.items()}
    if given["vllm_num_engines"]:
        values[f"{ROLLOUT}.name"] = "vllm"
    if "vllm_tensor_parallel_size" in given or given["vllm_num_engines"]:
        values[f"{ROLLOUT}.tensor_model_parallel_size"] = given["vllm_tensor_parallel_size"]
    nodes, per_node = machines(given, gpus_of(given, "actor") + sum(own.values()))
    values |= {"trainer.nnodes": nodes, "trainer.n_gpus_per_node": per_node}
    if nodes > 1 and not {"trainer.master_addr", "ray_kwargs.ray_init.address"} & set(overrides):
        values["ray_kwargs.ray_init.address"] = "auto"  # as OpenRLHF, which joins the running Ray cluster
    return values


def machines(given: GivenFlags, gpus: int) -> tuple[int, int]:
    """(machines, GPUs of each). OpenRLHF's flags have no number of machines; a role on several has their size."""
    on_several = [given[f"{role}_num_gpus_per_node"] for role in ROLES if given[f"{role}_num_nodes"] > 1]
    per_node = on_several[0] if on_several else GPUS_OF_A_MACHINE
    return (1, gpus) if gpus <= per_node and not on_several else (gpus // per_node, per_node)


def placement_faults(given: GivenFlags, roles: Collection[str], typed: Mapping[str, str]) -> Iterator[str]:
    actor, engines = gpus_of(given, "actor"), given["vllm_num_engines"] or 0
    tensor_parallel = given["vllm_tensor_parallel_size"]
    below = [name for name in FLAGS if isinstance(given[name], int) and name in given and given[name] < 1]
    for name in below:
        if name != "vllm_num_engines" or engines < 0:
            yield f"--{name} {given[name]}: use 1 or more"
    if below:
        return
    if given["colocate_critic_reward"] and {"critic", "reward"} <= set(roles) and not given["colocate_all_models"]:
        yield (
            "--colocate_critic_reward: critic and reward model cannot share workers without the actor; leave it out, "
            "or use --colocate_all_models"
        )
    if given["colocate_all_models"] and engines and engines * tensor_parallel != actor:
        yield (
            f"--colocate_all_models: --vllm_num_engines {engines} × --vllm_tensor_parallel_size {tensor_parallel} = "
            f"{engines * tensor_parallel} GPUs, and the actor has --actor_num_nodes × --actor_num_gpus_per_node = "
            f"{actor}; make them equal"
        )
    sizes = {"actor": actor, **pools(given, roles)}
    gpus = sum(sizes.values())
    nodes, per_node = machines(given, gpus)
    chosen = {"trainer.nnodes", "trainer.n_gpus_per_node"} <= set(typed)
    if nodes * per_node != gpus and not chosen and any(name in given for name in FLAGS):
        yield (
            f"{' + '.join(f'{role} {size}' for role, size in sizes.items())} = {gpus} GPUs do not fill machines of "
            f"{per_node}; change the flags of the placement, or set the machines after them: trainer.nnodes=N "
            "trainer.n_gpus_per_node=M"
        )


def async_values(given: GivenFlags) -> dict[str, Any]:
    """OpenRLHF's queue has the batch of the next step, too. It drops no batch."""
    if not given["async_train"]:
        return {}
    return {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.num_warmup_batches": given["async_queue_size"] - 1,
        "trainer.v1.sampler.max_off_policy_strategy": "wait",
    }


def async_faults(given: GivenFlags, typed: Mapping[str, str]) -> Iterator[str]:
    if not given["async_train"]:
        for name in ("async_queue_size", "partial_rollout"):
            if name in given:
                yield f"--{name}: no effect without --async_train"
        return
    if given["async_queue_size"] < 1:
        yield f"--async_queue_size {given['async_queue_size']}: use 1 or more"
    if given["colocate_all_models"]:
        yield (
            "--async_train: with --colocate_all_models no GPU generates while the others train; leave one of them out, "
            "or use trainer.v1.trainer_mode=colocate_async"
        )
    elif not given["vllm_num_engines"] and "trainer.pools.rollout" not in typed:
        yield "--async_train needs GPUs that generate while the others train; add --vllm_num_engines N"
