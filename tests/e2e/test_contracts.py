"""Two steps on the embedded model with each contract of environments and tools."""

import pytest
import yaml

import rloom
from tests.unit.episodes.test_contracts import FUNCTION_TOOLS, INTERACTION, SKYRL, tool_config, written

SMALL = {
    "data.train_batch_size": 4,
    "data.max_response_length": 32,
    "actor_rollout_ref.rollout.n": 2,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "algorithm.adv_estimator": "rloo",
    "trainer.total_training_steps": 2,
    "trainer.val_before_train": False,
    "trainer.test_freq": -1,
    "trainer.save_freq": -1,
}
MULTI_TURN = "actor_rollout_ref.rollout.multi_turn"
ROWS = [
    {
        "prompt": [{"role": "user", "content": f"{number}+1="}],
        "data_source": "math_reasoning",
        "reward_model": {"ground_truth": str(number + 1)},
        "extra_info": {"interaction_kwargs": {"name": "twice", "ground_truth": str(number + 1)}},
        "reward_spec": {"ground_truth": str(number + 1)},
        "env_class": "shout",
    }
    for number in range(8)
]


def trained(tmp_path, keys, **arguments):
    arguments = {"train": ROWS, **arguments}
    result = rloom.train({**SMALL, **keys, "trainer.default_local_dir": str(tmp_path / "run")}, **arguments)
    assert result.steps == 2
    return result.history


def test_function_tools_and_configured_tools_train(tmp_path):
    functions = written(tmp_path, "functions.py", FUNCTION_TOOLS)
    keys = {f"{MULTI_TURN}.function_tool_path": functions, f"{MULTI_TURN}.tool_config_path": tool_config(tmp_path)}
    trained(tmp_path, {**keys, f"{MULTI_TURN}.enable": True})
    assert (tmp_path / "created").read_text() == (tmp_path / "released").read_text() == "x" * 16


def test_an_interaction_trains(tmp_path):
    written(tmp_path, "twice.py", INTERACTION)
    listed = {"interaction": [{"class_name": "twice.TwiceInteraction", "config": {}}]}
    path = written(tmp_path, "interactions.yaml", yaml.safe_dump(listed))
    keys = {f"{MULTI_TURN}.interaction_config_path": path, f"{MULTI_TURN}.max_user_turns": 1}
    scores = []

    def reward(data_source, solution_str, ground_truth, extra_info):
        scores.append(extra_info["turn_scores"])
        assert extra_info["num_turns"] in (2, 4)  # prompt, answer, user, answer
        return float(sum(extra_info["turn_scores"]))

    history = trained(tmp_path, keys, reward=reward)
    assert len(scores) == 16 and all(0 < len(one) <= 2 for one in scores)
    assert sum(map(sum, scores)) == pytest.approx(sum(8 * step["critic/score/mean"] for step in history))


def test_an_environment_of_skyrl_trains(tmp_path):
    path = written(tmp_path, "shout.py", SKYRL)
    keys = {f"{MULTI_TURN}.environment": f"{path}:Shout", f"{MULTI_TURN}.environment_kwargs": {"mark": "!"}}
    history = trained(tmp_path, {**keys, f"{MULTI_TURN}.max_assistant_turns": 2, "data.max_response_length": 96})
    # a right answer ends an episode with 1, another one has 0.25 and then 1 for the second turn, if it ends in time
    assert all(0 < step["critic/score/mean"] <= 1.25 for step in history)


def test_an_environment_and_tools_of_the_program_train_with_a_reward_that_reads_them(tmp_path):
    class Guess:
        def __init__(self):
            self.tries, self.secret = 0, object()

        def reset(self, **row):
            self.tries = 1
            return "?"

        def guess(self, number: int) -> str:
            """Guess.

            Args:
                number: The number.
            """
            self.tries += 1
            return "no"

        def get_reward(self) -> float:
            return 2.0

    def shout(text: str) -> str:
        """Shout.

        Args:
            text: What.
        """
        return text.upper()

    seen = []

    def reward(completions, environments, **columns):
        seen.extend(
            (environment.tries, completion[0]["role"])
            for environment, completion in zip(environments, completions, strict=True)
        )
        with pytest.raises(AttributeError, match="ran in a process of its own"):
            environments[0].secret  # noqa: B018
        return [0.5 * environment.tries for environment in environments]

    history = trained(tmp_path, {}, environment=Guess, tools=[shout], reward=reward)
    assert seen and all(tries >= 1 and role == "assistant" for tries, role in seen)
    assert all(step["critic/score/mean"] >= 2.5 for step in history)  # 0.5 a try, and 2 of the environment
