"""What of a long result or observation the policy reads."""

import asyncio
import textwrap
from dataclasses import replace
from typing import Any

import pytest

from rloom.episodes.base import EnvironmentSetup, EpisodeLimits, Observation, cut
from rloom.episodes.contracts.calls import UserCalls
from rloom.episodes.contracts.mcp_servers import McpServer, McpTools, servers_of_entry
from rloom.episodes.contracts.table import UserCode
from rloom.episodes.contracts.text import ConversationEnvironment, TextEnvironment
from rloom.episodes.contracts.verl import Interaction
from rloom.episodes.record import Ending
from rloom.episodes.runner import EnvironmentDriver, LimitReached
from rloom.launch.episodes import limits_of, verl_config
from tests.helpers import configured
from tests.unit.episodes.test_contracts import episodes
from tests.unit.episodes.test_limits import ScriptedTurns, running
from tests.unit.episodes.test_tools import call

QUESTION = [{"role": "user", "content": "Go."}]
LONG = "d" * 2000
CUT = "d" * 128 + "...(truncated)..." + "d" * 128
DEFAULT = limits_of(configured())
GIVEN = replace(DEFAULT, result_characters=256)


class SkyRl:
    def init(self, prompt):
        return [*prompt, {"role": "user", "content": LONG}], {}

    def step(self, text):
        return {"observations": [{"role": "user", "content": LONG}], "reward": 0.0, "done": False}


class Gym:
    def reset(self, **row):
        return LONG

    def step(self, text):
        return LONG, 0.0, False


class Reader:
    def read(self) -> str:
        """Read."""
        return LONG

    def get_reward(self) -> float:
        return 1.0


class User:
    async def start_interaction(self, instance, **kwargs):
        return instance

    async def generate_response(self, instance, messages, **kwargs):
        return False, LONG, 0.0, {}


@pytest.mark.parametrize("limits", [DEFAULT, GIVEN])
def test_observations_and_replies_in_place_of_a_user_are_never_cut(limits: EpisodeLimits) -> None:
    for environment in (ConversationEnvironment(SkyRl(), limits), TextEnvironment(Gym(), limits)):
        assert environment.begin({}, QUESTION)[-1]["content"].endswith(LONG)
        assert environment.act("x").messages[0]["content"] == LONG
    user, calls = Interaction({"a": User()}), UserCalls(5)
    user.begin(calls, {})
    assert user.answer(calls, []).messages[0]["content"] == LONG
    calls.close()


def result(code: UserCode, name: str = "read") -> str:
    environment = code.environment({}, seed=0)
    environment.begin({}, QUESTION)
    seen = environment.act(call(name))
    environment.close()
    return str(seen.messages[0]["content"])


def test_results_of_a_class_with_tools_are_cut_if_the_key_is_set() -> None:
    assert result(UserCode(DEFAULT, Reader)) == LONG
    assert result(UserCode(GIVEN, Reader)) == CUT
    assert result(UserCode(replace(GIVEN, result_characters=4), Reader)) == "dd...(truncated)...dd"


def test_results_of_verls_tools_have_verls_default(tmp_path: Any) -> None:
    (tmp_path / "functions.py").write_text(
        textwrap.dedent(
            """
            from verl.tools.function_tool import function_tool

            @function_tool
            def read() -> str:
                "Read."
                return "d" * 2000
            """
        )
    )
    (tmp_path / "tools.py").write_text(
        textwrap.dedent(
            """
            from verl.tools.base_tool import BaseTool
            from verl.tools.schemas import ToolResponse

            class Reads(BaseTool):
                async def execute(self, instance_id, parameters, **kwargs):
                    return ToolResponse(text="d" * 2000), None, {}
            """
        )
    )
    schema = "{type: function, function: {name: read, description: Read., parameters: {type: object, properties: {}}}}"
    (tmp_path / "tools.yaml").write_text(f"tools:\n- class_name: tools.py:Reads\n  tool_schema: {schema}\n")
    given = (
        {"function_tool_path": str(tmp_path / "functions.py")},
        {"tool_config_path": str(tmp_path / "tools.yaml")},
    )
    for one in given:
        with episodes(EnvironmentSetup(None, {}, DEFAULT, **one)) as (open_one, _):
            episode = open_one()
            episode.begin()
            assert episode.results(call("read")) == [CUT]


def test_results_of_an_mcp_server_in_verls_file_have_verls_default(tmp_path: Any, monkeypatch: Any) -> None:
    (tmp_path / "servers.json").write_text('{"mcpServers": {"s": {"command": "x"}}}')
    schema = {"type": "function", "function": {"name": "read"}}
    monkeypatch.setattr("rloom.episodes.contracts.mcp_servers.listed_tools", lambda *_: [schema])
    entry = {"config": {"type": "mcp"}, "mcp": {"mcp_servers_config_path": str(tmp_path / "servers.json")}}
    [server] = servers_of_entry("key", str(tmp_path / "tools.yaml"), entry)
    [tool] = McpTools(server).tools()
    assert tool.result_characters == 256
    [tool] = McpTools(McpServer("s", {}, (schema,))).tools()
    assert tool.result_characters is None


def test_verls_loops_read_a_number() -> None:
    key = "actor_rollout_ref.rollout.multi_turn.max_tool_response_length"
    for given, expected in (([], 256), ([f"{key}=512"], 512)):
        found = verl_config(configured(*given))["actor_rollout_ref"]["rollout"]["multi_turn"]
        assert found["max_tool_response_length"] == expected


def test_an_observation_that_no_tokens_can_hold_ends_the_episode_and_is_not_encoded() -> None:
    run = running(ScriptedTurns(lambda prompt: "7"), EpisodeLimits(50))

    class Environment:
        tools = None

        async def begin(self, *given):
            return tuple(QUESTION)

        async def act(self, *given):
            return Observation(({"role": "user", "content": "d" * 7_000_000},), reward=0.25)

    run.writer.add = lambda *given, **more: pytest.fail("it is encoded")
    with pytest.raises(LimitReached) as reached:
        asyncio.run(EnvironmentDriver(None, ()).converse(run, Environment()))
    assert reached.value.ending is Ending.TOKENS and run.rewards == [0.25]


def test_one_character_of_the_middle_is_none() -> None:
    assert cut("abcdefgh", 1, "middle") == "...(truncated)..."
    assert cut("abcdefgh", 3, "middle") == "a...(truncated)...h"
    assert cut("abcdefgh", 1, "left") == "a...(truncated)"
