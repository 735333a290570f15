"""Keys that only some runs use: when, and which switch enables them. A key that only one switch makes useful declares
it where it is defined (`switch=`); the table rloom/assets/tables/effects.yaml has the others.

A key that the user set and that this run does not use is reported: as an error if the user would expect another result,
and as a notice if the key is about memory or speed, or if the user also set its switch. Every run uses the keys that no
row of the table names.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, partial
from operator import attrgetter
from typing import Any

from rloom.algos.needs import ESTIMATORS, LOSSES, EstimatorNeeds, LossNeeds
from rloom.config.base import ACTOR, CRITIC, REF, ROLLOUT, PassSection, Switch
from rloom.config.derived import Needs, measures_mismatch, needs_old_logprobs
from rloom.config.keys import Key, all_keys, value_at
from rloom.config.reward_sections import ClassifierKeys
from rloom.config.schema import Actor, Config, Critic, PolicyLossSection
from rloom.environments.kinds import MULTI_TURN
from rloom.episodes.kinds import AGENT, ENABLE_KEY, ENVIRONMENT_KEY, OWN_KEY, EpisodeKind, episode_kind
from rloom.episodes.kinds import KINDS as EPISODES
from rloom.extras import TRACKERS
from rloom.tables import read_table


@dataclass(frozen=True)
class RunFacts:
    """What determines whether a key is used. The table names these fields and properties."""

    config: Config
    needs: Needs
    on_cpu: bool

    @property
    def scores_with_the_actor(self) -> bool:
        compares_adapter = self.config.uses_reference and self.config.actor_rollout_ref.model.has_lora
        return compares_adapter or needs_old_logprobs(self.config, self.needs.loss)

    @property
    def measures_mismatch(self) -> bool:
        return measures_mismatch(self.config)

    @property
    def shares_prompts(self) -> bool:
        """Whether some model can compute a prompt once for several samples."""
        roles, critic = self.config.actor_rollout_ref, self.config.critic
        replayed = self.config.replays_routing and not self.config.uses_reference  # which chooses its own experts
        actor = not replayed and roles.model.use_remove_padding and not divided(roles.actor, self.config.actor_workers)
        if not self.needs.estimator.needs_critic:
            return actor
        return actor or (critic.model.use_remove_padding and not divided(critic, self.critic_workers))

    @property
    def critic_workers(self) -> int:
        return self.config.workers_of("critic")

    @cached_property
    def episodes(self) -> EpisodeKind | None:
        return episode_kind(self.config)

    @property
    def has_named_tracker(self) -> bool:
        """A tracker that shows project and experiment."""
        return not {*TRACKERS, "tensorboard"}.isdisjoint(self.config.trainer.loggers)

    @property
    def project_name_in_directory(self) -> bool:
        return self.config.trainer.project_name in self.config.trainer.default_local_dir

    @property
    def experiment_name_in_directory(self) -> bool:
        return self.config.trainer.experiment_name in self.config.trainer.default_local_dir


def divided(role: Actor | Critic, workers: int) -> bool:
    """Whether workers divide each sequence or the model."""
    return workers > 1 and (role.kind.model_parallel or role.ulysses_sequence_parallel_size > 1)


@dataclass(frozen=True)
class EffectRule:
    """A row of the table, which describes the fields."""

    keys: Sequence[str]
    used: Callable[[RunFacts], bool]
    otherwise: str
    error: bool = False
    switch: str | None = None
    harmless: Sequence[Any] = ()
    apart_from: Sequence[str] = ()


@dataclass(frozen=True)
class WithoutEffect:
    """Sentences about keys that the user set and this run does not use."""

    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    on_a_cpu: list[str] = field(default_factory=list, compare=False)  # notices if trainer.device=auto is a CPU


ESTIMATOR, LOSS_MODE = "algorithm.adv_estimator", f"{ACTOR}.policy_loss.loss_mode"


def without_effect(config: Config, needs: Needs) -> WithoutEffect:
    """The keys that the user set and this run does not use: one sentence per row of the table."""
    run, found = RunFacts(config, needs, on_cpu=config.trainer.device == "cpu"), WithoutEffect()
    named: set[str] = set()
    for rule in rules():
        only_on_cpu = rule.used(run)
        if only_on_cpu and rule.used(replace(run, on_cpu=True)):
            continue
        idle = [key for key in idle_keys(rule, config) if key not in named]
        if not idle:
            continue
        settings = ", ".join(f"{key}={value_at(config, key)}" for key in idle)
        sentence = f"{settings}: no effect in this run, because {filled(rule.otherwise, config)}"
        if only_on_cpu:
            found.on_a_cpu.append(sentence)
            continue
        named.update(idle)
        is_error = rule.error and not (rule.switch and config.is_given(rule.switch))
        (found.errors if is_error else found.notices).append(sentence)
    return found


def idle_keys(rule: EffectRule, config: Config) -> Iterator[str]:
    for key in sorted(config.given):
        covered = any(f"{key}.".startswith(f"{name}.") for name in rule.keys)
        if covered and key not in rule.apart_from and value_at(config, key) not in (None, *rule.harmless):
            yield key


def filled(sentence: str, config: Config) -> str:
    """`sentence` with every `{key}` replaced by `key=value`, and `{key:}` by the value alone."""
    parts = sentence.split("{")
    named = [(key, rest) for key, _, rest in (part.partition("}") for part in parts[1:])]
    return parts[0] + "".join(f"{shown(key, config)}{rest}" for key, rest in named)


def shown(key: str, config: Config) -> str:
    return str(value_at(config, key[:-1])) if key.endswith(":") else f"{key}={value_at(config, key)}"


@cache
def rules() -> list[EffectRule]:
    """The rows of the table, and those of the functions that it names."""
    found: list[EffectRule] = []
    for row in read_table("effects"):
        found += MADE_HERE[row]() if isinstance(row, str) else table_rules(row)
    return found


def table_rules(row: Mapping[str, Any]) -> Iterator[EffectRule]:
    """One for each section of `in`."""
    for section in row.get("in", [""]):
        given = {name: in_section(value, section) for name, value in row.items() if name != "in"}
        yield EffectRule(**{**given, "used": partial(is_any_true, given["used"])})


def in_section(value: Any, section: str) -> Any:
    if isinstance(value, list):
        return [in_section(one, section) for one in value]
    return value.replace("$", section) if isinstance(value, str) else value


def is_any_true(conditions: Sequence[str], run: RunFacts) -> bool:
    return any(is_true(condition, run) for condition in conditions)


def is_true(condition: str, run: RunFacts) -> bool:
    """`path`, `path=value` (it is the value, or has it), or one of these after `not`."""
    path, equals, value = condition.removeprefix("not ").partition("=")
    found = attrgetter(path)(run)
    if equals:
        held = value in found if isinstance(found, frozenset) else value == str(found)
    else:
        held = found is not None and found is not False and found != ()
    return held is not condition.startswith("not ")


def switch_rules() -> list[EffectRule]:
    """The keys that declare their switch, in the order of the tree: one row for those of a section with equal ones."""
    rows: dict[tuple[str, Switch], list[Key]] = {}
    for path, key in all_keys().items():
        if key.switch is not None:
            section = path if key.section is not None else path.rpartition(".")[0]
            rows.setdefault((f"{section}.{key.switch.name}", key.switch), []).append(key)
    return [switch_rule(switch, path, keys) for (path, switch), keys in rows.items()]


def switch_rule(switch: Switch, path: str, keys: list[Key]) -> EffectRule:
    return EffectRule(
        [key.path for key in keys],
        lambda run: switch.is_on(value_at(run.config, path)),
        f"{switch.off}; set {path}{switch.on}",
        error=True,
        switch=path,
        harmless=switch.harmless,
        apart_from=[path],
    )


def setting_rules() -> list[EffectRule]:
    """The settings that only some estimators or policy losses read."""
    return [
        EffectRule(
            ["algorithm.gamma"],
            partial(is_any_true, ["needs.estimator.reads=gamma"]),
            f"{{{ESTIMATOR}}} does not discount; use 1.0, or {readers(ESTIMATORS, 'gamma', 'or')}",
            error=True,
            harmless=(1,),
        ),
        EffectRule(
            ["algorithm.lam"],
            partial(is_any_true, ["needs.estimator.reads=lam"]),
            f"{{{ESTIMATOR}}} does not read it; {readers(ESTIMATORS, 'lam')} does",
        ),
        EffectRule(
            ["algorithm.norm_adv_by_std_in_grpo"],
            partial(is_any_true, ["needs.estimator.reads=norm_adv_by_std_in_grpo"]),
            f"{{{ESTIMATOR}}} does not read it; {readers(ESTIMATORS, 'norm_adv_by_std_in_grpo')} do",
            error=True,
            harmless=(True,),
        ),
        *(
            EffectRule(
                [f"{ACTOR}.policy_loss.{name}"],
                partial(is_any_true, [f"needs.loss.reads={name}"]),
                f"{{{LOSS_MODE}}} does not read it; {readers(LOSSES, name)} does",
                error=True,
                switch=LOSS_MODE,
            )
            for name in PolicyLossSection.model_fields
            if name != "loss_mode"
        ),
    ]


def readers(table: Mapping[str, EstimatorNeeds] | Mapping[str, LossNeeds], name: str, last: str = "and") -> str:
    """The entries that read a setting: "gae, reinforce_plus_plus or remax"."""
    *others, final = [entry for entry, needs in table.items() if name in needs.reads]
    return f"{', '.join(others)} {last} {final}" if others else final


def pass_rules() -> Iterator[EffectRule]:
    """Passes are filled by samples or by tokens: the key of the other way is not used."""
    for path in (ACTOR, CRITIC, ROLLOUT, REF, "reward_model"):
        kind = all_keys()[path].section
        assert kind is not None and issubclass(kind, PassSection)
        names, by_tokens = kind.pass_keys, f"config.{path}.fills_by_tokens"
        yield EffectRule(
            [f"{path}.{names.size}_per_gpu", f"{path}.{names.size}"],
            partial(is_any_true, [f"not {by_tokens}"]),
            f"{{{path}.{names.dynamic}}} fills passes by tokens",
        )
        yield EffectRule(
            [f"{path}.{names.budget}"],
            partial(is_any_true, [by_tokens]),
            f"passes are filled by samples; {path}.{names.dynamic}=True would fill them by tokens",
        )


def reward_model_rules() -> list[EffectRule]:
    return [
        EffectRule(
            [f"reward_model.{name}" for name in ClassifierKeys.model_fields],
            partial(is_any_true, ["config.reward_model.model_path"]),
            "there is no reward model; set reward_model.path",
            error=True,
            switch="reward_model.enable",
            harmless=(False,),
            apart_from=["reward_model.enable"],
        )
    ]


def episode_rules() -> Iterator[EffectRule]:
    """The keys of episodes of several turns: those that some kinds read, and those that all read."""
    selecting = {key for kind in EPISODES.values() for key in kind.keys} | {OWN_KEY, ENABLE_KEY}
    reading = {name: {*kind.reads, *kind.keys} for name, kind in EPISODES.items()}
    some = dict.fromkeys(key for keys in reading.values() for key in keys if key not in selecting)
    for key in some:
        readers = [kind for name, kind in EPISODES.items() if key in reading[name]]
        ways = " or ".join(key for kind in readers for key in kind.keys)
        yield EffectRule(
            [key],
            partial(is_read_in_episodes, key),
            f"it is read only with {' or '.join(kind.title for kind in readers)}; set {ways}",
            error=True,
            switch=ENABLE_KEY,
        )
    every = [path for path in all_keys() if path.startswith((f"{MULTI_TURN}.", f"{AGENT}."))]
    yield EffectRule(
        [path for path in every if path not in selecting and path not in some],
        lambda run: run.episodes is not None,
        f"answers have one turn; set {ENVIRONMENT_KEY}, or the key of tools or an agent",
        error=True,
        switch=ENABLE_KEY,
        harmless=("hermes",),  # as `format`: commands of verl with one turn have it
    )


def is_read_in_episodes(key: str, run: RunFacts) -> bool:
    """A user's own kind may read every key."""
    kind = run.episodes
    return kind is not None and (OWN_KEY in kind.keys or key in kind.reads)


MADE_HERE: Mapping[str, Callable[[], Iterable[EffectRule]]] = {
    rows.__name__: rows for rows in (switch_rules, setting_rules, reward_model_rules, pass_rules, episode_rules)
}
