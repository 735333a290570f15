import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from rloom.runs.curve import draw_learning_curve, smoothed


def draw(tmp_path: Path, *records: dict[str, float]) -> tuple[int, int, int]:
    """Width, height and size in bytes of the picture of these records."""
    metrics_file = tmp_path / "metrics.jsonl"
    metrics_file.write_text("".join(json.dumps(record) + "\n" for record in records))
    picture = draw_learning_curve(metrics_file, tmp_path / "pictures" / "learning_curve.png")
    content = picture.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height, len(content)


def test_a_whole_run_becomes_a_picture(tmp_path: Path) -> None:
    records: list[dict[str, float]] = [{"step": 0, "val-core/openai/gsm8k/acc/mean@1": 0.2}]
    for step in range(1, 41):
        records.append(
            {
                "step": step,
                "critic/score/mean": step / 50,
                "response_length/mean": 200.0 + step,
                "actor/kl_loss": 0.001 * step,
                "actor/entropy": 1 / step,
            }
        )
    records.append({"step": 40, "val-core/openai/gsm8k/acc/mean@1": 0.7})
    width, height, size = draw(tmp_path, *records)
    assert (width, height) == (1500, 930)
    assert size > 50_000


@pytest.mark.parametrize(
    "record",
    [
        {"step": 1, "critic/score/mean": 0.5},
        {"step": 0, "val-core/$x$/acc/mean@1": 0.5},
        {"step": 1, "critic/score/mean": -3.0, "actor/entropy": 0.2},
        {"step": 1, "response_length/mean": 17.0},
    ],
)
def test_one_step_and_any_subset_of_the_series_will_do(tmp_path: Path, record: dict[str, float]) -> None:
    assert draw(tmp_path, record)[2] > 5_000


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    assert draw(tmp_path)[2] > 5_000
    assert draw_learning_curve(tmp_path / "none.jsonl", tmp_path / "none.png").exists()


def test_the_smooth_line_is_the_mean_of_the_neighbourhood() -> None:
    assert smoothed(np.array([0.0, 3.0, 0.0, 3.0])).tolist() == [1.5, 1.0, 2.0, 1.5]
    assert smoothed(np.array([1.0, 2.0])).tolist() == [1.0, 2.0]


def test_matplotlib_is_imported_only_to_draw() -> None:
    code = "import sys, rloom.runs.curve; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
