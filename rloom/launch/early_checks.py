"""What can be checked before torch is imported, which takes seconds: files, folders and packages that a run needs."""

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rloom.config.algorithm_needs import brings_own_algorithm, declared_needs
from rloom.config.checks import verify
from rloom.config.load import expand
from rloom.config.megatron_checks import CRITIC, megatron_roles, uses_megatron
from rloom.config.megatron_split import replay_fault, split_faults
from rloom.config.run_config import RunConfig
from rloom.config.schema import EMBEDDED, IN_PYTHON, Config
from rloom.config.sft_schema import SftConfig
from rloom.errors import ConfigError, DataError, ModelError, RewardError
from rloom.extras import SERVER_PACKAGES, TRACKERS, install_command
from rloom.gpus import smallest_memory
from rloom.launch.directory import run_directory
from rloom.launch.model_sources import critic_source, policy_source, reward_source, sft_source
from rloom.models.source import ModelSource, check_folder, read_config
from rloom.plan.fit import is_counted, with_offload
from rloom.rollout.vllm.environment import check_installed
from rloom.runtime.nodes import no_ray
from rloom.startup import announce
from rloom.training.checkpoint import STATE, verify_checkpoint


def check(config: Config) -> Config:
    """What can be checked before torch is imported. Returns the configuration to train with."""
    check_keys(config)
    has_critic = not brings_own_algorithm(config) and declared_needs(config).estimator.needs_critic
    check_early(config, critic=has_critic)
    return check_memory(config, critic=has_critic)


def check_keys(config: Config) -> None:
    if not brings_own_algorithm(config):  # the user's own file imports torch; `run` checks it
        verify(config, declared_needs(config))


def check_early(config: Config, *, critic: bool) -> None:
    """`critic`: whether the algorithm trains one."""
    if uses_megatron(config, critic=critic):
        check_megatron_installed()
    check_extras(config)
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "vllm" and rollout.starts_servers is not False:
        check_installed()
    elif rollout.starts_servers:
        check_server_installed(rollout.name)
    run_directory(config)
    check_data_files(config)
    check_reward_function(config)
    for source in model_sources(config, critic=critic):
        check_folder(source)
    check_split(config, critic=critic)


def check_extras(config: RunConfig) -> None:
    """The optional libraries of this run, other than its rollout engine."""
    if config.uses_ray and find_spec("ray") is None:
        raise ConfigError(no_ray())
    for name in TRACKERS:
        if name in config.trainer.loggers and find_spec(name) is None:
            way = f"remove it from trainer.logger, or install it: {install_command(name)}"
            raise ConfigError(f"trainer.logger={name!r} is not installed; {way}")


def check_megatron_installed() -> None:
    if not is_installed("megatron-core"):
        raise ConfigError(
            "strategy=megatron with several workers needs megatron-core, not installed here; install: "
            f"{install_command('megatron')}; or use strategy=fsdp"
        )


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def check_server_installed(name: str) -> None:
    missing = [package for package in SERVER_PACKAGES[name] if find_spec(package) is None]
    if missing:
        key = "actor_rollout_ref.rollout"
        raise ConfigError(
            f"{key}.name={name}: {' and '.join(missing)} not installed here, so rloom cannot start the server; install "
            f"it (docs/servers.md), name a running server in {key}.server.urls=[...], or use {key}.name=vllm"
        )


def check_split(config: Config, *, critic: bool) -> None:
    """Whether the models can be divided as the keys of the Megatron engine require, and have what router replay needs.

    One worker holds a whole model of any family.
    """
    faults: list[str] = []
    for role in megatron_roles(config, critic=critic):
        source = critic_source(config) if role.path == CRITIC else policy_source(config)
        if role.workers > 1:
            faults += split_faults(role, read_config(source), f"{source.key}={source.path}")
    if config.replays_routing:
        source = policy_source(config)
        fault = replay_fault(read_config(source), f"{source.key}={source.path}")
        faults += [] if fault is None else [fault]
    if faults:
        raise ConfigError("\n".join(faults))


def check_memory(config: Config, *, critic: bool) -> Config:
    """The configuration to train with: on GPUs, what certainly does not fit is moved to the host, or is an error.

    No check for a model of a family that the plan does not count.
    """
    gpu_bytes = smallest_memory(os.environ)
    if gpu_bytes is None or not config.trainer.memory_check or not is_counted(config):
        return config
    for source in model_sources(config, critic=critic):
        read_config(source)  # the plan reads it from the cache
    try:
        return with_offload(config, gpu_bytes)
    except ModelError:
        return config


def check_early_sft(config: SftConfig) -> None:
    check_extras(config)
    run_directory(config)
    check_data_files(config)
    check_folder(sft_source(config))


def check_data_files(config: Config | SftConfig) -> None:
    from rloom.data.files import locate  # imports pyarrow

    given = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    for key, files in given.items():
        for file in [files] if isinstance(files, str) else files or []:
            try:
                if file not in (EMBEDDED, IN_PYTHON):
                    locate(file)
            except DataError as error:
                raise DataError(f"{key}: {error}") from error


def check_reward_function(config: Config) -> None:
    given = config.custom_reward_function
    if given.path not in (None, IN_PYTHON) and not (file := expand(given.path).absolute()).is_file():
        raise RewardError(
            f"custom_reward_function.path={given.path!r}: there is no file {file}; use a Python file that defines "
            f"{given.name}"
        )


def model_sources(config: Config, *, critic: bool) -> Iterator[ModelSource]:
    yield policy_source(config)
    if critic and config.critic.model.path not in (None, config.actor_rollout_ref.model.path):
        yield critic_source(config)
    if config.reward_model.model_path is not None:
        yield reward_source(config)


def check_checkpoint(checkpoint: Path) -> None:
    """A folder that is no checkpoint. The bytes of one are verified later."""
    if not (checkpoint / STATE).is_file():
        verify_checkpoint(checkpoint)


def announce_run(config: Config, version: str) -> None:
    """The first line on the screen. The libraries load for seconds after it."""
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    announce(
        f"rloom {version} · {config.algorithm.adv_estimator} on {config.actor_rollout_ref.model.path} · "
        f"{config.data.train_batch_size} × {rollout.n} answers a step · {workers(config)}"
        f"{trainer.default_local_dir} · {loading()}"
    )


def announce_sft(config: SftConfig, version: str) -> None:
    announce(
        f"rloom {version} · sft on {config.model.path} · {config.data.train_batch_size} rows a step · {workers(config)}"
        f"{config.trainer.default_local_dir} · {loading()}"
    )


def workers(config: RunConfig) -> str:
    """`8 workers · `; where the user gave no number, what it comes from. Empty for one."""
    machines = f"{config.trainer.nnodes} machines × " if config.trainer.nnodes > 1 else ""
    several = f"{config.workers} workers" if config.workers > 1 else ""
    return f"{text} · " if (text := machines + config.all_visible if config.all_visible else several) else ""


def loading(libraries: Sequence[str] = ("torch", "transformers")) -> str:
    return f"loading {' and '.join(libraries)} ..."
