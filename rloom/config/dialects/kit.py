"""The flags and environment variables of `train.sh`, as overrides of rloom's keys."""

import argparse
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import NoReturn

from rloom.config.unsupported import JUDGES, REWARD_MODELS, Unsupported
from rloom.errors import ConfigError


@dataclass(frozen=True)
class Setting:
    """A flag or a variable of the kit, and the key it sets."""

    key: str
    english: str
    chinese: str
    variable: str | None = None  # the environment variable with the same meaning as the flag

    def meaning(self, chinese: bool) -> str:
        return f"{self.chinese if chinese else self.english} ({self.key})"


FLAGS = {
    "model": Setting(
        "actor_rollout_ref.model.path", "model: folder or hub name", "模型：目录或 Hub 名称", variable="MODEL_PATH"
    ),
    "epochs": Setting("trainer.total_epochs", "passes over the training prompts", "训练轮数"),
    "lr": Setting("actor_rollout_ref.actor.optim.lr", "learning rate of the policy", "策略（Actor）学习率"),
    "batch_size": Setting(
        "data.train_batch_size",
        "prompts per step, in four updates",
        "每步的提示数，分四次更新",
    ),
    "kl_coef": Setting(
        "algorithm.kl_ctrl.kl_coef",
        "coefficient of the KL in the reward; setting it enables the KL",
        "奖励中 KL 的系数；给出即启用 KL",
        variable="KL_COEF",
    ),
    "n_gpus": Setting("trainer.n_gpus_per_node", "GPUs of this machine", "本机 GPU 数", variable="N_GPUS"),
}
VARIABLES = {
    "CLIP_RATIO": Setting("actor_rollout_ref.actor.clip_ratio", "PPO's clip range", "PPO 裁剪范围"),
    "GAE_GAMMA": Setting("algorithm.gamma", "discount of later rewards", "折扣因子 γ"),
    "GAE_LAMBDA": Setting("algorithm.lam", "GAE's lambda", "GAE 的 λ"),
    "PPO_EPOCHS": Setting(
        "actor_rollout_ref.actor.ppo_epochs", "passes over each batch in the update", "每批数据的更新轮数"
    ),
    "CRITIC_LR": Setting("critic.optim.lr", "learning rate of the critic", "Critic 学习率"),
    "CRITIC_EPOCHS": Setting("critic.ppo_epochs", "the same, for the critic", "Critic 的更新轮数"),
    "CLIPRANGE_VALUE": Setting("critic.cliprange_value", "clip range of the values", "价值裁剪范围"),
    "ROLLOUT_N": Setting("actor_rollout_ref.rollout.n", "answers to each prompt", "每个提示的回答数"),
    "ROLLOUT_TEMPERATURE": Setting("actor_rollout_ref.rollout.temperature", "sampling temperature", "采样温度"),
    "ROLLOUT_TP_SIZE": Setting(
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
        "GPUs of one rollout engine; 1 in this version",
        "每个推理引擎的 GPU 数；本版本为 1",
    ),
    "GPU_MEMORY_UTILIZATION": Setting(
        "actor_rollout_ref.rollout.gpu_memory_utilization",
        "share of a GPU's memory in use, at most, with the key-value cache",
        "KV 缓存可用的显存比例",
    ),
    "NNODES": Setting("trainer.nnodes", "machines", "机器数"),
    "NODE_RANK": Setting("trainer.node_rank", "rank of this machine, from 0", "本机编号，从 0 开始"),
    "MASTER_ADDR": Setting("trainer.master_addr", "address of machine 0", "0 号机器的地址"),
}
# Flags and variables of the kit that this version does not support -> whether they take a value, what is missing.
UNSUPPORTED_FLAGS: dict[str, tuple[bool, Unsupported]] = {
    "reward_model": (True, REWARD_MODELS),
    "use_api_reward": (False, JUDGES),
    "rm_api_type": (True, JUDGES),
    "rm_model": (True, JUDGES),
    "rm_prompt_preset": (True, JUDGES),
    "rm_system_prompt": (True, JUDGES),
    "rm_scoring_prompt": (True, JUDGES),
}
UNSUPPORTED_VARIABLES = {"REWARD_MODEL_PATH": REWARD_MODELS}
OUTPUT = "outputs/checkpoints"  # with one folder per model
MODEL_KEY = "actor_rollout_ref.model.path"

ENGLISH = (
    "Trains a policy: without flags, the embedded model on the embedded data, no download.",
    "Every key of `rloom config` can follow as key=value and overrides the flags.",
    "Environment variables (a flag overrides its variable):",
    "show this help and end",
)
CHINESE = (
    "训练策略模型；不带参数时使用内置模型和内置数据，无需下载。",
    "其后可写 `rloom config` 中的任意 key=value，优先级最高。",
    "环境变量（同名参数优先于变量）：",
    "显示本帮助并退出",
)


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"train.sh: {message}; it takes --{', --'.join(FLAGS)} and key=value")


def translate(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Overrides for `load_config`. A flag overrides its variable, a key=value overrides both."""
    given = vars(parser(is_chinese(environment)).parse_intermixed_args(list(arguments)))
    refuse_unsupported(given, environment)
    overrides = [f"{found.key}={environment[name]}" for name, found in VARIABLES.items() if environment.get(name)]
    for flag, found in FLAGS.items():
        value = given[flag] or (environment.get(found.variable) if found.variable else None)
        if value:
            overrides += [f"{found.key}={value}", *consequences(flag, value)]
    overrides += given["overrides"]
    return [f"trainer.default_local_dir={OUTPUT}/{model_folder(overrides)}", *overrides]


def model_folder(overrides: Sequence[str]) -> str:
    """A hub name unchanged (Qwen/Qwen2.5-7B), the last part of a path, or `embedded` without a model."""
    values = [value for key, _, value in (text.lstrip("+").partition("=") for text in overrides) if key == MODEL_KEY]
    path = PurePosixPath(values[-1].strip("'\"") if values else "embedded")
    is_hub_name = len(path.parts) == 2 and path.parts[0] not in ("~", "..", "/", ".")
    parts = path.parts if is_hub_name else (path.name,)
    return "/".join(re.sub(r"[^\w.-]", "_", part) for part in parts) or "model"


def parser(chinese: bool) -> Parser:
    about, keys, variables, help_help = CHINESE if chinese else ENGLISH
    named = {found.variable: found for found in FLAGS.values() if found.variable} | VARIABLES
    lines = [f"  {name:<24}{found.meaning(chinese)}" for name, found in named.items()]
    made = Parser(
        "train.sh",
        usage="train.sh [--flag VALUE ...] [key=value ...]",
        description=f"{about}\n{keys}",
        epilog="\n".join([variables, *lines]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    made.add_argument("-h", "--help", action="help", help=help_help)
    for flag, found in FLAGS.items():
        made.add_argument(f"--{flag}", metavar="VALUE", help=found.meaning(chinese))
    for flag, (takes_value, _) in UNSUPPORTED_FLAGS.items():
        made.add_argument(f"--{flag}", action="store" if takes_value else "store_true", help=argparse.SUPPRESS)
    made.add_argument("overrides", nargs="*", metavar="key=value", help=argparse.SUPPRESS)
    return made


def is_chinese(environment: Mapping[str, str]) -> bool:
    chosen = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "")
    return chosen.startswith("zh")


def refuse_unsupported(given: Mapping[str, object], environment: Mapping[str, str]) -> None:
    faults = [
        missing.sentence(f"--{flag} {given[flag]}" if takes_value else f"--{flag}")
        for flag, (takes_value, missing) in UNSUPPORTED_FLAGS.items()
        if given[flag]
    ]
    faults += [
        missing.sentence(f"{name}={environment[name]}")
        for name, missing in UNSUPPORTED_VARIABLES.items()
        if environment.get(name)
    ]
    if faults:
        raise ConfigError("\n".join(faults))


def consequences(flag: str, value: str) -> list[str]:
    """Further keys that a flag sets."""
    if flag == "batch_size" and value.isdigit():
        quarter = int(value) // 4 if int(value) % 4 == 0 else int(value)  # four updates per step, as in the kit
        return [f"actor_rollout_ref.actor.ppo_mini_batch_size={quarter}"]
    return []
