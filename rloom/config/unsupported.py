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

DATASET_CLASS = Unsupported("a dataset class of your own is", "write the rows to a parquet, json or jsonl file")
LIGER = Unsupported("Liger is", "remove the key; model.use_fused_kernels computes log-probs in chunks")
FSDP_KEYS = Unsupported(
    "this section of verl's SFT trainer is",
    "use engine.dtype, engine.param_offload and engine.fsdp_size; rloom keeps float32 masters and wraps each layer",
)

WEIGHTS = Unsupported("another source of weights than a Hugging Face folder is", "remove the key, and set model.path")
OF_MEGATRON = {  # values other than those of one_behaviour.py
    "context_parallel_size": Unsupported(
        "Megatron's context parallelism is",
        "use 1 and a larger tensor_model_parallel_size with sequence_parallel=True, or strategy=fsdp with "
        "ulysses_sequence_parallel_size",
    ),
    "virtual_pipeline_model_parallel_size": Unsupported(
        "an interleaved pipeline is", "use null: each rank holds one block of layers"
    ),
    "dist_checkpointing_path": WEIGHTS,
    "dist_checkpointing_prefix": WEIGHTS,
    "override_mcore_model_config": Unsupported("this section is", "use override_transformer_config"),
}
SCHEDULE = Unsupported(
    "this part of Megatron's learning rate schedule is", "use lr_scheduler_type, lr_warmup_steps and min_lr_ratio"
)
OF_OPTIMIZER = {
    "optimizer": Unsupported("another optimizer than AdamW is", "remove the key"),
    "min_lr": Unsupported("an absolute final learning rate is", "use min_lr_ratio, its share of lr"),
    **dict.fromkeys(("lr_warmup_init", "lr_decay_steps", "lr_wsd_decay_steps", "weight_decay_incr_style"), SCHEDULE),
}
ROLES = ("actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref")
REPLAY_FILES = Unsupported("writing routings to files is", "remove the key: they go from memory to memory")
DIVIDED = Unsupported(
    "a model that is divided over some of the actor's workers is",
    "remove the key: it is divided over all of them, or give it a number of workers for itself alone",
)

UNSUPPORTED_KEYS = {  # keys or sections
    **{f"{role}.megatron.{name}": missing for role in ROLES for name, missing in OF_MEGATRON.items()},
    **{f"{role}.optim.{name}": missing for role in ROLES[:2] for name, missing in OF_OPTIMIZER.items()},
    **{f"{role}.load_weight": Unsupported("training a model with new weights is", "remove the key") for role in ROLES},
    "actor_rollout_ref.actor.router_replay.record_file": REPLAY_FILES,
    "actor_rollout_ref.actor.router_replay.replay_file": REPLAY_FILES,
    "data.custom_cls": DATASET_CLASS,
    "model.use_liger": LIGER,
    "model.fsdp_config": FSDP_KEYS,
}
UNSUPPORTED_VALUES: dict[tuple[str, str | type], Unsupported] = {  # (key, value or its type)
    ("actor_rollout_ref.actor.router_replay.mode", "R2"): Unsupported(
        "replaying the experts of the old policy (R2) is", "use R3, which replays those of the rollout"
    ),
    **{("reward_model.reward_manager", name): MANAGERS for name in ("prime", "rate_limited")},
    **{(f"trainer.pools.{role}", list): DIVIDED for role in ("actor", "critic", "ref")},
}


def unsupported_key(path: str) -> Unsupported | None:
    return next((missing for start, missing in UNSUPPORTED_KEYS.items() if f"{path}.".startswith(f"{start}.")), None)


def unsupported_value(path: str, value: Any) -> Unsupported | None:
    return UNSUPPORTED_VALUES.get((path, value if isinstance(value, str) else type(value)))


def unsupported_name(name: str) -> str | None:
    """The sentence for an unsupported key, a part of one, or an unsupported value."""
    for path, missing in UNSUPPORTED_KEYS.items():
        if f".{name}." in f".{path}.":
            return missing.sentence(path)
    values = UNSUPPORTED_VALUES.items()
    return next((missing.sentence(f"{path}={value}") for (path, value), missing in values if value == name), None)
