"""verl's keys that are not part of the tree.

Keys that select among several behaviours of verl, where rloom has one: with the value of rloom's behaviour such a key
is accepted in silence, with another value with a notice. Keys whose other values would give another result are refused,
with the reason and the way out.
"""

from collections.abc import Mapping
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
OF_MEGATRON = {  # values other than those of MEGATRON below
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


ACTOR, CRITIC, REF = "actor_rollout_ref.actor", "critic", "actor_rollout_ref.ref"


@dataclass(frozen=True)
class OneBehaviour:
    reason: str  # completes "no effect in rloom, because"
    same: tuple[Any, ...] = ()  # values that name rloom's behaviour
    refuses_others: bool = False

    def accepts(self, value: Any) -> bool:
        return value in self.same or not self.refuses_others

    def notice(self, path: str, value: Any) -> str | None:
        return None if value in self.same else f"{path}={value}: no effect in rloom, because {self.reason}"


def only(*values: Any) -> OneBehaviour:
    """Other values are refused."""
    return OneBehaviour("", same=values, refuses_others=True)


MEGATRON = {
    "context_parallel_size": only(1, None),
    "virtual_pipeline_model_parallel_size": only(1, None),
    "use_distributed_optimizer": OneBehaviour(
        "masters and moments are always divided over the data-parallel ranks", same=(True,)
    ),
    "grad_offload": OneBehaviour("gradients exist only while a mini-batch is trained on"),
    "use_dist_checkpointing": OneBehaviour(
        "weights are read from the Hugging Face folder of model.path, and checkpoints are rloom's own", same=(False,)
    ),
    "dist_checkpointing_path": only(None),
    "dist_checkpointing_prefix": only("", None),
    "use_mbridge": OneBehaviour("rloom maps Hugging Face's weights to Megatron's itself", same=(False,)),
    "vanilla_mbridge": OneBehaviour("rloom maps Hugging Face's weights to Megatron's itself", same=(True,)),
    "use_remove_padding": OneBehaviour("the Megatron engine trains on packed sequences", same=(True,)),
    "seed": OneBehaviour("training has no dropout and draws no random numbers"),
    "override_ddp_config": OneBehaviour("rloom sums float32 gradients over the data-parallel ranks itself", same=({},)),
    "override_mcore_model_config": only({}),
    "forward_only": OneBehaviour("a role that is not trained has no gradients", same=(True, False)),
}
OPTIMIZER = {
    "optimizer": only("adam", "adamw", "AdamW"),
    "min_lr": only(0),
    "lr_warmup_init": only(0),
    "lr_decay_steps": only(None),
    "weight_decay_incr_style": only("constant"),
    "lr_wsd_decay_style": OneBehaviour("there is no WSD schedule", same=("exponential",)),
    "lr_wsd_decay_steps": only(None),
    "use_checkpoint_opt_param_scheduler": OneBehaviour("a resumed run has the schedule of its keys", same=(False,)),
    "total_training_steps": OneBehaviour("trainer.total_training_steps sets the length of the run", same=(-1,)),
    "override_optimizer_config": OneBehaviour(
        "rloom has one optimizer, AdamW with float32 state; megatron.optimizer_offload keeps its state on the host",
        same=({},),
    ),
}
KEYS: Mapping[str, OneBehaviour] = {
    **{f"{section}.megatron.{name}": rule for section in (ACTOR, CRITIC, REF) for name, rule in MEGATRON.items()},
    **{
        f"{REF}.megatron.{name}": OneBehaviour("the reference has the actor's value")
        for name in ("sequence_parallel", "override_transformer_config", "dtype")
    },
    **{f"{section}.optim.{name}": rule for section in (ACTOR, CRITIC) for name, rule in OPTIMIZER.items()},
    **{f"{section}.load_weight": only(True) for section in (ACTOR, CRITIC, REF)},
    f"{ACTOR}.router_replay.record_file": only(None),
    f"{ACTOR}.router_replay.replay_file": only(None),
}


def without_one_behaviour(tree: Mapping[str, Any], prefix: str = "") -> tuple[dict[str, Any], list[str]]:
    """(the tree without these keys, notices). Values that rloom refuses stay in the tree, where they are unknown."""
    kept: dict[str, Any] = {}
    notices: list[str] = []
    for name, value in tree.items():
        path = f"{prefix}{name}"
        rule = KEYS.get(path)
        if rule is not None and rule.accepts(value):
            notice = rule.notice(path, value)
            notices += [] if notice is None else [notice]
        elif isinstance(value, dict) and any(known.startswith(f"{path}.") for known in KEYS):
            kept[name], inner = without_one_behaviour(value, f"{path}.")
            notices += inner
        else:
            kept[name] = value
    return kept, notices
