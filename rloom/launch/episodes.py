"""The environments of a run, from its configuration."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager

from transformers import PreTrainedTokenizerBase

from rloom.config.base import GIVEN_IN_PYTHON
from rloom.config.load import expand
from rloom.config.schema import Config
from rloom.episodes.base import Limits, Setup
from rloom.episodes.kinds import MULTI_TURN, environment_reference, episode_kind
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.runner import Driver, EnvironmentDriver, EpisodeRunner
from rloom.episodes.template import TurnTemplate
from rloom.episodes.writer import Texts
from rloom.errors import ConfigError
from rloom.plugins import referenced
from rloom.rewards.base import ScoringUnit
from rloom.types import SampleGroup, Score


class EnvironmentReward:
    """The reward that the environment gave, as a part of the mix."""

    unit = ScoringUnit.ANSWER

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        return [[score_of(sample.environment_reward) for sample in group] for group in groups]

    def check(self) -> None:
        return

    def metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        return


def score_of(reward: float | None) -> Score:
    if reward is None:
        return Score.failed("the environment gave no reward")
    return Score.of(reward, subject=f"the environment gave {reward:g}")


def environment_reward(config: Config) -> EnvironmentReward:
    return EnvironmentReward()


def environment_driver(config: Config, texts: Texts, limits: Limits, objects: bytes | None = None) -> EnvironmentDriver:
    """`objects`: the calling program's environment and tools."""
    keys = config.actor_rollout_ref.rollout.multi_turn
    if objects is None and GIVEN_IN_PYTHON in (keys.environment, keys.function_tool_path):
        raise ConfigError(
            f"{MULTI_TURN}: the environment or the tools of that run were given to rloom.train and not saved; set "
            f"{MULTI_TURN}.environment=FILE.py:NAME or function_tool_path=FILE"
        )
    named = None if keys.environment in (None, GIVEN_IN_PYTHON) else environment_reference(keys.environment)
    setup = Setup(
        named,
        keys.environment_kwargs,
        limits,
        file_of(keys.function_tool_path),
        file_of(keys.tool_config_path),
        file_of(keys.interaction_config_path),
        objects,
        keys.format,
    )
    pool = EnvironmentPool(setup, keys.max_environments)
    return EnvironmentDriver(pool, pool.load())


def file_of(path: str | None) -> str | None:
    return None if path in (None, GIVEN_IN_PYTHON) else str(expand(path))


@contextmanager
def open_episodes(
    config: Config, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int], objects: bytes | None = None
) -> Iterator[EpisodeRunner | None]:
    """None: answers have one turn. `objects`: what the calling program gave in place of files."""
    kind = episode_kind(config)
    if kind is None:
        yield None
        return
    texts = Texts(
        TurnTemplate(tokenizer, config.actor_rollout_ref.model.custom_chat_template),
        lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True),
        {token: tokenizer.decode([token]) for token in stop_ids},
        lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=False),
        config.actor_rollout_ref.rollout.multi_turn.format,
    )
    limits = limits_of(config)
    given = {} if objects is None else {"objects": objects}
    driver: Driver = referenced(kind.build)(config, texts, limits, **given)
    with closing(EpisodeRunner(driver, texts, limits)) as runner:
        yield runner


def limits_of(config: Config) -> Limits:
    keys = config.actor_rollout_ref.rollout.multi_turn
    return Limits(
        response_tokens=config.data.max_response_length,
        turns=keys.max_assistant_turns,
        user_turns=keys.max_user_turns,
        turn_tokens=keys.max_turn_length,
        result_characters=keys.max_tool_response_length,
        truncate_side=keys.tool_response_truncate_side,
        call_s=keys.tool_timeout_s,
        episode_s=keys.episode_timeout_s,
        parallel_calls=keys.max_parallel_calls,
        tool_error=keys.tool_error,
    )
