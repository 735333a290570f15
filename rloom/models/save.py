"""Save a model as a Hugging Face folder."""

from pathlib import Path

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rloom.atomic import sync_all
from rloom.models.network import PolicyNetwork


def save_description(network: PolicyNetwork, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Save configuration and tokenizer: a Hugging Face folder without the weights."""
    base = network.decoder.base
    base.config.save_pretrained(folder)
    base.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sync_all(folder)


def save_pretrained(
    network: PolicyNetwork,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    weights: dict[str, Tensor] | None = None,  # where the network holds only a shard of them
) -> None:
    """Save a folder for from_pretrained: the model, or with LoRA its adapter."""
    network.decoder.model.save_pretrained(folder, **({} if weights is None else {"state_dict": weights}))
    tokenizer.save_pretrained(folder)
    sync_all(folder)


def merge_adapter(network: PolicyNetwork) -> None:
    """Merge LoRA into the weights; this cannot be undone."""
    model = network.decoder.model
    if isinstance(model, PeftModel):
        network.decoder.model = model.merge_and_unload()
