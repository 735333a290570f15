"""Text of others does not control the terminal."""

import io
import json
import logging
import re
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from rloom.cli import main
from rloom.cli.reward import render
from rloom.console import run_safely
from rloom.errors import DataError
from rloom.runs.display import Display
from rloom.runs.records import EVENTS_FILE, EventLog
from rloom.terminal import printable
from rloom.types import Sample, Score

# clears the screen, sets the clipboard, moves to the start of the line; one byte for ESC [; reverses the order of text;
# ends a line; hides text; half of a surrogate pair
HOSTILE = "a\x1b[2J\x1b]52;c;Y3VybA==\x07\rb\x7f\x9b31m\u202e\u2066\u2028\ufeff\U000e0041\ud83d z"
SHOWN = r"a\u001b[2J\u001b]52;c;Y3VybA==\u0007\u000db\u007f\u009b31m\u202e\u2066\u2028\ufeff\udb40\udc41\ud83d z"
OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\u2028\u2029\ufeff\ud800-\udfff]")


def test_what_a_terminal_obeys_is_shown() -> None:
    assert printable(HOSTILE) == SHOWN
    assert json.loads(f'"{SHOWN}"') == HOSTILE
    assert printable(f"{HOSTILE}é") == f"{SHOWN}é"


@pytest.mark.parametrize("text", ["", "plain, two\n\tlines", "答案：42", "👩‍🔬 می‌خواهم", "{'a': [1]}"])
def test_other_text_is_left_as_it_is(text: str) -> None:
    assert printable(text) == text


def no_control(text: str, times: int = 1) -> None:
    assert not OBEYED.search(text), ascii(OBEYED.search(text))
    assert text.count(r"\u001b[2J") >= times, ascii(text)


def test_rows_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"prompt": HOSTILE, "data_source": HOSTILE, "ground_truth": HOSTILE, HOSTILE: {HOSTILE: HOSTILE}}
    (tmp_path / "rows.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps({**row, 'data_source': 3})}\n")
    assert main(["data", "show", str(tmp_path / "rows.jsonl")]) == 0
    no_control(capsys.readouterr().out, 8)
    assert main(["data", "check", str(tmp_path / "rows.jsonl")]) == 1
    no_control(capsys.readouterr().out, 2)


def test_errors_and_log_lines_that_quote_values(capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        # pytest's processes cannot send half a surrogate pair to each other in a captured line
        logging.getLogger("rloom.anything").info(f"the answer was {HOSTILE}".replace("\ud83d", ""))
        raise DataError(f"row 3: {HOSTILE}")

    assert run_safely(command) == 2
    no_control(capsys.readouterr().err, 2)


def test_the_console_of_a_run() -> None:
    text = io.StringIO()
    display = Display(Console(file=text, width=200))
    display.message(HOSTILE)
    display.validation(1, {f"val-core/{HOSTILE}/acc/mean@1": 0.5}, first={}, measures={HOSTILE: "accuracy"})
    no_control(text.getvalue(), 2)


def test_a_score_that_is_tried() -> None:
    score = Score(1.0, prediction=HOSTILE, detail=HOSTILE)
    no_control(render(Sample("s", "p", "r", "t"), score, "rule", HOSTILE, HOSTILE), 2)


@pytest.mark.parametrize("command", [["runs"], ["runs", "--json"], ["compare"], ["compare", "--json"], ["doctor"]])
def test_names_and_configurations_of_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    folders = [tmp_path / f"{number} \x1b[2J" for number in range(2)]
    for number, folder in enumerate(folders):
        folder.mkdir()
        (folder / "config.yaml").write_text(yaml.safe_dump({"algorithm": {"adv_estimator": f"{HOSTILE}{number}"}}))
        events = EventLog(folder / EVENTS_FILE)
        events.write("run", step=0, total_steps=1, host="h", pid=1)
        events.write("validation", step=0, metrics={f"val-core/{HOSTILE}/acc/mean@1": 0.5})
        events.write("end", status=f"Error{HOSTILE}", message=HOSTILE)
    main([*command, str(tmp_path)] if command[0] == "runs" else [*command, *map(str, folders)])
    no_control(capsys.readouterr().out, 2)
