"""Check that rloom computes a model family correctly: compare its logits with those of the model's own forward.

The check runs on a small model of the same architecture with few layers, random weights, a small vocabulary and
attention windows shorter than the samples. It is created from the configuration alone, in a second, before any weights
are read. Expected are the logits of transformers with eager attention, one sample at a time; rloom computes those of
two samples of different length together.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from math import lcm
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from rloom.batch import Batch
from rloom.engines.ulysses import SequenceParallelGroup, sequence_parallel_outputs
from rloom.errors import ModelError
from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.attention import Attend, AttentionOptions, PackedAttention, PaddedAttention
from rloom.models.load import first_line
from rloom.models.network import PolicyNetwork

LENGTHS = (12, 7)
WINDOW = 4  # shorter than both samples
VOCABULARY = 128
WIDTH = 64  # size of the feed-forward layers, which act on single tokens
EXPERTS = 4
MOST_PARAMETERS = 1_000_000_000  # 4 GB
TOLERANCE = 1e-3  # relative to the largest logit
WINDOWS = ("sliding_window", "attention_chunk_size", "window_size", "attention_window_size")
# Counts of tokens in a row at which a family changes its computation (Llama 4: the temperature of attention). A row of
# packed samples is longer than the run's longest sample, so these are always shortened.
THRESHOLDS = ("floor_scale",)
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_USED = ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "moe_top_k")
SPECIAL_TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id")
REPEATS = ("period", "interval", "pattern", "block_types", "every")  # names of entries that set the kinds of layers


@dataclass(frozen=True)
class TrainingSupport:
    """Which layouts of samples are correct for a family. None: correct; otherwise the fault."""

    packed: str | None
    padded: str | None
    attention: str  # with which padded samples are correct: rloom, or transformers' sdpa or eager
    own_attention: str  # implementation of transformers: sdpa if it equals eager


def check_training(model: PreTrainedModel) -> TrainingSupport:
    """`model` in float32 on the CPU, with transformers' own attention."""
    samples = two_samples(model)
    expected = own_logits(model, samples)
    faults = {
        (attention, packed): find_difference(model, samples, expected, attention, packed=packed)
        for attention, packed in ((RLOOM_ATTENTION, True), (RLOOM_ATTENTION, False), ("sdpa", False), ("eager", False))
    }
    model.set_attn_implementation("eager")
    correct = [attention for (attention, packed), fault in faults.items() if not packed and fault is None]
    return TrainingSupport(
        packed=faults[RLOOM_ATTENTION, True],
        padded=None if correct else faults["eager", False],
        attention=correct[0] if correct else "eager",
        own_attention="sdpa" if "sdpa" in correct else "eager",
    )


def check_split(model: PreTrainedModel, group: SequenceParallelGroup) -> str | None:
    """What is wrong with packed samples whose tokens the ranks of a group share; None if nothing is. Collective."""
    samples = two_samples(model)
    length_N = torch.tensor([len(tokens) for tokens in samples])
    tokens_T, mask_T = torch.cat(samples), torch.cat([torch.arange(len(tokens)) > 0 for tokens in samples])
    expected_T = torch.cat(
        [
            logits[:-1].log_softmax(-1).gather(1, tokens[1:, None]).squeeze(1)
            for tokens, logits in zip(samples, own_logits(model, samples), strict=True)
        ]
    )
    batch = Batch(tokens_T, mask_T, torch.zeros(len(tokens_T)), length_N, length_N, length_N.float(), length_N > 0)
    try:
        model.set_attn_implementation(RLOOM_ATTENTION)
        with torch.no_grad():
            found_T = sequence_parallel_outputs(PolicyNetwork(model, packed=True), batch, batch, group).output_T[mask_T]
    except Exception as error:  # from a family's code, given arguments that it does not support
        return first_line(error)
    finally:
        model.set_attn_implementation("eager")
    relative = largest_difference(found_T, expected_T)
    return f"log-probs differ from the model's own by {relative:.2g} of their size" if relative > TOLERANCE else None


def two_samples(model: PreTrainedModel) -> list[Tensor]:
    draw = torch.Generator().manual_seed(0)
    # some embeddings have rows for other inputs than text after those of the vocabulary
    entry = getattr(model.config.get_text_config(), "vocab_size", VOCABULARY)
    vocabulary = min(VOCABULARY, entry, model.get_input_embeddings().weight.shape[0])
    return [torch.randint(3, vocabulary, (length,), generator=draw) for length in LENGTHS]


@torch.no_grad()
def own_logits(model: PreTrainedModel, samples: Sequence[Tensor]) -> list[Tensor]:
    """Logits of transformers' own code, one sample at a time."""
    model.eval()
    model.set_attn_implementation("eager")
    return [model(input_ids=tokens[None], use_cache=False).logits[0].float() for tokens in samples]


@torch.no_grad()
def find_difference(
    model: PreTrainedModel, samples: Sequence[Tensor], expected: Sequence[Tensor], attention: str, *, packed: bool
) -> str | None:
    """How rloom's logits of the samples, computed together, differ from the expected ones; None: they do not."""
    try:
        model.set_attn_implementation(attention)
        if model.config._attn_implementation != attention:  # transformers did not set it
            return f"{type(model).__name__} has its own attention only"
        network = PolicyNetwork(model, packed=packed)
        relative = largest_difference(network.logits(hidden_states(network, samples)), torch.cat(list(expected)))
    except Exception as error:  # from a family's code, given arguments that it does not support
        return first_line(error)
    return f"logits differ from the model's own by {relative:.2g} of their size" if relative > TOLERANCE else None


def hidden_states(network: PolicyNetwork, samples: Sequence[Tensor]) -> Tensor:
    decoder = network.decoder
    tokens_T, length_N = torch.cat(list(samples)), torch.tensor([len(tokens) for tokens in samples])
    if decoder.own_attention:
        return decoder.padded(tokens_T, length_N)
    counter = CallCounter(PackedAttention(length_N, tokens_T.device) if decoder.packed else PaddedAttention())
    position_T = torch.cat([torch.arange(len(tokens)) for tokens in samples])
    hidden = (
        decoder.packed_hidden(tokens_T, counter, position_T)
        if decoder.packed
        else decoder.padded(tokens_T, length_N, counter)
    )
    if not counter.calls:
        raise ModelError(f"{type(decoder.base).__name__} has its own attention only")
    return hidden


class CallCounter:
    """Counts the calls of an attention."""

    def __init__(self, attend: Attend) -> None:
        self.attend, self.calls = attend, 0

    def __call__(self, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        self.calls += 1
        return self.attend(query, key, value, options)

    def reset(self) -> None:
        self.attend.reset()


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the largest expected absolute value."""
    if found.shape != expected.shape or not torch.isfinite(found).all():
        return float("inf")
    found = found.float()
    return float((found - expected).abs().max() / expected.abs().max().clamp(min=1e-6))


def small_model(
    config: PreTrainedConfig,
    *,
    longest: int | None = None,
    ranks: int = 1,
    trust_remote_code: bool = False,
    kind: Any = AutoModelForCausalLM,
) -> PreTrainedModel:
    """A small model of this configuration's architecture, with attention heads that `ranks` divide.

    Attention windows are shortened if samples of `longest` tokens exceed them. `kind`: an auto class of transformers.
    """
    shrinkers: tuple[Callable[[PreTrainedConfig, int | None], None], ...] = (
        partial(shrink_all, ranks=ranks),
        shrink_depth,
    )
    failure: Exception | None = None
    for shrink in shrinkers:
        small = copy.deepcopy(config)
        try:
            shrink(small, longest)
            return random_model(small, trust_remote_code, kind)
        except Exception as error:  # some families require relations between entries
            failure = failure or error
    assert failure is not None
    if kind is AutoModelForCausalLM and type(config) not in kind._model_mapping and not trust_remote_code:
        raise ModelError("transformers has no model of this family for text alone; models of images are not supported")
    raise ModelError(f"no small model of it could be created for a check: {first_line(failure)}") from failure


def random_model(
    config: PreTrainedConfig, trust_remote_code: bool, kind: Any = AutoModelForCausalLM
) -> PreTrainedModel:
    """All parameters are random, biases and norms too, so that a pass that ignores one differs."""
    settings: dict[str, Any] = {"trust_remote_code": trust_remote_code, "attn_implementation": "eager"}
    with torch.device("meta"):
        empty = kind.from_config(copy.deepcopy(config), **settings)
        size = sum(parameter.numel() for parameter in empty.parameters())
    if size > MOST_PARAMETERS:
        raise ModelError(f"it has {size / 1e9:.0f}B parameters")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model: PreTrainedModel = kind.from_config(config, dtype=torch.float32, **settings)
        for parameter in model.parameters():
            if parameter.dim() < 2:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
        model.eval()(input_ids=torch.arange(3, 8)[None])
    return model


def shrink_all(config: PreTrainedConfig, longest: int | None, *, ranks: int) -> None:
    shrink_depth(config, longest)
    text = config.get_text_config()
    for name in EXPERT_COUNTS:
        limit_entry(text, name, EXPERTS)
    for name in EXPERTS_USED:
        limit_entry(text, name, 2)
    for name in ("n_group", "topk_group"):
        limit_entry(text, name, 1)
    keep_heads(text, ranks)
    for name, value in vars(text).items():
        if "intermediate_size" in name and isinstance(value, int):
            limit_entry(text, name, WIDTH)


def shrink_depth(config: PreTrainedConfig, longest: int | None) -> None:
    """Few layers, one of each kind; a small vocabulary; short windows."""
    text = config.get_text_config()
    for part in {id(part): part for part in (config, text)}.values():
        part.__dict__.pop("quantization_config", None)
        limit_entry(part, "vocab_size", VOCABULARY)
        for number, name in enumerate(SPECIAL_TOKENS):
            if name in vars(part):
                setattr(part, name, number)
        for name in THRESHOLDS:
            limit_entry(part, name, WINDOW)
        for name in WINDOWS:
            window = getattr(part, name, None)
            if longest is None or (isinstance(window, int) and window < longest):
                limit_entry(part, name, WINDOW)
    for part in vars(config).values():  # vision and audio towers
        if isinstance(part, PreTrainedConfig) and part is not text:
            for name in ("num_hidden_layers", "depth", "num_layers"):
                limit_entry(part, name, 1)
    keep_layers(text)


def keep_layers(text: PreTrainedConfig) -> None:
    """Keep one layer of each kind, at least two. Configuration lists hold an entry per layer, or layer indices."""
    total = text.num_hidden_layers
    lists = {name: value for name, value in vars(text).items() if isinstance(value, list)}
    index_lists = {name: value for name, value in lists.items() if holds_layer_indices(value, total)}
    entry_lists = {name: value for name, value in lists.items() if len(value) == total and name not in index_lists}
    kinds: dict[str, int] = {}  # entries of the lists for a layer -> the first such layer
    for layer in range(total):
        entries = [value[layer] for value in entry_lists.values()] + [layer in value for value in index_lists.values()]
        kinds.setdefault(repr(entries), layer)
    chosen = list(kinds.values())
    least = 2 if entry_lists or index_lists or not any(word in name for name in vars(text) for word in REPEATS) else 4
    chosen += [layer for layer in range(total) if layer not in chosen][: max(0, least - len(chosen))]
    chosen.sort()
    for name, value in entry_lists.items():
        setattr(text, name, [value[layer] for layer in chosen])
    for name, value in index_lists.items():
        setattr(text, name, [index for index, layer in enumerate(chosen) if layer in value])
    text.num_hidden_layers = len(chosen)


def holds_layer_indices(value: list[Any], total: int) -> bool:
    """Whether a list holds layer indices, which are distinct; lists with an entry per layer repeat entries."""
    return bool(value) and all(type(one) is int and 0 <= one < total for one in value) and len({*value}) == len(value)


def keep_heads(text: PreTrainedConfig, ranks: int) -> None:
    """Keep few attention heads, of the same size: they hold most of the remaining weights. `ranks` divide them."""
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    if getattr(text, "head_dim", None) is None:
        text.head_dim = text.hidden_size // heads
    kept = min(key_heads, 2)
    text.num_attention_heads = lcm(kept * min(heads // key_heads, 2), ranks)
    text.num_key_value_heads = kept if key_heads < heads else text.num_attention_heads


def limit_entry(config: PreTrainedConfig, name: str, most: int) -> None:
    value = getattr(config, name, None)
    if isinstance(value, int) and not isinstance(value, bool) and value > most:
        setattr(config, name, most)
