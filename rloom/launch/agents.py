"""The agents of a run, from its configuration."""

import pickle
from typing import Any

from transformers import PreTrainedTokenizerBase

from rloom.config.load import expand
from rloom.config.schema import Config
from rloom.episodes.agents.driver import AgentDriver, AgentLoopDriver, OneTurnDriver
from rloom.episodes.agents.process import AgentSetup
from rloom.episodes.base import Limits
from rloom.episodes.kinds import KINDS, ONE_TURN, WITH_TOOLS
from rloom.episodes.pool import EnvironmentPool
from rloom.episodes.runner import Driver
from rloom.episodes.writer import Texts
from rloom.errors import ConfigError
from rloom.plugins import referenced


def agent_driver(config: Config, texts: Texts, limits: Limits) -> AgentDriver:
    keys = config.actor_rollout_ref.rollout.agent
    setup = AgentSetup(
        path=keys.path,
        command=keys.command,
        kwargs=keys.kwargs,
        config=verl_config(config),
        tokenizer=pickled_tokenizer(texts),
    )
    return opened(config, texts, setup)


def agent_loop_driver(config: Config, texts: Texts, limits: Limits) -> AgentLoopDriver:
    keys = config.actor_rollout_ref.rollout.agent
    default = keys.default_agent_loop
    listed = [] if keys.agent_loop_config_path is None else [str(expand(keys.agent_loop_config_path))]
    named = [default] if default is not None and ":" in default else []
    agents = None
    if listed or named:
        loops, own_config = (*listed, *named), verl_config(config)
        setup = AgentSetup(loops=loops, config=own_config, tokenizer=pickled_tokenizer(texts))
        agents = opened(config, texts, setup)
    own: dict[str, Driver] = dict.fromkeys((ONE_TURN, WITH_TOOLS), OneTurnDriver())
    if has_tools := KINDS["tools"].is_set(config):
        own[WITH_TOOLS] = referenced(KINDS["tools"].build)(config, texts, limits)
    default = default or (WITH_TOOLS if has_tools else ONE_TURN)
    known = [*own, *(() if agents is None else agents.loops)]
    driver = AgentLoopDriver(agents, own, default)
    if default not in known:
        driver.close()
        raise ConfigError(
            f"actor_rollout_ref.rollout.agent.default_agent_loop={default}: there is no such agent loop; there are "
            f"{', '.join(known)}. List yours in agent_loop_config_path, or name its class as file.py:name"
        )
    return driver


def opened(config: Config, texts: Texts, setup: AgentSetup) -> AgentDriver:
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
    """With the chat template that the run uses."""
    tokenizer = pickle.loads(pickle.dumps(tokenizer_of(texts)))
    if texts.template.custom_chat_template is not None:
        tokenizer.chat_template = texts.template.custom_chat_template
    return pickle.dumps(tokenizer)


def verl_config(config: Config) -> dict[str, Any]:
    """The configuration as agent loops read it, with verl's names."""
    found = config.model_dump(mode="json")
    rollout, data = found["actor_rollout_ref"]["rollout"], found["data"]
    rollout |= {
        "prompt_length": config.data.max_prompt_length,
        "response_length": config.data.max_response_length,
        "calculate_log_probs": True,
    }
    data.setdefault("apply_chat_template_kwargs", {})
    data["tool_config_path"] = config.actor_rollout_ref.rollout.multi_turn.tool_config_path
    return found
