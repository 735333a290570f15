"""Tools of real MCP servers: a program, and one at a URL."""

import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import yaml

from rloom.episodes.base import EnvironmentSetup, EpisodeLimits
from rloom.episodes.pool import EnvironmentPool
from rloom.errors import ConfigError
from tests.unit.episodes.test_contracts import call, episodes, written
from tests.waiting import wait_until

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="mcp is not installed")  # an import takes seconds
LIMITS = EpisodeLimits(400, turns=8, call_s=60, result_characters=100, parallel_calls=3)  # each starts a program
SERVER = '''
    import sys
    from mcp.server.mcpserver import MCPServer

    server = MCPServer("numbers")
    total = 0

    @server.tool()
    def add(number: int) -> str:
        """Add to the total."""
        global total
        total += number
        return str(total)

    @server.tool()
    def fail() -> str:
        """Fail."""
        raise ValueError("no such number")

    @server.tool()
    async def wait() -> str:
        """Wait."""
        import asyncio
        await asyncio.sleep(60)

    if sys.argv[1:]:
        server.run("streamable-http", port=int(sys.argv[1]))
    else:
        server.run()
'''


def config_of(folder, servers, selected=None) -> str:
    """verl's form."""
    written(folder, "servers.json", json.dumps({"mcpServers": servers}))
    mcp = {"mcp_servers_config_path": "./servers.json", "tool_selected_list": selected}
    entry = {"class_name": "verl.tools.mcp_search_tool.MCPSearchTool", "config": {"type": "mcp"}, "mcp": mcp}
    return written(folder, "tools.yaml", yaml.safe_dump({"tools": [entry]}))


def test_the_tools_of_a_program_are_called_in_a_program_for_each_episode(tmp_path):
    file = written(tmp_path, "server.py", SERVER)
    path = config_of(tmp_path, {"numbers": {"command": sys.executable, "args": [file]}})
    with episodes(EnvironmentSetup(None, {}, LIMITS, tool_config_path=path)) as (open_one, names):
        assert names == ["add", "fail", "wait"]
        first, second = open_one(), open_one()
        first.begin()
        second.begin()
        assert first.results(call("add", number=1) + call("add", number=2)) == ["1", "3"]
        assert second.results(call("add", number=5)) == ["5"]
        assert "Error executing tool fail" in first.results(call("fail"))[0]
        assert first.results(call("add", number="x"))[0].startswith("Error: ")
        assert first.end() is None


@pytest.mark.long
def test_a_call_that_waits_ends_at_its_limit_and_the_server_lives_on(tmp_path):
    file = written(tmp_path, "server.py", SERVER)
    servers = json.dumps({"mcpServers": {"numbers": {"command": sys.executable, "args": [file]}}})
    path = written(tmp_path, "servers.json", servers)
    with episodes(EnvironmentSetup(None, {}, EpisodeLimits(400, call_s=15), tool_config_path=path)) as (open_one, _):
        episode = open_one()
        episode.begin()
        assert episode.results(call("add", number=1)) == ["1"]
        assert episode.act(call("wait")).calls[0].error.startswith("CallTimeout")
        assert episode.results(call("add", number=1)) == ["2"]


def port_in(log):
    """The one that the server has chosen, once it answers there."""
    found = re.search(r"running on http://127\.0\.0\.1:(\d+)", log)
    return found and int(found[1])


def test_the_tools_of_a_url_are_called_and_one_that_it_lacks_is_refused(tmp_path):
    file, log = written(tmp_path, "server.py", SERVER), tmp_path / "log"
    with log.open("w") as errors, subprocess.Popen([sys.executable, file, "0"], stderr=errors) as server:
        try:
            wait_until(lambda: port_in(log.read_text()), 240)
            port = port_in(log.read_text())
            path = config_of(tmp_path, {"numbers": {"url": f"http://127.0.0.1:{port}/mcp"}}, ["add"])
            with episodes(EnvironmentSetup(None, {}, LIMITS, tool_config_path=path)) as (open_one, names):
                assert names == ["add"]
                episode = open_one()
                episode.begin()
                assert episode.results(call("add", number=4)) == ["4"]
                assert "there is no tool 'fail'" in episode.results(call("fail"))[0]
                episode.end()
            refuse(config_of(tmp_path, {"numbers": {"url": f"http://127.0.0.1:{port}/mcp"}}, ["sub"]), "list has sub")
        finally:
            server.kill()


def refuse(path, reason):
    pool = EnvironmentPool(EnvironmentSetup(None, {}, LIMITS, tool_config_path=path), most=1)
    with pytest.raises(ConfigError, match=reason):
        pool.load()


def test_a_server_that_does_not_start_is_refused(tmp_path):
    broken = {"broken": {"command": sys.executable, "args": ["-c", "exit(3)"]}}
    refuse(config_of(tmp_path, broken), "the MCP server broken does not answer")
    refuse(config_of(tmp_path, {"empty": {}}), "no `command` and no `url`")
