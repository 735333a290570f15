"""verl's keys that select among several behaviours of verl, where rloom has one. They are not part of the tree.

A key with the value of rloom's behaviour is accepted in silence, another value with a notice. Keys whose other values
would give another result are refused: unsupported.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
