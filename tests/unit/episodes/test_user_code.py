"""Users' classes and data as they write them: Gymnasium's signature, names in rows, misspelt methods, odd results."""

import importlib.util
import os
import re

import pytest

from rloom.config.load import load_config
from rloom.episodes.base import EnvironmentSetup, EpisodeLimits
from rloom.episodes.contracts.table import UserCode
from rloom.episodes.contracts.text import numbered_action
from rloom.episodes.pool import EnvironmentFailed, EnvironmentPool
from rloom.episodes.rows import CodeNames, check_rows, faults
from rloom.errors import ConfigError, DataError
from rloom.launch.episodes import open_episodes
from rloom.launch.model_sources import policy_source
from rloom.models.load import load_tokenizer
from rloom.types import Prompt
from tests.unit.episodes.test_contracts import LIMITS, QUESTION, call, episodes, written

GYM_SITE = os.environ.get("RLOOM_GYMNASIUM")  # a folder with the package, where it is not installed
NO_GYMNASIUM = GYM_SITE is None and importlib.util.find_spec("gymnasium") is None

GYMNASIUM = """
    class Guess:
        def reset(self, *, seed=None, options=None):
            self.secret = options["secret"]
            return f" seed {seed}", {}

        def step(self, action):
            return "", float(action == self.secret), action == self.secret, False, {}

    class Named:
        def reset(self, prompt, secret, level=1):
            self.secret = secret
            return f" {prompt[0]['content']} {secret} {level}"

        def step(self, action):
            return "", 0.0, True
"""


def test_a_reset_receives_the_columns_that_it_names_and_gymnasiums_seed_and_options(tmp_path):
    path = written(tmp_path, "guess.py", GYMNASIUM)
    row = {"prompt": QUESTION, "secret": "7", "data_source": "game"}
    with episodes(EnvironmentSetup(f"{path}:Guess", {}, LIMITS)) as (open_one, _):
        episode = open_one()
        assert episode.begin(**row) == ["Go. seed 0"]
        assert episode.act("7").reward == 1.0
    with episodes(EnvironmentSetup(f"{path}:Named", {}, LIMITS)) as (open_one, _):
        assert open_one().begin(**row) == ["Go. Go. 7 1"]


class OfGymnasium:
    def reset(self, *, seed=None, options=None):
        self.seed = seed
        return 7, {}

    def step(self, action):
        return (1, 2), 0.5, False, False, {}


def test_the_seed_is_that_of_the_episode_and_observations_may_be_numbers():
    environment = UserCode(LIMITS, OfGymnasium).environment({}, seed=2**40 + 5)
    assert environment.begin({}, QUESTION)[-1]["content"] == "Go.7"
    assert environment.instance.seed == 5
    assert [one["content"] for one in environment.act("x").messages] == ["[1, 2]"]


@pytest.mark.skipif(NO_GYMNASIUM, reason="the package gymnasium is not installed")
def test_environments_of_gymnasium_run_unchanged(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{GYM_SITE or ''}:{os.environ.get('PYTHONPATH', '')}")
    lake = {"id": "FrozenLake-v1", "render_mode": "ansi", "is_slippery": False}
    limits = EpisodeLimits(400, call_s=20, result_characters=1000)
    with episodes(EnvironmentSetup("gymnasium:make", lake, limits)) as (open_one, _):
        episode = open_one()
        assert episode.begin(data_source="lake") == ["Go.\n[S]FFF\nFHFH\nFFFH\nHFFG\n"]
        assert episode.results("no idea") == ["Error: end the answer with a whole number from 0 to 3"]
        rewards = [episode.act(f"I go {way}").reward for way in (1, 1, 2, 2, 1)]
        last = episode.act("2")
        assert (rewards, last.reward, last.done, episode.end()) == ([0.0] * 5, 1.0, True, 0.0)
    own = """
        import gymnasium
        from gymnasium import spaces

        class Echo(gymnasium.Env):
            action_space = spaces.Text(100)
            observation_space = spaces.Text(100)

            def reset(self, *, seed=None, options=None):
                super().reset(seed=seed)
                return f" {self.np_random.integers(100)}", {}

            def step(self, action):
                return action.upper(), 0.25, action == "end", False, {}

        class Motor(Echo):
            action_space = spaces.Box(0, 1)
    """
    path = written(tmp_path, "echo.py", own)
    with episodes(EnvironmentSetup(f"{path}:Echo", {}, LIMITS)) as (open_one, _):
        begun = [open_one().begin() for _ in range(2)]
        assert begun[0] == begun[1]  # one seed, one draw
        episode = open_one()
        episode.begin()
        assert episode.results("hi") == ["HI"] and episode.act("end").done and episode.end() == 0.0
    with pytest.raises(ConfigError, match=r"actions of the space Box.*ActionWrapper"):
        refused(EnvironmentSetup(f"{path}:Motor", {}, LIMITS))


def refused(setup: EnvironmentSetup) -> None:
    """Raises the fault that is found when the files are loaded."""
    pool = EnvironmentPool(setup, most=1)
    try:
        pool.load()
    except Exception as error:
        raise ConfigError(str(error)) from error
    finally:
        pool.close()


@pytest.mark.parametrize(
    "text, action", [("3", 3), ("1 or 2", 2), ("-1", -1), ("4", None), ("", None), ("9" * 5000, None)]
)
def test_the_action_is_the_last_number_of_the_answer(text, action):
    if action is None:
        with pytest.raises(Exception, match="a whole number from -1 to 3"):
            numbered_action(text, -1, 3)
    else:
        assert numbered_action(text, -1, 3) == action


CODE = CodeNames(
    environments={"shop": ["price"], "walk": []}, tools=["pay", "go"], configured=["pay"], interactions=["user", "shy"]
)


@pytest.mark.parametrize(
    "row, fault",
    [
        ({"environment": "sea"}, "the row has environment='sea'; the environments are shop, walk"),
        ({"env_class": ["walk"]}, "the row has env_class=['walk']; the environments are shop, walk"),
        ({}, "the row has environment=None; the environments are shop, walk"),
        ({"environment": "shop"}, "`reset` needs `price`; the columns are environment"),
        (
            {"environment": "walk", "extra_info": {"tool_selection": ["pay", "fly"]}},
            "extra_info.tool_selection has 'fly'; the tools are pay, go",
        ),
        (
            {"environment": "walk", "extra_info": {"tools_kwargs": {"pya": {"create_kwargs": {}}, "go": None}}},
            "extra_info.tools_kwargs has 'pya', which is no tool, and has nothing for pay; correct the name",
        ),
        ({"environment": "walk", "extra_info": {"need_tools_kwargs": True}}, "extra_info.need_tools_kwargs is true"),
        (
            {"environment": "walk", "extra_info": {"interaction_kwargs": {"name": "rude"}}},
            "extra_info.interaction_kwargs.name is 'rude'; the interactions are user, shy",
        ),
    ],
)
def test_a_name_that_the_code_does_not_have_is_a_fault_of_its_row(row, fault):
    found = next(faults(CODE, row))
    assert found.startswith(fault)
    right = {"environment": "walk", "interaction_kwargs": {"name": "shy"}}
    prompts = [Prompt(n, (), "", (), "", columns=columns) for n, columns in enumerate([right, row])]
    check_rows(CODE, {"data.train_files": prompts[:1]})
    with pytest.raises(DataError, match=rf"data\.val_files, row 1 \(counting from 0\): {re.escape(found)}"):
        check_rows(CODE, {"data.train_files": prompts[:1], "data.val_files": prompts})


def test_arguments_of_further_tools_are_no_fault():
    row = {"tools_kwargs": {"pay": {"create_kwargs": {}}, "sing": {"create_kwargs": {}}}}
    assert not list(faults(CodeNames({"": []}, ["pay"], ["pay"]), row))
    assert not list(faults(CodeNames({"": []}, ["pay"]), {"tools_kwargs": {"sing": {}}}))


ODD = '''
    import sys

    class Odd:
        def thing(self) -> object:
            """Return an object."""
            return object()

        def things(self) -> list:
            """Return several."""
            return [1, object()]

        def many(self) -> set:
            """Return a set."""
            return {"b", "a"}

        def leave(self) -> None:
            """Exit."""
            sys.exit(2)

        async def leave_later(self) -> None:
            """Exit."""
            sys.exit(3)

        def get_reward(self):
            return "high"
'''


def test_an_address_is_no_result_an_exit_is_an_error_and_a_text_is_no_reward(tmp_path):
    path = written(tmp_path, "odd.py", ODD)
    limits = EpisodeLimits(400, call_s=20, parallel_calls=3)
    with episodes(EnvironmentSetup(f"{path}:Odd", {}, limits)) as (open_one, _):
        episode = open_one()
        episode.begin()
        for name in ("thing", "things"):
            [result] = episode.results(call(name))
            assert "whose text is an address" in result and "0x" not in result
        assert episode.results(call("many")) == ["{'a', 'b'}"]
        assert episode.results(call("leave")) == ["Error: SystemExit: 2"]
        assert episode.results(call("leave_later") * 2) == ["Error: RuntimeError: it called exit(3)"] * 2
        assert episode.results(call("leave_later")) == ["Error: SystemExit: 3"]
        assert episode.results(call("many")) == ["{'a', 'b'}"]
        with pytest.raises(EnvironmentFailed, match="the reward of get_reward is 'high'; return a number"):
            episode.end()


@pytest.mark.parametrize(
    "method, meant",
    [
        ("get_rewards", "get_reward"),
        ("getReward", "get_reward"),
        ("Reset", "reset"),
        ("rest", None),  # a tool of a game
    ],
)
def test_a_misspelt_method_is_no_tool(method, meant):
    def with_docstring(self) -> str:
        """What it does."""

    def without(self): ...

    make = type("Env", (), {method: with_docstring})
    if meant is None:
        assert len(UserCode(LIMITS, make).environment({}, seed=0).tools) == 1
    else:
        with pytest.raises(ConfigError, match=f"has a method `{method}`.* and no `{meant}`; rename the method"):
            UserCode(LIMITS, make).environment({}, seed=0)
    with pytest.raises(ConfigError, match=r"has a method `resets`.* and no `reset`"):
        UserCode(LIMITS, type("Env", (), {"resets": without})).environment({}, seed=0)


TOOL = """
    from verl.tools.base_tool import BaseTool

    class Plain(BaseTool): ...
"""


@pytest.mark.parametrize(
    "entry, reason",
    [
        ("{classname: own.Plain}", r"entry 1 of `tools:` has no class_name; it has classname\. Write class_name"),
        ("{class_name: own.Plain, config: {type: natve}}", "config.type='natve'; use native or mcp"),
        ("{class_name: own.Plain, config: []}", "write `tool_schema:` into its entry"),
        ("{class_name: own.Plain, config: [1]}", r"has config=\[1\]; write fields below it"),
        ("{class_name: 'own.py:Plan'}", r"class_name=.*own.py:Plan: .*own.py has no 'Plan'; it has BaseTool, Plain"),
    ],
)
def test_a_wrong_entry_of_verls_yaml_is_named(tmp_path, entry, reason):
    written(tmp_path, "own.py", TOOL)
    path = written(tmp_path, "tools.yaml", f"tools: [{entry}]")
    with pytest.raises(ConfigError, match=reason):
        refused(EnvironmentSetup(None, {}, LIMITS, tool_config_path=path))


def test_verls_yaml_names_a_class_of_a_file_beside_it(tmp_path):
    written(tmp_path, "own.py", TOOL)
    schema = "{type: function, function: {name: go, description: Go., parameters: {type: object, properties: {}}}}"
    path = written(tmp_path, "tools.yaml", f"tools: [{{class_name: 'own.py:Plain', tool_schema: {schema}}}]")
    with episodes(EnvironmentSetup(None, {}, LIMITS, tool_config_path=path)) as (_, names):
        assert names == ["go"]


ADD = '''
    from verl.tools.function_tool import function_tool

    @function_tool
    def add(a: int, b: int) -> int:
        """Add.

        Args:
            a: One number.
            b: The other.
        """
        return a + b

    class Calls:
        def add(self, a: int) -> int:
            """Add.

            Args:
                a: A number.
            """
            return a

    class Scored(Calls):
        def reset(self, level): ...

        def get_reward(self):
            return 1.0

    TOOLS, BOTH = [add], {"calls": Calls, "scored": Scored}
'''


def test_an_episode_of_tools_that_may_reward_a_call_has_the_reward_0_without_one(tmp_path):
    path = written(tmp_path, "add.py", ADD)
    with episodes(EnvironmentSetup(None, {}, LIMITS, function_tool_path=path)) as (open_one, _):
        episode = open_one()
        episode.begin()
        assert episode.act("no call").done and episode.end() == 0.0
    with episodes(EnvironmentSetup(f"{path}:TOOLS", {}, LIMITS)) as (open_one, _):
        episode = open_one()
        episode.begin()
        assert episode.act("no call").done and episode.end() is None


@pytest.mark.parametrize(
    "name, error, reason",
    [
        ("TOOLS", ConfigError, "it gives no reward, and the episodes are scored by it; write get_reward()"),
        ("BOTH", ConfigError, r"it gives no reward \(calls\), and"),
        ("Scored", DataError, r"data.train_files, row 0 \(counting from 0\): `reset` needs `level`; the columns are"),
    ],
)
def test_code_that_cannot_score_or_begin_is_found_before_the_start(tmp_path, name, error, reason):
    key = "actor_rollout_ref.rollout.multi_turn.environment"
    config = load_config([f"{key}={written(tmp_path, 'add.py', ADD)}:{name}"])
    tokenizer, prompts = load_tokenizer(policy_source(config)), [Prompt(0, (), "", (), "", columns={"prompt": "x"})]
    with pytest.raises(error, match=reason), open_episodes(config, tokenizer, rows={"data.train_files": prompts}):
        pass
    with open_episodes(config, tokenizer):  # to talk with, no reward is needed
        pass
