"""The user's agent, loaded in the process that the others are forked from."""

import asyncio
import os
import sys
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any

from rloom.episodes.agents.by_tokens import load_executor, load_loops
from rloom.episodes.agents.process import (
    PATH_KEY,
    AgentSetup,
    LoadedAgent,
    by_url_function,
    by_url_program,
    without_proxy,
)
from rloom.errors import ConfigError
from rloom.plugins import load_plugin

# a port on which nothing listens
ADDRESS: Mapping[str, Any] = {"base_url": "http://127.0.0.1:1", "api_key": "-", "max_retries": 0}
QUESTION: Mapping[str, Any] = {"model": "policy", "messages": [{"role": "user", "content": ""}]}


def load_agent(setup: AgentSetup) -> LoadedAgent:
    os.environ.update(without_proxy(os.environ))  # before the file is imported: a client may be made there
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
    agent = LoadedAgent(by_url_function(setup, found), by_url=True)
    load_clients()
    return agent


def load_clients() -> None:
    """SDKs import most of their modules with the first request, 0.2 s of work, which each forked process would do."""
    for name, ask in ASK.items():
        if (sdk := sys.modules.get(name)) is not None:
            with suppress(Exception):  # of another version: its modules are imported later
                asyncio.run(ask(sdk))


async def ask_openai(sdk: Any) -> None:
    client = sdk.OpenAI(http_client=sdk.DefaultHttpxClient(trust_env=False), **ADDRESS)
    with client, suppress(sdk.APIConnectionError):
        client.chat.completions.create(**QUESTION)
    async with sdk.AsyncOpenAI(http_client=sdk.DefaultAsyncHttpxClient(trust_env=False), **ADDRESS) as client:
        with suppress(sdk.APIConnectionError):
            await client.chat.completions.create(**QUESTION)
        with suppress(sdk.APIConnectionError):
            await client.responses.create(model="policy", input="")


async def ask_anthropic(sdk: Any) -> None:
    client = sdk.Anthropic(http_client=sdk.DefaultHttpxClient(trust_env=False), **ADDRESS)
    with client, suppress(sdk.APIConnectionError):
        client.messages.create(max_tokens=1, **QUESTION)
    async with sdk.AsyncAnthropic(http_client=sdk.DefaultAsyncHttpxClient(trust_env=False), **ADDRESS) as client:
        with suppress(sdk.APIConnectionError):
            await client.messages.create(max_tokens=1, **QUESTION)


ASK: Mapping[str, Callable[[Any], Coroutine[Any, Any, None]]] = {"openai": ask_openai, "anthropic": ask_anthropic}
