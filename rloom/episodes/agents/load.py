"""The user's agent, loaded in the process that the others are forked from."""

from rloom.episodes.agents.by_tokens import load_executor, load_loops
from rloom.episodes.agents.process import PATH_KEY, AgentSetup, LoadedAgent, by_url_function, by_url_program
from rloom.errors import ConfigError
from rloom.plugins import load_plugin


def load_agent(setup: AgentSetup) -> LoadedAgent:
    if setup.command is not None:
        return LoadedAgent(by_url_program(setup.command, setup.rewards_over_http), by_url=True)
    if setup.loops:
        return load_loops(setup)
    assert setup.path is not None
    found = load_plugin(PATH_KEY, setup.path)
    if not callable(found):
        kind = type(found).__name__
        raise ConfigError(f"{PATH_KEY}={setup.path} is a {kind}; use a function of (base_url, row), or a class")
    if (by_tokens := load_executor(setup, found)) is not None:
        return by_tokens
    return LoadedAgent(by_url_function(setup, found), by_url=True)
