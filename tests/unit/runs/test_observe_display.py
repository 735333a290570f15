import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from io import StringIO

import pytest
from rich.console import Console

from rloom.runs.display import Display, LinePart, ProgressLines, _folded
from rloom.runs.measures import validation_accuracies
from rloom.runs.names import describe_metrics, with_aliases
from tests.waiting import wait_until

METRICS = {
    "critic/score/mean": 0.53125,
    "actor/reward_kl_penalty": 0.002,
    "actor/ppo_kl": 0.9,
    "actor/pg_loss": 0.0213,
    "critic/vf_loss": 0.118,
    "actor/entropy": 0.41,
    "response_length/mean": 17.24,
    "timing_s/step": 1.94,
    "actor/lr": 1e-6,
}
LINE = (
    "step 12/40 · reward_mean 0.531 · kl 0.002 · actor_loss 0.0213"
    " · critic_loss 0.118 · entropy 0.41 · len 17.2 · 1.9 s"
)


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a developer's shell or CI says about colours does not matter here."""
    for name in ("FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def plain() -> Console:
    return Console(file=StringIO(), width=80)


def terminal() -> Console:
    return Console(file=StringIO(), width=80, force_terminal=True)


def written(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    return console.file.getvalue()


def test_a_file_gets_one_unfolded_line_a_step_without_codes() -> None:
    console = plain()
    Display(console, total_steps=40).step(12, METRICS)
    assert written(console) == LINE + "\n"


def test_only_what_was_measured_is_shown() -> None:
    console = plain()
    Display(console).step(3, {"critic/score/mean": -1.5, "reward/failed": 0.0, "perf/time_per_step": 1234.56})
    assert written(console) == "step 3 · reward_mean -1.500 · 1,234.6 s\n"


def test_failed_rewards_are_shown_when_there_are_any() -> None:
    console = plain()
    Display(console).step(3, {"reward/failed": 2.0})
    assert written(console) == "step 3 · failed 2\n"


def test_without_a_reference_only_the_kl_of_the_update_is_shown_and_named_so() -> None:
    console = plain()
    Display(console).step(1, {"actor/ppo_kl": 0.00012345, "response_length/mean": 12345.6})
    assert written(console) == "step 1 · ppo_kl 0.000123 · len 12,346\n"


def test_the_line_counts_epochs_from_one_and_shows_the_clip_fraction() -> None:
    console = plain()
    display = Display(console, total_steps=30, total_epochs=15)
    display.step(3, {"training/epoch": 1, "critic/score/mean": 0.5, "actor/pg_clipfrac": 0.125})
    assert written(console) == "step 3/30 · epoch 2/15 · reward_mean 0.500 · clip_fraction 0.125\n"


def test_an_epoch_beyond_the_planned_ones_has_no_total() -> None:
    """Dynamic sampling takes further prompts, and may need more epochs than planned."""
    console = plain()
    Display(console, total_epochs=2).step(3, {"training/epoch": 2})
    assert written(console) == "step 3 · epoch 3\n"


def test_metrics_have_the_names_of_the_guides_too_where_they_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {
        "critic/score/mean": 0.5, "actor/kl_loss": 0.3, "actor/kl_divergence": 0.2, "actor/pg_loss": 0.1,
        "critic/vf_loss": 0.4, "actor/pg_clipfrac": 0.15, "actor/ppo_ratio": 1.01, "actor/grad_norm": 2.0,
        "critic/grad_norm": 9.0, "training/epoch": 0,
    }  # fmt: skip
    assert with_aliases(measured) == measured | {
        "reward_mean": 0.5, "kl": 0.3, "kl_divergence": 0.3, "actor_loss": 0.1, "policy_loss": 0.1, "critic_loss": 0.4,
        "value_loss": 0.4, "clip_fraction": 0.15, "ppo_ratio": 1.01, "grad_norm": 2.0, "epoch": 0,
    }  # fmt: skip
    assert with_aliases({"actor/ppo_kl": 0.1}) == {"actor/ppo_kl": 0.1}  # it is not the KL to the reference
    assert "actor/pg_clipfrac" in describe_metrics()
    monkeypatch.setenv("RLOOM_LANGUAGE", "zh")
    assert "缓慢下降" in describe_metrics()


def test_a_validation_line_remembers_the_start() -> None:
    console = plain()
    Display(console).validation(
        10,
        {"val-core/math_reasoning/acc/mean@1": 0.719, "val-core/b/acc/mean@1": 1.25, "val-aux/b/acc/best@1": 1.0},
        first={"math_reasoning": (0, 0.375)},
        measures={"math_reasoning": "accuracy", "b": "accuracy"},
    )
    assert written(console) == "step 10 · validation · math_reasoning acc 71.9 % (start 37.5 %) · b acc 1.25\n"


def test_a_score_is_called_a_score_and_is_no_percentage() -> None:
    console = plain()
    metrics = {"val-core/hh/acc/mean@1": 0.8214, "val-core/own/acc/mean@1": -0.4219}
    Display(console).validation(2, metrics, first={"hh": (0, 0.5)}, measures={"hh": "score", "own": "score"})
    assert written(console) == "step 2 · validation · hh score 0.821 (start 0.5) · own score -0.422\n"


def test_a_validation_line_claims_no_start_that_was_not_measured() -> None:
    console = plain()
    Display(console).validation(16, {"val-core/a/acc/mean@1": 0.5}, first={"a": (8, 0.25)}, measures={"a": "accuracy"})
    assert written(console) == "step 16 · validation · a acc 50.0 % (step 8 25.0 %)\n"


def test_a_data_source_may_hold_slashes() -> None:
    assert validation_accuracies({"val-core/openai/gsm8k/acc/mean@8": 0.5, "critic/score/mean": 1.0}) == {
        "openai/gsm8k": 0.5
    }


def test_a_terminal_of_80_columns_folds_between_two_parts() -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True, no_color=True, color_system=None)
    Display(console, total_steps=40).step(12, METRICS)
    assert written(console).splitlines() == [
        "step 12/40 · reward_mean 0.531 · kl 0.002 · actor_loss 0.0213",
        "    critic_loss 0.118 · entropy 0.41 · len 17.2 · 1.9 s",
    ]


def test_a_terminal_gets_colours() -> None:
    console = terminal()
    Display(console).step(12, METRICS)
    assert "\x1b[" in written(console)


def test_a_terminal_shows_a_bar_for_each_stage_under_the_name_users_know() -> None:
    console = terminal()
    display = Display(console)
    for stage in ("gen", "values", "update_actor"):
        display.begin(stage)
        display.advance(stage, 64, 128)
    display.end("gen")
    display.clear()
    shown = written(console)
    assert all(name in shown for name in ("rollout", "compute_values", "train_actor"))
    assert "128/128" in shown  # what has ended is full
    assert " 64/128" in shown
    assert "gen" not in shown


def test_the_bars_fit_into_80_columns_and_go_when_the_step_is_done() -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system=None)
    display = Display(console)
    display.begin("old_log_prob")
    display.advance("old_log_prob", 100_000, 200_000)
    display.step(1, {"critic/score/mean": 0.5})
    rows = written(console).replace("\r", "\n").splitlines()
    assert max(len(row) for row in rows) <= 80
    assert rows[-1].endswith("step 1 · reward_mean 0.500")
    assert "\x1b[2K" in written(console)  # the line of the bar was erased


def test_a_stage_of_unknown_size_has_no_count() -> None:
    console = terminal()
    display = Display(console)
    display.begin("ref")
    display.end("ref")
    display.clear()
    assert "ref" in written(console)
    assert "/?" not in written(console) and "1/1" not in written(console)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def take_steps(display: Display, clock: Clock, seconds: Sequence[float]) -> None:
    for step, took in enumerate(seconds, start=1):
        display.begin_step(step)
        clock.now += took
        display.step(step, {})


def test_the_bar_of_the_run_has_the_step_under_way_and_the_time_left() -> None:
    """Steps of 60 s after a slow first one: 7 of 10 are left, of which one has run for 20 s."""
    console, clock = Console(file=StringIO(), width=80, force_terminal=True, color_system=None), Clock()
    display = Display(console, total_steps=10, clock=clock)
    take_steps(display, clock, [100.0, 60.0, 60.0])
    display.begin_step(4)
    clock.now += 20.0
    display.begin("gen")
    display.advance("gen", 64, 512)
    display.clear()
    rows = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", written(console)).replace("\r", "\n").splitlines()
    [bar] = {" ".join(row.split()[-4:]) for row in rows if "step 4/10" in row}
    assert bar == "about 6:40 left 0:04:00"
    assert any(re.fullmatch(r"  rollout +[━╸╺ ]+ 64/512 +0:00:00", row) for row in rows)
    assert max(map(len, rows)) <= 80


def test_without_a_terminal_a_line_every_30_seconds_says_how_far_the_stage_is(monkeypatch: pytest.MonkeyPatch) -> None:
    console, clock = plain(), Clock()
    display = Display(console, total_steps=8, clock=clock)
    take_steps(display, clock, [60.0, 60.0])
    display.begin_step(3)
    display.begin("gen")
    display.advance("gen", 64, 512)
    clock.now += 45.0
    display.report()
    display.end("gen")
    display.report()  # no stage is under way
    monkeypatch.setenv("RLOOM_LANGUAGE", "zh")
    display.begin("ref")
    display.report()
    display.close()
    assert written(console).splitlines()[2:] == [
        "step 3/8 · rollout 64/512 · 0:45 · about 5:15 left",
        "step 3/8 · ref · 0:00 · 约剩 5:15",
    ]


def test_the_lines_come_from_a_thread_that_ends_with_the_display() -> None:
    reported = threading.Event()
    lines = ProgressLines(reported.set, every_s=0.01)
    lines.start()
    assert reported.wait(60)
    lines.stop()
    wait_until(lambda: "progress-lines" not in {each.name for each in threading.enumerate()})


def test_the_display_waits_only_shortly_for_a_line_that_nobody_reads() -> None:
    blocked, written_at_last = threading.Event(), threading.Event()

    def report() -> None:
        blocked.set()
        written_at_last.wait(120)

    lines = ProgressLines(report, every_s=0.01)
    lines.start()
    assert blocked.wait(60)
    begin = time.monotonic()
    lines.stop()
    assert 0.5 < time.monotonic() - begin < 60
    written_at_last.set()


def test_wide_characters_take_two_columns_of_a_line() -> None:
    parts = [LinePart("步" * 10), LinePart("数" * 10)]  # 20 columns each, 4 of the indent, 3 between
    assert len(_folded(parts, 46)) == 2 and len(_folded(parts, 47)) == 1


def test_an_output_in_ascii_does_not_end_a_run() -> None:
    code = (
        "from rich.console import Console; from rloom.console import run_safely; "
        "from rloom.runs.display import Display; "
        "raise SystemExit(run_safely(lambda: Display(Console()).quote('64 × 8 步') or 0))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, env={**os.environ, "PYTHONIOENCODING": "ascii"}, timeout=240
    )
    assert (done.returncode, done.stdout) == (0, b"64 ? 8 ?\n"), done.stderr


def test_a_message_on_a_terminal_folds_between_words_and_leaves_paths_whole() -> None:
    console = Console(file=StringIO(), width=80, force_terminal=True, color_system=None)
    path = "checkpoints/" + "a_long_name/" * 8
    Display(console).message(
        f"gae on embedded (cpu): 2048 prompts, 64 × 8 answers a step, 32 steps, no reference\n{path} x"
    )
    assert written(console).splitlines() == [
        "gae on embedded (cpu): 2048 prompts, 64 × 8 answers a step, 32 steps, no",
        "    reference",
        path,
        "    x",
    ]


def test_no_terminal_means_no_bars() -> None:
    console = plain()
    display = Display(console)
    display.begin("gen")
    display.advance("gen", 1, 2)
    display.end("gen")
    display.clear()
    assert written(console) == ""


def test_a_message_is_printed_as_it_is() -> None:
    console = plain()
    Display(console).message("[bold]resumed[/bold] from step 3 " + "x" * 100)
    assert written(console) == "[bold]resumed[/bold] from step 3 " + "x" * 100 + "\n"


def test_a_quiet_display_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    display = Display(quiet=True)
    display.begin("gen")
    display.step(1, METRICS)
    display.message("hello")
    assert capsys.readouterr() == ("", "")


def test_an_answer_is_shown_as_it_is_in_every_language(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOOM_LANGUAGE", "zh")
    console = Console(file=StringIO(), width=200)
    answer = "'Paris; the reward is 5, step 3 of 4' (expected '4')"
    Display(console).quote(answer)
    assert isinstance(console.file, StringIO)
    assert console.file.getvalue() == answer + "\n"
