"""What users of verl and of the kit ask for and this version does not have, with what to use instead."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    what: str  # subject and verb
    instead: str

    def sentence(self, asked: str) -> str:
        return f"{asked}: {self.what} not in this version of rloom; {self.instead}"


SCORED_NOW = (
    "score with a built-in rule (`data_source` of the rows chooses it), or with a function of your own: "
    "custom_reward_function.path=FILE"
)
REWARD_MODELS = Unsupported("reward models are", SCORED_NOW)
JUDGES = Unsupported("API judges are", SCORED_NOW)
MIXES = Unsupported(
    "mixes of rewards are", "one function of yours can add several scores: custom_reward_function.path=FILE"
)
MANAGERS = Unsupported(
    "other reward managers are", "leave the key out; reward_model.overlong_buffer has DAPO's penalty"
)
CODE = Unsupported("code rewards are", SCORED_NOW)
MEGATRON = Unsupported(
    "the Megatron engine is", "use strategy=fsdp, which shards over all GPUs, and leave its keys out"
)
ENGINE = "use actor_rollout_ref.rollout.name=native (the default) or hf"

# key or section -> what is missing
KEYS = {
    "reward_model.enable": REWARD_MODELS,
    "reward_model.path": REWARD_MODELS,
    "reward_model.model": REWARD_MODELS,
    "reward_model.micro_batch_size_per_gpu": REWARD_MODELS,
    "reward_model.api": JUDGES,
    "reward_model.composite": MIXES,
    "composite_reward": MIXES,
    "reward_model.sandbox": CODE,
    "actor_rollout_ref.actor.megatron": MEGATRON,
    "actor_rollout_ref.actor.megatron_config": MEGATRON,
    "actor_rollout_ref.ref.megatron": MEGATRON,
    "critic.megatron": MEGATRON,
    "critic.megatron_config": MEGATRON,
}
# key, value -> what is missing
VALUES = {
    ("actor_rollout_ref.rollout.name", "vllm"): Unsupported("the vLLM engine is", ENGINE),
    ("actor_rollout_ref.rollout.name", "sglang"): Unsupported("the SGLang engine is", ENGINE),
    ("actor_rollout_ref.rollout.name", "trtllm"): Unsupported("the TensorRT-LLM engine is", ENGINE),
    ("actor_rollout_ref.actor.strategy", "megatron"): MEGATRON,
    ("critic.strategy", "megatron"): MEGATRON,
    **{("reward_model.reward_manager", name): MANAGERS for name in ("dapo", "prime", "rate_limited")},
}
# Values of such keys that ask for nothing else than what this version does.
SAME_AS_DEFAULT = {"reward_model.enable": False}


def unsupported_key(path: str) -> Unsupported | None:
    return next((later for start, later in KEYS.items() if f"{path}.".startswith(f"{start}.")), None)


def unsupported_value(path: str, value: Any) -> Unsupported | None:
    return VALUES.get((path, value)) if isinstance(value, str) else None


def unsupported_name(name: str) -> str | None:
    """What to tell someone who looks up a key, a part of one, or a value that is not there yet."""
    for path, later in KEYS.items():
        if f".{name}." in f".{path}.":
            return later.sentence(path)
    return next((later.sentence(f"{path}={value}") for (path, value), later in VALUES.items() if value == name), None)
