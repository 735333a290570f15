"""Whether a model can be divided as the keys of the Megatron engine require, by its config.json alone."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rloom.config.divisors import divisors
from rloom.config.megatron_checks import MegatronRole, count, shown

FAMILIES = {  # model_type -> name
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3-MoE",
    "mixtral": "Mixtral",
}
EXPERTS = ("num_experts", "num_local_experts")  # keys of config.json


@dataclass(frozen=True)
class ModelSizes:
    """Entries of config.json, with their names there."""

    layers: Mapping[str, int]  # what pipeline stages divide
    tensors: Mapping[str, int]  # what tensor parallel ranks divide
    key_value_heads: int  # tensor parallel ranks divide them, or they divide the ranks
    experts: Mapping[str, int]  # what expert parallel ranks divide; empty: no experts
    expert_tensors: Mapping[str, int]  # what the tensor parallel ranks of an expert divide


def model_sizes(fields: Mapping[str, Any]) -> ModelSizes:
    experts = {name: int(fields[name]) for name in EXPERTS if fields.get(name)}
    heads = fields["num_attention_heads"]
    tensors = {"num_attention_heads": heads}
    inner = "moe_intermediate_size" if "moe_intermediate_size" in fields else "intermediate_size"
    mlp = {inner: int(fields[inner])}
    return ModelSizes(
        layers={"num_hidden_layers": fields["num_hidden_layers"]},
        tensors=tensors if experts else tensors | mlp,
        key_value_heads=fields.get("num_key_value_heads") or heads,
        experts=experts,
        expert_tensors=mlp if experts else {},
    )


def family_fault(role: MegatronRole, fields: Mapping[str, Any], source: str) -> str | None:
    family = fields.get("model_type")
    if family in FAMILIES:
        return None
    return (
        f"{role.path}.strategy=megatron: {source} is of the family {family!r}, and the Megatron engine has "
        f"{', '.join(FAMILIES.values())}; use {role.path}.strategy=fsdp"
    )


def split_faults(role: MegatronRole, fields: Mapping[str, Any], source: str) -> Iterator[str]:
    """`fields`: config.json. `source`: the key and the value that name the model."""
    fault = family_fault(role, fields, source)
    if fault is not None:
        yield fault
        return
    try:
        sizes = model_sizes(fields)
    except KeyError as error:
        yield f"{source}: its config.json has no {error}, by which the model is divided"
        return
    section = role.section
    fit = f"of {source}; TP × PP that work with it on {count(role.workers)}: {shown(fitting(sizes, role), section)}"
    yield from remainders(role, "tensor_model_parallel_size", section.tensor_model_parallel_size, sizes.tensors, fit)
    tensor = section.tensor_model_parallel_size
    if not shares_heads(sizes, tensor):
        yield (
            f"{role.key}.tensor_model_parallel_size={tensor} neither divides num_key_value_heads="
            f"{sizes.key_value_heads} nor is a multiple of it, {fit}"
        )
    yield from remainders(role, "pipeline_model_parallel_size", section.pipeline_model_parallel_size, sizes.layers, fit)
    experts = section.expert_model_parallel_size
    if experts > 1 and not sizes.experts:
        yield f"{role.key}.expert_model_parallel_size={experts}: {source} has no experts; use 1"
    possible = [size for size in divisors(expert_ranks(role)) if all(n % size == 0 for n in sizes.experts.values())]
    way_out = f"of {source}; use {' or '.join(map(str, possible))}"
    yield from remainders(role, "expert_model_parallel_size", experts, sizes.experts, way_out)
    way_out = f"of {source}; use expert_tensor_parallel_size=1"
    yield from remainders(
        role, "expert_tensor_parallel_size", section.expert_tensor_ranks, sizes.expert_tensors, way_out
    )


def shares_heads(sizes: ModelSizes, tensor: int) -> bool:
    return sizes.key_value_heads % tensor == 0 or tensor % sizes.key_value_heads == 0


def remainders(role: MegatronRole, name: str, size: int, numbers: Mapping[str, int], way_out: str) -> Iterator[str]:
    wrong = [f"{entry}={number}" for entry, number in numbers.items() if number % size]
    if wrong:
        yield f"{role.key}.{name}={size} does not divide {' and '.join(wrong)} {way_out}"


def expert_ranks(role: MegatronRole) -> int:
    """Ranks of a pipeline stage that can divide the experts."""
    return role.workers // role.section.pipeline_model_parallel_size // role.section.expert_tensor_ranks


def fitting(sizes: ModelSizes, role: MegatronRole) -> list[tuple[int, int]]:
    """(TP, PP) that divide the model and the workers."""
    return [
        (tensor, size // tensor)
        for size in divisors(role.workers)
        for tensor in divisors(size)
        if all(number % tensor == 0 for number in sizes.tensors.values())
        and shares_heads(sizes, tensor)
        and all(number % (size // tensor) == 0 for number in sizes.layers.values())
    ]


def replay_fault(fields: Mapping[str, Any], source: str) -> str | None:
    """Router replay, with a model that has no router."""
    if fields.get("model_type") in FAMILIES and not any(fields.get(name) for name in EXPERTS):
        return f"actor_rollout_ref.actor.router_replay.mode=R3: {source} has no experts; remove the key"
    return None
