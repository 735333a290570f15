"""Keys and values of verl and of the kit that this version does not support, with what to use instead."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Unsupported:
    what: str  # subject and verb
    instead: str

    def sentence(self, setting: str) -> str:
        return f"{setting}: {self.what} not in this version of rloom; {self.instead}"


MANAGERS = Unsupported("other reward managers are", "remove the key; reward_model.overlong_buffer is DAPO's penalty")
MEGATRON = Unsupported(
    "the Megatron engine is", "use strategy=fsdp, which shards over all GPUs, and remove the Megatron keys"
)

DATASET_CLASS = Unsupported("a dataset class of your own is", "write the rows to a parquet, json or jsonl file")
LIGER = Unsupported("Liger is", "remove the key; model.use_fused_kernels computes log-probs in chunks")
FSDP_KEYS = Unsupported(
    "this section of verl's SFT trainer is",
    "use engine.dtype, engine.param_offload and engine.fsdp_size; rloom keeps float32 masters and wraps each layer",
)

UNSUPPORTED_KEYS = {  # keys or sections
    "actor_rollout_ref.actor.megatron": MEGATRON,
    "actor_rollout_ref.actor.megatron_config": MEGATRON,
    "actor_rollout_ref.ref.megatron": MEGATRON,
    "critic.megatron": MEGATRON,
    "critic.megatron_config": MEGATRON,
    "data.custom_cls": DATASET_CLASS,
    "model.use_liger": LIGER,
    "model.fsdp_config": FSDP_KEYS,
}
UNSUPPORTED_VALUES = {  # (key, value)
    ("actor_rollout_ref.actor.strategy", "megatron"): MEGATRON,
    ("critic.strategy", "megatron"): MEGATRON,
    **{("reward_model.reward_manager", name): MANAGERS for name in ("prime", "rate_limited")},
}


def unsupported_key(path: str) -> Unsupported | None:
    return next((missing for start, missing in UNSUPPORTED_KEYS.items() if f"{path}.".startswith(f"{start}.")), None)


def unsupported_value(path: str, value: Any) -> Unsupported | None:
    return UNSUPPORTED_VALUES.get((path, value)) if isinstance(value, str) else None


def unsupported_name(name: str) -> str | None:
    """The sentence for an unsupported key, a part of one, or an unsupported value."""
    for path, missing in UNSUPPORTED_KEYS.items():
        if f".{name}." in f".{path}.":
            return missing.sentence(path)
    values = UNSUPPORTED_VALUES.items()
    return next((missing.sentence(f"{path}={value}") for (path, value), missing in values if value == name), None)
