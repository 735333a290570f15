"""Colours, bars and folded lines are for terminals only, and a terminal can do without colours."""

import os
import pty
import re
import subprocess
import sys

from tests.architecture.source import ROOT

STEP = """
from rloom.runs.display import Display
display = Display(total_steps=2)
display.begin("gen")
display.advance("gen", 1, 2)
display.step(1, {"critic/score/mean": 0.5, "training/epoch": 0})
"""
LINE = "step 1/2 · epoch 1 · reward_mean 0.500"
COLOUR = re.compile(r"\x1b\[[\d;]*3[0-7]")


def environment(**variables: str) -> dict[str, str]:
    dropped = ("NO_COLOR", "FORCE_COLOR", "TERM", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS", "COLORTERM")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return kept | {"PYTHONPATH": str(ROOT), "TERM": "xterm-256color", "PYTHONIOENCODING": "utf-8"} | variables


def on_a_terminal(*command: str, **variables: str) -> str:
    parent, child = pty.openpty()
    process = subprocess.Popen(command, stdin=child, stdout=child, stderr=child, env=environment(**variables))
    os.close(child)
    written = b""
    while True:
        try:
            part = os.read(parent, 4096)
        except OSError:  # the other end is closed
            break
        if not part:
            break
        written += part
    os.close(parent)
    assert process.wait(timeout=240) == 0
    return written.decode()


def in_a_pipe(*command: str, **variables: str) -> str:
    done = subprocess.run(command, env=environment(**variables), capture_output=True, text=True, timeout=240)
    assert done.returncode == 0
    return done.stdout + done.stderr


def test_a_terminal_has_colours_and_a_bar() -> None:
    said = on_a_terminal(sys.executable, "-c", STEP)
    assert COLOUR.search(said) and "rollout" in said


def test_no_color_removes_the_colours() -> None:
    said = on_a_terminal(sys.executable, "-c", STEP, NO_COLOR="1")
    assert not COLOUR.search(said) and "reward_mean" in said


def test_a_dumb_terminal_gets_plain_lines() -> None:
    assert on_a_terminal(sys.executable, "-c", STEP, TERM="dumb").split("\r\n") == [LINE, ""]


def test_a_pipe_gets_plain_lines() -> None:
    assert in_a_pipe(sys.executable, "-c", STEP) == f"{LINE}\n"


COMMANDS = """
import contextlib
from rloom.cli import main
for arguments in (["--help"], ["help", "metrics"], ["plan", "--help"], ["config", "algorithm.lam"]):
    with contextlib.suppress(SystemExit):  # argparse ends the program after its help
        assert main(arguments) == 0
"""


def test_help_and_lookups_are_plain_without_colours_wanted() -> None:
    piped, shown = (
        in_a_pipe(sys.executable, "-c", COMMANDS),
        on_a_terminal(sys.executable, "-c", COMMANDS, NO_COLOR="1"),
    )
    assert "\x1b" not in piped and not COLOUR.search(shown)
    for written in (piped, shown):
        assert all(word in written for word in ("completion", "reward_mean", "--gpu_memory", "algorithm.lam"))
