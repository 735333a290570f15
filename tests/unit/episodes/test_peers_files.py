"""Files of verl, TRL and SkyRL (all Apache-2.0), unchanged, from clones. Skipped where there is none."""

import os
import sqlite3
from contextlib import closing

import pytest

from rloom.config.load import load_config
from rloom.episodes.base import EnvironmentSetup, EpisodeLimits
from tests.unit.episodes.peers import extracted
from tests.unit.episodes.test_contracts import LIMITS, call, episodes, written

VERL, TRL, SKYRL = "volcengine+verl", "huggingface+trl", "NovaSky-AI+SkyRL"


def test_the_tool_of_verls_example_runs_with_its_own_configuration(tmp_path, monkeypatch):
    files = ("base_tool", "schemas", "gsm8k_tool")
    config = "examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml"
    score = "verl/utils/reward_score/gsm8k.py"
    extracted(VERL, tmp_path, *(f"verl/tools/{name}.py" for name in files), score, config)
    written(tmp_path / "verl/utils", "rollout_trace.py", "def rollout_trace_op(function):\n    return function\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with episodes(EnvironmentSetup(None, {}, LIMITS, tool_config_path=str(tmp_path / config))) as (open_one, names):
        assert names == ["calc_gsm8k_reward"]
        episode = open_one()
        episode.begin(extra_info={"tools_kwargs": {names[0]: {"create_kwargs": {"ground_truth": "72"}}}})
        wrong = episode.act(call(names[0], answer="71"))
        assert wrong.messages[0]["content"] == "Current parsed answer='71' reward=0.0" and wrong.reward == -0.05
        assert episode.act(call(names[0], answer="72")).reward == 0.0
        assert episode.end() == 1.0
        assert episode.running.report.facts == {"tool_rewards": [-0.05, 0.0]}


def test_verls_configuration_of_that_tool_runs_without_verl(tmp_path):
    config = "examples/sglang_multiturn/config/tool_config/gsm8k_tool_config.yaml"
    extracted(VERL, tmp_path, config)
    with episodes(EnvironmentSetup(None, {}, LIMITS, tool_config_path=str(tmp_path / config))) as (open_one, names):
        episode = open_one()
        episode.begin(extra_info={"tools_kwargs": {names[0]: {"create_kwargs": {"ground_truth": "72"}}}})
        assert [episode.act(call(names[0], answer=answer)).reward for answer in ("71", "72")] == [-0.05, 0.0]
        assert episode.end() == 1.0


def test_the_interaction_of_verls_example_runs_with_its_own_configuration(tmp_path, monkeypatch):
    config = "examples/sglang_multiturn/config/interaction_config/gsm8k_interaction_config.yaml"
    files = ("interactions/base", "interactions/gsm8k_interaction", "utils/reward_score/gsm8k")
    extracted(VERL, tmp_path, config, *(f"verl/{name}.py" for name in files))
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    with episodes(EnvironmentSetup(None, {}, LIMITS, interaction_config_path=str(tmp_path / config))) as (open_one, _):
        episode = open_one()
        episode.begin(extra_info={"interaction_kwargs": {"name": "gsm8k", "ground_truth": "72"}})
        assert "incorrect" in episode.results("#### 71")[0]
        seen = episode.act("#### 72")
        assert seen.done and seen.reward == 1.0


def test_an_environment_of_skyrl_runs(tmp_path, monkeypatch):
    folder = "skyrl-gym/skyrl_gym"
    files = ("core", "envs/base_text_env", "envs/gsm8k/multi_turn_env", "envs/gsm8k/utils")
    extracted(SKYRL, tmp_path, *(f"{folder}/{name}.py" for name in files))
    written(tmp_path / folder, "__init__.py", "from skyrl_gym.core import Env\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'skyrl-gym'}:{os.environ.get('PYTHONPATH', '')}")
    reference = "skyrl_gym.envs.gsm8k.multi_turn_env:GSM8kMultiTurnEnv"
    with episodes(EnvironmentSetup(reference, {}, LIMITS)) as (open_one, _):
        episode = open_one()
        episode.begin(env_class="gsm8k_multi_turn", reward_spec={"ground_truth": "72"}, extra_info={"max_turns": 3})
        seen = episode.act("#### 71")
        assert "step-by-step" in seen.messages[0]["content"] and seen.reward == pytest.approx(0.2 / 8)  # 8 turns
        assert episode.act("#### 72").done and episode.end() == 0.0
        assert episode.running.report.metrics == {"steps": 2.0}


def test_the_environments_of_skyrl_run_by_their_names(tmp_path, monkeypatch):
    """SQL, search, AIME and GSM8K, unchanged. No server answers the search: the policy reads the error."""
    extracted(SKYRL, tmp_path, "skyrl-gym/skyrl_gym")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path / 'skyrl-gym'}:{os.environ.get('PYTHONPATH', '')}")
    names = {"aime": "aime.env:AIMEEnv", "gsm8k": "gsm8k.env:GSM8kEnv", "text2sql": "sql.env:SQLEnv"}
    names |= {"search": "search.env:SearchEnv"}
    imports = "".join(f"from skyrl_gym.envs.{name.replace(':', ' import ')}\n" for name in names.values())
    listed = ", ".join(f"{name!r}: {made.partition(':')[2]}" for name, made in names.items())
    path = written(tmp_path, "environments.py", f"{imports}ENVIRONMENTS = {{{listed}}}\n")
    database = tmp_path / "spider/database/shop/shop.sqlite"
    database.parent.mkdir(parents=True)
    with closing(sqlite3.connect(database)) as made:
        made.executescript("create table item (price int); insert into item values (3), (4);")
    settings = {"db_path": str(tmp_path), "search_url": "http://127.0.0.1:9/retrieve", "timeout": 1}
    limits = EpisodeLimits(400, call_s=60, result_characters=500)
    with episodes(EnvironmentSetup(f"{path}:ENVIRONMENTS", settings, limits)) as (open_one, tools):
        assert tools == []
        aime = open_one()
        aime.begin(env_class="aime", reward_model={"ground_truth": "7"})
        seen = aime.act("Answer: 7")
        assert (seen.reward, seen.done) == (1.0, True)
        gsm8k = open_one()
        gsm8k.begin(env_class="gsm8k", reward_spec={"ground_truth": "72"})
        assert gsm8k.act("#### 72").reward == 1.0
        sql = open_one()
        truth = {"ground_truth": "select sum(price) from item"}
        sql.begin(env_class="text2sql", db_id="shop", data="spider", reward_spec=truth, max_turns=3)
        assert "7" in sql.results("<think>t</think><sql>select sum(price) from item</sql>")[0]
        seen = sql.act("<think>t</think><solution>select 3 + 4</solution>")
        assert (seen.reward, seen.done) == (1.0, True)
        search = open_one()
        search.begin(env_class="search", reward_spec={"ground_truth": {"target": ["Rome"]}})
        assert search.act("<search>Rome</search>").messages
        assert search.act("<answer>Rome</answer>").reward == 1.0


def test_the_game_of_trls_example_runs_as_a_class_of_tools(tmp_path, monkeypatch):
    extracted(TRL, tmp_path, "examples/scripts/grpo_2048.py")
    for name in ("datasets", "peft", "trl"):
        written(tmp_path, f"{name}.py", "Dataset = LoraConfig = GRPOConfig = GRPOTrainer = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    limits = EpisodeLimits(400, call_s=20)
    setup = EnvironmentSetup(f"{tmp_path}/examples/scripts/grpo_2048.py:Game2048Env", {}, limits)
    with episodes(setup) as (open_one, names):
        assert names == ["move"]
        first, second = open_one(), open_one()
        begun = first.begin()
        assert begun == second.begin() and begun[0].startswith("Go.score=0.0\n")  # one seed, one board
        assert first.results(call("move", direction="sideways"))[0] == begun[0].removeprefix("Go.")
        for way in ("left", "up", "left", "up"):
            first.act(call("move", direction=way))
        assert first.act("That is all.").done and first.end() is None  # its reward function reads the score
        assert set(first.running.report.state) == {"board", "score", "done"}


def test_the_tool_of_trls_example_runs(tmp_path, monkeypatch):
    extracted(TRL, tmp_path, "examples/scripts/grpo_agent.py")
    names = "GRPOConfig = GRPOTrainer = ModelConfig = ScriptArguments = TrlParser = None\n"
    written(tmp_path, "trl.py", names)
    written(tmp_path, "datasets.py", "load_dataset = None\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    written(tmp_path, "tools.py", "from examples.scripts.grpo_agent import query_biogrid\nTOOLS = [query_biogrid]\n")
    with episodes(EnvironmentSetup(f"{tmp_path / 'tools.py'}:TOOLS", {}, LIMITS)) as (open_one, found):
        assert found == ["query_biogrid"]
        episode = open_one()
        episode.begin()
        assert "unable to open database file" in episode.results(call("query_biogrid", sql_command="SELECT 1"))[0]
        # the tool sets an alarm of its own: the next call has its limit again
        assert "unable to open database file" in episode.results(call("query_biogrid", sql_command="SELECT 1"))[0]


@pytest.mark.parametrize(
    "script, config, overrides",
    [
        (
            "run_qwen2.5-3b_gsm8k_multiturn.sh",
            "gsm8k_multiturn_grpo",
            [
                "data.return_raw_chat=True",
                "actor_rollout_ref.rollout.multi_stage_wake_up=True",
                "actor_rollout_ref.rollout.over_sample_rate=0.1",
                "actor_rollout_ref.rollout.mode=async",
                "global_profiler.tool=torch_memory",
                "actor_rollout_ref.rollout.multi_turn.tool_config_path=tools.yaml",
            ],
        ),
        (
            "run_qwen2.5-0.5b_gsm8k_multiturn_w_interaction.sh",
            "gsm8k_multiturn_grpo_w_interaction",
            [
                "actor_rollout_ref.model.enable_activation_offload=True",
                "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
                "actor_rollout_ref.rollout.multi_turn.interaction_config_path=interactions.yaml",
            ],
        ),
    ],
)
def test_the_keys_of_verls_commands_are_read(tmp_path, script, config, overrides):
    folder = "examples/sglang_multiturn"
    extracted(VERL, tmp_path, f"{folder}/{script}", f"{folder}/config/{config}.yaml")
    words = (tmp_path / folder / script).read_text()
    assert all(override.partition("=")[0] in words for override in overrides)
    found = load_config(overrides, config_path=str(tmp_path / folder / "config"), config_name=config)
    assert found.actor_rollout_ref.rollout.multi_turn.enable is True
