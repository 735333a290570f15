"""`train.sh --data FILE`: a run on the user's own prompts, and what the screen shows before it."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rloom.cli.kit import main
from rloom.config.schema import Config
from rloom.trainer import main_ppo

# As document 002 prints it.
PRINTED = """
[
  {
    "prompt": "计算 15 + 27 的结果",
    "ground_truth": "42",
    "data_source": "math_reasoning"
  }
]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("TRAIN_DATA", "VAL_DATA", "MODEL_PATH"):
        monkeypatch.delenv(name, raising=False)
    Path("data.json").write_text(PRINTED, encoding="utf-8")
    return tmp_path


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The configurations of runs, which do not begin."""
    found: list[Config] = []
    monkeypatch.setattr(main_ppo, "train", lambda config: found.append(config) or 0)
    return found


def write_rows(name: str, count: int) -> None:
    rows = [{"prompt": f"{n} + 1", "ground_truth": str(n + 1), "data_source": "math_reasoning"} for n in range(count)]
    Path(name).write_text(json.dumps(rows), encoding="utf-8")


def test_the_printed_file_trains_and_its_rule_scores(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--model", "embedded", "--data", "data.json", "--epochs", "2", "trainer.save_freq=-1"]) == 0
    shown = capsys.readouterr()
    assert shown.out.splitlines()[:2] == [
        "Model: embedded · Data: data.json · Reward: rules, selected by the data_source of each row",
        "Batch: data.json has 1 row, fewer than the default batch of 64; a step takes all of them. "
        "--batch_size sets another number",
    ]
    assert "Rewards: math_reasoning " in shown.out + shown.err
    run = next(Path("outputs").rglob("metrics.jsonl"))
    steps = [json.loads(line) for line in run.read_text(encoding="utf-8").splitlines()]
    assert steps[-1]["training/global_step"] == 2


@pytest.mark.parametrize(
    ("rows", "arguments", "sizes"),
    [
        (20, [], (20, 5)),  # four updates
        (21, [], (21, 21)),  # 4 does not divide it: one update
        (1024, [], (1024, 256)),
        (1025, [], (1024, 256)),
        (20, ["data.train_max_samples=8"], (8, 2)),
        (20, ["--batch_size", "4"], (4, 1)),  # chosen: it stays
        (20, ["--batch_size", "64"], (64, 16)),  # too large: the run ends with the error of every command
    ],
)
def test_fewer_prompts_than_the_default_batch_are_one_batch(
    rows: int, arguments: list[str], sizes: tuple[int, int], started: list[Config]
) -> None:
    write_rows("rows.json", rows)
    assert main(["--data", "rows.json", *arguments]) == 0
    [config] = started
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == sizes


def test_several_files_are_counted_together(started: list[Config]) -> None:
    write_rows("a.json", 3)
    write_rows("b.json", 5)
    assert main(["--data", "a.json,b.json"]) == 0
    assert started[0].data.train_batch_size == 8


def test_a_model_of_ones_own_without_data_is_warned_of(
    started: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "Qwen/Qwen2.5-7B"]) == 0
    assert capsys.readouterr().out.splitlines()[1] == (
        "WARNING: no --data is given, so Qwen/Qwen2.5-7B trains on rloom's embedded sums, such as 12 + 29. "
        "For your own prompts: --data FILE (json, jsonl or parquet), or TRAIN_DATA=FILE"
    )
    for arguments in ([], ["--model", "m", "--data", "data.json"], ["--model", "m", "data.train_files=data.json"]):
        assert main(arguments) == 0
        assert "WARNING" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (["--data", "date.json"], "data error: --data: date.json: no such file; the nearest name in . is data.json"),
        (["--data", "data.json", "--val", "no.json"], "data error: --val: no.json: no such file; the nearest name in"),
        (["--data", "broken.json"], "--data: broken.json, line 1: not valid JSON (Expecting value); correct that line"),
        (["--data", "data.txt"], "--data: data.txt: the name determines the format and must end in .parquet, .json"),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_flag(
    arguments: list[str], fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("broken.json").write_text("[,]")
    Path("data.txt").write_text("x")
    assert main(arguments) == 2
    assert fault in capsys.readouterr().err


def test_a_file_without_rows_is_named_before_the_batch_is_chosen(
    started: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), "empty.parquet")
    assert main(["--data", "empty.parquet"]) == 2
    shown = capsys.readouterr()
    assert started == [] and "--data: empty.parquet: holds no rows" in shown.err and "Batch:" not in shown.out
