"""verl's keys that are not part of the tree, and values of its keys that rloom does not have.

verl selects among several behaviours where rloom has one. A key with the value of rloom's behaviour is accepted in
silence. With another value it is accepted with a notice if the result is the same, and refused otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rloom.config.base import ACTOR, CRITIC, REF


@dataclass(frozen=True)
class VerlKey:
    """A key and the values that are not in `same`: a notice with `reason`, or an error with `missing`."""

    same: tuple[Any, ...] = ()  # values that name rloom's behaviour
    reason: str = ""  # completes "no effect in rloom, because"
    missing: str = ""  # subject and verb of "... not in this version of rloom"
    instead: str = ""

    def accepts(self, value: Any) -> bool:
        return value in self.same or bool(self.reason)

    def refusal(self, setting: str) -> str:
        return f"{setting}: {self.missing} not in this version of rloom; {self.instead}"


def ignored(reason: str, *same: Any) -> VerlKey:
    return VerlKey(same, reason)


def refused(missing: str, instead: str, *same: Any) -> VerlKey:
    return VerlKey(same, missing=missing, instead=instead)


def weights(*same: Any) -> VerlKey:
    return refused(
        "another source of weights than a Hugging Face folder is", "remove the key, and set model.path", *same
    )


def schedule(*same: Any) -> VerlKey:
    return refused(
        "this part of Megatron's learning rate schedule is",
        "use lr_scheduler_type, lr_warmup_steps and min_lr_ratio",
        *same,
    )


MEGATRON = {
    "context_parallel_size": refused(
        "Megatron's context parallelism is",
        "use 1 and a larger tensor_model_parallel_size with sequence_parallel=True, or strategy=fsdp with "
        "ulysses_sequence_parallel_size",
        *(1, None),
    ),
    "virtual_pipeline_model_parallel_size": refused(
        "an interleaved pipeline is", "use null: each rank holds one block of layers", 1, None
    ),
    "dist_checkpointing_path": weights(None),
    "dist_checkpointing_prefix": weights("", None),
    "override_mcore_model_config": refused("this section is", "use override_transformer_config", {}),
    "use_distributed_optimizer": ignored("masters and moments are always divided over the data-parallel ranks", True),
    "grad_offload": ignored("gradients exist only while a mini-batch is trained on"),
    "use_dist_checkpointing": ignored(
        "weights are read from the Hugging Face folder of model.path, and checkpoints are rloom's own", False
    ),
    "use_mbridge": ignored("rloom maps Hugging Face's weights to Megatron's itself", False),
    "vanilla_mbridge": ignored("rloom maps Hugging Face's weights to Megatron's itself", True),
    "use_remove_padding": ignored("the Megatron engine trains on packed sequences", True),
    "seed": ignored("training has no dropout and draws no random numbers"),
    "override_ddp_config": ignored("rloom sums float32 gradients over the data-parallel ranks itself", {}),
    "forward_only": ignored("a role that is not trained has no gradients", True, False),
}
OPTIMIZER = {
    "optimizer": refused("another optimizer than AdamW is", "remove the key", "adam", "adamw", "AdamW"),
    "min_lr": refused("an absolute final learning rate is", "use min_lr_ratio, its share of lr", 0),
    "lr_warmup_init": schedule(0),
    "lr_decay_steps": schedule(None),
    "lr_wsd_decay_steps": schedule(None),
    "weight_decay_incr_style": schedule("constant"),
    "lr_wsd_decay_style": ignored("there is no WSD schedule", "exponential"),
    "use_checkpoint_opt_param_scheduler": ignored("a resumed run has the schedule of its keys", False),
    "total_training_steps": ignored("trainer.total_training_steps sets the length of the run", -1),
    "override_optimizer_config": ignored(
        "rloom has one optimizer, AdamW with float32 state; megatron.optimizer_offload keeps its state on the host", {}
    ),
}
REPLAY_FILE = refused("writing routings to files is", "remove the key: they go from memory to memory", None)
KEYS: Mapping[str, VerlKey] = {  # keys or sections
    **{f"{role}.megatron.{name}": rule for role in (ACTOR, CRITIC, REF) for name, rule in MEGATRON.items()},
    **{
        f"{REF}.megatron.{name}": ignored("the reference has the actor's value")
        for name in ("sequence_parallel", "override_transformer_config", "dtype")
    },
    **{f"{role}.optim.{name}": rule for role in (ACTOR, CRITIC) for name, rule in OPTIMIZER.items()},
    **{
        f"{role}.load_weight": refused("training a model with new weights is", "remove the key", True)
        for role in (ACTOR, CRITIC, REF)
    },
    f"{ACTOR}.router_replay.record_file": REPLAY_FILE,
    f"{ACTOR}.router_replay.replay_file": REPLAY_FILE,
    "data.custom_cls": refused("a dataset class of your own is", "write the rows to a parquet, json or jsonl file"),
    "model.use_liger": refused("Liger is", "remove the key; model.use_fused_kernels computes log-probs in chunks"),
    "model.fsdp_config": refused(
        "this section of verl's SFT trainer is",
        "use engine.dtype, engine.param_offload and engine.fsdp_size; rloom keeps float32 masters and wraps each layer",
    ),
}
DIVIDED = refused(
    "a model that is divided over some of the actor's workers is",
    "remove the key: it is divided over all of them, or give it a number of workers for itself alone",
)
MANAGER = refused("other reward managers are", "remove the key; reward_model.overlong_buffer is DAPO's penalty")
VALUES: Mapping[tuple[str, str | type], VerlKey] = {  # (key of the tree, value or its type)
    (f"{ACTOR}.router_replay.mode", "R2"): refused(
        "replaying the experts of the old policy (R2) is", "use R3, which replays those of the rollout"
    ),
    **{("reward_model.reward_manager", name): MANAGER for name in ("prime", "rate_limited")},
    **{(f"trainer.pools.{role}", list): DIVIDED for role in ("actor", "critic", "ref")},
}


def unsupported_key(path: str) -> VerlKey | None:
    return next((key for start, key in KEYS.items() if key.missing and f"{path}.".startswith(f"{start}.")), None)


def unsupported_value(path: str, value: Any) -> VerlKey | None:
    return VALUES.get((path, value if isinstance(value, str) else type(value)))


def unsupported_name(name: str) -> str | None:
    """The sentence for an unsupported key, a part of one, or an unsupported value."""
    for path, key in KEYS.items():
        if key.missing and f".{name}." in f".{path}.":
            return key.refusal(path)
    return next((key.refusal(f"{path}={value}") for (path, value), key in VALUES.items() if value == name), None)


def without_one_behaviour(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """(the tree without these keys, notices). Values that rloom refuses stay in the tree, where they are unknown."""
    kept: dict[str, Any] = {}
    notices: list[str] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        key = KEYS.get(path)
        if key is not None and key.accepts(value):
            notices += [] if value in key.same else [f"{path}={value}: no effect in rloom, because {key.reason}"]
        elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in KEYS):
            kept[name], inner = without_one_behaviour(value, f"{path}.")
            notices += inner
        else:
            kept[name] = value
    return kept, notices
