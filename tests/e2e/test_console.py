"""What a run prints: on a terminal of 80 columns, into a pipe, and when it is stopped before it began."""

import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest

from rloom.terminal import columns
from tests.architecture.source import ROOT
from tests.e2e.runs import arguments

CODES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
VALIDATED = ("trainer.test_freq=2", "trainer.val_before_train=True", "algorithm.adv_estimator=rloo")
OWN_REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return -0.5\n"


def environment(**variables: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "NO_COLOR", "LANG", "LC_ALL")}
    return {**kept, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT), **variables}


def read_all(terminal: int) -> str:
    found = b""
    while True:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # the program has ended
            return found.decode()
        if not part:
            return found.decode()
        found += part


def test_on_a_terminal_of_80_columns_nothing_is_wider_and_no_word_is_cut(tmp_path: Path) -> None:
    run = tmp_path / "checkpoints" / "a_name_that_is_long" / "another_name_that_is_long"
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    command = [sys.executable, "-m", "rloom", "train", *arguments(run, 2, *VALIDATED)]
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=tmp_path, env=environment()
    ) as process:
        os.close(theirs)
        shown = read_all(ours)
    os.close(ours)
    assert process.returncode == 0, shown
    rows = [row.rstrip() for row in CODES.sub("", shown).replace("\r", "\n").split("\n")]
    too_wide = {row for row in rows if columns(row) > 80}
    assert {row for row in too_wide if str(run) not in row} == set()  # a path that is longer than the line
    text = "\n".join(rows)
    assert "measures the KL to it)" in " ".join(text.split())
    assert re.search(r"^  step 2/2 +\S+ about \d+:\d\d left +\d+:\d\d:\d\d$", text, re.M)  # the bar of the run
    assert re.search(r"^  train_actor +[━╸╺ ]+ 2/2 ", text, re.M)  # mini-batches
    assert re.search(r"^  rollout +[━╸╺ ]+ 8/8 ", text, re.M)  # answers
    assert re.search(r"^Held-out accuracy on math_reasoning: .* % at the start, .* % now, best", text, re.M)
    assert re.search(r"^Time: \d+:\d\d; [\d,]+ tokens, [\d,]+ a second$", text, re.M)
    newest = run.relative_to(tmp_path) / "global_step_2"
    assert f"Talk to it: rloom chat {newest}" in " ".join(text.split())


@pytest.mark.long
def test_in_a_pipe_a_chinese_run_says_how_far_it_is_and_calls_its_score_a_score(tmp_path: Path) -> None:
    (tmp_path / "reward.py").write_text(OWN_REWARD)
    own = f"custom_reward_function.path={tmp_path / 'reward.py'}"
    often = (
        "import sys; from rloom.runs.display import ProgressLines; ProgressLines.__init__.__defaults__ = (0.05,); "
        "from rloom.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", often, "train", *arguments(tmp_path / "run", 3, *VALIDATED, own)],
        capture_output=True, text=True, cwd=tmp_path, env=environment(RLOOM_LANGUAGE="zh"), timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    assert re.search(r"^step [23]/3 · \w+( \d/\d)? · \d+:\d\d · 约剩 \d+:\d\d$", done.stdout, re.M)
    assert "step 0 · validation · math_reasoning score -0.5\n" in done.stdout
    assert "验证分数，math_reasoning：开始时 -0.5，现在 -0.5，最高 -0.5（第 0 步）" in done.stdout
    assert "acc" not in done.stdout and "用时：" in done.stdout


@pytest.mark.parametrize(("language", "word"), [("en", "Stopped."), ("zh", "已停止。")])
def test_ctrl_c_before_training_says_so(tmp_path: Path, language: str, word: str) -> None:
    command = [sys.executable, "-m", "rloom", "train", *arguments(tmp_path / "run", 3)]
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(RLOOM_LANGUAGE=language),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a background process of a shell, as a test run may be, ignores ctrl-C, and so do its children
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as process:
        assert process.stderr is not None
        while not process.stderr.readline().startswith("["):  # of `rloom 0.1.0 ...`: torch is loaded next
            pass
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=240)
    assert process.returncode == 130
    assert rest.splitlines()[-1] == word and "Traceback" not in rest
