"""`rloom export CKPT DIR`: write the policy of a checkpoint as a Hugging Face folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch

from rloom import __version__
from rloom.config.base import RunConfig
from rloom.config.from_checkpoint import MODEL_ALONE, load_saved, load_saved_sft, read_yaml, saved_root
from rloom.config.given_keys import default_tree
from rloom.config.load import validate
from rloom.config.schema import Config, SftConfig
from rloom.errors import CheckpointError
from rloom.launch.directory import has_files, open_checkpoint
from rloom.launch.model_sources import policy_source, sft_source
from rloom.launch.models import policy_engine, policy_network
from rloom.launch.sft import sft_engine, sft_network
from rloom.models.checkpoint_format import merge_adapter, save_pretrained
from rloom.models.load import load_tokenizer
from rloom.models.network import PolicyNetwork
from rloom.models.source import ModelSource
from rloom.runs.model_card import CardFacts, model_card
from rloom.runs.run_folder import CONFIG_FILE, flat_config
from rloom.training.checkpoint import Checkpoints, read_state


def export_newest(run: Path, folder: Path, *, dtype: str) -> Path:
    """The policy of the newest checkpoint of a run directory, beside subfolders of `folder` if it has any."""
    checkpoint = Checkpoints(run, keep={}).newest()
    if checkpoint is None:
        raise CheckpointError(f"{run} has no checkpoint to export")
    return export(checkpoint, folder, dtype=dtype, beside_folders=True)


def export(
    checkpoint: Path,
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    adapter: bool = False,
    dtype: str = "float32",
    beside_folders: bool = False,
) -> Path:
    """`adapter`: write the LoRA adapter instead of merging it into the weights."""
    open_checkpoint(checkpoint)
    if has_files(folder) if beside_folders else folder.is_file() or (folder.exists() and any(folder.iterdir())):
        raise CheckpointError(f"{folder} is not empty; use a folder that does not exist yet")
    trained = saved_sft if saved_root(checkpoint) is SftConfig else saved_policy
    network, source, has_lora = trained(checkpoint, overrides)
    if adapter and not has_lora:
        raise CheckpointError(f"--adapter: {checkpoint} was trained without LoRA; remove the flag")
    if not adapter:
        merge_adapter(network)
    network.module.to(getattr(torch, dtype))
    draft = folder.with_name(f".{folder.name}-writing")
    shutil.rmtree(draft, ignore_errors=True)
    save_pretrained(network, load_tokenizer(source), draft)
    (draft / "README.md").write_text(card_of(checkpoint, folder.name, source.path, adapter=adapter), encoding="utf-8")
    if not folder.exists():
        return draft.rename(folder)
    for entry in draft.iterdir():
        entry.rename(folder / entry.name)
    draft.rmdir()
    return folder


def card_of(checkpoint: Path, name: str, base: str, *, adapter: bool) -> str:
    saved = read_yaml(checkpoint / CONFIG_FILE)
    is_sft = saved_root(checkpoint) is SftConfig
    root: type[RunConfig] = SftConfig if is_sft else Config
    usual = validate(default_tree(root), root=root).model_dump(mode="json")  # with values that follow from others
    values, defaults = flat_config(saved), flat_config(usual)
    roles = {"critic."} if not (checkpoint / "critic").is_dir() else set()
    changed = {
        key: value
        for key, value in values.items()
        if key in defaults and defaults[key] != value and not key.startswith(tuple(roles))
    }
    algorithm = "sft" if is_sft else str(values.get("algorithm.adv_estimator"))
    facts = CardFacts(
        name=name,
        version=__version__,
        changed=changed,
        command="sft" if is_sft else "train",
        step=read_state(checkpoint)["step"],
        base=base,
        algorithm=algorithm.rpartition(":")[2],
        data=values.get("data.train_files"),
        adapter=adapter,
    )
    return model_card(facts, checkpoint.parent)


def push(folder: Path, name: str, *, private: bool) -> str:
    """The address of the model on the hub."""
    from rloom.hub import push_folder  # imports huggingface_hub, which an export does not need

    return push_folder(folder, name, private=private)


Trained = tuple[PolicyNetwork, ModelSource, bool]  # the model with the checkpoint's weights; whether it has LoRA


def saved_policy(checkpoint: Path, overrides: Sequence[str]) -> Trained:
    # float32, as saved, for any data type of the run
    exact = ["trainer.device=cpu", "actor_rollout_ref.actor.fsdp_config.dtype=float32"]
    config = load_saved(checkpoint, overrides, uses=MODEL_ALONE, settings=exact)
    network = policy_network(config)
    policy_engine(config, network, trained=False).load(checkpoint / "actor", frozenset({"model"}))
    return network, policy_source(config), config.actor_rollout_ref.model.has_lora


def saved_sft(checkpoint: Path, overrides: Sequence[str]) -> Trained:
    config = load_saved_sft(checkpoint, overrides, settings=["trainer.device=cpu", "engine.dtype=float32"])
    network = sft_network(config)
    sft_engine(config, network, trained=False).load(checkpoint / "actor", frozenset({"model"}))
    return network, sft_source(config), config.model.has_lora
