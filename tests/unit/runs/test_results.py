"""The recipes' programs: the table of runs, with numbers made by hand, and the comparison of prompts once in small."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import yaml

RECIPES = Path(__file__).parents[3] / "recipes"
METRIC = "val-core/openai/gsm8k/acc/mean@1"


@pytest.fixture
def results(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(RECIPES))
    return importlib.import_module("results")


def run_directory(folder: Path, seed: int, last: float, lr: float = 1e-6, tested: int = 2) -> Path:
    """Two steps of 3 s and 5 s, a test of 100 problems before and, unless it was ended there, after them."""
    (folder / "answers").mkdir(parents=True)
    config = {
        "trainer": {"project_name": "gsm8k"},
        "algorithm": {"adv_estimator": "gae"},
        "actor_rollout_ref": {"model": {"path": "/models/coder"}, "actor": {"optim": {"lr": lr}}},
        "data": {"seed": seed},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "answers" / "0.jsonl").write_text('{"data_source": "openai/gsm8k"}\n' * 100)
    (folder / "seconds.txt").write_text("369\n")
    events: list[dict[str, Any]] = [
        {"event": "run", "step": 0, "total_steps": 2, "host": "a", "pid": 1},
        {"event": "validation", "step": 0, "metrics": {METRIC: 0.5}, "measures": {}},
        *(
            {"event": "step", "step": step, "metrics": {"timing_s/step": seconds, "critic/score/mean": 0.5}}
            for step, seconds in ((1, 3.0), (2, 5.0))
        ),
        {"event": "validation", "step": tested, "metrics": {METRIC: last}, "measures": {}},
        {"event": "end", "status": "finished"},
    ]
    lines = [json.dumps({"time": 1.0 + number, **event}) for number, event in enumerate(events)]
    (folder / "events.jsonl").write_text("".join(f"{line}\n" for line in lines))
    return folder


def test_runs_of_several_seeds_share_a_row(results: Any, tmp_path: Path) -> None:
    runs = [
        results.Run(results.RunFolder(run_directory(tmp_path / name, seed, last)))
        for name, seed, last in (("b", 2, 0.82), ("a", 1, 0.78))
    ]
    # the mean is 80 %, and sqrt(80 · 20 / 100) is 4 points
    assert results.table(runs).splitlines()[2] == (
        "| gsm8k | coder | PPO | 1, 2 | 2 | GSM8K test (100) | 50.0 | 78.0, 82.0 (mean 80.0) | 4.0 | 6 min 9 s | 4.0 |"
    )


def test_a_row_names_the_keys_in_which_runs_of_an_algorithm_differ(results: Any, tmp_path: Path) -> None:
    given = [("a", 1, 0.78, 1e-6, 2), ("b", 1, 0.6, 1e-5, 2), ("c", 2, 0.82, 1e-6, 2), ("d", 1, 0.5, 1e-4, 1)]
    runs = [results.Run(results.RunFolder(run_directory(tmp_path / name, *rest))) for name, *rest in given]
    cells = [[cell.strip() for cell in line.split("|")] for line in results.table(runs).splitlines()[2:]]
    assert [(row[3], row[4], row[8], row[9]) for row in cells] == [
        ("PPO, lr=1e-06", "1, 2", "78.0, 82.0 (mean 80.0)", "4.0"),
        ("PPO, lr=1e-05", "1", "60.0", "4.9"),  # sqrt(60 · 40 / 100)
        ("PPO, lr=0.0001", "1", "–", "–"),  # its last test was in step 1 of 2
    ]


def test_a_setting_is_as_long_as_needed(results: Any, tmp_path: Path) -> None:
    run = results.Run(results.RunFolder(run_directory(tmp_path / "run", 1, 0.5)))
    keys = ["actor_rollout_ref.actor.optim.lr", "critic.optim.lr", "data.train_batch_size"]
    assert results.setting(run, keys).startswith("actor.optim.lr=1e-06, critic.optim.lr=")
    assert ", train_batch_size=" in results.setting(run, keys)


def test_a_picture_is_drawn_for_each_recipe(results: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_directory(tmp_path / "run", 1, 0.75)
    monkeypatch.setattr("sys.argv", ["results.py", str(run), "--pictures", str(tmp_path)])
    results.main()
    assert (tmp_path / "results_gsm8k.png").stat().st_size > 10_000


@pytest.mark.slow
def test_prompts_are_compared_on_training_problems(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model solves none; its answers are cut off at 4 tokens."""
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "2 + 2?", "answer": "#### 123456789"}\n' * 3)
    monkeypatch.syspath_prepend(str(RECIPES / "gsm8k"))
    arguments = ["embedded", str(tmp_path), "--problems", "2", "--max_new_tokens", "4", "trainer.device=cpu"]
    monkeypatch.setattr("sys.argv", ["compare_prompts.py", *arguments])
    importlib.import_module("compare_prompts").main()
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")][2:]
    assert len(rows) == 5 and "| (the question alone) |" in rows[-1]
    assert [row.split(" | ", 1)[1] for row in rows] == ["0.0 | 0.0 | 0.0 | 0.0 | 0.0 | 4 | 100.0 |"] * 5
