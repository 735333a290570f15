"""The training strategies of a run: what each needs and can do, and where its engine is. Imports no torch.

Configuration, plan, smoke run and launch read these declarations, and compare no names. A `Reference` is the
`module:name` of a function, which is imported when the function is called.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from rloom.plugins import Reference, resolve_kind

GROUP = "rloom.strategies"  # entry points of other packages


@dataclass(frozen=True, kw_only=True)
class StrategyKind:
    # (network, placement, ranks, *, scoring, training, optimizer, reference, compiled) -> Engine of one worker
    build: Reference
    title: str  # in sentences
    one_worker: bool = False  # it also builds the engine of a run's only worker; otherwise that is LocalEngine
    section: Literal["fsdp_config", "megatron"] = "fsdp_config"  # of a role: keys of offload and data type
    # ranks divide layers and their matrices by the sizes in `megatron`. Each reads its part of the weights from the
    # model's files, packs sequences, and has one such division in its process
    model_parallel: bool = False
    sequence_parallel: bool = True  # ranks can share a sequence (ulysses_sequence_parallel_size)
    trains_adapters: bool = True
    whole_logits: bool = True  # each worker has the logits of the whole vocabulary, which the exact KL needs
    packages: tuple[str, ...] = ()  # distributions that several workers import
    extras: tuple[str, ...] = ()  # of rloom, which install them


LOCAL = StrategyKind(build="rloom.launch.engines:local_engine", title="the engine of one worker", one_worker=True)
FSDP = StrategyKind(build="rloom.launch.engines:fsdp_engine", title="FSDP's engine")
STRATEGIES: Mapping[str, StrategyKind] = {
    "fsdp": FSDP,
    "fsdp2": FSDP,
    "megatron": StrategyKind(
        build="rloom.launch.engines:megatron_engine",
        title="the Megatron engine",
        section="megatron",
        model_parallel=True,
        sequence_parallel=False,
        trains_adapters=False,
        whole_logits=False,
        packages=("megatron-core",),
        extras=("megatron",),
    ),
}


MEGATRON_FAMILIES = {  # model_type -> name
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
}


def strategy_kind(key: str, name: str) -> StrategyKind:
    return resolve_kind(key, name, STRATEGIES, GROUP, StrategyKind)
