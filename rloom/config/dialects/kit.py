"""The flags and environment variables of `train.sh`, as overrides of our own keys."""

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePosixPath
from typing import NoReturn

from rloom.errors import ConfigError

# flag, environment variable -> key
KEYS = {
    "model": ("MODEL_PATH", "actor_rollout_ref.model.path"),
    "epochs": (None, "trainer.total_epochs"),
    "lr": (None, "actor_rollout_ref.actor.optim.lr"),
    "batch_size": (None, "data.train_batch_size"),
    "kl_coef": ("KL_COEF", "algorithm.kl_ctrl.kl_coef"),
    "n_gpus": ("N_GPUS", "trainer.n_gpus_per_node"),
}
VARIABLES = {
    "CLIP_RATIO": "actor_rollout_ref.actor.clip_ratio",
    "GAE_GAMMA": "algorithm.gamma",
    "GAE_LAMBDA": "algorithm.lam",
    "PPO_EPOCHS": "actor_rollout_ref.actor.ppo_epochs",
    "CRITIC_LR": "critic.optim.lr",
    "CRITIC_EPOCHS": "critic.ppo_epochs",
    "CLIPRANGE_VALUE": "critic.cliprange_value",
    "ROLLOUT_N": "actor_rollout_ref.rollout.n",
    "ROLLOUT_TEMPERATURE": "actor_rollout_ref.rollout.temperature",
    "ROLLOUT_TP_SIZE": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "GPU_MEMORY_UTILIZATION": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "NNODES": "trainer.nnodes",
    "NODE_RANK": "trainer.node_rank",
    "MASTER_ADDR": "trainer.master_addr",
}
NOT_YET = ("REWARD_MODEL_PATH",)  # variables of the kit that this version would have to ignore
OUTPUT = "outputs/checkpoints"  # each model has a folder of its own below it
MODEL_KEY = "actor_rollout_ref.model.path"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"train.sh: {message}; it takes --{', --'.join(KEYS)} and key=value")


def translate(arguments: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Overrides for `load_config`. A flag wins over its variable, a key=value over both."""
    parser = Parser("train.sh", description=__doc__, allow_abbrev=False)
    for flag in KEYS:
        parser.add_argument(f"--{flag}")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    given = vars(parser.parse_intermixed_args(list(arguments)))
    for name in NOT_YET:
        if environment.get(name):
            raise ConfigError(
                f"{name}={environment[name]}: this version scores with rules and your own function "
                "(custom_reward_function.path=FILE), not with reward models; unset it"
            )
    overrides = [f"{key}={environment[name]}" for name, key in VARIABLES.items() if environment.get(name)]
    for flag, (variable, key) in KEYS.items():
        value = given[flag] or (environment.get(variable) if variable else None)
        if value:
            overrides += [f"{key}={value}", *consequences(flag, value)]
    overrides += given["overrides"]
    return [f"trainer.default_local_dir={OUTPUT}/{model_folder(overrides)}", *overrides]


def model_folder(overrides: Sequence[str]) -> str:
    """A hub name as it is (Qwen/Qwen2.5-7B), of a path its last part; without a model, embedded."""
    values = [value for key, _, value in (text.lstrip("+").partition("=") for text in overrides) if key == MODEL_KEY]
    path = PurePosixPath(values[-1].strip("'\"") if values else "embedded")
    is_hub_name = len(path.parts) == 2 and path.parts[0] not in ("~", "..", "/", ".")
    parts = path.parts if is_hub_name else (path.name,)
    return "/".join(re.sub(r"[^\w.-]", "_", part) for part in parts) or "model"


def consequences(flag: str, value: str) -> list[str]:
    """What else a flag means to someone who knows only the flag."""
    if flag == "kl_coef":
        return ["algorithm.use_kl_in_reward=True"]
    if flag == "batch_size" and value.isdigit():
        quarter = int(value) // 4 if int(value) % 4 == 0 else int(value)  # four updates a step, as users are used to
        return [f"actor_rollout_ref.actor.ppo_mini_batch_size={quarter}"]
    return []
