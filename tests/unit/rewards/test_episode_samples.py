"""What each reward receives of an episode of several turns."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rloom.rewards.base import Style
from rloom.rewards.judge.prompts import answer_of
from rloom.rewards.pool import RulePool
from rloom.rewards.remote import encode
from rloom.rewards.user_function import FunctionCaller
from rloom.types import Sample, SampledEpisode

ANSWERS = ({"role": "assistant", "content": "add(2, 3)"}, {"role": "tool", "content": "5 #### 9"})
EPISODE = SampledEpisode(
    (*ANSWERS, {"role": "assistant", "content": "#### 5"}),
    "add(2, 3) tool 5 #### 9 assistant #### 5",
    (7, 8, 9),
    0.5,
    {"num_turns": 4, "final_answer": "#### 5"},
)
QUESTION = ({"role": "user", "content": "2 + 3?"},)
SAMPLE = Sample("openai/gsm8k", "2 + 3?", "#### 5", "5", {"index": 1}, QUESTION, (1,), (9,), {}, EPISODE)


def test_a_function_of_verl_gets_all_text_and_the_facts_of_the_episode() -> None:
    seen: dict[str, Any] = {}

    def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
        seen.update(solution=solution_str, **extra_info)
        return 1.0

    FunctionCaller(compute_score, {}).for_group(Style.ANSWER)((SAMPLE,))
    assert seen == {"solution": EPISODE.text, "index": 1, "num_turns": 4, "final_answer": "#### 5"}


def test_a_function_of_trl_gets_messages() -> None:
    seen: dict[str, Any] = {}

    def reward(completions: Any, completion_ids: Any, num_turns: Any, **columns: Any) -> list[float]:
        seen.update(completions=completions, ids=completion_ids, turns=num_turns)
        return [1.0]

    FunctionCaller(reward, {}).for_group(Style.COLUMNS)((SAMPLE,))
    assert seen == {"completions": [list(EPISODE.messages)], "ids": [[7, 8, 9]], "turns": [4]}


def test_a_function_of_openrlhf_and_a_server_get_all_text() -> None:
    seen: list[str] = []

    def reward_func(queries: list[str], prompts: list[str], labels: list[str]) -> dict[str, Any]:
        seen.extend(queries)
        return {"rewards": [1.0]}

    FunctionCaller(reward_func, {}).for_group(Style.QUERIES)((SAMPLE,))
    assert seen == [f"2 + 3?{EPISODE.text}"]
    assert encode(SAMPLE)["query"] == f'"2 + 3?{EPISODE.text}"'


def test_a_judge_reads_the_messages_with_their_roles() -> None:
    assert answer_of(SAMPLE) == "assistant: add(2, 3)\n\ntool: 5 #### 9\n\nassistant: #### 5"


@pytest.mark.parametrize(("last", "score"), [("#### 5", 1.0), ("#### 9", 0.0)])
def test_a_rule_reads_the_last_turn_and_not_what_a_tool_wrote(last: str, score: float) -> None:
    pool = RulePool(num_workers=1, timeout_s=30)
    try:
        sample = Sample("openai/gsm8k", "2 + 3?", last, "5", episode=EPISODE)
        assert asyncio.run(pool.score([(sample,)]))[0][0].value == score
    finally:
        pool.close()


def test_the_function_of_a_file_gets_the_episode_in_its_process(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    return len(solution_str) + 100 * extra_info['num_turns']\n"
    )
    for reads, score in ((True, len(EPISODE.text) + 400.0), (False, None)):
        pool = RulePool(num_workers=1, timeout_s=30, path=str(file), reads_episodes=reads)
        try:
            assert asyncio.run(pool.score([(SAMPLE,)]))[0][0].value == score
        finally:
            pool.close()
