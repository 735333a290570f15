"""What a worker of `vllm serve` needs to generate for a trainer in another process: weights, and its log-probs.

vLLM adds the methods of this class to its own worker (`--worker-extension-cls`), and the trainer calls them by
POST /collective_rpc (`VLLM_SERVER_DEV_MODE=1`).
"""

import secrets
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from rloom.engines.distributed import NamedGroup
from rloom.engines.weight_sync import SharedChannel, received_stream
from rloom.models.load import first_line
from rloom.rollout.vllm.weights import divide_logits, repack_head

JOIN_TIMEOUT_S = 600.0
INSTANCE = secrets.token_hex(8)  # of this process


class ServerWorker:
    rank: int  # of vLLM's worker: its place among the tensor parallel processes of the server
    device: torch.device
    reload_weights: Callable[..., None]
    get_model: Callable[[], Any]
    trainer: NamedGroup | SharedChannel | None = None
    own_logits: Callable[..., Tensor | None] | None = None
    weights_label: str | None = None  # None: those that vLLM read, or parts of several

    def weights_identity(self) -> list[str | None]:
        """A trainer uses an answer only if it reads afterwards what it has read after its update."""
        return [INSTANCE, self.weights_label]

    def join_trainer(self, name: str, address: str, ranks: int, backend: str, shared: bool, temperature: float) -> None:
        """A second trainer, or the same after a failure, replaces the first."""
        self.weights_label = None
        if self.trainer is not None:
            self.trainer.close()
        group = NamedGroup(
            name,
            1 + self.rank,
            ranks,
            address=address,
            backend=backend,
            device=torch.device(self.device),
            timeout_s=JOIN_TIMEOUT_S,
        )
        self.trainer = SharedChannel(group, torch.device(self.device)) if shared else group
        self.set_temperature(temperature)

    def set_temperature(self, temperature: float) -> None:
        model = self.get_model()
        if self.own_logits is None:
            self.own_logits = model.compute_logits
        model.compute_logits = self.own_logits
        if temperature != 1.0:
            divide_logits(model, temperature)

    @torch.no_grad()
    def receive_weights(self, label: str) -> str | None:
        """All buckets of an update. Returns why vLLM's model does not take them, or an empty text.

        None: no trainer was joined, as in a new process at the URL of one that ended.
        """
        if self.trainer is None:
            return None
        self.weights_label = None
        weights = received_stream(self.trainer)
        try:
            self.reload_weights(weights_iterator=weights)
        except (ValueError, KeyError, AttributeError) as error:  # from the loaders of vLLM's models
            for _ in weights:  # the trainer sends to the end
                pass
            return first_line(error)
        repack_head(self.get_model())
        self.weights_label = label
        return ""
