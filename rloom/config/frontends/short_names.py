"""Short names of the keys that most runs set: keyword arguments of `rloom.train` and flags of `train.sh`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

MODEL = "actor_rollout_ref.model.path"
BATCH, MINI_BATCH = "data.train_batch_size", "actor_rollout_ref.actor.ppo_mini_batch_size"
KL_LOSS, KL_LOSS_COEF = "actor_rollout_ref.actor.use_kl_loss", "actor_rollout_ref.actor.kl_loss_coef"


@dataclass(frozen=True)
class ShortName:
    key: str
    meaning: str


SHORT_NAMES: Mapping[str, ShortName] = {
    "model": ShortName(MODEL, "model: folder or hub name"),
    "algorithm": ShortName("algorithm.adv_estimator", "algorithm: gae (PPO), grpo, rloo, reinforce_plus_plus, ..."),
    "lr": ShortName("actor_rollout_ref.actor.optim.lr", "learning rate of the policy"),
    "critic_lr": ShortName("critic.optim.lr", "learning rate of the critic"),
    "n": ShortName("actor_rollout_ref.rollout.n", "answers to each prompt"),
    "batch": ShortName(BATCH, "prompts per step, in four updates"),
    "mini_batch": ShortName(MINI_BATCH, "prompts per update; divides the prompts per step"),
    "steps": ShortName("trainer.total_training_steps", "steps in all"),
    "epochs": ShortName("trainer.total_epochs", "passes over the training prompts"),
    "max_prompt_length": ShortName("data.max_prompt_length", "maximum tokens of a prompt"),
    "max_response_length": ShortName("data.max_response_length", "maximum tokens of an answer"),
    "temperature": ShortName("actor_rollout_ref.rollout.temperature", "sampling temperature"),
    "kl_coef": ShortName("algorithm.kl_ctrl.kl_coef", "coefficient of the KL in the reward; 0: no KL"),
    "kl_loss_coef": ShortName(KL_LOSS_COEF, "coefficient of the KL in the loss; 0: no KL"),
    "clip_ratio": ShortName("actor_rollout_ref.actor.clip_ratio", "PPO's clip range"),
    "entropy_coeff": ShortName("actor_rollout_ref.actor.entropy_coeff", "coefficient of the entropy bonus"),
    "lora_rank": ShortName("actor_rollout_ref.model.lora_rank", "rank of the LoRA adapter; 0: train all weights"),
    "rollout": ShortName("actor_rollout_ref.rollout.name", "rollout engine: native, vllm, sglang, hf"),
    "trainer_mode": ShortName(
        "trainer.v1.trainer_mode",
        "sync; colocate_async: a step does not wait for its longest answers; separate_async: generation goes on while "
        "a step trains",
    ),
    "n_gpus": ShortName("trainer.n_gpus_per_node", "GPUs of this machine"),
    "seed": ShortName("data.seed", "seed of the prompt order and of the sampled answers"),
    "save_freq": ShortName("trainer.save_freq", "save a checkpoint every N steps"),
    "test_freq": ShortName("trainer.test_freq", "validate every N steps"),
    "output_dir": ShortName("trainer.default_local_dir", "the run directory"),
}


def short_values(given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(keys that short names set, further keys that follow from them unless they are given). None: not given."""
    values = {short.key: given[name] for name, short in SHORT_NAMES.items() if given.get(name) is not None}
    return values, consequences(values)


def consequences(values: Mapping[str, Any]) -> dict[str, Any]:
    """Further keys that follow from a number of prompts and from a KL in the loss. Values are numbers or their text."""
    found: dict[str, Any] = {}
    if (prompts := str(values.get(BATCH, ""))).isdigit():
        found[MINI_BATCH] = mini_batch(int(prompts))
    if KL_LOSS_COEF in values:
        found[KL_LOSS] = str(values[KL_LOSS_COEF]) not in ("0", "0.0")
    return found


def mini_batch(prompts: int) -> int:
    """Four updates per step, or one."""
    return prompts // 4 if prompts % 4 == 0 else prompts
