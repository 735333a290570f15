"""What can be checked before torch is imported, which takes seconds: files, folders and packages that a run needs."""

import logging
import os
from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from rloom.config.base import CRITIC, GIVEN_IN_PYTHON, RunConfig
from rloom.config.checks import check_and_warn
from rloom.config.derived import brings_own_algorithm, declared_needs
from rloom.config.engine_checks import divided_strategies, megatron_roles, replay_fault, split_faults
from rloom.config.load import expand
from rloom.config.schema import Config, SftConfig
from rloom.config.sections import RolloutSection
from rloom.console import announce
from rloom.engines.kinds import StrategyKind
from rloom.environments.kinds import MULTI_TURN
from rloom.episodes.agents.by_tokens import DEFAULT_KEY, read_loops
from rloom.episodes.agents.process import command_words
from rloom.episodes.kinds import AGENT, ENVIRONMENT_KEY, environment_reference, episode_kind
from rloom.errors import ConfigError, ModelError
from rloom.extras import TRACKERS, install_command
from rloom.gpus import CHOICE, has_no_gpu, smallest_memory, visible_gpus
from rloom.launch.directory import directory_of, run_directory
from rloom.launch.inputs import RunData, UserObjects, read_data
from rloom.launch.model_sources import critic_source, policy_source, reward_source, sft_source
from rloom.models.source import ModelSource, check_folder, read_config
from rloom.plan.disk import DiskPlan, disk_plan, roles_text, sft_disk_plan, size_text
from rloom.plan.make import is_counted, with_offload
from rloom.plugins import check_reference, referenced
from rloom.rewards.user_function import check_source
from rloom.runtime.nodes import no_ray
from rloom.runtime.placement import WorkerLayout
from rloom.training.checkpoint import STATE, Checkpoints, verify_checkpoint

log = logging.getLogger(__name__)
COMMAND = UserObjects()  # a command gives the configuration alone
# A switch for tests: the workers of a machine share its first GPU and communicate over gloo, which is slow.
SHARE_GPU = "RLOOM_TEST_SHARE_GPU"


def check(config: Config, given: UserObjects = COMMAND) -> tuple[Config, RunData]:
    """What can be checked before torch is imported. Returns the configuration and the rows to train with."""
    check_keys(config)
    return check_run(config, given)


def check_run(config: Config, given: UserObjects) -> tuple[Config, RunData]:
    """As `check`, for keys that were checked."""
    has_critic = not brings_own_algorithm(config) and declared_needs(config).estimator.needs_critic
    check_early(config, critic=has_critic)
    data = read_data(config, given)
    checked = check_memory(config, critic=has_critic)
    check_disk(checked, len(data.train), critic=has_critic)
    return checked, data


def check_keys(config: Config) -> None:
    if not brings_own_algorithm(config):  # the user's own file imports torch; `run` checks it
        check_and_warn(config, declared_needs(config))


def check_early(config: Config, *, critic: bool) -> None:
    """`critic`: whether the algorithm trains one."""
    for name, kind in divided_strategies(config, critic=critic).items():
        check_strategy_installed(name, kind)
    check_extras(config)
    check_gpus(config)
    check_engine_installed(config.actor_rollout_ref.rollout)
    run_directory(config)
    check_reward_function(config)
    check_episodes(config)
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


def layout_of(config: RunConfig) -> WorkerLayout:
    share = os.environ.get(SHARE_GPU, "0")
    if share not in ("0", "1"):
        raise ConfigError(f"{SHARE_GPU}={share}: use 1 to put all workers of a machine on one GPU, or leave it out")
    return config.layout(1 / config.gpus_per_node if share == "1" else 1.0)


def check_gpus(config: RunConfig) -> None:
    """GPUs that this machine does not have. Those of an existing cluster may be elsewhere."""
    device, count, visible = config.trainer.device, config.gpus_per_node, os.environ.get(CHOICE)
    if device == "cpu" or config.joins_a_cluster:
        return
    chosen = "" if visible is None else f" ({CHOICE}={visible})"
    if has_no_gpu(os.environ):
        if device == "cuda":
            raise ConfigError(f"trainer.device=cuda: this machine shows no GPU{chosen}; use auto or cpu")
        if count > 1:
            raise ConfigError(
                f"trainer.n_gpus_per_node={count}: this machine shows no GPU{chosen}; trainer.device=cpu "
                f"trains with {count} processes on the CPU, trainer.n_gpus_per_node=1 with one"
            )
        return
    found, layout = len(visible_gpus(os.environ)), layout_of(config)
    needed = max(1, layout.devices // layout.nodes)
    if 0 < found < needed:
        raise ConfigError(
            f"trainer.n_gpus_per_node={count}: {needed} GPUs are needed, this machine shows {found}{chosen}"
        )


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


def check_disk(config: Config, rows: int, *, critic: bool) -> None:
    """`rows`: of the training data. No check for a model of unknown size."""
    if config.trainer.val_only:
        return
    directory = directory_of(config)
    steps = total_steps(config, rows)
    try:
        for source in model_sources(config, critic=critic):
            read_config(source)  # the plan reads it from the cache
        found = disk_plan(config, directory, steps, critic=critic, saved=saved_steps(config, directory))
    except ModelError:
        return
    check_room(found, config.trainer.save_freq, "actor_rollout_ref.actor.checkpoint", "max_actor_ckpt_to_keep")


def check_sft_disk(config: SftConfig, rows: int) -> None:
    directory = directory_of(config)
    try:
        read_config(sft_source(config))
        found = sft_disk_plan(config, directory, total_steps(config, rows), saved=saved_steps(config, directory))
    except ModelError:
        return
    check_room(found, config.trainer.save_freq, "trainer.checkpoint", "max_ckpt_to_keep")


def total_steps(config: Config | SftConfig, rows: int) -> int:
    """At most: rows that are too long may be left out."""
    trainer = config.trainer
    batch = config.prompts_per_round if isinstance(config, Config) else config.data.train_batch_size
    return trainer.total_training_steps or trainer.total_epochs * (rows // batch)


def saved_steps(config: RunConfig, directory: Path) -> int:
    """Checkpoints of this run that are there already."""
    return len(Checkpoints(directory, keep={}).steps()) if config.trainer.resume_mode == "auto" else 0


def check_room(disk: DiskPlan, save_freq: int, section: str, keep: str) -> None:
    """`section`, `keep`: the keys that say what a checkpoint has, and how many are kept."""
    if disk.free_bytes is None or not disk.holds_not_all:
        return
    free = f"{size_text(disk.free_bytes)} are free"
    if disk.holds_no_checkpoint:
        raise ConfigError(
            f"trainer.default_local_dir={disk.folder}: a checkpoint of this run takes {roles_text(disk)}, and {free} "
            f"there; make room, choose another directory, or save the weights alone: {section}.save_contents=[model]"
        )
    fewer = f"trainer.{keep}=1 keeps the newest checkpoint only, " if save_freq > 0 else ""
    log.warning(
        f"Note: trainer.default_local_dir={disk.folder}: this run writes up to {size_text(disk.all_bytes)} "
        f"({size_text(disk.all_bytes - disk.answer_bytes)} of checkpoints, {size_text(disk.answer_bytes)} of answers), "
        f"and {free} there; {fewer}trainer.log_rollouts=False writes no answers"
    )


def check_early_sft(config: SftConfig) -> None:
    check_extras(config)
    check_gpus(config)
    run_directory(config)
    check_folder(sft_source(config))


def check_reward_function(config: Config) -> None:
    given = config.custom_reward_function
    if given.path is not None and given.path != GIVEN_IN_PYTHON:
        whole_groups = config.reward_model.reward_manager == "batch"
        check_source(str(expand(given.path)), given.name, given.reward_kwargs, whole_groups=whole_groups)


def check_episodes(config: Config) -> None:
    kind = episode_kind(config)
    if kind is not None and kind.check is not None:
        referenced(kind.check)(config)


def check_environment(config: Config) -> None:
    name = config.actor_rollout_ref.rollout.multi_turn.environment
    assert name is not None
    if name != GIVEN_IN_PYTHON:
        check_reference(ENVIRONMENT_KEY, environment_reference(name))
    check_tool_files(config)


def check_tool_files(config: Config) -> None:
    keys = config.actor_rollout_ref.rollout.multi_turn
    for name in ("function_tool_path", "tool_config_path", "interaction_config_path"):
        path = getattr(keys, name)
        if path not in (None, GIVEN_IN_PYTHON) and not expand(path).is_file():
            raise ConfigError(f"{MULTI_TURN}.{name}={path}: there is no such file; correct the path")


def check_agent(config: Config) -> None:
    keys = config.actor_rollout_ref.rollout.agent
    if keys.path is not None and keys.command is not None:
        raise ConfigError(f"{AGENT}.path={keys.path} and {AGENT}.command={keys.command}: each is an agent; keep one")
    if keys.path is not None:
        check_reference(f"{AGENT}.path", keys.path)
        if keys.rewards_over_http:
            raise ConfigError(
                f"{AGENT}.rewards_over_http=True is for {AGENT}.command: a function of {AGENT}.path gets `reward_key` "
                "as an argument; remove it"
            )
        return
    assert keys.command is not None
    command_words(keys.command)
    if keys.kwargs:
        raise ConfigError(f"{AGENT}.kwargs={keys.kwargs}: a program has none; write them into {AGENT}.command")


def check_agent_loops(config: Config) -> None:
    keys = config.actor_rollout_ref.rollout.agent
    if keys.agent_loop_config_path is not None:
        read_loops(str(expand(keys.agent_loop_config_path)))
    if keys.default_agent_loop is not None and ":" in keys.default_agent_loop:
        check_reference(DEFAULT_KEY, keys.default_agent_loop)
    check_tool_files(config)


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
    on = " on the CPU" if config.trainer.device == "cpu" else ""
    several = f"{config.workers} workers{on}" if config.workers > 1 else ""
    return f"{text} · " if (text := machines + config.all_visible if config.all_visible else several) else ""


def loading(libraries: Sequence[str] = ("torch", "transformers")) -> str:
    return f"loading {' and '.join(libraries)} ..."
