"""The environments and agents of a run, from its configuration."""

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from rloom.config.base import GIVEN_IN_PYTHON
from rloom.config.derived import reward_parts
from rloom.config.keys import value_at
from rloom.config.load import expand
from rloom.config.schema import Config
from rloom.environments.kinds import MULTI_TURN
from rloom.episodes.agents.process import AgentSetup
from rloom.episodes.base import VERL_RESULT_CHARACTERS, WITHHELD, EnvironmentSetup, EpisodeLimits, ToolSchema
from rloom.episodes.kinds import AGENT, KINDS, ONE_TURN, WITH_TOOLS, environment_reference, episode_kind
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.record import Ending
from rloom.episodes.rows import check_rows
from rloom.episodes.runner import Driver, EnvironmentDriver, EpisodeRunner
from rloom.episodes.template import TurnTemplate
from rloom.episodes.tool_calls import CODE_BLOCK, argument_types
from rloom.episodes.writer import Texts
from rloom.errors import ConfigError, DataError
from rloom.launch.rewards import rules
from rloom.plugins import referenced
from rloom.rewards.base import Reward, ScoringUnit
from rloom.types import Message, Prompt, Sample, SampleGroup, Score

if TYPE_CHECKING:  # it imports uvicorn, which other runs need not load
    from rloom.episodes.agents.driver import AgentDriver, AgentLoopDriver


log = logging.getLogger(__name__)
NO_REWARD = (
    "the environment gave no reward; return one from get_reward(), step() or the agent, or set another reward, such as "
    "custom_reward_function.path"
)


class EnvironmentReward:
    """The reward that the environment or the agent gave, as a part of the mix."""

    unit = ScoringUnit.ANSWER

    def __init__(self, otherwise: Reward | None = None) -> None:
        """`otherwise`: scores the episodes that have none."""
        self.otherwise = otherwise
        self.has_said = False  # which reward scores

    async def score(self, groups: Sequence[SampleGroup]) -> list[list[Score]]:
        scores = [[score_of(sample) for sample in group] for group in groups]
        if self.otherwise is None:
            return scores
        for group, found in zip(groups, scores, strict=True):
            without = [place for place, sample in enumerate(group) if sample.episode and sample.episode.reward is None]
            if without:
                scored = tuple(group[place] for place in without)
                self.say_rules(scored)
                [further] = await self.otherwise.score([scored])
                for place, score in zip(without, further, strict=True):
                    found[place] = score
        return scores

    def say_rules(self, samples: SampleGroup) -> None:
        """Not for episodes that failed: they have no score."""
        ended = any(one.episode is not None and one.episode.info["ending"] == Ending.DONE.value for one in samples)
        if ended and not self.has_said:
            self.has_said = True
            log.warning(
                "Note: the rule of the data source scores the episodes that have no reward of their own. "
                "agent/without_reward counts those of your agents"
            )

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
        return Score.failed(sample.episode.no_reward or NO_REWARD)
    return Score.of(reward, subject=f"the environment gave {reward:g}")


def environment_reward(config: Config) -> EnvironmentReward:
    kind = episode_kind(config)
    return EnvironmentReward(rules(config) if kind is not None and kind.or_rules else None)


def environment_driver(
    config: Config, texts: Texts, limits: EpisodeLimits, objects: bytes | None = None
) -> EnvironmentDriver:
    """`objects`: the calling program's environment and tools."""
    keys = config.actor_rollout_ref.rollout.multi_turn
    if objects is None and GIVEN_IN_PYTHON in (keys.environment, keys.function_tool_path):
        raise ConfigError(
            f"{MULTI_TURN}: the environment or the tools of that run were given to rloom.train and not saved; set "
            f"{MULTI_TURN}.environment=FILE.py:NAME or function_tool_path=FILE"
        )
    named = None if keys.environment in (None, GIVEN_IN_PYTHON) else environment_reference(keys.environment)
    setup = EnvironmentSetup(
        named,
        keys.environment_kwargs,
        limits,
        file_of(keys.function_tool_path),
        file_of(keys.tool_config_path),
        file_of(keys.interaction_config_path),
        objects,
        keys.format,
        name=None if named is None else keys.environment,
        withheld=withheld(config),
    )
    pool = EnvironmentPool(setup, keys.max_environments)
    tools = pool.load()
    if keys.format == CODE_BLOCK:
        check_block_tools(pool, tools)
    warn_of_unwritten_tools(texts.template, tools)
    return EnvironmentDriver(pool, tools)


def check_block_tools(pool: EnvironmentPool, tools: Sequence[ToolSchema]) -> None:
    for name, arguments in argument_types(tools).items():
        if len(arguments) != 1:
            pool.close()
            raise ConfigError(
                f"{MULTI_TURN}.format={CODE_BLOCK}: the tool {name} has {len(arguments)} arguments, and a block of "
                "code is one; give it one argument, or use another format"
            )


def warn_of_unwritten_tools(template: TurnTemplate, tools: Sequence[ToolSchema]) -> None:
    question: list[Message] = [{"role": "user", "content": "?"}]
    if tools and template.render(question, tools) == template.render(question):
        names = ", ".join(str(tool["function"]["name"]) for tool in tools)
        log.warning(
            f"Note: the chat template does not write the list of tools ({names}): the policy is not told of them. "
            "Describe them in the prompts, or set actor_rollout_ref.model.custom_chat_template to one that does"
        )


def withheld(config: Config) -> tuple[str, ...]:
    """Variables that a user's code does not get: those with rloom's own keys, and those that the configuration names
    for a judge or a server."""
    rewards, server = config.reward_model, config.actor_rollout_ref.rollout.server
    named = (rewards.api.api_key_env, rewards.remote.token_env, server.key_env)
    return (*WITHHELD, *(name for name in named if name is not None))


def check_loaded_code(config: Config, driver: EnvironmentDriver, rows: Mapping[str, Sequence[Prompt]]) -> None:
    names = driver.pool.names
    if names.without_reward and any(part.kind.by_turns for part in reward_parts(config)):
        which = f" ({', '.join(names.without_reward)})" if any(names.without_reward) else ""
        raise ConfigError(
            f"{turns_source(config)}: it gives no reward{which}, and the episodes are scored by it; write "
            "get_reward(), set custom_reward_function.path, or score by the rules of the data: "
            "reward_model.composite.enable=True +reward_model.composite.weights.rule_score=1"
        )
    check_rows(names, rows)


def turns_source(config: Config) -> str:
    keys = [*KINDS["environment"].keys, *KINDS["tools"].keys]
    return ", ".join(f"{key}={value}" for key in keys if (value := value_at(config, key)) is not None)


def file_of(path: str | None) -> str | None:
    return None if path in (None, GIVEN_IN_PYTHON) else str(expand(path))


def agent_driver(config: Config, texts: Texts, limits: EpisodeLimits) -> "AgentDriver":
    keys = config.actor_rollout_ref.rollout.agent
    setup = AgentSetup(
        path=keys.path,
        command=keys.command,
        kwargs=keys.kwargs,
        rewards_over_http=keys.rewards_over_http,
        config=verl_config(config),
        tokenizer=pickled_tokenizer(texts),
        withheld=withheld(config),
    )
    return opened(config, texts, setup)


def agent_loop_driver(config: Config, texts: Texts, limits: EpisodeLimits) -> "AgentLoopDriver":
    from rloom.episodes.agents.driver import AgentLoopDriver, OneTurnDriver

    keys = config.actor_rollout_ref.rollout.agent
    default = keys.default_agent_loop
    listed = [] if keys.agent_loop_config_path is None else [str(expand(keys.agent_loop_config_path))]
    named = [default] if default is not None and ":" in default else []
    agents = None
    if listed or named:
        loops, own_config = (*listed, *named), verl_config(config)
        tokenizer = pickled_tokenizer(texts)
        setup = AgentSetup(loops=loops, config=own_config, tokenizer=tokenizer, withheld=withheld(config))
        agents = opened(config, texts, setup)
    own: dict[str, Driver] = dict.fromkeys((ONE_TURN, WITH_TOOLS), OneTurnDriver())
    if has_tools := KINDS["tools"].is_set(config):
        own[WITH_TOOLS] = referenced(KINDS["tools"].build)(config, texts, limits)
    default = default or (WITH_TOOLS if has_tools else ONE_TURN)
    driver = AgentLoopDriver(agents, own, default)
    if default not in driver.names:
        driver.close()
        raise ConfigError(
            f"{AGENT}.default_agent_loop={default}: there is no such agent loop; there are "
            f"{', '.join(driver.names)}. List yours in agent_loop_config_path, or name its class as file.py:name"
        )
    return driver


def check_agent_names(config: Config, driver: "AgentLoopDriver", rows: Mapping[str, Sequence[Prompt]]) -> None:
    """The column `agent_name` of each row, and what the rows of tool_agent name of the tools."""
    tools = driver.own.get(WITH_TOOLS)
    for key, prompts in rows.items():
        for prompt in prompts:
            name = prompt.columns.get("agent_name")
            if name and name not in driver.names:
                raise DataError(
                    f"{key}, row {prompt.index} (counting from 0): the row has agent_name={name!r}; the agent loops "
                    f"are {', '.join(driver.names)}. List yours in {AGENT}.agent_loop_config_path"
                )
            if (name or driver.default) == WITH_TOOLS and isinstance(tools, EnvironmentDriver):
                check_rows(tools.pool.names, {key: [prompt]})


def opened(config: Config, texts: Texts, setup: AgentSetup) -> "AgentDriver":
    from rloom.episodes.agents.driver import AgentDriver

    pool = EnvironmentPool(setup, config.actor_rollout_ref.rollout.multi_turn.max_environments)
    found = pool.loaded()
    tokenizer = tokenizer_of(texts)
    return AgentDriver(
        pool,
        by_url=found["by_url"],
        vocabulary=max(tokenizer.get_vocab().values()) + 1,
        max_prompt=config.data.max_prompt_length,
        port=config.actor_rollout_ref.rollout.agent.port,
        loops=tuple(found["loops"]),
    )


def tokenizer_of(texts: Texts) -> PreTrainedTokenizerBase:
    tokenizer = texts.template.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def pickled_tokenizer(texts: Texts) -> bytes:
    return pickle.dumps(tokenizer_of(texts))


def verl_config(config: Config) -> dict[str, Any]:
    """The configuration as agent loops read it, with verl's names."""
    found = config.model_dump(mode="json")
    rollout, data = found["actor_rollout_ref"]["rollout"], found["data"]
    rollout |= {
        "prompt_length": config.data.max_prompt_length,
        "response_length": config.data.max_response_length,
        "calculate_log_probs": True,
    }
    if rollout["multi_turn"]["max_tool_response_length"] is None:  # verl's loops compare it with a length
        rollout["multi_turn"]["max_tool_response_length"] = VERL_RESULT_CHARACTERS
    data["tool_config_path"] = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    return found


def special_texts(tokenizer: PreTrainedTokenizerBase) -> frozenset[str]:
    """Of tokens that mark turns. Tags such as <think> are tokens of some models, too, which any text may have."""
    return frozenset(token.content for token in tokenizer.added_tokens_decoder.values() if token.special)


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
def open_episodes(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    objects: bytes | None = None,
    rows: Mapping[str, Sequence[Prompt]] | None = None,
) -> Iterator[EpisodeRunner | None]:
    """None: answers have one turn. `objects`: what the calling program gave in place of files; `rows`: the data by
    their key."""
    kind = episode_kind(config)
    if kind is None:
        yield None
        return
    template = TurnTemplate(
        tokenizer,
        special_texts=special_texts(tokenizer),
        call_format=config.actor_rollout_ref.rollout.multi_turn.format,
    )
    texts = Texts(
        template,
        lambda tokens: tokenizer.decode(list(tokens), skip_special_tokens=True),
        SingleTokenTexts(tokenizer),
        marked_decoder(tokenizer, template.source),
    )
    limits = limits_of(config)
    given = {} if objects is None else {"objects": objects}
    driver: Driver = referenced(kind.build)(config, texts, limits, **given)
    with closing(EpisodeRunner(driver, texts, limits)) as runner:
        if rows is not None and kind.check_loaded is not None:
            referenced(kind.check_loaded)(config, driver, rows)
        yield runner


def limits_of(config: Config) -> EpisodeLimits:
    keys = config.actor_rollout_ref.rollout.multi_turn
    return EpisodeLimits(
        response_tokens=config.data.max_response_length,
        prompt_tokens=config.data.max_prompt_length,
        total_tokens=config.data.max_length,
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
        tool_error=keys.tool_error,
    )
