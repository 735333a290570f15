"""The environments of a run, from its configuration."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from importlib.util import find_spec

from transformers import PreTrainedTokenizerBase

from rloom.config.schema import Config
from rloom.episodes.base import Limits, Setup
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.runner import EnvironmentDriver, EpisodeRunner
from rloom.episodes.template import TurnTemplate
from rloom.episodes.writer import Texts
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


def environment_reference(name: str) -> str:
    """file.py:name or module:name of an environment, which may be one of rloom's."""
    if ":" in name:
        return name
    module = f"rloom.environments.{name}"
    assert find_spec(module) is not None
    return f"{module}:{''.join(part.capitalize() for part in name.split('_'))}"


def marked_decoder(tokenizer: PreTrainedTokenizerBase, template: str) -> Callable[[Sequence[int]], str]:
    """Text with the special tokens that the chat template writes, such as the marks of a call; without others."""
    added = tokenizer.added_tokens_decoder.items()
    dropped = {number for number, token in added if token.special and token.content not in template}
    return lambda tokens: tokenizer.decode([token for token in tokens if token not in dropped])


def episode_limits(config: Config) -> Limits:
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
        episode_tokens=keys.max_episode_length,
        at_limit=keys.at_limit,
        parallel_calls=keys.max_parallel_calls,
    )


@contextmanager
def open_episodes(
    config: Config, tokenizer: PreTrainedTokenizerBase, stop_ids: Sequence[int]
) -> Iterator[EpisodeRunner | None]:
    """None: the run has answers of one turn."""
    keys = config.actor_rollout_ref.rollout.multi_turn
    if keys.environment is None:
        yield None
        return
    limits = episode_limits(config)
    setup = Setup(environment_reference(keys.environment), keys.environment_kwargs, limits)
    pool = EnvironmentPool(setup, keys.max_environments)
    tools = pool.load()
    template = TurnTemplate(tokenizer, config.actor_rollout_ref.model.custom_chat_template)
    texts = Texts(
        template,
        lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True),
        {token: tokenizer.decode([token]) for token in stop_ids},
        marked_decoder(tokenizer, template.source),
    )
    with closing(EpisodeRunner(EnvironmentDriver(pool, tools), texts, limits)) as runner:
        yield runner
