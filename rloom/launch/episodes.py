"""The environments of a run, from its configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager

from transformers import PreTrainedTokenizerBase

from rloom.config.schema import Config
from rloom.episodes.base import Limits, Setup
from rloom.episodes.kinds import environment_reference, episode_kind
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.runner import Driver, EnvironmentDriver, EpisodeRunner
from rloom.episodes.template import TurnTemplate
from rloom.episodes.writer import Texts
from rloom.launch.rewards import rules
from rloom.plugins import referenced
from rloom.rewards.base import Reward, ScoringUnit
from rloom.types import Sample, SampleGroup, Score


class EnvironmentReward:
    """The reward that the environment or the agent gave, as a part of the mix."""

    unit = ScoringUnit.ANSWER

    def __init__(self, otherwise: Reward | None = None) -> None:
        """`otherwise`: scores the episodes that have none."""
        self.otherwise = otherwise

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        scores = [[score_of(sample) for sample in group] for group in groups]
        if self.otherwise is None:
            return scores
        for group, found in zip(groups, scores, strict=True):
            without = [place for place, sample in enumerate(group) if sample.episode and sample.episode.reward is None]
            if without:
                [further] = await self.otherwise.score([tuple(group[place] for place in without)])
                for place, score in zip(without, further, strict=True):
                    found[place] = score
        return scores

    def check(self) -> None:
        if self.otherwise is not None:
            self.otherwise.check()

    def metrics(self) -> Mapping[str, float]:
        return {} if self.otherwise is None else self.otherwise.metrics()

    def close(self) -> None:
        if self.otherwise is not None:
            self.otherwise.close()


def score_of(sample: Sample) -> Score:
    assert sample.episode is not None
    reward = sample.episode.reward
    if reward is None:
        return Score.failed(
            "the environment gave no reward; return one from get_reward(), step() or the agent, or set another reward, "
            "such as custom_reward_function.path"
        )
    return Score.of(reward, subject=f"the environment gave {reward:g}")


def environment_reward(config: Config) -> EnvironmentReward:
    kind = episode_kind(config)
    return EnvironmentReward(rules(config) if kind is not None and kind.or_rules else None)


def environment_driver(config: Config, texts: Texts, limits: Limits) -> EnvironmentDriver:
    keys = config.actor_rollout_ref.rollout.multi_turn
    assert keys.environment is not None
    setup = Setup(environment_reference(keys.environment), keys.environment_kwargs, limits)
    pool = EnvironmentPool(setup, keys.max_environments)
    return EnvironmentDriver(pool, pool.load())


def marked_decoder(tokenizer: PreTrainedTokenizerBase, template: str) -> Callable[[Sequence[int]], str]:
    """Text with the special tokens that the chat template writes, such as the marks of a call; without others."""
    added = tokenizer.added_tokens_decoder.items()
    dropped = {number for number, token in added if token.special and token.content not in template}
    return lambda tokens: tokenizer.decode([token for token in tokens if token not in dropped])


class SingleTokenTexts(dict[int, str]):
    """The text of single tokens, such as stop tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        super().__init__()
        self.tokenizer = tokenizer

    def __missing__(self, token: int) -> str:
        self[token] = text = str(self.tokenizer.decode([token]))
        return text


@contextmanager
def open_episodes(config: Config, tokenizer: PreTrainedTokenizerBase) -> Iterator[EpisodeRunner | None]:
    """None: answers have one turn."""
    kind = episode_kind(config)
    if kind is None:
        yield None
        return
    template = TurnTemplate(tokenizer, config.actor_rollout_ref.model.custom_chat_template)
    texts = Texts(
        template,
        lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True),
        SingleTokenTexts(tokenizer),
        marked_decoder(tokenizer, template.source),
    )
    limits = limits_of(config)
    driver: Driver = referenced(kind.build)(config, texts, limits)
    with closing(EpisodeRunner(driver, texts, limits)) as runner:
        yield runner


def limits_of(config: Config) -> Limits:
    keys = config.actor_rollout_ref.rollout.multi_turn
    return Limits(
        response_tokens=config.data.max_response_length,
        prompt_tokens=config.data.max_prompt_length,
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
