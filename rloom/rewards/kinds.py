"""The kinds of rewards: which keys select each, what it needs and where it is built. Imports no torch.

Configuration, smoke run, train.sh, doctor and launch read these declarations, and compare no names. A `Reference` is
the `module:name` of a function, which is imported when the function is called. A user's own kind is a RewardKind, too:
`reward_model.kinds` names it (docs/extending.md).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.episodes.kinds import ENVIRONMENT_KEY, episode_kind, gives_rewards
from rloom.errors import ConfigError
from rloom.plugins import Reference, is_own, resolve_kind
from rloom.rewards.judge.settings import PROVIDERS, address_in

GROUP = "rloom.reward_kinds"  # entry points of other packages
OWN_KEY = "reward_model.kinds"
JUDGE, REMOTE = "reward_model.api", "reward_model.remote"
INSTEAD = "other parts or rules score the answers"  # in a smoke run


def always(config: Any) -> bool:
    return True


@dataclass(frozen=True)
class ServerTraits:
    """Of a kind whose scores come from a server that a smoke run does not call."""

    is_absent: Callable[[Any, Mapping[str, str]], bool]  # (configuration, environment): no server of the user's own
    smoke_note: Callable[[Any], str]  # what replaces it


@dataclass(frozen=True)
class CallKeys:
    """Keys of single calls, which the doctor changes when they fail."""

    timeout_s: str
    concurrency: str
    max_retries: str


@dataclass(frozen=True, kw_only=True)
class RewardKind:
    parts: tuple[str, ...]  # names in a mix that it can compute; the first is the usual one
    # (configuration) -> Reward. None: the workers of the run hold a model that scores
    build: Reference | None
    switch: str = OWN_KEY  # the key that selects it
    is_set: Callable[[Any], bool] = always  # of a configuration
    alone: bool = True  # it can be the only reward; otherwise it is a part of a mix
    is_default: Callable[[Any], bool] | None = None  # it is the reward where no other is set; the first one counts
    section: str | None = None  # keys that only this kind reads
    title: str | None = None  # in train.sh's sentence about the reward
    by_turns: bool = False  # it is the sum of rewards that the turns of an episode have
    by_data_source: bool = False  # every row needs a data_source with a rule
    check_prompts: Reference | None = None  # (configuration, data sets): RewardError where it cannot score them
    takes_function: bool = False  # the calling program may give its function
    every_machine: bool = False  # it needs processors: each machine of a run computes a share
    smoke_changes: Reference | None = None  # (configuration) -> keys of a smoke run
    server: ServerTraits | None = None
    calls: CallKeys | None = None


KINDS: Mapping[str, RewardKind] = {
    "function": RewardKind(
        parts=("rule_score",),
        build="rloom.launch.rewards:custom_function",
        switch="custom_reward_function.path",
        is_set=lambda config: config.custom_reward_function.path is not None,
        takes_function=True,
        every_machine=True,
    ),
    "environment": RewardKind(
        parts=("environment_score",),
        build="rloom.launch.episodes:environment_reward",
        switch=ENVIRONMENT_KEY,
        is_set=lambda config: episode_kind(config) is not None,
        alone=False,
        is_default=gives_rewards,
        by_turns=True,
        title="environment",
    ),
    "rules": RewardKind(
        parts=("rule_score",),
        build="rloom.launch.rewards:rules",
        switch="rules need no key",
        alone=False,
        is_default=always,
        by_data_source=True,
        check_prompts="rloom.launch.rewards:check_rules",
        every_machine=True,
    ),
    "model": RewardKind(
        parts=("rm_score",),
        build=None,
        switch="reward_model.path",
        is_set=lambda config: config.reward_model.model_path is not None,
        title="reward model {}",
        smoke_changes="rloom.config.frontends.smoke:embedded_classifier",
    ),
    "judge": RewardKind(
        parts=("api_score", "rm_score"),
        build="rloom.launch.rewards:judge",
        switch=f"{JUDGE}.enable",
        is_set=lambda config: config.reward_model.api.enable,
        section=JUDGE,
        title="API judge",
        smoke_changes="rloom.config.frontends.smoke:own_judge_cache",
        server=ServerTraits(
            lambda config, environment: (
                not (config.reward_model.api.base_url or address_in(environment, config.reward_model.api.type))
            ),
            lambda config: (
                f"{INSTEAD}; a judge of your own is called at "
                f"{' or '.join(PROVIDERS[config.reward_model.api.type].address_variables)}"
            ),
        ),
        calls=CallKeys(f"{JUDGE}.timeout_s", f"{JUDGE}.concurrency", f"{JUDGE}.max_retries"),
    ),
    "remote": RewardKind(
        parts=("remote_score", "rm_score"),
        build="rloom.launch.rewards:remote_reward",
        switch=f"{REMOTE}.urls",
        is_set=lambda config: bool(config.reward_model.remote.addresses),
        section=REMOTE,
        title="reward servers",
        server=ServerTraits(lambda config, environment: True, lambda config: INSTEAD),
    ),
    "format": RewardKind(
        parts=("format_score",),
        build="rloom.launch.rewards:format_rule",
        switch="reward_model.format.pattern",
        is_set=lambda config: config.reward_model.format.pattern is not None,
        alone=False,
    ),
}
PARTS = tuple(dict.fromkeys(part for kind in KINDS.values() for part in kind.parts))


def kinds_of(names: Sequence[str]) -> dict[str, RewardKind]:
    """rloom's kinds and the user's own, by name. Their files are loaded. `names`: the value of reward_model.kinds."""
    found = dict(KINDS)
    for name in names:
        if not is_own(name, GROUP):
            raise ConfigError(
                f"{OWN_KEY}={name}: no installed package registers it ({GROUP}); name yours as my_module:MY_KIND or "
                "./my_file.py:MY_KIND"
            )
        own = resolve_kind(OWN_KEY, name, {}, GROUP, RewardKind)
        taken = next((part for part in own.parts for kind in found.values() if part in kind.parts), None)
        if not own.parts:
            raise ConfigError(f"{OWN_KEY}={name} computes no part; give its RewardKind one in `parts`")
        if taken is not None:
            raise ConfigError(f"{OWN_KEY}={name} computes the part {taken}; choose a name that no other reward has")
        found[name] = own
    return found
