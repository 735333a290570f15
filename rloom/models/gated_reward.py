"""ArmoRM's architecture: a Llama with several objectives, and a gate that weighs them by the prompt.

Its repository has this as Python files, which do not run here: the classes have the names of its weights.
N conversations, K objectives, H hidden size.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu
from transformers import LlamaModel, LlamaPreTrainedModel, PreTrainedConfig
from transformers.modeling_outputs import SequenceClassifierOutput

ARCHITECTURE = "LlamaForRewardModelWithGating"
# <|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n in the tokens of Llama 3
ANSWER_HEADER = (128009, 128006, 78191, 128007, 271)


def is_gated(config: PreTrainedConfig) -> bool:
    """Relatives of ArmoRM with this name have quantiles of each objective, which are not computed here."""
    return ARCHITECTURE in (config.architectures or ()) and "num_quantiles" not in config.to_dict()


class Gate(nn.Module):
    """The weights of the objectives: linear layers with ReLU between them, and a softmax at a temperature."""

    def __init__(self, hidden: int, inner: int, inner_layers: int, objectives: int, temperature: float) -> None:
        super().__init__()
        sizes = [hidden, *[inner] * inner_layers, objectives]
        self.layers = nn.ModuleList(map(nn.Linear, sizes[:-1], sizes[1:]))
        self.logit_scale = nn.Parameter(torch.ones(1))
        self.temperature = temperature

    def forward(self, prompt_NH: Tensor) -> Tensor:
        first, *others = self.layers
        values_N = dense(prompt_NH, first)
        for layer in others:
            values_N = dense(relu(values_N), layer)
        return torch.softmax(values_N / self.temperature, dim=-1) * self.logit_scale.float()


def dense(inputs: Tensor, layer: nn.Module) -> Tensor:
    """In float32: bfloat16 cannot tell close scores apart."""
    assert isinstance(layer, nn.Linear)
    return linear(inputs, layer.weight.float(), None if layer.bias is None else layer.bias.float())


class GatedRewardModel(LlamaPreTrainedModel):  # type: ignore[misc]
    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        given = config.to_dict()
        objectives = given.get("num_objectives", 19)
        self.model = LlamaModel(config)
        self.regression_layer = nn.Linear(config.hidden_size, objectives, bias=False)
        self.reward_transform_matrix = nn.Parameter(torch.eye(objectives))
        self.gating = Gate(
            config.hidden_size,
            given.get("gating_hidden_dim", 1024),
            given.get("gating_n_hidden", 3),
            objectives,
            given.get("gating_temperature", 10),
        )
        self.post_init()

    def scores(self, end_NH: Tensor, prompt_NH: Tensor) -> Tensor:
        """scores_N1 in float32, from hidden states of the last tokens and of the tokens that end the prompts."""
        objectives_NK = dense(end_NH.float(), self.regression_layer) @ self.reward_transform_matrix.float()
        gate_NK: Tensor = self.gating(prompt_NH.float())
        return (gate_NK * objectives_NK).sum(dim=-1, keepdim=True)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> SequenceClassifierOutput:
        """Score one conversation without padding."""
        hidden_TH = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state[0]
        end = prompt_end(input_ids[0].tolist())
        assert len(input_ids) == 1 and end is not None
        return SequenceClassifierOutput(logits=self.scores(hidden_TH[-1:], hidden_TH[end : end + 1]))


def prompt_end(tokens: Sequence[int]) -> int | None:
    """The position of the token that ends the prompt: the first of the last header of an answer. None: no header."""
    length = len(ANSWER_HEADER)
    starts = range(len(tokens) - length, -1, -1)
    return next((start for start in starts if tuple(tokens[start : start + length]) == ANSWER_HEADER), None)
