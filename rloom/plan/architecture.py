"""A model's size from its config.json: parameters, and what a token takes in training and in the cache.

Only that one file is read; nothing is downloaded.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.config.base import EMBEDDED
from rloom.config.load import expand
from rloom.errors import ModelError

EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "embedded" / "model"


class UnknownSize(ModelError):
    """The model may well train, but its parameters cannot be counted here."""


@dataclass(frozen=True)
class FamilyDefaults:
    """Defaults of keys that a config.json may leave out, and what the code of a family fixes."""

    tied: bool = False  # default of tie_word_embeddings
    kv_heads: int | None = None  # default of num_key_value_heads; None: as many as heads
    head_size: int | None = None  # default of head_dim; None: hidden_size / heads
    qkv_bias: bool = False  # fixed; the key attention_bias adds biases to q, k, v and o
    norms: int = 2  # fixed: of the hidden size, in a layer
    head_norms: bool = False  # fixed: norms of queries and keys, of the head size


FAMILIES = {
    "llama": FamilyDefaults(),
    "mistral": FamilyDefaults(kv_heads=8),
    "qwen2": FamilyDefaults(kv_heads=32, qkv_bias=True),
    "qwen3": FamilyDefaults(kv_heads=32, head_size=128, head_norms=True),
    "gemma": FamilyDefaults(tied=True, kv_heads=16, head_size=256),
    "gemma2": FamilyDefaults(tied=True, kv_heads=4, head_size=256, norms=4),
    "gemma3_text": FamilyDefaults(tied=True, kv_heads=4, head_size=256, norms=4, head_norms=True),
}


@dataclass(frozen=True)
class Architecture:
    family: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # one matrix is input and output embedding
    attention_bias: bool = False
    mlp_bias: bool = False
    context: int | None = None  # max_position_embeddings

    @property
    def query_size(self) -> int:
        return self.heads * self.head_size

    @property
    def kv_size(self) -> int:
        """Numbers in the keys, or the values, of one token in one layer."""
        return self.kv_heads * self.head_size

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Of a layer: name -> (in, out)."""
        return {
            "q_proj": (self.hidden, self.query_size),
            "k_proj": (self.hidden, self.kv_size),
            "v_proj": (self.hidden, self.kv_size),
            "o_proj": (self.query_size, self.hidden),
            "gate_proj": (self.hidden, self.intermediate),
            "up_proj": (self.hidden, self.intermediate),
            "down_proj": (self.intermediate, self.hidden),
        }

    @property
    def layer_parameters(self) -> int:
        family = FAMILIES[self.family]
        numbers = sum(rows * columns for rows, columns in self.matrices.values())
        biases = 0
        if family.qkv_bias or self.attention_bias:
            biases += self.query_size + 2 * self.kv_size
        if self.attention_bias:
            biases += self.hidden
        if self.mlp_bias:
            biases += 2 * self.intermediate + self.hidden
        return numbers + biases + self.norm_parameters

    @property
    def norm_parameters(self) -> int:
        """Of a layer."""
        family = FAMILIES[self.family]
        return family.norms * self.hidden + (2 * self.head_size if family.head_norms else 0)

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def outer_parameters(self) -> int:
        """Outside the layers: embeddings and the last norm."""
        return self.embedding * (1 if self.tied else 2) + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.outer_parameters

    @property
    def critic_outer_parameters(self) -> int:
        """A critic's head has one output, and there is no output embedding."""
        return self.embedding + 2 * self.hidden

    @property
    def critic_parameters(self) -> int:
        return self.layers * self.layer_parameters + self.critic_outer_parameters

    @property
    def matrix_parameters(self) -> int:
        """Those that every token is multiplied with: an untied input embedding is only looked up."""
        return self.parameters - (0 if self.tied else self.embedding)

    @property
    def saved_numbers(self) -> int:
        """Of one token, saved by one compiled layer for the backward pass.

        The inputs of attention and of the MLP (2 hidden), queries and attention's output (2 query), keys and values
        (2 kv), gate and up (2 intermediate). Norms and the product of gate and up are recomputed.
        """
        return 2 * (self.hidden + self.query_size + self.kv_size + self.intermediate)

    def adapter_parameters(self, rank: int, targets: str | Sequence[str]) -> int:
        """Of LoRA. `all-linear` leaves the output embedding out."""
        names = [targets] if isinstance(targets, str) else targets
        chosen = [size for name, size in self.matrices.items() if "all-linear" in names or name in names]
        return self.layers * sum(rank * (rows + columns) for rows, columns in chosen)


def read_architecture(path: str, key: str, overrides: Mapping[str, Any]) -> Architecture:
    """Of a folder, the embedded model, or a hub name whose config.json is in the cache already."""
    return architecture({**read_fields(path, key), **overrides}, f"{key}={path}")


def read_fields(path: str, key: str) -> dict[str, Any]:
    """config.json of a model."""
    file = find_config(path, key)
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{key}={path}: {file} cannot be read: {error}") from error
    return fields


def find_config(path: str, key: str) -> Path:
    folder = EMBEDDED_FOLDER if path == EMBEDDED else expand(path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise ModelError(f"{key}={path}: the folder has no config.json, so it is no Hugging Face model")
        return folder / "config.json"
    if path.startswith((".", "/", "~")):
        raise ModelError(f"{key}={path}: there is no such folder; give a folder or a hub name")
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(path, "config.json")
    except HFValidationError as error:
        raise ModelError(f"{key}={path}: this is neither a folder nor a hub name") from error
    if not isinstance(cached, str):
        raise UnknownSize(
            f"{key}={path}: its config.json is not in the Hugging Face cache, and a plan downloads nothing; "
            f"`hf download {path} config.json` fetches that one file, or give a folder"
        )
    return Path(cached)


def architecture(fields: Mapping[str, Any], source: str) -> Architecture:
    name = fields.get("model_type")
    if name not in FAMILIES:
        raise UnknownSize(
            f"{source}: its parameters cannot be counted from config.json (model_type {name!r}); "
            f"the families counted are {', '.join(FAMILIES)}"
        )
    family = FAMILIES[name]
    try:
        heads, hidden = fields["num_attention_heads"], fields["hidden_size"]
        kv_heads = fields.get("num_key_value_heads", family.kv_heads)
        return Architecture(
            family=name,
            hidden=hidden,
            intermediate=fields["intermediate_size"],
            layers=fields["num_hidden_layers"],
            heads=heads,
            kv_heads=kv_heads or heads,
            head_size=fields.get("head_dim") or family.head_size or hidden // heads,
            vocabulary=fields["vocab_size"],
            tied=fields.get("tie_word_embeddings", family.tied),
            attention_bias=name not in ("qwen2", "mistral") and fields.get("attention_bias", False),
            mlp_bias=name == "llama" and fields.get("mlp_bias", False),
            context=fields.get("max_position_embeddings"),
        )
    except KeyError as error:
        raise ModelError(f"{source}: its config.json has no {error}; a {name} model's has") from error
