"""The reward model of a run: its size and its memory on one GPU. Each worker that scores holds a whole copy."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rloom.config.derived import reward_batching
from rloom.config.schema import Config
from rloom.errors import ModelError
from rloom.plan.architecture import FAMILIES, UnknownSize, architecture, read_fields
from rloom.plan.batches import Batches, largest_share, plan_passes
from rloom.plan.models import BFLOAT16, FLOAT32

DEBERTA = "deberta-v2"
DEFAULT_LABELS = 2  # of a config.json without id2label


@dataclass(frozen=True)
class RewardPlan:
    family: str
    parameters: int
    number_bytes: int
    token_numbers: int  # that one layer has of one token in a forward pass
    tokens: int  # of the largest pass
    offloaded: bool
    own_workers: int | None  # None: it shares the actor's

    @property
    def weights(self) -> float:
        return self.number_bytes * self.parameters

    @property
    def at_rest(self) -> float:
        """Bytes on a GPU that it shares, while it does not score."""
        return 0 if self.offloaded or self.own_workers is not None else self.weights

    @property
    def scoring(self) -> float:
        """Bytes in a forward pass: the weights, and the numbers of one layer; none are saved for a backward pass."""
        return self.weights + self.number_bytes * self.tokens * self.token_numbers


def reward_plan(config: Config, sizes: Batches) -> RewardPlan | None:
    section, own = config.reward_model, config.trainer.pools.own.get("reward")
    path = section.model_path
    if path is None:
        return None
    key = "reward_model.path" if section.path is not None else "reward_model.model.path"
    fsdp, ranks = section.model.fsdp_config, config.workers_of("reward")
    longest = min(sizes.longest, section.max_length or sizes.longest)
    family, parameters, token_numbers = size_of(read_fields(path, key), f"{key}={path}", longest)
    float32 = fsdp.dtype == "float32" or (fsdp.dtype == "auto" and config.trainer.device == "cpu")
    passes = plan_passes(largest_share(sizes.samples, ranks), reward_batching(section, ranks), longest)
    return RewardPlan(
        family=family,
        parameters=parameters,
        number_bytes=FLOAT32 if float32 else BFLOAT16,
        token_numbers=token_numbers,
        tokens=passes.tokens,
        offloaded=own is None if fsdp.param_offload is None else fsdp.param_offload,
        own_workers=own,
    )


def size_of(fields: Mapping[str, Any], source: str, longest: int) -> tuple[str, int, int]:
    """(family, parameters, numbers that a layer has of one token)"""
    labels = len(fields["id2label"]) if "id2label" in fields else DEFAULT_LABELS
    family = fields.get("model_type")
    if family not in (*FAMILIES, DEBERTA):
        raise UnknownSize(
            f"{source}: its parameters cannot be counted from config.json (model_type {family!r}); "
            f"the reward models counted are {', '.join([*FAMILIES, DEBERTA])}"
        )
    if family != DEBERTA:
        size = architecture(fields, source)
        return size.family, size.critic_parameters + (labels - 1) * size.hidden, size.saved_numbers
    try:
        # its attention has the scores of all pairs of tokens: of contents, of positions, summed, and as weights
        scores = 4 * fields["num_attention_heads"] * longest
        numbers = 6 * fields["hidden_size"] + 2 * fields["intermediate_size"] + scores
        return DEBERTA, deberta_parameters(fields, labels), numbers
    except KeyError as error:
        raise ModelError(f"{source}: its config.json has no {error}; a {DEBERTA} model's has") from error


def deberta_parameters(fields: Mapping[str, Any], labels: int) -> int:
    """Of DeBERTa v2 and v3 with a pooler and a classifier. The defaults are those of transformers."""
    hidden, inner, norm = fields["hidden_size"], fields["intermediate_size"], 2 * fields["hidden_size"]
    positions = fields.get("max_position_embeddings", 512)
    rows = fields["vocab_size"] + fields.get("type_vocab_size", 0)
    rows += positions if fields.get("position_biased_input", True) else 0
    relative = norm if "layer_norm" in fields.get("norm_rel_ebd", "none") else 0
    projections = 4  # queries, keys, values, output
    if fields.get("relative_attention", False):
        spans = (fields.get("position_buckets", -1), fields.get("max_relative_positions", -1), positions)
        relative += 2 * next(span for span in spans if span > 0) * hidden
        kinds = fields.get("pos_att_type") or ()  # a list, or "p2c|c2p" in older files
        projections += 0 if fields.get("share_att_key", False) else ("c2p" in kinds) + ("p2c" in kinds)
    layer = projections * (hidden * hidden + hidden) + 2 * hidden * inner + inner + hidden + 2 * norm
    kernel = fields.get("conv_kernel_size", 0)
    convolution = kernel * hidden * hidden + hidden + norm if kernel > 0 else 0
    head = hidden * hidden + hidden + labels * (hidden + 1)
    return int(rows * hidden + norm + relative + fields["num_hidden_layers"] * layer + convolution + head)
