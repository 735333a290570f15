"""What can be checked before torch is imported, which takes seconds: files, folders and packages that a run needs."""

import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rloom.config.base import CRITIC, EMBEDDED_NAME, GIVEN_IN_PYTHON, RunConfig
from rloom.config.checks import check_and_warn
from rloom.config.derived import brings_own_algorithm, declared_needs
from rloom.config.engine_checks import divided_strategies, megatron_roles, replay_fault, split_faults
from rloom.config.load import expand
from rloom.config.schema import Config, SftConfig
from rloom.config.sections import RolloutSection
from rloom.console import announce
from rloom.data.files import locate
from rloom.engines.kinds import StrategyKind
from rloom.errors import ConfigError, DataError, ModelError, RewardError
from rloom.extras import TRACKERS, install_command
from rloom.gpus import smallest_memory
from rloom.launch.directory import run_directory
from rloom.launch.model_sources import critic_source, policy_source, reward_source, sft_source
from rloom.models.source import ModelSource, check_folder, read_config
from rloom.plan.make import is_counted, with_offload
from rloom.plugins import referenced
from rloom.runtime.nodes import no_ray
from rloom.training.checkpoint import STATE, verify_checkpoint


def check(config: Config) -> Config:
    """What can be checked before torch is imported. Returns the configuration to train with."""
    check_keys(config)
    has_critic = not brings_own_algorithm(config) and declared_needs(config).estimator.needs_critic
    check_early(config, critic=has_critic)
    return check_memory(config, critic=has_critic)


def check_keys(config: Config) -> None:
    if not brings_own_algorithm(config):  # the user's own file imports torch; `run` checks it
        check_and_warn(config, declared_needs(config))


def check_early(config: Config, *, critic: bool) -> None:
    """`critic`: whether the algorithm trains one."""
    for name, kind in divided_strategies(config, critic=critic).items():
        check_strategy_installed(name, kind)
    check_extras(config)
    check_engine_installed(config.actor_rollout_ref.rollout)
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


def check_strategy_installed(name: str, kind: StrategyKind) -> None:
    missing = [package for package in kind.packages if not is_installed(package)]
    if missing:
        way = f"install: {install_command(*kind.extras)}" if kind.extras else "install it"
        raise ConfigError(
            f"strategy={name} with several workers needs {' and '.join(missing)}, not installed here; {way}; or use "
            "strategy=fsdp"
        )


def is_installed(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True


def check_engine_installed(rollout: RolloutSection) -> None:
    """The packages of an engine that generates in this environment, or of servers that rloom starts in it."""
    kind, key = rollout.kind, "actor_rollout_ref.rollout"
    if rollout.starts_servers is False:
        return
    if kind.check_installed is not None:
        referenced(kind.check_installed)()
    missing = " and ".join(package for package in kind.packages if find_spec(package) is None)
    if missing and rollout.starts_servers:
        raise ConfigError(
            f"{key}.name={rollout.name}: {missing} not installed here, so rloom cannot start the server; install it "
            f"(docs/rollout.md), name a running server in {key}.server.urls=[...], or use {key}.name=vllm"
        )
    if missing:
        raise ConfigError(f"{key}.name={rollout.name}: {missing} not installed here; install it, or use name=native")


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
    given = {"data.train_files": config.data.train_files, "data.val_files": config.data.val_files}
    for key, files in given.items():
        for file in [files] if isinstance(files, str) else files or []:
            try:
                if file not in (EMBEDDED_NAME, GIVEN_IN_PYTHON):
                    locate(file)
            except DataError as error:
                raise DataError(f"{key}: {error}") from error


def check_reward_function(config: Config) -> None:
    given = config.custom_reward_function
    if given.path not in (None, GIVEN_IN_PYTHON) and not (file := expand(given.path).absolute()).is_file():
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
