"""The training engine of a role, by its strategy, and the work of its model."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedConfig

from rloom.config.schema import Actor, Critic
from rloom.config.sections import Megatron
from rloom.engines.base import Engine, Placement
from rloom.engines.distributed import rank_mesh
from rloom.engines.fsdp import FSDPEngine
from rloom.engines.kinds import LOCAL, StrategyKind
from rloom.engines.local import LocalEngine
from rloom.engines.megatron.sizes import ModelParallel
from rloom.engines.ulysses import check_heads, new_sequence_parallel_group
from rloom.families.family import family_of
from rloom.models.network import Network
from rloom.models.source import ModelSource
from rloom.plugins import referenced
from rloom.runs.metrics import ModelWork


@dataclass(frozen=True)
class Ranks:
    """How the ranks of a role divide its model and its batches."""

    count: int
    shards: int  # ranks that hold one copy of the weights; -1: all
    sequence: int  # ranks that divide a sequence
    role: str  # section of the configuration, for error messages
    source: ModelSource
    megatron: Megatron | None = None  # how they divide the model's matrices and layers


def local_engine(network: Network, where: Placement, ranks: Ranks, **settings: Any) -> Engine:
    return LocalEngine(network, where, **settings)


def fsdp_engine(network: Network, where: Placement, ranks: Ranks, **settings: Any) -> Engine:
    mesh, group = rank_mesh(where.device, ranks.shards), None
    if ranks.sequence > 1:
        key = f"{ranks.role}.ulysses_sequence_parallel_size"
        check_heads(network, ranks.sequence, ranks.count, key)
        group = new_sequence_parallel_group(ranks.sequence)
        family_of(ranks.source).check_split(group, key)
    return FSDPEngine(network, where, mesh, sequence_group=group, **settings)


def megatron_engine(
    network: Network, where: Placement, ranks: Ranks, *, reference: Engine | None = None, **settings: Any
) -> Engine:
    """`reference` is for a KL over the whole vocabulary, which the configuration's checks refuse here."""
    from rloom.engines.megatron.engine import MegatronEngine  # an extra

    section = ranks.megatron
    assert section is not None
    return MegatronEngine(
        network,
        ranks.source,
        where,
        model_parallel(section),
        key=f"{ranks.role}.strategy",
        recompute=section.recomputes_layers(checkpointing=network.decoder.base.is_gradient_checkpointing),
        overrides=section.transformer_config(),
        **settings,
    )


def model_parallel(section: Megatron) -> ModelParallel:
    return ModelParallel(
        tensor=section.tensor_model_parallel_size,
        pipeline=section.pipeline_model_parallel_size,
        expert=section.expert_model_parallel_size,
        expert_tensor=section.expert_tensor_parallel_size,
        sequence=section.sequence_parallel,
    )


def reads_own_part(role: Actor | Critic, ranks: int) -> bool:
    """Whether each rank reads its part of the weights from the model's files; else rank 0 reads all."""
    return ranks > 1 and role.kind.model_parallel


def rank_of(role: Actor | Critic, worker: int, workers: int) -> int:
    """The rank of a worker in the process group of its pool."""
    return model_parallel(role.megatron).rank_of(worker, workers) if reads_own_part(role, workers) else worker


def make_engine(kind: StrategyKind, network: Network, where: Placement, ranks: Ranks, **settings: Any) -> Engine:
    """One rank holds a whole model, unless the strategy has an engine for it."""
    chosen = kind if ranks.count > 1 or kind.one_worker else LOCAL
    engine: Engine = referenced(chosen.build)(network, where, ranks, **settings)
    return engine


def model_work(network: Network) -> ModelWork | None:
    """Of a whole model, whose parameters may be empty. None: a mixture of experts that does not tell its choices."""
    model = network.decoder.base
    config = model.config.get_text_config()
    chosen: int | None = getattr(config, "num_experts_per_tok", None)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    looked_up = None if head is not None and head.weight is embedding else embedding
    active = trained = 0.0
    for name, parameter in network.module.named_parameters():
        if parameter is looked_up or parameter.dim() < 2:
            continue
        numbers = float(parameter.numel())
        owner, experts, _ = name.partition(".experts.")
        if experts and chosen is None:
            return None
        if chosen is not None and (experts or parameter.dim() == 3):  # all experts in one tensor, or one module each
            modules = [] if parameter.dim() == 3 else [*network.module.get_submodule(f"{owner}.experts").children()]
            numbers *= chosen / (len(modules) or parameter.shape[0])
        active += numbers
        trained += numbers * parameter.requires_grad
    return ModelWork(active, trained, attention_work(config))


def attention_work(config: PreTrainedConfig) -> dict[int | None, int]:
    """Layers without keys of all tokens, such as linear attention, have none."""
    heads: int = config.num_attention_heads
    usual: int = getattr(config, "head_dim", None) or config.hidden_size // heads
    latent: int | None = getattr(config, "v_head_dim", None)  # multi-head latent attention: other keys than values
    key = config.qk_nope_head_dim + config.qk_rope_head_dim if latent else usual
    window: int | None = getattr(config, "sliding_window", None)
    everywhere = "full_attention" if window is None else "sliding_attention"
    types = getattr(config, "layer_types", None) or [everywhere] * config.num_hidden_layers
    windows = {"full_attention": None, "attention": None, "sliding_attention": window}
    layers = Counter(windows[kind] for kind in types if kind in windows)
    return {of_layers: count * heads * (key + (latent or usual)) for of_layers, count in layers.items()}
