"""What `rloom plan` and the first lines of a run say of answers of several turns."""

import pytest

from rloom import cli
from rloom.config.derived import turns_text
from rloom.config.load import load_config

TURNS = "actor_rollout_ref.rollout.multi_turn"
GUESS = f"{TURNS}.environment=guess_number"
SIZES = ("data.train_batch_size=32", "actor_rollout_ref.rollout.n=4", "data.max_response_length=48")


def test_a_run_of_one_turn_says_nothing() -> None:
    assert turns_text(load_config([])) is None
    assert turns_text(load_config(["actor_rollout_ref.rollout.agent.default_agent_loop=single_turn_agent"])) is None


def test_what_answers_between_turns_and_all_limits_are_said() -> None:
    limits = [f"{TURNS}.max_assistant_turns=4", f"{TURNS}.max_turn_length=16", f"{TURNS}.episode_timeout_s=90"]
    assert turns_text(load_config([GUESS, *SIZES, *limits])) == (
        "environment guess_number; at most 4 turns, 48 tokens after the prompt, 16 tokens a turn, 60 s a call, "
        "90 s an episode"
    )
    assert turns_text(load_config([GUESS, *SIZES])) == (
        "environment guess_number; turns without limit, 48 tokens after the prompt, 60 s a call"
    )


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (f"{TURNS}.function_tool_path=tools.py", "tools tools.py; "),
        ("actor_rollout_ref.rollout.agent.path=agent.py:run", "agent agent.py:run; "),
    ],
)
def test_tools_and_agents_are_named(key: str, said: str) -> None:
    found = turns_text(load_config([key]))
    assert found is not None and found.startswith(said)


def test_requests_and_processes_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    keys = [GUESS, *SIZES, f"{TURNS}.max_assistant_turns=4", f"{TURNS}.max_environments=64"]
    assert cli.main(["plan", *keys]) == 0
    printed = capsys.readouterr().out
    assert "several turns               environment guess_number; at most 4 turns" in printed
    # 32 × 4 episodes of 4 turns; 48 / 4 tokens; 64 processes of 4 MiB
    assert "at most 512 a step; 12 tokens a turn" in printed
    assert "64 at a time; about 256.0 MiB of the host" in printed
    assert cli.main(["plan", *SIZES]) == 0
    assert "several turns" not in capsys.readouterr().out
