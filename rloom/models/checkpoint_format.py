"""Saving a model as a Hugging Face folder, and its parameters under the names and shapes of a published checkpoint.

transformers renames and fuses the weights of some families when it reads them (the experts of a layer become one
tensor); other libraries take the names of the checkpoint.
"""

from collections.abc import Iterator
from pathlib import Path

from peft import PeftModel
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

from rloom.atomic import sync_all
from rloom.errors import ModelError
from rloom.models.network import PolicyNetwork


class CheckpointFormat:
    """Converts weights one at a time, so that no second model is held."""

    def __init__(self, network: PolicyNetwork) -> None:
        self.model: PreTrainedModel = network.decoder.base
        self.conversions = getattr(self.model, "_weight_conversions", None)
        if self.conversions is None:  # not read from a checkpoint
            self.conversions = get_model_conversion_mapping(self.model, add_legacy=False)
        # an entry of a checkpoint that became several parameters would be put together from all of them
        split = [
            conversion
            for conversion in self.conversions
            if isinstance(conversion, WeightConverter) and len(conversion.target_patterns) > 1
        ]
        if split:
            raise ModelError(
                f"the parameters {', '.join(split[0].target_patterns)} of {type(self.model).__name__} are one entry of "
                "its checkpoint: rloom does not send them to vLLM; use actor_rollout_ref.rollout.name=native or hf"
            )

    def __call__(self, weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights:
            if self.conversions:
                yield from revert_weight_conversion(self.model, {name: tensor}).items()
            else:
                yield name, tensor

    @property
    def complete(self) -> bool:
        """Whether the parameters are all that a checkpoint holds: some families save buffers, too."""
        parameters = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        return bool(self.model.state_dict().keys() <= parameters)


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
