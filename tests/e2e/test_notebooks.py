"""The notebooks of examples/notebooks: their cells run one after the other, with two steps each."""

import ast
import json
from pathlib import Path
from typing import Any

import pytest

from tests.architecture.source import ROOT

FOLDER = ROOT / "examples" / "notebooks"
STEPS = 2


def cells(name: str, kind: str) -> list[str]:
    found = json.loads((FOLDER / name).read_text(encoding="utf-8"))
    assert found["nbformat"] == 4
    return ["".join(cell["source"]) for cell in found["cells"] if cell["cell_type"] == kind]


def executed(name: str) -> dict[str, Any]:
    """The names that the notebook defines, and `shown_values`: the value of each cell's last line."""
    names: dict[str, Any] = {"shown_values": []}
    for code in cells(name, "code"):
        tree = ast.parse(code, f"{name}")
        for node in tree.body:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "STEPS":
                node.value = ast.Constant(STEPS, lineno=1, col_offset=0)
        last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, name, "exec"), names)
        if isinstance(last, ast.Expr):
            names["shown_values"].append(eval(compile(ast.Expression(last.value), name, "eval"), names))
    return names


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)  # slow


def test_a_first_run(tmp_path: Path) -> None:
    names = executed("first_run.ipynb")
    assert names["result"].steps == STEPS and (tmp_path / "runs" / "first_model" / "config.json").is_file()
    assert len(names["shown_values"][1]) == 2 and all(names["shown_values"][1])


def test_a_reward_of_ones_own(capsys: pytest.CaptureFixture[str]) -> None:
    names = executed("own_reward.ipynb")
    assert names["shown_values"][0] == ([1.0], [0.88])
    parts = names["shown_values"][-1]
    assert [step for step, *_ in parts] == [1, 2] and all(0 <= correct <= 1 for _, correct, _ in parts)
    for step, (_, correct, brief) in zip(names["result"].history[-STEPS:], parts, strict=True):
        assert step["critic/score/mean"] == pytest.approx(correct + 0.2 * brief, abs=1e-5)
    assert capsys.readouterr().out.count("  score ") == STEPS


def test_a_language_model_as_the_judge() -> None:
    pytest.importorskip("openai")
    names = executed("judge.ipynb")
    assert [step for step, _ in names["shown_values"][-1]] == [1, 2] and names["result"].history[-1][
        "reward/failed"
    ] == 0.0


def test_a_look_at_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    names = executed("look_at_a_run.ipynb")
    assert len(names["answers"]) == STEPS * 8 * 4 and "math_reasoning" in capsys.readouterr().out
    worst, best = names["shown_values"][0]
    assert worst[0][0] <= best[-1][0]


def test_every_notebook_is_run_here_and_has_both_languages() -> None:
    text = Path(__file__).read_text(encoding="utf-8")
    for file in FOLDER.glob("*.ipynb"):
        assert f'executed("{file.name}")' in text
        headings = [line for cell in cells(file.name, "markdown") for line in cell.splitlines() if line.startswith("#")]
        assert headings and all(" · " in heading for heading in headings), file.name
