"""Files of verl, TRL and SkyRL (all Apache-2.0), unchanged, from clones. Skipped where there is none."""

import os

import pytest

from rloom.config.load import load_config
from rloom.episodes.base import EnvironmentSetup
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
