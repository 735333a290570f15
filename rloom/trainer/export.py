"""`rloom export CKPT DIR`: a checkpoint's policy as an ordinary Hugging Face folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from rloom.config.saved import MODEL_ALONE, load_saved
from rloom.errors import CheckpointError
from rloom.models.load import load_tokenizer
from rloom.models.save import merge_adapter, save_pretrained
from rloom.trainer.assemble.inputs import policy_source
from rloom.trainer.assemble.models import policy_engine, policy_network
from rloom.trainer.directory import open_checkpoint


def export(
    checkpoint: Path, folder: Path, overrides: Sequence[str] = (), *, adapter: bool = False, dtype: str = "float32"
) -> Path:
    """`adapter` keeps LoRA apart instead of folding it into the weights."""
    open_checkpoint(checkpoint)
    if folder.exists() and (folder.is_file() or any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; name a folder that is not there yet")
    # the numbers as they were saved, whatever precision the run computed in
    exact = ["trainer.device=cpu", "actor_rollout_ref.actor.fsdp_config.dtype=float32"]
    config = load_saved(checkpoint, overrides, uses=MODEL_ALONE, settings=exact)
    if adapter and not config.actor_rollout_ref.model.has_lora:
        raise CheckpointError(f"--adapter: {checkpoint} was trained without LoRA; leave the flag out")
    network = policy_network(config)
    policy_engine(config, network, trained=False).load(checkpoint / "actor", frozenset({"model"}))
    if not adapter:
        merge_adapter(network)
    network.module.to(getattr(torch, dtype))
    draft = folder.with_name(f".{folder.name}-writing")
    shutil.rmtree(draft, ignore_errors=True)
    save_pretrained(network, load_tokenizer(policy_source(config)), draft)
    if folder.exists():
        folder.rmdir()
    return draft.rename(folder)
