"""Parameters under the names and in the shapes of a published checkpoint.

transformers renames and fuses the weights of some families when it reads them (the experts of a layer become one
tensor); other libraries take the names of the checkpoint.
"""

from collections.abc import Iterator

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, revert_weight_conversion

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
