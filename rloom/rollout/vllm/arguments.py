"""The arguments of vLLM's engine: from rloom's settings, and from `engine_kwargs` of the user."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Any, get_args

import torch
from vllm import EngineArgs
from vllm.config.lora import MaxLoRARanks

from rloom.errors import ConfigError, ModelError
from rloom.models.load import first_line
from rloom.models.source import ModelSource

KWARGS_KEY = "actor_rollout_ref.rollout.engine_kwargs"
CPU_CACHE_BYTES = 1 << 30
VLLMS_LARGEST_GRAPH = 512  # sequences, by default: larger steps would run without CUDA graphs
# arguments that rloom sets, and the key that the user sets instead
SET_BY_RLOOM = {
    "model": "actor_rollout_ref.model.path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "hf_overrides": "actor_rollout_ref.model.override_config",
    "dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
    "max_model_len": "data.max_prompt_length and data.max_response_length",
    "max_num_seqs": "actor_rollout_ref.rollout.max_num_seqs",
    "max_num_batched_tokens": "actor_rollout_ref.rollout.max_num_batched_tokens",
    "enforce_eager": "actor_rollout_ref.rollout.enforce_eager",
    "gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "enable_sleep_mode": "actor_rollout_ref.rollout.free_cache_engine",
    "tensor_parallel_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "enable_lora": "actor_rollout_ref.model.lora_rank",
    "max_lora_rank": "actor_rollout_ref.model.lora_rank",
    "max_loras": "actor_rollout_ref.model.lora_rank",
    "seed": "data.seed",
    # log-probs and stop tokens of the trainer depend on these
    "logprobs_mode": "actor_rollout_ref.rollout.temperature",
    "generation_config": "actor_rollout_ref.rollout.temperature, top_p and top_k",
    "skip_tokenizer_init": "actor_rollout_ref.model.path",
    "distributed_executor_backend": "trainer.n_gpus_per_node",
    "data_parallel_size": "trainer.n_gpus_per_node",
    "pipeline_parallel_size": "trainer.n_gpus_per_node",
}


@dataclass(frozen=True)
class VllmSettings:
    source: ModelSource
    device: torch.device
    dtype: torch.dtype
    max_sequences: int
    max_batched_tokens: int
    max_model_tokens: int  # prompt and answer
    memory_share: float  # of the GPU: vLLM's weights, activations and key-value cache
    free_memory: bool  # sleep releases weights and cache
    eager: bool
    temperature: float  # of the trainer's log-probs
    request_seeds: bool = False
    reads_weights: bool = True  # False: load_weights sends all of them before the first request
    lora_rank: int | None = None
    tensor_parallel: int = 1  # workers that share the engine
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)


def engine_arguments(settings: VllmSettings) -> dict[str, Any]:
    check_names(settings.engine_kwargs)
    on_gpu = settings.device.type == "cuda"
    return {
        "model": settings.source.location,
        "trust_remote_code": settings.source.trust_remote_code,
        "hf_overrides": dict(settings.source.overrides),
        "load_format": "auto" if settings.reads_weights else "dummy",
        "dtype": str(settings.dtype).removeprefix("torch."),
        "max_model_len": settings.max_model_tokens,
        "max_num_seqs": settings.max_sequences,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "enforce_eager": settings.eager or not on_gpu,
        "gpu_memory_utilization": settings.memory_share,
        "enable_sleep_mode": on_gpu and settings.free_memory,
        "enable_prefix_caching": True,  # the answers to one prompt share its keys and values
        "logprobs_mode": "raw_logprobs",  # at the temperature of the trainer, see weights.py; before top-k and top-p
        "generation_config": "vllm",  # not the model's own sampling settings: the trainer does not apply them
        "skip_tokenizer_init": True,  # token ids in, token ids out
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **(graph_arguments(settings) if on_gpu else cpu_arguments(settings)),
        **({} if settings.tensor_parallel == 1 else parallel_arguments(settings.tensor_parallel)),
        **({} if settings.lora_rank is None else lora_arguments(settings.lora_rank)),
        **settings.engine_kwargs,
    }


def graph_arguments(settings: VllmSettings) -> dict[str, Any]:
    large = settings.max_sequences > VLLMS_LARGEST_GRAPH and not settings.eager
    return {"max_cudagraph_capture_size": settings.max_sequences} if large else {}


def cpu_arguments(settings: VllmSettings) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": CPU_CACHE_BYTES,  # instead of a share of the machine's memory
        # vLLM fails on a prompt that is computed in parts if its request has a seed: each is computed whole
        "enable_chunked_prefill": False,
        "max_num_batched_tokens": max(settings.max_batched_tokens, settings.max_model_tokens),
    }


def parallel_arguments(workers: int) -> dict[str, Any]:
    return {
        "tensor_parallel_size": workers,
        "distributed_executor_backend": "external_launcher",  # each worker runs its own rank in its own process
        "disable_custom_all_reduce": True,  # it needs a process that sees the GPUs of all ranks
    }


def lora_arguments(rank: int) -> dict[str, Any]:
    allowed: tuple[int, ...] = get_args(MaxLoRARanks)
    ranks = [size for size in allowed if size >= rank]
    if not ranks:
        raise ConfigError(
            f"actor_rollout_ref.model.lora_rank={rank}: vLLM supports adapters up to rank {max(allowed)}; "
            "use a lower rank, or actor_rollout_ref.rollout.name=native"
        )
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": min(ranks)}


def check_names(engine_kwargs: Mapping[str, Any]) -> None:
    known = {argument.name for argument in fields(EngineArgs)}
    for name, value in engine_kwargs.items():
        if name in SET_BY_RLOOM:
            raise ConfigError(f"{KWARGS_KEY}.{name}={value}: rloom sets this argument; use {SET_BY_RLOOM[name]}")
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{KWARGS_KEY}.{name}={value}: vLLM's EngineArgs has no such argument; {hint}correct or remove it"
            )


def check_model(settings: VllmSettings) -> None:
    """Before weights are read: vLLM has this architecture and accepts the arguments of the model."""
    check_dtype(settings)
    arguments = engine_arguments(settings)
    try:
        model = EngineArgs(**arguments).create_model_config()
    except Exception as error:  # pydantic's and vLLM's own
        raise ModelError(
            f"{settings.source.key}={settings.source.path}: vLLM does not accept this model or its arguments: "
            f"{cause_of(error)}. Use actor_rollout_ref.rollout.name=native or hf, or another model"
        ) from error
    check_heads(model.hf_text_config, settings.tensor_parallel)


def check_heads(model_config: Any, tensor_parallel: int) -> None:
    heads = model_config.num_attention_heads
    if heads % tensor_parallel:
        fitting = [size for size in range(1, heads + 1) if heads % size == 0]
        raise ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tensor_parallel}: it has to divide the "
            f"{heads} attention heads of the model; use one of {', '.join(map(str, fitting))}"
        )


def check_dtype(settings: VllmSettings) -> None:
    """vLLM's kernels end the process with an illegal instruction on a CPU without bfloat16 arithmetic."""
    on_cpu, has_bfloat16 = settings.device.type == "cpu", torch.ops.mkldnn._is_mkldnn_bf16_supported()
    if on_cpu and settings.dtype == torch.bfloat16 and not has_bfloat16:
        raise ConfigError(
            "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16: this CPU has no bfloat16 arithmetic, which vLLM's "
            "kernels need; use auto or float32"
        )


def cause_of(error: Exception) -> str:
    """One line. A message of pydantic has a title, the field and the cause, and a link."""
    title, *lines = str(error).strip().splitlines() or [""]
    if "validation error" not in title:
        return first_line(error)
    cause = " ".join(line.strip() for line in lines if not line.lstrip().startswith("For further information"))
    return cause.partition(" [type=")[0]
