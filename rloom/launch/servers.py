"""The rollout engine of servers, from the configuration: by URL, or started on this machine."""

import os
import secrets
from collections.abc import Sequence
from pathlib import Path

import torch

from rloom.config.load import expand
from rloom.config.schema import Config
from rloom.engines.base import Engine
from rloom.engines.distributed import all_gather_objects
from rloom.errors import ConfigError
from rloom.launch.model_sources import policy_source
from rloom.models.checkpoint_format import CheckpointFormat
from rloom.models.network import PolicyNetwork
from rloom.plugins import referenced
from rloom.rollout.kinds import ServerKind
from rloom.rollout.limits import with_queued
from rloom.rollout.servers.arguments import (
    SGLANG_ENVIRONMENT,
    ServerSettings,
    sglang_arguments,
    sglang_command,
    trtllm_arguments,
    trtllm_command,
)
from rloom.rollout.servers.client import ClientSettings, ServerRollout, ServerSpec
from rloom.rollout.servers.launch import Launch, ServerProcess, own_command
from rloom.rollout.servers.sglang import SglangApi
from rloom.rollout.servers.trtllm import TrtllmApi
from rloom.rollout.servers.vllm import VllmApi
from rloom.rollout.servers.watch import WatchSettings
from rloom.rollout.servers.wire import COLLECTIVE, SHARED, ServerApi, TransferSettings

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
CONTROL_KEY = "RLOOM_SERVER_KEY"
VLLM_ON_CPU = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def server_rollout(
    config: Config,
    network: PolicyNetwork,
    actor: Engine | None,  # where this process has all its weights
    device: torch.device,
    dtype: torch.dtype,
    gpus: Sequence[str],  # of all workers of this machine
) -> ServerRollout:
    rollout, kind = config.actor_rollout_ref.rollout, server_kind(config)
    section = rollout.server
    on_gpu = device.type == "cuda"
    shared = section.weight_transfer == SHARED
    key = server_key(section.key_env)
    if key is None and kind.takes_handles and rollout.starts_servers:
        key = secrets.token_hex(32)  # its server takes weights only with a key
    return ServerRollout(
        running_servers(config, device) if section.addresses else started_servers(config, device, dtype, gpus, key),
        referenced(kind.wire)(config),
        ClientSettings(
            WatchSettings(section.start_timeout_s, section.health_interval_s, section.max_restarts),
            request_timeout_s=section.request_timeout_s,
            # a server of the user's is on other GPUs, unless it shares the trainer's memory
            releases_memory=on_gpu and rollout.free_cache_engine and (shared or not section.addresses),
            max_requests=with_queued(rollout.sequences(device.type)),
            key=key,
        ),
        CheckpointFormat(network),
        None if actor is None else actor.weights,
    )


def server_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    if variable not in os.environ:
        raise ConfigError(
            f"actor_rollout_ref.rollout.server.key_env={variable}: the environment has no such variable; set it"
        )
    return os.environ[variable]


def transfer(config: Config, device: torch.device, *, on_trainers_gpu: bool) -> TransferSettings:
    rollout = config.actor_rollout_ref.rollout
    kind: str = rollout.server.weight_transfer
    if kind == "auto":
        kind = SHARED if rollout.on_first_gpu or on_trainers_gpu else COLLECTIVE
    return TransferSettings(kind, device, rollout.tensor_model_parallel_size, rollout.server.start_timeout_s)


def running_servers(config: Config, device: torch.device) -> list[ServerSpec]:
    how = transfer(config, device, on_trainers_gpu=False)
    return [ServerSpec(url, None, how) for url in config.actor_rollout_ref.rollout.server.addresses]


def started_servers(
    config: Config,
    device: torch.device,
    dtype: torch.dtype,
    gpus: Sequence[str],
    key: str | None,
) -> list[ServerSpec]:
    rollout = config.actor_rollout_ref.rollout
    size, count = rollout.tensor_model_parallel_size, rollout.engines(config.workers)
    on_gpu = device.type == "cuda"
    if rollout.on_first_gpu and on_gpu:  # it takes handles of memory on its own GPU
        gpus = [own_gpu()]
    if on_gpu and count * size > len(gpus):
        raise ConfigError(
            f"actor_rollout_ref.rollout.server.count={count} with tensor_model_parallel_size={size}: {count * size} "
            f"GPUs are needed, and the run has {len(gpus)} here; use less, or name servers in "
            "actor_rollout_ref.rollout.server.urls"
        )
    command, environment = start_command(config, device, dtype, key)
    logs = expand(config.trainer.default_local_dir) / "logs"
    specs = []
    for number in range(count):
        own = gpus[number * size : (number + 1) * size] if on_gpu else []
        visible = {VISIBLE_GPUS: ",".join(own)} if own else {}
        process = ServerProcess(Launch(command, environment | visible, Path(logs) / f"server_{number}.log"))
        how = transfer(config, device, on_trainers_gpu=own_gpu() in own)
        specs.append(ServerSpec(process.url, process, how))
    return specs


def start_command(
    config: Config, device: torch.device, dtype: torch.dtype, key: str | None
) -> tuple[list[str], dict[str, str]]:
    """The command line, and what it adds to the environment."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.server.command is not None:
        return own_command(rollout.server.command, policy_source(config).location), {}
    command: tuple[list[str], dict[str, str]] = referenced(server_kind(config).command)(config, device, dtype, key)
    return command


def server_kind(config: Config) -> ServerKind:
    found = config.actor_rollout_ref.rollout.kind.servers
    assert found is not None  # the run uses servers
    return found


def vllm_wire(config: Config) -> ServerApi:
    rollout = config.actor_rollout_ref.rollout
    return VllmApi(rollout.temperature, rollout.request_seeds)


def sglang_wire(config: Config) -> ServerApi:
    return SglangApi()


def trtllm_wire(config: Config) -> ServerApi:
    return TrtllmApi()


def sglang_server_command(
    config: Config, device: torch.device, dtype: torch.dtype, key: str | None
) -> tuple[list[str], dict[str, str]]:
    return sglang_command(server_settings(config, device, dtype)), SGLANG_ENVIRONMENT


def check_sglang_server(config: Config, device: torch.device, dtype: torch.dtype) -> None:
    sglang_arguments(server_settings(config, device, dtype))


def trtllm_server_command(
    config: Config, device: torch.device, dtype: torch.dtype, key: str | None
) -> tuple[list[str], dict[str, str]]:
    assert key is not None
    return trtllm_command(server_settings(config, device, dtype), CONTROL_KEY), {CONTROL_KEY: key}


def check_trtllm_server(config: Config, device: torch.device, dtype: torch.dtype) -> None:
    trtllm_arguments(server_settings(config, device, dtype))


def server_settings(config: Config, device: torch.device, dtype: torch.dtype) -> ServerSettings:
    rollout, on_gpu = config.actor_rollout_ref.rollout, device.type == "cuda"
    return ServerSettings(
        source=policy_source(config),
        dtype=str(dtype).removeprefix("torch."),
        max_sequences=rollout.sequences(device.type),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        max_model_tokens=config.data.longest_sample,
        memory_share=rollout.gpu_memory_utilization,
        releases_memory=on_gpu and rollout.free_cache_engine,
        eager=rollout.enforce_eager,
        tensor_parallel=rollout.tensor_model_parallel_size,
        on_gpu=on_gpu,
        engine_kwargs=rollout.engine_kwargs,
    )


def own_gpu() -> str:
    return os.environ.get(VISIBLE_GPUS, "0").split(",")[0]


def gpus_of_workers(*, alone: bool = True) -> list[str]:
    """The GPUs of all workers of a pool, which call this together. A single worker has those that it sees."""
    if alone:
        seen = os.environ.get(VISIBLE_GPUS) or ",".join(map(str, range(torch.cuda.device_count())))
        return [gpu for gpu in seen.split(",") if gpu]
    return sorted({*all_gather_objects(own_gpu())})
