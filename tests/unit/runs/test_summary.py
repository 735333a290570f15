"""The lines at the end of a run, in both languages."""

from pathlib import Path

import pytest

from rloom.language import to_chinese
from rloom.runs.records import EventLog
from rloom.runs.run_folder import RunFolder
from rloom.runs.summary import summary_lines
from tests.run_directories import write_run

GSM8K = "val-core/openai/gsm8k/acc/mean@1"
JUDGE = "reward/api_score"


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    counted = {f"{JUDGE}/requests": 10, f"{JUDGE}/input_tokens": 2_000, f"{JUDGE}/output_tokens": 50}
    steps = {
        0: {GSM8K: 0.25},
        1: {"perf/total_num_tokens": 6_000.0, **counted, f"{JUDGE}/cost": 0.5},
        2: {"perf/total_num_tokens": 3_000.0, GSM8K: 0.75, **counted, f"{JUDGE}/cost": 0.25},
        3: {GSM8K: 0.5, "reward/rm_score/tokens": 900.0},
    }
    path = write_run(tmp_path / "run", {}, steps)
    events = EventLog(path / "events.jsonl")
    for step, stage, seconds in ((1, "step", 40.0), (1, "gen", 30.0), (2, "step", 20.0), (2, "testing", 4.0)):
        events.write("stage_end", step=step, stage=stage, seconds=seconds)
    events.write("stage_end", step=3, stage="save_checkpoint", seconds=1.0)
    return RunFolder(path)


def test_what_the_run_reached_how_long_it_took_and_what_its_judge_cost(run: RunFolder) -> None:
    lines = summary_lines(run)
    assert lines == [
        "Held-out accuracy on openai/gsm8k: 25.0 % at the start, 50.0 % now, best 75.0 % at step 2",
        "Time: 1:05; 9,000 tokens, 150 a second",
        "Judge: 20 requests, 4,000 tokens in, 100 out, cost 0.75",
    ]
    assert [to_chinese(line) for line in lines] == [
        "验证准确率，openai/gsm8k：开始时 25.0 %，现在 50.0 %，最高 75.0 %（第 2 步）",
        "用时：1:05；9,000 个 token，每秒 150 个",
        "评分模型：20 次请求，输入 4,000 个 token，输出 100 个，费用 0.75",
    ]


def test_a_run_that_validated_once_and_one_without_prices(tmp_path: Path) -> None:
    steps = {4: {GSM8K: 0.5, "reward/requests": 1.0, "reward/input_tokens": 7.0, "reward/output_tokens": 2.0}}
    assert summary_lines(RunFolder(write_run(tmp_path / "run", {}, steps))) == [
        "Held-out accuracy on openai/gsm8k: 50.0 % after step 4",
        "Judge: 1 request, 7 tokens in, 2 out",
    ]


def test_supervised_fine_tuning_has_a_loss(tmp_path: Path) -> None:
    steps = {2: {"val/loss": 1.5}, 4: {"val/loss": 0.75}, 6: {"val/loss": 1.0}}
    [line] = summary_lines(RunFolder(write_run(tmp_path / "run", {}, steps)))
    assert line == "Validation loss: 1.500 after step 2, 1.000 now, lowest 0.750 at step 4"
    assert to_chinese(line) == "验证损失：第 2 步后 1.500，现在 1.000，最低 0.750（第 4 步）"
