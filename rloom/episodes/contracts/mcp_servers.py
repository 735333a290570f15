"""Tools of MCP servers: programs that speak MCP on their standard input and output, or servers at a URL."""

import asyncio
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from rloom.episodes.base import VERL_RESULT_CHARACTERS, ToolSchema
from rloom.episodes.contracts.calls import NO_IMAGES, ToolResult, UserCalls
from rloom.episodes.contracts.tools import Tool, Toolset
from rloom.errors import ConfigError
from rloom.extras import install_command
from rloom.plugins import type_and_message

START_LIMIT_S = 60.0  # of a server, while the run starts


@dataclass(frozen=True)
class McpServer:
    """One server, its tools, and the time limit of one call (null: that of all tools)."""

    name: str
    settings: Mapping[str, Any]  # {"command", "args", "env", "cwd"} or {"url", "headers"}
    tools: tuple[ToolSchema, ...]
    timeout_s: float | None = None
    result_characters: int | None = None  # of one result, where the limits have none


def servers_of_entry(key: str, path: str, entry: Mapping[str, Any]) -> list[McpServer]:
    """Those that an entry of a YAML file with `type: mcp` names."""
    keys = entry.get("mcp") or {}
    place = keys.get("mcp_servers_config_path")
    if place is None:
        raise ConfigError(f"{key}={path}: an entry of type mcp needs mcp.mcp_servers_config_path, a JSON file")
    files = [Path(place).expanduser(), Path(path).expanduser().parent / place]
    file = next((one for one in files if one.is_file()), files[0])
    timeout_s = (entry.get("config") or {}).get("timeout")
    servers = servers_of_file(f"{key}={path}", str(file), keys.get("tool_selected_list"), timeout_s)
    return [replace(server, result_characters=VERL_RESULT_CHARACTERS) for server in servers]


def servers_of_file(
    key: str, path: str, selected: Sequence[str] | None = None, timeout_s: float | None = None
) -> list[McpServer]:
    """From the common form {"mcpServers": {name: {"command", "args", "env"} or {"url", "headers"}}}."""
    try:
        found = json.loads(Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{key}: {path} cannot be read ({type_and_message(error)}); name a JSON file") from error
    listed = found.get("mcpServers") if isinstance(found, dict) else None
    if not isinstance(listed, dict) or not listed:
        raise ConfigError(f'{key}: write {{"mcpServers": {{"NAME": {{"command": ..., "args": [...]}}}}}} in {path}')
    servers = []
    for name, settings in listed.items():
        if not isinstance(settings, dict) or not ("command" in settings or "url" in settings):
            raise ConfigError(f"{key}: the server {name} in {path} has no `command` and no `url`; write one of them")
        tools = [tool for tool in listed_tools(key, name, settings) if selected is None or name_of(tool) in selected]
        servers.append(McpServer(name, settings, tuple(tools), timeout_s))
    missing = set(selected or ()) - {name_of(tool) for server in servers for tool in server.tools}
    if missing:
        raise ConfigError(f"{key}: tool_selected_list has {sorted(missing)[0]}, which no server of {path} offers")
    return servers


def name_of(tool: ToolSchema) -> str:
    return str(tool["function"]["name"])


def listed_tools(key: str, name: str, settings: Mapping[str, Any]) -> list[ToolSchema]:
    """Connect once and ask for them."""

    async def ask() -> list[ToolSchema]:
        async with asyncio.timeout(START_LIMIT_S), client_of(settings, sys.stderr) as client:
            return [openai_schema(tool) for tool in (await client.list_tools()).tools]

    try:
        return asyncio.run(ask())
    except ImportError as error:
        raise ConfigError(f"{key}: tools of MCP servers need the package mcp: {install_command('mcp')}") from error
    except BaseException as error:  # anyio raises groups of errors
        reason = type_and_message(first_error(error))
        raise ConfigError(
            f"{key}: the MCP server {name} does not answer ({reason}); start it by hand to see why"
        ) from error


def first_error(error: BaseException) -> Exception:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error if isinstance(error, Exception) else RuntimeError(str(error))


def openai_schema(tool: Any) -> ToolSchema:
    function = {"name": tool.name, "description": tool.description or "", "parameters": tool.input_schema}
    return {"type": "function", "function": function}


def client_of(settings: Mapping[str, Any], errors: IO[str]) -> AbstractAsyncContextManager[Any]:
    """`errors`: where a program's standard error goes."""
    from mcp import Client, StdioServerParameters
    from mcp.client.stdio import stdio_client
    from mcp.client.streamable_http import create_mcp_http_client, streamable_http_client

    if "command" in settings:
        own = {name: settings[name] for name in ("command", "args", "env", "cwd") if settings.get(name) is not None}
        found: AbstractAsyncContextManager[Any] = Client(stdio_client(StdioServerParameters(**own), errlog=errors))
        return found
    headers = dict(settings.get("headers") or {})
    if "auth_token" in settings:  # as verl writes it
        headers["Authorization"] = f"Bearer {settings['auth_token']}"
    at_url: AbstractAsyncContextManager[Any] = Client(
        streamable_http_client(settings["url"], http_client=create_mcp_http_client(headers=headers))
    )
    return at_url


class McpTools(Toolset):
    """The tools of one server. An episode that calls one has a connection of its own, and with it a program of its own,
    from the first call to the end."""

    def __init__(self, server: McpServer) -> None:
        self.server = server
        self.client: asyncio.Future[Any] | None = None
        self.done = asyncio.Event()
        self.keeper: asyncio.Task[None] | None = None

    def tools(self) -> Sequence[Tool]:
        return [
            Tool(schema, self.caller(name_of(schema)), read_result, result_characters=self.server.result_characters)
            for schema in self.server.tools
        ]

    def caller(self, name: str) -> Callable[..., Any]:
        async def call(**arguments: Any) -> Any:
            client = await self.connected()
            return await client.call_tool(name, arguments, read_timeout_seconds=self.server.timeout_s)

        return call

    async def connected(self) -> Any:
        if self.client is None:
            loop = asyncio.get_running_loop()
            self.client = loop.create_future()
            self.keeper = loop.create_task(self.keep(self.client))
        return await asyncio.shield(self.client)

    async def keep(self, ready: "asyncio.Future[Any]") -> None:
        """The connection has to be closed by the task that opened it."""
        try:
            with open(os.devnull, "w") as errors:
                async with client_of(self.server.settings, errors) as client:
                    ready.set_result(client)
                    await self.done.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(first_error(error))

    def close(self, calls: UserCalls) -> None:
        if self.keeper is not None:
            calls(self.finish, self.keeper)

    async def finish(self, keeper: "asyncio.Task[None]") -> None:
        self.done.set()
        await keeper


def read_result(found: Any) -> ToolResult:
    if any(block.type != "text" for block in found.content):
        raise ValueError(NO_IMAGES)
    text = "\n".join(block.text for block in found.content)
    if found.is_error:
        raise RuntimeError(text)
    return ToolResult(text)
