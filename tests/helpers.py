"""Tiny models of every family and batches for them, made on the spot from a seed."""

import io
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rloom.batch import TrainBatch
from rloom.config.given_keys import default_tree, known, put
from rloom.config.load import validate
from rloom.config.schema import Config
from rloom.engines.base import AdamW, Placement
from rloom.engines.local import LocalEngine
from rloom.models.load import Lora, load_causal_lm
from rloom.models.network import PolicyNetwork
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching

VOCABULARY = 64
WINDOW = 4  # shorter than every sample of `a_batch`
ADAMW = AdamW(weight_decay=0.01, betas=(0.9, 0.95), grad_clip=1.0)
CPU = Placement(torch.device("cpu"))
FLOAT32 = torch.float32
# Bound of what must be equal but for the order of sums, in float64 (see `float32_as`): a gradient rounds by about 1e-16
# of its size, and the epsilon of AdamW, 1e-8, lets that become at most 1e-8 of one weight's step.
SAME = 1e-9
Weights = dict[str, Tensor]

SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MIXED_LAYERS = ["sliding_attention", "full_attention"]
SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}  # low enough to be felt
FAMILIES: Mapping[str, Callable[[], PreTrainedConfig]] = {
    "qwen2": lambda: Qwen2Config(**SHAPE),
    "qwen3": lambda: Qwen3Config(**SHAPE, head_dim=16, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**SHAPE),
    "gemma": lambda: GemmaConfig(**SHAPE, head_dim=16),
    "gemma2": lambda: Gemma2Config(**SHAPE, **SOFTCAPS, head_dim=8, query_pre_attn_scalar=8, sliding_window=WINDOW),
    "gemma3": lambda: Gemma3TextConfig(
        **SHAPE, head_dim=16, query_pre_attn_scalar=16, sliding_window=WINDOW, layer_types=MIXED_LAYERS
    ),
    "mistral": lambda: MistralConfig(**SHAPE, sliding_window=WINDOW),
}


MIXTURES: Mapping[str, Callable[[], PreTrainedConfig]] = {  # of experts
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **SHAPE, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True
    ),
    "mixtral": lambda: MixtralConfig(**SHAPE, head_dim=16, num_local_experts=4, num_experts_per_tok=2),
}


def tiny_model(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    """Every parameter is random, biases and norms too, so that none can be forgotten without a trace. Drawn in float32
    within `float32_as`, too: float64 draws other numbers, and a folder that a test makes is used by later ones."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_default_dtype(FLOAT32)
        try:
            model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        finally:
            torch.set_default_dtype(default)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.to(default).eval()


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    words = {f"w{token}": token for token in range(VOCABULARY)}
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="w3")), unk_token="w3", pad_token="w0", eos_token="w2"
    )


def save_model(folder: Path, config: PreTrainedConfig, seed: int = 0, dtype: torch.dtype = FLOAT32) -> Path:
    tiny_model(config, seed).to(dtype).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def eager_model(folder: Path) -> PreTrainedModel:
    """The reference: transformers' own model with its plainest attention."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


def policy(folder: Path, *, packed: bool = True, lora: Lora | None = None, **settings: Any) -> PolicyNetwork:
    """In float32: an engine casts weights, which have the dtype of their files."""
    network = PolicyNetwork(load_causal_lm(ModelSource(str(folder)), lora=lora), packed=packed, **settings)
    network.cast(torch.float32)
    return network


@cache
def read_model(folder: Path) -> PreTrainedModel:
    with (
        torch.random.fork_rng(devices=[]),
        float32_as(FLOAT32),
    ):  # safetensors finds a file's dtype by its name in torch
        return load_causal_lm(ModelSource(str(folder)))


def copied_model(folder: Path) -> PreTrainedModel:
    """Of a folder that no test changes, as those of `model_folder`: reading it takes ten times as long as a copy."""
    return deepcopy(read_model(folder))


def copied_policy(folder: Path, **settings: Any) -> PolicyNetwork:
    """As `policy`, of a folder that no test changes."""
    network = PolicyNetwork(copied_model(folder), packed=True, **settings)
    network.cast(torch.float32)
    return network


def engine_of(network: PolicyNetwork, placement: Placement = CPU, adamw: AdamW = ADAMW) -> LocalEngine:
    whole = MicroBatching(tokens=10_000)
    return LocalEngine(network, placement, scoring=whole, training=whole, optimizer=adamw)


def a_batch(seed: int = 0) -> TrainBatch:
    """Eight answers to four prompts, 6 to 17 tokens each: one score failed, one answer has a tool's words in it. The
    answers of the last two groups begin with the same prompts, those of the others with different ones."""
    draws = torch.Generator().manual_seed(seed)
    prompts, answers = [3, 3, 2, 2, 5, 5, 4, 4], [6, 9, 4, 13, 3, 12, 8, 5]
    lengths = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    total = sum(lengths)
    mask_T = torch.cat([torch.arange(p + a) >= p for p, a in zip(prompts, answers, strict=True)])
    mask_T[sum(lengths[:3]) + 6 : sum(lengths[:3]) + 9] = False
    tokens_T = torch.randint(3, VOCABULARY, (total,), generator=draws)
    samples = tokens_T.split(lengths)
    for row in (5, 7):
        samples[row][: prompts[row]] = samples[row - 1][: prompts[row]]
    return TrainBatch(
        tokens_T=tokens_T,
        mask_T=mask_T,
        rollout_logprobs_T=torch.zeros(total),
        length_N=torch.tensor(lengths),
        group_N=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3]),
        score_N=torch.tensor([1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0]),
        valid_N=torch.tensor([True, True, True, True, False, True, True, True]),
        advantages_T=torch.randn(total, generator=draws, dtype=FLOAT32) * mask_T,
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=None,
        returns_T=None,
    )


def samples_of(batch: TrainBatch) -> list[tuple[Tensor, Tensor]]:
    """(tokens, mask) of each sample."""
    lengths = batch.length_N.tolist()
    return list(zip(batch.tokens_T.split(lengths), batch.mask_T.split(lengths), strict=True))


def train_batch() -> TrainBatch:
    """Log-probs near those of the tiny models, so that some ratios are clipped and some are not."""
    batch, draws = a_batch(), torch.Generator().manual_seed(1)
    noise = [torch.randn(len(batch.tokens_T), generator=draws, dtype=FLOAT32) for _ in range(4)]
    return replace(
        batch,
        old_logprobs_T=-6 + 3 * noise[0],
        ref_logprobs_T=-6 + 2 * noise[1],
        values_T=noise[2],
        returns_T=noise[3],
    )


def assert_same(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        largest = float(tensor.abs().max())
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-4, atol=1e-5 * largest + 1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_identical(found: Weights, expected: Weights) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def assert_near(found: Weights, expected: Weights, relative: float) -> None:
    """To the largest number of all: some gradients are nothing but rounding (a key's bias moves no attention)."""
    assert found.keys() == expected.keys()
    largest = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        difference = float((found[name] - tensor).abs().max())
        assert difference <= relative * largest, f"{name}: {difference} of {largest}"


@contextmanager
def float32_as(dtype: torch.dtype) -> Iterator[None]:
    """`torch.float32`, `torch.float` and `Tensor.float` mean `dtype` within the context, in rloom and in transformers.

    AdamW divides a gradient by its own size, so where a gradient is next to nothing, its rounding decides about a whole
    step, and rounding differs from CPU to CPU. So what must be equal is compared in float64.
    """
    torch.save(torch.zeros(1), io.BytesIO())  # torch keeps tables of the names of dtypes from the first time on
    cast = patch.object(Tensor, "float", lambda tensor: tensor.to(dtype))
    before, hook = torch.get_default_dtype(), register_optimizer_step_pre_hook(narrow_scale)
    with patch.object(torch, "float32", dtype), patch.object(torch, "float", dtype), cast:
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)
            hook.remove()


def narrow_scale(optimizer: Optimizer, *_: Any) -> None:
    """torch's fused AdamW reads these two in float32, whatever the dtype of the weights."""
    for name in ("grad_scale", "found_inf"):
        setattr(optimizer, name, getattr(optimizer, name).to(FLOAT32))


@contextmanager
def recorded_syncs(folder: Path) -> Iterator[dict[str, int]]:
    """What this process syncs in a folder: path -> the bytes of the file at that time, 0 of a folder."""
    synced: dict[str, int] = {}
    fsync = os.fsync

    def record(handle: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        synced[str(path.relative_to(folder))] = path.stat().st_size if path.is_file() else 0
        fsync(handle)

    with patch.object(os, "fsync", record):
        yield synced


def apart(found: Weights, expected: Weights, start: Weights) -> float:
    """How far two results are from each other, as a share of the way from where both started."""
    assert found.keys() == expected.keys() == start.keys()
    distance, way = (
        torch.cat([(one[name].cpu() - other[name].cpu()).flatten() for name in start]).double().norm()
        for one, other in ((found, expected), (expected, start))
    )
    return float(distance / way)


def configured(*overrides: str) -> Config:
    """What `load_config` makes of these `key=value`, without composing files: the schema's defaults and these keys."""
    tree, settings = default_tree(), dict(text.lstrip("+").split("=", 1) for text in overrides)
    for path, value in settings.items():
        put(tree, path, yaml.safe_load(value))
    return validate(tree, given=known(settings))
