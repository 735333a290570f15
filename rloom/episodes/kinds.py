"""The kinds of episodes: which keys select each, what it reads and where it is built. Imports no torch.

Configuration, early checks, smoke run and launch read these declarations, and compare no names. A `Reference` is the
`module:name` of a function, which is imported when the function is called. A user's own kind is an EpisodeKind, too:
`multi_turn.kind` names it (docs/extending.md).
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from rloom.environments.kinds import ENVIRONMENTS, MULTI_TURN
from rloom.errors import ConfigError
from rloom.plugins import Reference, installed, is_own, resolve_kind

GROUP, ENVIRONMENT_GROUP = "rloom.episode_kinds", "rloom.environments"  # entry points of other packages
AGENT = "actor_rollout_ref.rollout.agent"
OWN_KEY, ENVIRONMENT_KEY, ENABLE_KEY = f"{MULTI_TURN}.kind", f"{MULTI_TURN}.environment", f"{MULTI_TURN}.enable"

ONE_TURN, WITH_TOOLS = "single_turn_agent", "tool_agent"  # agent loops of rloom, by verl's names

# Keys of MULTI_TURN and AGENT that only some kinds read
TOOL_KEYS = (
    f"{MULTI_TURN}.max_parallel_calls",
    f"{MULTI_TURN}.max_tool_response_length",
    f"{MULTI_TURN}.tool_response_truncate_side",
    f"{MULTI_TURN}.tool_timeout_s",
    f"{MULTI_TURN}.tool_error",
    f"{MULTI_TURN}.max_user_turns",
)


@dataclass(frozen=True, kw_only=True)
class EpisodeKind:
    """Episodes of one kind.

    `build` is called with (config, texts, limits), once in the process that drives the run, and returns a `Driver` of
    rloom.episodes.runner. A user's code runs in processes that the driver starts.
    """

    title: str  # in sentences: "an environment"
    build: Reference
    keys: tuple[str, ...] = (OWN_KEY,)  # a value in one of them selects it
    only_beside: tuple[str, ...] = ()  # values of those keys that select it only where another kind is selected, too
    reads: tuple[str, ...] = ()  # further keys that not every kind reads
    includes: tuple[str, ...] = ()  # kinds whose keys it reads itself; both may be set
    # (config) raises ConfigError, before torch is imported: such as a file that does not exist
    check: Reference | None = None
    # (config, driver, rows), once the user's code is loaded: raises ConfigError, or DataError for a row that names what
    # does not exist. `rows`: prompts by the key of their files
    check_loaded: Reference | None = None
    # without another reward in the configuration, the score is the reward that its episodes have; False: the rules' one
    rewards: bool = True

    or_rules: bool = False  # an episode that has no reward is scored by the rules

    def is_set(self, config: Any) -> bool:
        return bool(self.set_keys(config))

    def set_keys(self, config: Any) -> list[str]:
        given = {key: value for key in self.keys if (value := attrgetter(key)(config)) is not None}
        if all(value in self.only_beside for value in given.values()):
            others = [kind for kind in KINDS.values() if kind is not self] if given else []
            return list(given) if any(kind.is_set(config) for kind in others) else []
        return list(given)


KINDS: Mapping[str, EpisodeKind] = {
    "environment": EpisodeKind(
        title="an environment",
        build="rloom.launch.episodes:environment_driver",
        keys=(ENVIRONMENT_KEY,),
        reads=(f"{MULTI_TURN}.environment_kwargs", *TOOL_KEYS),
        includes=("tools",),
        check="rloom.launch.early_checks:check_environment",
        check_loaded="rloom.launch.episodes:check_loaded_code",
    ),
    "tools": EpisodeKind(
        title="tools",
        build="rloom.launch.episodes:environment_driver",
        keys=(
            f"{MULTI_TURN}.function_tool_path",
            f"{MULTI_TURN}.tool_config_path",
            f"{MULTI_TURN}.interaction_config_path",
        ),
        reads=TOOL_KEYS,
        check="rloom.launch.early_checks:check_tool_files",
        check_loaded="rloom.launch.episodes:check_loaded_code",
        rewards=False,
    ),
    "agent": EpisodeKind(
        title="an agent",
        build="rloom.launch.episodes:agent_driver",
        keys=(f"{AGENT}.path", f"{AGENT}.command"),
        reads=(f"{AGENT}.kwargs", f"{AGENT}.port", f"{AGENT}.rewards_over_http", f"{MULTI_TURN}.tool_timeout_s"),
        check="rloom.launch.early_checks:check_agent",
        or_rules=True,
    ),
    "agent_loop": EpisodeKind(
        title="agent loops",
        build="rloom.launch.episodes:agent_loop_driver",
        keys=(f"{AGENT}.agent_loop_config_path", f"{AGENT}.default_agent_loop"),
        only_beside=(ONE_TURN, WITH_TOOLS),  # alone, they are answers of one turn
        reads=TOOL_KEYS,
        includes=("tools",),
        check="rloom.launch.early_checks:check_agent_loops",
        check_loaded="rloom.launch.episodes:check_agent_names",
        or_rules=True,
    ),
}


def chosen_kinds(config: Any) -> dict[str, EpisodeKind]:
    """The kinds that the keys select, by name. A valid configuration has one at most."""
    found = {name: kind for name, kind in KINDS.items() if kind.is_set(config)}
    included = {name for kind in found.values() for name in kind.includes}
    found = {name: kind for name, kind in found.items() if name not in included}
    if (own := config.actor_rollout_ref.rollout.multi_turn.kind) is not None:
        if not is_own(own, GROUP):
            raise ConfigError(
                f"{OWN_KEY}={own}: no installed package registers it ({GROUP}); name yours as my_module:MY_KIND or "
                "./my_file.py:MY_KIND"
            )
        found[own] = resolve_kind(OWN_KEY, own, {}, GROUP, EpisodeKind)
    return found


def episode_kind(config: Any) -> EpisodeKind | None:
    """None: answers have one turn."""
    return next(iter(chosen_kinds(config).values()), None)


def gives_rewards(config: Any) -> bool:
    """Whether the episodes have rewards of their own. Some environments of rloom only have tools."""
    kind, shipped = (
        episode_kind(config),
        ENVIRONMENTS.get(config.actor_rollout_ref.rollout.multi_turn.environment or ""),
    )
    return kind is not None and kind.rewards and (shipped is None or shipped.rewards)


def episode_faults(config: Any) -> Iterator[str]:
    """One sentence for each fault of the keys that select the kind."""
    chosen = chosen_kinds(config)
    enabled = attrgetter(ENABLE_KEY)(config)
    if enabled and not chosen:
        tools = ", ".join(KINDS["tools"].keys)
        yield f"{ENABLE_KEY}=True: nothing says what is between the turns; set {tools}, {ENVIRONMENT_KEY} or an agent"
    if enabled is False and chosen:
        key = next(key for kind in chosen.values() for key in kind.keys if attrgetter(key)(config) is not None)
        yield f"{ENABLE_KEY}=False and {key}={attrgetter(key)(config)}: remove one of the two"
    if len(chosen) > 1:
        given = [f"{key}={attrgetter(key)(config)}" for kind in chosen.values() for key in kind.set_keys(config)]
        yield f"{' and '.join(given)}: each says how the episodes of the run go; keep one"


def environment_reference(name: str) -> str:
    """file.py:name or module:name of the environment of this name."""
    if ":" in name:
        return name
    return ENVIRONMENTS[name].made if name in ENVIRONMENTS else installed(ENVIRONMENT_GROUP)[name].value
