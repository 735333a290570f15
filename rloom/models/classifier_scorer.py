"""A reward model on one worker: conversations in, scores out."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rloom.errors import ModelError
from rloom.models.classifier import Classifier, PassLayout
from rloom.models.conversations import Conversation, ConversationEncoder
from rloom.packing import MicroBatching
from rloom.types import Sample, Score


class HostWeights:
    """The host keeps a copy for good, since frozen weights do not change: releasing them copies nothing back."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self.device = device
        self.tensors: list[Tensor] = list(chain(module.parameters(), module.buffers()))
        # pinned memory: copies to the device run at the full speed of the bus, and do not wait for each other
        self.host = [
            tensor.detach().pin_memory() if device.type == "cuda" else tensor.detach() for tensor in self.tensors
        ]
        self.release()

    @contextmanager
    def on_device(self) -> Iterator[None]:
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = copy.to(self.device, non_blocking=True)
        try:
            yield
        finally:
            self.release()

    def release(self) -> None:
        for tensor, copy in zip(self.tensors, self.host, strict=True):
            tensor.data = copy


log = logging.getLogger(__name__)
LAYOUTS = {
    PassLayout.PACKED: "packed",
    PassLayout.PADDED: "padded",
    PassLayout.ROWS: "padded, by the model's own forward",
    PassLayout.SINGLE: "one at a time, by the model's own forward",
}


@dataclass(frozen=True)
class ScoredConversations:
    scores: list[Score]
    tokens: int  # number of tokens of the conversations that were scored
    truncated: int  # conversations


class ClassifierScorer:
    def __init__(
        self,
        classifier: Classifier,
        encoder: ConversationEncoder,
        *,
        device: torch.device,
        batching: MicroBatching,
        label_weights: Sequence[float] | None = None,
        moments: tuple[float, float] = (0.0, 1.0),  # a score is (output - mean) / std
        offload: bool = False,  # to host memory, while nothing is scored
        compiled: bool = False,
    ) -> None:
        self.classifier, self.encoder, self.device, self.batching = classifier, encoder, device, batching
        self.label_weights, self.moments = label_weights, moments
        self.labels = classifier.labels
        if label_weights is not None and len(label_weights) != len(self.labels):
            raise ModelError(
                f"reward_model.label_weights={list(label_weights)}: the reward model has {len(self.labels)} labels "
                f"({', '.join(self.labels)}); give one weight for each"
            )
        if compiled and device.type == "cuda" and classifier.layout is PassLayout.PACKED:
            assert classifier.decoder is not None
            classifier.decoder.compile()
        self.host_weights: HostWeights | None = None
        if offload and device.type != "cpu":
            self.host_weights = HostWeights(classifier.model, device)
        else:
            classifier.model.to(device)

    @property
    def size(self) -> int:
        return sum(parameter.numel() for parameter in self.classifier.model.parameters())

    @property
    def description(self) -> str:
        dtype = str(self.classifier.model.dtype).removeprefix("torch.")
        offloaded = ", offloaded while it does not score" if self.host_weights is not None else ""
        return f"{dtype} on {self.device}, conversations {LAYOUTS[self.classifier.layout]}{offloaded}"

    def on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.host_weights is None else self.host_weights.on_device()

    def score(self, samples: Sequence[Sample]) -> ScoredConversations:
        """A score for each sample, in order."""
        encoded = [self.checked(one) for one in self.encoder.encode(samples)]
        rows = [row for row, one in enumerate(encoded) if isinstance(one, Conversation)]
        conversations = [one for one in encoded if isinstance(one, Conversation)]
        found: dict[int, Score] = {row: one for row, one in enumerate(encoded) if isinstance(one, Score)}
        for row, outputs in zip(rows, self.outputs(conversations), strict=True):
            found[row] = self.score_of(outputs)
        return ScoredConversations(
            [found[row] for row in range(len(samples))],
            tokens=sum(len(conversation.tokens) for conversation in conversations),
            truncated=sum(conversation.truncated for conversation in conversations),
        )

    def checked(self, one: Conversation | Score) -> Conversation | Score:
        fault = self.classifier.fault(one) if isinstance(one, Conversation) else None
        return one if fault is None else Score.failed(fault)

    def outputs(self, conversations: Sequence[Conversation]) -> list[list[float]]:
        """The outputs of each conversation, one for each label. The host reads them once, after the last pass."""
        if not conversations:
            return []
        passes = self.classifier.passes(conversations, self.batching)
        with self.on_device():
            parts = [self.classifier.outputs([conversations[row] for row in rows], self.device) for rows in passes]
            values: list[list[float]] = torch.cat(parts).tolist()
        found = dict(zip((row for rows in passes for row in rows), values, strict=True))
        return [found[row] for row in range(len(conversations))]

    def score_of(self, outputs: Sequence[float]) -> Score:
        value, parts = outputs[0], {}
        if len(outputs) != len(self.labels):
            self.check_combined(outputs)
        elif len(outputs) > 1 or self.label_weights is not None:
            weights = self.label_weights or [1 / len(outputs)] * len(outputs)
            value = sum(weight * output for weight, output in zip(weights, outputs, strict=True))
            parts = dict(zip(self.labels, outputs, strict=True))
        value = (value - self.moments[0]) / self.moments[1]
        return Score.of(value, parts, subject=f"the reward model's output is {list(outputs)}")

    def check_combined(self, outputs: Sequence[float]) -> None:
        """A model that combines its labels itself, as ArmoRM does, has one output."""
        name = type(self.classifier.model).__name__
        if len(outputs) != 1:
            raise ModelError(f"reward_model.path: {name} has {len(outputs)} outputs for {len(self.labels)} labels")
        if self.label_weights is not None:
            raise ModelError(
                f"reward_model.label_weights={list(self.label_weights)}: {name} combines its {len(self.labels)} labels "
                "to one score itself; remove the key"
            )
