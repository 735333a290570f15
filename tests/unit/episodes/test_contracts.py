"""Contracts of other systems: files as their users write them, in real environment processes."""

import json
import textwrap
import time
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloom.episodes.base import EnvironmentSetup, EpisodeLimits
from rloom.episodes.contracts.table import UserCode
from rloom.episodes.pool import EnvironmentPool, RunningEnvironment
from rloom.episodes.replies import EnvironmentFailed
from rloom.errors import ConfigError
from rloom.net.loop import EventLoop

LIMITS = EpisodeLimits(400, turns=8, call_s=20, result_characters=100, parallel_calls=3)
QUESTION = [{"role": "user", "content": "Go."}]


class Episode:
    """One episode of a pool, without a policy."""

    def __init__(self, loop: EventLoop, context: AbstractAsyncContextManager[RunningEnvironment]) -> None:
        self.loop, self.context = loop, context
        self.running = loop.run(context.__aenter__())
        self.closed = False

    def begin(self, **row: Any) -> list[str]:
        return [message["content"] for message in self.loop.run(self.running.begin(row, QUESTION, 0))]

    def act(self, text: str, marked: str | None = None):
        return self.loop.run(self.running.act(text, marked))

    def results(self, text: str) -> list[str]:
        return [message["content"] for message in self.act(text).messages]

    def end(self) -> float | None:
        """The reward. After it, the process closes the environment and ends."""
        reward = self.loop.run(self.running.end())
        self.close()
        return reward

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.loop.run(self.context.__aexit__(None, None, None))

    @property
    def tools(self) -> list[str] | None:
        return None if self.running.tools is None else [tool["function"]["name"] for tool in self.running.tools]


@contextmanager
def episodes(setup: EnvironmentSetup):
    """A function that opens an episode, and the names of the tools."""
    pool, loop, opened = EnvironmentPool(setup, most=8), EventLoop("test"), []
    try:
        names = [tool["function"]["name"] for tool in pool.load()]

        def open_one() -> Episode:
            opened.append(Episode(loop, pool.episode()))
            return opened[-1]

        yield open_one, names
    finally:
        for episode in opened:
            episode.close()
        loop.close()
        pool.close()


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def written(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(textwrap.dedent(text))
    return str(file)


FUNCTION_TOOLS = '''
    import asyncio, time
    from verl.tools.function_tool import function_tool
    from verl.tools.schemas import ToolResponse

    met = 0

    @function_tool
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One number.
            b: The other.
        """
        return a + b

    @function_tool("look_up")
    async def lookup(word: str):
        """Look a word up.

        Args:
            word: The word.
        """
        if word == "wait":
            await asyncio.sleep(60)
        if word == "meet":  # waits for another call
            global met
            met += 1
            while met < 2:
                await asyncio.sleep(0.01)
        return {"word": word}, 0.5, {"queries": 1}

    @function_tool(schema={"type": "function", "function": {"name": "picture", "description": "Draw.", "parameters": {
        "type": "object", "properties": {}, "required": []}}})
    def picture():
        return ToolResponse(image=["pixels"])

    @function_tool
    def nothing() -> None:
        """Nothing."""

    @function_tool
    def hang() -> None:
        """Hang."""
        while True:
            time.sleep(0.01)
'''


def test_functions_that_a_file_marks_are_tools(tmp_path):
    limits = EpisodeLimits(400, call_s=20, result_characters=100, parallel_calls=3)
    path = written(tmp_path, "functions.py", FUNCTION_TOOLS)
    with episodes(EnvironmentSetup(None, {}, limits, function_tool_path=path)) as (open_one, names):
        assert names == ["add", "look_up", "picture", "nothing", "hang"]
        episode = open_one()
        assert episode.begin() == ["Go."] and episode.tools is None
        seen = episode.act(call("add", a=1, b=2) + call("look_up", word="x") + call("nothing"))
        assert [one.result for one in seen.calls] == ["3", '{"word": "x"}', ""]  # in the order of the calls
        assert seen.reward == 0.5
        assert "cannot hold" in episode.results(call("picture"))[0]
        assert episode.results("<tool_call>{</tool_call>")[0].startswith("Error: the call is not valid JSON")
        assert episode.act("Done.").done


def test_each_call_of_a_turn_has_its_own_limit_and_coroutines_run_together(tmp_path):
    limits = EpisodeLimits(400, call_s=3, result_characters=100, parallel_calls=3)
    path = written(tmp_path, "functions.py", FUNCTION_TOOLS)
    with episodes(EnvironmentSetup(None, {}, limits, function_tool_path=path)) as (open_one, _):
        episode = open_one()
        episode.begin()
        seen = episode.act("".join(call("look_up", word=word) for word in ("wait", "meet", "meet")))
        assert [one.error and one.error.partition(":")[0] for one in seen.calls] == ["CallTimeout", None, None]
        assert seen.calls[2].result == '{"word": "meet"}' and seen.calls[2].seconds < seen.calls[0].seconds
        seen = episode.act(call("hang") + call("add", a=1, b=2))
        assert [one.error and one.error.partition(":")[0] for one in seen.calls] == ["CallTimeout", None]
        assert seen.calls[1].result == "3"
        assert episode.end() == 0.0


def test_an_error_of_a_tool_fails_the_episode_if_the_key_says_so(tmp_path):
    limits = EpisodeLimits(400, call_s=20, tool_error="fail")
    path = written(tmp_path, "functions.py", FUNCTION_TOOLS)
    with episodes(EnvironmentSetup(None, {}, limits, function_tool_path=path)) as (open_one, _):
        episode = open_one()
        episode.begin()
        assert "there is no tool 'sub'" in episode.results(call("sub"))[0]  # an error of the policy's, which it reads
        with pytest.raises(EnvironmentFailed, match=r"the tool add: TypeError"):
            episode.act(call("add", a=1))


COUNTER = """
    import os
    from verl.tools.base_tool import BaseTool
    from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
    from verl.utils.rollout_trace import rollout_trace_op

    class Counter(BaseTool):
        def __init__(self, config, tool_schema):
            super().__init__(config, tool_schema)
            self.values = {}

        def note(self, what):
            with open(os.path.join(self.config["folder"], what), "a") as file:
                file.write("x")

        async def create(self, instance_id=None, **kwargs):
            instance_id, response = await super().create(instance_id)
            self.values[instance_id] = kwargs["create_kwargs"].get("start", 0)
            self.note("created")
            return instance_id, response

        @rollout_trace_op
        async def execute(self, instance_id, parameters, **kwargs):
            self.values[instance_id] += parameters["number"] * kwargs.get("factor", 1)
            kwargs["agent_data"].extra_fields["last"] = parameters["number"]
            return ToolResponse(text=str(self.values[instance_id])), 0.25, {"calls": 1}

        async def calc_reward(self, instance_id, **kwargs):
            return float(self.values[instance_id] == kwargs.get("wanted", 5))

        async def release(self, instance_id, **kwargs):
            del self.values[instance_id]
            self.note("released")
"""
SCHEMA = {
    "type": "function",
    "function": {
        "name": "count",
        "description": "Count.",
        "parameters": {
            "type": "object",
            "properties": {"number": {"type": "integer", "description": "How many."}},
            "required": ["number"],
        },
    },
}


def tool_config(folder: Path) -> str:
    written(folder, "counter_tool.py", COUNTER)
    config = {"type": "native", "folder": str(folder)}
    entry = {"class_name": "counter_tool.Counter", "config": config, "tool_schema": SCHEMA}
    return written(folder, "tools.yaml", yaml.safe_dump({"tools": [entry]}))


def test_a_tool_of_verl_is_created_once_and_released_once_in_an_episode(tmp_path):
    setup = EnvironmentSetup(None, {}, LIMITS, tool_config_path=tool_config(tmp_path))
    with episodes(setup) as (open_one, names):
        assert names == ["count"]
        episode = open_one()
        kwargs = {
            "create_kwargs": {"start": 1, "other": None},
            "execute_kwargs": {"factor": 2},
            "calc_reward_kwargs": None,
        }
        episode.begin(extra_info={"need_tools_kwargs": True, "tools_kwargs": {"count": kwargs}})
        assert episode.results(call("count", number=1)) == ["3"]
        seen = episode.act(call("count", number=1) + call("count", number=3))
        assert [one.result for one in seen.calls] == ["5", "11"] and seen.reward == 0.5
        assert episode.end() == 0.0  # 11 is not 5
        assert episode.running.report.facts == {"last": 3, "tool_rewards": [0.25] * 3}
        assert episode.running.report.metrics == {"calls": 1.0}
        assert [(tmp_path / name).read_text() for name in ("created", "released")] == ["x", "x"]
        again = open_one()
        with pytest.raises(EnvironmentFailed, match=r"has no extra_info\.tools_kwargs"):
            again.begin(extra_info={"need_tools_kwargs": True, "tools_kwargs": None})


SLOW = """
    import asyncio
    from verl.tools.base_tool import BaseTool

    class Slow(BaseTool):
        async def create(self, instance_id=None, **kwargs):
            await asyncio.sleep(2.8)
            return await super().create(instance_id)
"""


@pytest.mark.long
def test_the_beginning_of_many_tools_has_the_limit_of_a_call_for_each(tmp_path):
    written(tmp_path, "slow_tool.py", SLOW)
    schemas = [{**SCHEMA, "function": {**SCHEMA["function"], "name": f"slow{number}"}} for number in range(4)]
    entries = [{"class_name": "slow_tool.Slow", "config": {}, "tool_schema": schema} for schema in schemas]
    path = written(tmp_path, "tools.yaml", yaml.safe_dump({"tools": entries}))
    with episodes(EnvironmentSetup(None, {}, EpisodeLimits(400, call_s=4), tool_config_path=path)) as (open_one, _):
        episode = open_one()
        began = time.monotonic()
        assert episode.begin() == ["Go."]
        assert time.monotonic() - began > 11  # more than two calls may take
        assert episode.end() == 0.0


SHELL = """
    import os

    class Shell:
        def spawn(self) -> str:
            '''What a program that is started here has open.'''
            os.system("ls -l /proc/self/fd > " + os.environ["FOUND"])
            return open(os.environ["FOUND"]).read()
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="reads /proc")
def test_a_program_that_a_tool_starts_has_no_connection_to_the_driver(tmp_path, monkeypatch):
    """It could answer in place of the environment."""
    monkeypatch.setenv("FOUND", str(tmp_path / "found"))
    path = written(tmp_path, "shell.py", SHELL)
    with episodes(EnvironmentSetup(f"{path}:Shell", {}, EpisodeLimits(400, call_s=20))) as (open_one, _):
        episode = open_one()
        episode.begin()
        [found] = episode.results(call("spawn"))
        assert "pipe:" in found and "socket:" not in found


def test_a_row_selects_its_tools(tmp_path):
    path = written(tmp_path, "functions.py", FUNCTION_TOOLS)
    setup = EnvironmentSetup(None, {}, LIMITS, path, tool_config(tmp_path))
    with episodes(setup) as (open_one, names):
        assert names[-1] == "count"
        episode = open_one()
        episode.begin(extra_info={"tool_selection": ["add"]})
        assert episode.tools == ["add"]
        assert "there is no tool 'count'" in episode.results(call("count", number=1))[0]
        assert not (tmp_path / "created").exists()  # it is not created, either
        other = open_one()
        with pytest.raises(EnvironmentFailed, match="tool_selection has 'sub'"):
            other.begin(extra_info={"tool_selection": ["sub"]})


INTERACTION = """
    from verl.interactions.base import BaseInteraction

    class TwiceInteraction(BaseInteraction):
        def __init__(self, config):
            super().__init__(config)
            self.wanted = {}

        async def start_interaction(self, instance_id=None, ground_truth=None, **kwargs):
            self.wanted[instance_id] = ground_truth
            return instance_id

        async def generate_response(self, instance_id, messages, **kwargs):
            right = messages[-1]["content"] == self.wanted[instance_id]
            return right, "Right." if right else "Again.", float(right), {}

        async def finalize_interaction(self, instance_id, **kwargs):
            del self.wanted[instance_id]
"""


def test_an_interaction_of_verl_answers_in_place_of_a_user(tmp_path):
    written(tmp_path, "twice.py", INTERACTION)
    listed = {"interaction": [{"class_name": "twice.TwiceInteraction", "config": {}}]}
    path = written(tmp_path, "interactions.yaml", yaml.safe_dump(listed))
    functions = written(tmp_path, "functions.py", FUNCTION_TOOLS)
    with episodes(EnvironmentSetup(None, {}, LIMITS, functions, interaction_config_path=path)) as (open_one, _):
        episode = open_one()
        episode.begin(extra_info={"interaction_kwargs": {"name": "twice", "ground_truth": "7"}})
        assert episode.results(call("add", a=1, b=2)) == ["3"]
        seen = episode.act("6")
        assert (seen.messages[0], seen.reward, seen.done) == ({"role": "user", "content": "Again."}, 0.0, False)
        assert episode.act("7").done
        assert episode.end() == 0.0 and episode.running.report.facts == {"turn_scores": [0.0, 1.0]}
        with pytest.raises(EnvironmentFailed, match="the interactions are twice"):
            open_one().begin(extra_info={"interaction_kwargs": {"name": "thrice"}})


SKYRL = """
    from typing import Any
    from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput, ConversationType
    from skyrl_gym.tools.core import ToolGroup, tool

    class Words(ToolGroup):
        @tool
        def upper(self, text: str) -> str:
            return text.upper()

    class Shout(BaseTextEnv):
        def __init__(self, env_config: Any, extras: dict[str, Any] = {}):
            super().__init__()
            self.ground_truth = extras["reward_spec"]["ground_truth"]
            self.max_turns = extras.get("max_turns", 5)
            self.mark = env_config.mark
            self.init_tool_groups([Words("words")])

        def init(self, prompt: ConversationType):
            return [*prompt, {"role": "user", "content": "Shout."}], {}

        def step(self, action: str) -> BaseTextEnvStepOutput:
            self.turns += 1
            if action == self.ground_truth or self.turns >= self.max_turns:
                return BaseTextEnvStepOutput(observations=[], reward=1.0, done=True, metadata={})
            seen = self._execute_tool("words", "upper", (action,)) + self.mark
            return BaseTextEnvStepOutput(
                observations=[{"role": "user", "content": seen}], reward=0.25, done=False, metadata={}
            )

        def get_metrics(self):
            return {"steps": self.turns, "name": "not a number"}
"""


def test_an_environment_of_skyrl_receives_its_row_and_reports_its_metrics(tmp_path):
    path = written(tmp_path, "shout.py", SKYRL)
    with episodes(EnvironmentSetup(f"{path}:Shout", {"mark": "!"}, LIMITS)) as (open_one, names):
        assert names == []
        episode = open_one()
        assert episode.begin(env_class="shout", reward_spec={"ground_truth": "HI"}) == ["Go.", "Shout."]
        seen = episode.act("hi")
        assert (seen.messages[0]["content"], seen.reward, seen.done) == ("HI!", 0.25, False)
        assert episode.act("HI").done and episode.end() == 0.0
        assert episode.running.report.metrics == {"steps": 2.0}
        with pytest.raises(EnvironmentFailed, match="KeyError: 'reward_spec'"):
            open_one().begin()


TRL = '''
    class Shop:
        def __init__(self):
            self.reward, self.client = 0.0, object()

        async def reset(self, price=3, **row):
            assert "environment" not in row or row["environment"] == "shop"
            self.price = price
            return [{"type": "text", "text": " Buy."}]

        async def pay(self, amount: int) -> str:
            """Pay.

            Args:
                amount: How much.
            """
            self.reward = float(amount == self.price)
            return "paid"

        async def get_reward(self) -> float:
            return self.reward

    class Walk:
        def reset(self, **row): ...

        def go(self, where: str) -> dict:
            """Go.

            Args:
                where: To which place.
            """
            return {"at": where}

    ENVIRONMENTS = {"shop": Shop, "walk": Walk}
'''


def test_the_row_chooses_its_environment_and_with_it_the_tools(tmp_path):
    path = written(tmp_path, "environments.py", TRL)
    with episodes(EnvironmentSetup(f"{path}:ENVIRONMENTS", {}, LIMITS)) as (open_one, names):
        assert names == ["pay", "go"]
        shop = open_one()
        assert shop.begin(environment="shop", price=4) == ["Go. Buy."] and shop.tools == ["pay"]
        assert shop.results(call("pay", amount=4)) == ["paid"]
        assert shop.end() == 1.0
        assert shop.running.report.state == {"reward": 1.0, "price": 4}
        walk = open_one()
        walk.begin(environment="walk")
        assert walk.tools == ["go"] and walk.results(call("go", where="on")) == ['{"at": "on"}']
        assert walk.end() is None
        with pytest.raises(EnvironmentFailed, match="environments are shop, walk"):
            open_one().begin(environment="sea")


@pytest.mark.parametrize(
    "code, reason",
    [
        ("class Environment:\n    x = 1", "has no `step` and no public method"),
        ("class Environment:\n    def step(self, text): ...", "neither `reset"),
        ("class Environment:\n    def __init__(self, env_config, extras): ...", "has no `init`"),
        ("class Environment:\n    def execute(self): ...\n    def release(self): ...", "is a tool of verl"),
        ("class Environment:\n    def generate_response(self): ...", "is an interaction of verl"),
        (
            "class Environment:\n    async def reset(self, states): ...\n    async def step(self, states): ...",
            r"is an agent of OpenRLHF.*name it in actor_rollout_ref\.rollout\.agent\.path",
        ),
        ("Environment = 7", "the environment is a int"),
        ("class Environment:\n    def go(self, where): 'Go.'", "no type hint for where"),
    ],
)
def test_what_fits_no_contract_is_refused_with_what_is_missing(tmp_path, code, reason):
    path = written(tmp_path, "environment.py", code)
    pool = EnvironmentPool(EnvironmentSetup(f"{path}:Environment", {}, LIMITS), most=1)
    with pytest.raises(ConfigError, match=reason):
        pool.load()


def test_a_file_without_tools_is_refused(tmp_path):
    for name, text, reason in [
        ("function_tool_path", "x = 1", "marks no function"),
        ("tool_config_path", "tools: 7", "write a list `tools:`"),
        ("tool_config_path", "tools: [{class_name: nowhere.Tool, config: {}}]", "cannot be imported"),
        ("tool_config_path", "tools: [{config: {type: mcp}}]", "needs mcp.mcp_servers_config_path"),
        ("interaction_config_path", "interaction: [{class_name: json.JSONDecoder}]", "json.JSONDecoder"),
    ]:
        path = written(tmp_path, "given.py" if name == "function_tool_path" else "given.yaml", text)
        pool = EnvironmentPool(EnvironmentSetup(None, {}, LIMITS, **{name: path}), most=1)
        with pytest.raises(ConfigError, match=reason):
            pool.load()


def test_a_text_environment_has_no_tools():
    class Gym:
        def reset(self, **row): ...

        def step(self, text): ...

    with pytest.raises(ConfigError, match="reads text, so it has no tools"):
        UserCode(LIMITS, Gym, interactions={"x": object()}).environment({}, seed=0)
