"""Sequence classifiers, which score conversations: load one, and compute its outputs for several conversations.

`GatedRewardModel` is ArmoRM's architecture: a Llama with several objectives, and a gate that weighs them by the prompt.
Its repository has this as Python files, which do not run here: the classes have the names of its weights.

N conversations, T tokens of all of them, packed, L labels, K objectives, H hidden size.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu
from transformers import (
    AutoModelForSequenceClassification,
    LlamaModel,
    LlamaPreTrainedModel,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import SequenceClassifierOutput
from transformers.models.llama import modeling_llama

from rloom.errors import ModelError
from rloom.models.conversations import Conversation
from rloom.models.decoder import Decoder
from rloom.models.load import first_line, quiet_transformers, read_config
from rloom.models.source import ModelSource, check_folder
from rloom.packing import MicroBatching
from rloom.transfer import send

NAMES_SHOWN = 4
# Checkpoints of InstructGPT-style reward models (Starling): a causal model's body with a linear head beside it.
VALUE_HEAD = "v_head.weight"
VALUE_HEAD_NAMES = {r"^transformer\.": "model.", r"^v_head\.": "score."}


class PassLayout(Enum):
    """How the conversations of a forward pass are arranged."""

    PACKED = "packed"  # one row without padding, through rloom's attention; the head reads the last tokens
    PADDED = "padded"  # a row for each; the head reads the last tokens
    ROWS = "rows"  # a row for each, padded, through the model's own forward
    SINGLE = "single"  # one conversation in a pass, through the model's own forward


@dataclass(frozen=True)
class ScoringLayout:
    layout: PassLayout
    attention: str | None  # implementation; None: the one that transformers chooses


def load_classifier(source: ModelSource, *, dtype: torch.dtype, attention: str | None) -> PreTrainedModel:
    """The classifier in evaluation mode, every weight of it read from its checkpoint."""
    check_folder(source)
    restore_older_names()
    settings = {"dtype": dtype, "attn_implementation": attention, "trust_remote_code": source.trust_remote_code}
    try:
        if source.path == "embedded":
            return untrained_classifier(source, settings)
        model, report = read_classifier(source, settings, **openrlhf_form(source))
        if VALUE_HEAD in report["unexpected_keys"] and report["missing_keys"]:
            model, report = read_classifier(source, {**settings, "key_mapping": VALUE_HEAD_NAMES}, labels=1)
    except Exception as error:  # transformers raises many types
        raise ModelError(
            f"{source.key}={source.path}: the reward model could not be loaded: {first_line(error)}. Give a folder or "
            f"hub name of a sequence classifier{code_advice(source, has_code='trust_remote_code' in str(error))}"
        ) from error
    check_complete(source, model, report)
    model.requires_grad_(False)
    return model.eval()


def read_classifier(
    source: ModelSource, settings: Mapping[str, Any], *, labels: int | None = None, head: str | None = None
) -> tuple[PreTrainedModel, Mapping[str, Any]]:
    """The model, and which weights the checkpoint lacks or has in addition. `labels`: None: as its config.json has.
    `head`: its name, if it is another one than score."""
    settings = settings if head is None else {**settings, "key_mapping": {rf"^{re.escape(head)}\.": "score."}}
    config = read_config(source)
    if labels is not None:
        config.num_labels = labels
    with quiet_transformers():  # check_complete raises an error where transformers would log a table
        model, report = classifier_class(config).from_pretrained(
            source.location, config=config, output_loading_info=True, **settings
        )
    return model, report


def openrlhf_form(source: ModelSource) -> dict[str, Any]:
    """OpenRLHF's reward models have one label, which their config.json does not say, and may name the head."""
    config = read_config(source)
    if "normalize_reward" not in config.to_dict():
        return {}
    head = getattr(config, "value_head_prefix", "score")
    return {"labels": 1, "head": None if head == "score" else head}


def classifier_class(config: PreTrainedConfig) -> Any:
    return GatedRewardModel if is_gated(config) else AutoModelForSequenceClassification


def untrained_classifier(source: ModelSource, settings: Mapping[str, Any]) -> PreTrainedModel:
    """The embedded model with a head from a fixed seed, the same on every worker: its scores mean nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, _ = read_classifier(source, settings, labels=1)
    model.requires_grad_(False)
    return model.eval()


def restore_older_names() -> None:
    """Code of repositories after ArmoRM's imports a docstring from transformers that newer versions do not have."""
    vars(modeling_llama).setdefault("LLAMA_INPUTS_DOCSTRING", "")


def check_complete(source: ModelSource, model: PreTrainedModel, report: Mapping[str, Any]) -> None:
    """transformers fills weights that a checkpoint lacks with random numbers: scores would mean nothing."""
    missing, extra = sorted(report["missing_keys"]), sorted(report["unexpected_keys"])
    if not missing:
        return
    has_code = bool(getattr(model.config, "auto_map", None))
    raise ModelError(
        f"{source.key}={source.path}: the checkpoint has no {listed(missing)}, which {type(model).__name__} needs"
        + (f"; it has {listed(extra)} instead" if extra else "")
        + ". Scores from weights that were never trained mean nothing. Give a reward model with its classification head"
        + code_advice(source, has_code=has_code)
    )


def listed(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (
        f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    )


def code_advice(source: ModelSource, *, has_code: bool) -> str:
    if not has_code or source.trust_remote_code:
        return ""
    return "; its repository has Python files of its own: if you trust them, set reward_model.trust_remote_code=True"


class Classifier:
    """A classifier whose outputs for several conversations equal those for each of them alone."""

    def __init__(self, model: PreTrainedModel, layout: PassLayout) -> None:
        self.model = model
        self.pad_id: int | None = model.config.get_text_config().pad_token_id
        self.layout = PassLayout.SINGLE if layout is PassLayout.ROWS and self.pad_id is None else layout
        self.decoder: Decoder | None = None
        if layout in (PassLayout.PACKED, PassLayout.PADDED):
            self.decoder = Decoder(model, packed=layout is PassLayout.PACKED)
            self.head = None if isinstance(model, GatedRewardModel) else linear_head(model)

    @property
    def labels(self) -> list[str]:
        names: Mapping[int, str] = self.model.config.id2label
        return [str(names[label]) for label in sorted(names)]

    def passes(self, conversations: Sequence[Conversation], batching: MicroBatching) -> list[list[int]]:
        """Rows of each forward pass."""
        lengths = [len(conversation.tokens) for conversation in conversations]
        if self.layout is PassLayout.SINGLE:
            return [[row] for row in range(len(lengths))]
        if self.layout is PassLayout.PACKED:
            return batching.cut(lengths)
        # models look for the end of a conversation by the padding token, so one that holds it gets a pass of its own
        alone = [row for row, one in enumerate(conversations) if self.decoder is None and self.pad_id in one.tokens]
        together = sorted(set(range(len(lengths))) - set(alone), key=lambda row: (-lengths[row], row))
        return [*padded_passes(together, lengths, batching), *([row] for row in alone)]

    @torch.no_grad()
    def outputs(self, conversations: Sequence[Conversation], device: torch.device) -> Tensor:
        """outputs_NL in float32, on the device."""
        if self.decoder is None:
            return self.own_outputs(conversations, device)
        length_N = torch.tensor([len(conversation.tokens) for conversation in conversations])
        tokens_T = torch.tensor([token for conversation in conversations for token in conversation.tokens])
        hidden_TH = self.decoder.hidden(send(tokens_T, device), length_N)

        def hidden_NH(position: Callable[[Sequence[int]], int | None]) -> Tensor:
            position_N = torch.tensor([position(conversation.tokens) for conversation in conversations])
            return hidden_TH[send(length_N.cumsum(0) - length_N + position_N, device)]

        if isinstance(self.model, GatedRewardModel):
            return self.model.scores(hidden_NH(self.last_token), hidden_NH(prompt_end))
        assert self.head is not None
        return dense(hidden_NH(self.last_token).float(), self.head)

    def fault(self, conversation: Conversation) -> str | None:
        """Why the model cannot score this conversation."""
        if isinstance(self.model, GatedRewardModel) and prompt_end(conversation.tokens) is None:
            return (
                "the conversation has no header of an answer (<|start_header_id|>assistant<|end_header_id|>), where "
                "the reward model reads the prompt; it needs the chat template of Llama 3, and the end of the prompt"
            )
        return None

    def last_token(self, tokens: Sequence[int]) -> int:
        """The token at which the head reads: the last that is not the padding token, as in transformers.

        A model whose conversations end with its padding token was trained that way.
        """
        return next((index for index in reversed(range(len(tokens))) if tokens[index] != self.pad_id), 0)

    def own_outputs(self, conversations: Sequence[Conversation], device: torch.device) -> Tensor:
        longest = max(len(conversation.tokens) for conversation in conversations)
        pad_id = 0 if self.pad_id is None else self.pad_id

        def rows(values: Sequence[Sequence[int]], filling: int) -> Tensor:
            return send(torch.tensor([[*row, *[filling] * (longest - len(row))] for row in values]), device)

        arguments = {
            "input_ids": rows([conversation.tokens for conversation in conversations], pad_id),
            "attention_mask": rows([[1] * len(conversation.tokens) for conversation in conversations], 0),
        }
        segments = [conversation.segments for conversation in conversations if conversation.segments is not None]
        if segments:
            arguments["token_type_ids"] = rows(segments, 0)
        return read_output(self.model(**arguments))


def read_output(output: Any) -> Tensor:
    """Some repositories' code gives one score that combines the labels; other classifiers have logits."""
    score: Tensor | None = getattr(output, "score", None)
    found = output.logits if score is None else score
    return found.float().reshape(len(found), -1)


def linear_head(model: PreTrainedModel) -> nn.Linear:
    """The head of transformers' classifiers on top of a causal model."""
    head = getattr(model, "score", None)
    if not isinstance(head, nn.Linear):
        raise ModelError(f"{type(model).__name__} has no linear head named score")
    return head


def padded_passes(rows: Sequence[int], lengths: Sequence[int], batching: MicroBatching) -> list[list[int]]:
    """`rows` from the longest conversation to the shortest: a pass has the length of its first one."""
    found: list[list[int]] = []
    most = 0  # rows of the last pass
    for row in rows:
        if found and len(found[-1]) < most:
            found[-1].append(row)
            continue
        found.append([row])
        most = batching.samples or max(1, (batching.tokens or 0) // lengths[row])
    return found


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
