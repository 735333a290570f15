"""Model shapes by name with random weights, and how fast a device could run them at best.

Speed does not depend on what the weights say, so a shape stands for its model and nothing need be downloaded.
"""

import argparse
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from rloom.models.network import PolicyNetwork

# Of one H200: the first two measured there (its data sheet says 4.8e12 and 989e12), the third from the data sheet.
MEMORY_BANDWIDTH = 4.3e12  # bytes/s
MATRIX_RATE = 700e12  # FLOP/s
PEAK_FLOPS = 989e12  # FLOP/s, dense bfloat16

NUMBER_BYTES = 2  # bfloat16, of weights and cache alike
ARCHITECTURES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}


@dataclass(frozen=True)
class Shape:
    """The numbers of a config.json that decide what a model costs."""

    family: str  # model_type of transformers
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    tied: bool  # input and output embedding are one matrix
    rope_theta: float = 1e6
    rms_eps: float = 1e-6
    context: int = 32768
    head: int | None = None  # None: hidden / heads

    @property
    def head_size(self) -> int:
        return self.head or self.hidden // self.heads

    @property
    def kv_size(self) -> int:
        """Numbers of one token's keys, or values, in one layer."""
        return self.kv_heads * self.head_size

    @property
    def parameters(self) -> int:
        queries = self.heads * self.head_size
        attention = 2 * self.hidden * queries + 2 * self.hidden * self.kv_size
        biases = queries + 2 * self.kv_size if self.family == "qwen2" else 0
        norms = 2 * self.hidden + (2 * self.head_size if self.family == "qwen3" else 0)
        layer = attention + biases + 3 * self.hidden * self.intermediate + norms
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + self.hidden + embeddings

    @property
    def matrix_parameters(self) -> int:
        """Those that every token is multiplied with: an input embedding of its own is only looked up."""
        return self.parameters - (0 if self.tied else self.vocabulary * self.hidden)

    @property
    def kv_bytes(self) -> int:
        """One token's keys and values in all layers."""
        return 2 * self.layers * self.kv_size * NUMBER_BYTES

    def config(self) -> dict[str, Any]:
        """config.json, in the layout that every version of transformers and vLLM reads."""
        return {
            "architectures": [ARCHITECTURES[self.family]],
            "model_type": self.family,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_size,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": self.tied,
            "rope_theta": self.rope_theta,
            "rms_norm_eps": self.rms_eps,
            "max_position_embeddings": self.context,
            "hidden_act": "silu",
            "bos_token_id": 0,
            "eos_token_id": 1,
            "dtype": "bfloat16",
            "torch_dtype": "bfloat16",
        }


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 151936, tied=True),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 151936, tied=True),
    "qwen2.5-7b": Shape("qwen2", 3584, 18944, 28, 28, 4, 152064, tied=False),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 151936, tied=True, context=40960, head=128),
    "smollm2-135m": Shape("llama", 576, 1536, 30, 9, 3, 49152, tied=True, rope_theta=1e5, rms_eps=1e-5, context=8192),
    "tiny": Shape("qwen2", 64, 192, 2, 4, 2, 512, tied=True, context=2048),  # for a CPU, and for tests
    "tiny-qwen3": Shape("qwen3", 64, 192, 2, 4, 2, 512, tied=True, context=2048, head=32),
}


@dataclass(frozen=True)
class Rates:
    """What the device can do at best."""

    bandwidth: float = MEMORY_BANDWIDTH
    matrix: float = MATRIX_RATE
    peak: float = PEAK_FLOPS

    def bound_seconds(self, flops: float, bytes_moved: float) -> float:
        return flops / self.matrix + bytes_moved / self.bandwidth


def decode_floor_seconds(shape: Shape, prompt_tokens: int, new_tokens: Sequence[int], rates: Rates) -> float:
    """About the shortest time in which answers of these lengths, all running at once, can be written.

    Every step reads all weights once, and for each sequence the keys and values of all its tokens so far; every token
    is multiplied with every matrix. The two times are added, as if no product ran while cached keys are read.
    Attention's own products, sampling and everything element by element count as nothing.
    """
    cached = sum(new * prompt_tokens + new * (new - 1) // 2 for new in new_tokens)  # tokens read, over all steps
    weights = max(new_tokens) * shape.matrix_parameters * NUMBER_BYTES
    flops = 2.0 * shape.matrix_parameters * sum(new_tokens)
    return rates.bound_seconds(flops, weights + cached * shape.kv_bytes)


def prefill_floor_seconds(shape: Shape, prompt_tokens: int, prompts: int, rates: Rates) -> float:
    """Reading `prompts` different prompts, each once however many answers follow it."""
    return rates.bound_seconds(2.0 * shape.matrix_parameters * prompt_tokens * prompts, 0.0)


def training_flops(shape: Shape, tokens: int) -> float:
    """Forward and backward by the usual count, 6 operations a parameter and token; recomputation earns nothing."""
    return 6.0 * shape.parameters * tokens


def random_prompts(shape: Shape, count: int, length: int, seed: int) -> list[tuple[int, ...]]:
    """Equal for a seed in every process. The first two ids are left out: they begin and end texts."""
    draw = random.Random(seed)
    return [tuple(draw.randrange(2, shape.vocabulary) for _ in range(length)) for _ in range(count)]


def spread_lengths(count: int, least: int, most: int, seed: int) -> list[int]:
    """Answer lengths, uniform between the two."""
    draw = random.Random(seed)
    return [draw.randint(least, most) for _ in range(count)]


def skewed_lengths(count: int, least: int, most: int, seed: int) -> list[int]:
    """Many short answers and few long ones: the logarithm is uniform between the two."""
    draw = random.Random(seed)
    return [round(least * (most / least) ** draw.random()) for _ in range(count)]


def random_model(shape: Shape, device: torch.device, dtype: torch.dtype, attention: str) -> Any:
    """A transformers model made on its device in its dtype: a 7B never passes through host memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = {name: value for name, value in shape.config().items() if name not in ("model_type", "torch_dtype")}
    config = AutoConfig.for_model(shape.family, **fields)
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)


def random_network(shape: Shape, device: torch.device, dtype: torch.dtype) -> "PolicyNetwork":
    # here, not above: the vLLM peer reads the shapes in an environment that may lack rloom
    from rloom.models.attention import NAME
    from rloom.models.network import PolicyNetwork

    return PolicyNetwork(random_model(shape, device, dtype, NAME), packed=True, temperature=1.0)


def add_shape_arguments(parser: argparse.ArgumentParser, shape: str | None) -> None:
    parser.add_argument("--shape", choices=list(SHAPES), default=shape, help="random weights of this shape")
    parser.add_argument("--prompt_tokens", type=int, default=128)
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--repeat", type=int, default=3, help="measured repetitions, after one that warms up")
    parser.add_argument("--eager", action="store_true", help="no compiled layers, no captured graphs")
    parser.add_argument("--profile", metavar="FILE", help="profile one more repetition; FILE.json.gz gets the trace")
    parser.add_argument("--bandwidth", type=float, default=MEMORY_BANDWIDTH, help="bytes/s (%(default).3g)")
    parser.add_argument("--matrix_rate", type=float, default=MATRIX_RATE, help="FLOP/s reached (%(default).3g)")
    parser.add_argument("--peak", type=float, default=PEAK_FLOPS, help="FLOP/s of the data sheet (%(default).3g)")


def rates_of(given: argparse.Namespace) -> Rates:
    return Rates(given.bandwidth, given.matrix_rate, given.peak)
