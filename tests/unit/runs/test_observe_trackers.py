import json
import math
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloom.errors import ConfigError
from rloom.runs.records import read_metrics, truncate_metrics
from rloom.runs.trackers import make_trackers
from rloom.runs.trackers.base import FileTracker, Start, Tracker
from rloom.runs.trackers.tensorboard import TensorboardTracker, folder_of
from rloom.runs.trackers.wandb import WandbTracker, logged_in
from tests.waiting import wait_until


def lines(run_dir: Path) -> list[Any]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def make(names: list[str], run_dir: Path) -> list[Tracker]:
    return make_trackers(names, Start(run_dir, "p", "e", {"a": 1}))


def start_wandb(run_dir: Path, said: list[str], *, resumed: bool = False) -> WandbTracker:
    return WandbTracker(Start(run_dir, "p", "e", {"lr": 0.1}, resumed, said.append))


def test_the_file_holds_one_object_a_line_as_soon_as_it_is_logged(tmp_path: Path) -> None:
    tracker = FileTracker(tmp_path / "run")
    tracker.log(1, {"critic/score/mean": 0.5})
    tracker.log(2, {"critic/score/mean": 0.75, "actor/lr": 1e-6})
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == (
        '{"step": 1, "critic/score/mean": 0.5}\n{"step": 2, "critic/score/mean": 0.75, "actor/lr": 1e-06}\n'
    )


def test_after_a_crash_in_the_middle_of_a_line_the_next_record_stands_alone(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "x": 1.0}\n{"step": 2, "x": 2.')
    FileTracker(tmp_path).log(2, {"x": 3.0})
    assert lines(tmp_path) == [{"step": 1, "x": 1.0}, {"step": 2, "x": 3.0}]


def test_a_number_that_is_not_finite_is_null_in_the_file_and_absent_when_read(tmp_path: Path) -> None:
    FileTracker(tmp_path).log(1, {"actor/grad_norm": math.nan, "x": math.inf, "y": 1.0})
    assert lines(tmp_path) == [{"step": 1, "actor/grad_norm": None, "x": None, "y": 1.0}]
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 1, "y": 1.0}]


def test_records_of_one_step_are_merged_when_read(tmp_path: Path) -> None:
    tracker = FileTracker(tmp_path)
    tracker.log(0, {"val": 0.1})
    tracker.log(1, {"x": 1.0})
    tracker.log(1, {"val": 0.2})
    assert read_metrics(tmp_path / "metrics.jsonl") == [{"step": 0, "val": 0.1}, {"step": 1, "x": 1.0, "val": 0.2}]


def test_garbled_lines_are_not_records(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 1, "x": 1.0}\n\x00\x00\xff\n[1]\n{"x": 2.0}\n{"step": 3, "x": 3.0}\n{"step": 4}')
    assert read_metrics(file) == [{"step": 1, "x": 1.0}, {"step": 3, "x": 3.0}]


def test_truncation_keeps_the_bytes_of_what_it_keeps(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1,   "x": 1.50}\n{"step": 2, "x": 2.0}\n{"step": 3')
    truncate_metrics(file, 1)
    assert file.read_text() == '{"step": 1,   "x": 1.50}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_missing_file_reads_as_empty_and_needs_no_truncation(tmp_path: Path) -> None:
    truncate_metrics(tmp_path / "metrics.jsonl", 3)
    assert read_metrics(tmp_path / "metrics.jsonl") == []


def test_the_file_is_written_whatever_the_loggers(tmp_path: Path) -> None:
    assert [type(tracker) for tracker in make([], tmp_path)] == [FileTracker]
    assert [type(tracker) for tracker in make(["console", "file"], tmp_path)] == [FileTracker]


def test_an_unknown_logger_is_named_with_those_that_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"trainer\.logger=\['console', 'comet'\].*'comet'.*'tensorboard'"):
        make(["console", "comet"], tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "trackio"])
def test_a_missing_package_is_an_error_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=rf"trainer\.logger.*'{name}'.*-m pip install .*\[{name}\]"):
        make([name], tmp_path)


# ---- TensorBoard: what is written is read back by its own reader


def scalars(folder: Path, name: str) -> list[tuple[int, float]]:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return [(event.step, event.value) for event in events.Scalars(name)]


def test_tensorboard_reads_back_what_was_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In runs/ of the current directory, where `tensorboard --logdir ./runs/` looks."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    tracker = make(["tensorboard"], tmp_path / "checkpoints" / "p" / "e")[-1]
    tracker.log(1, {"critic/score/mean": 0.5, "val-core/s/acc/mean@1": 0.25})
    tracker.log(2, {"critic/score/mean": 0.75})
    tracker.close()
    assert scalars(tmp_path / "runs" / "p" / "e", "critic/score/mean") == [(1, 0.5), (2, 0.75)]
    assert scalars(tmp_path / "runs" / "p" / "e", "val-core/s/acc/mean@1") == [(1, 0.25)]


def test_tensorboard_does_not_show_a_resumed_step_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = TensorboardTracker(tmp_path / "runs" / "p" / "e")
    for step in (1, 2, 3):
        first.log(step, {"x": float(step)})
    first.close()
    # Event files are read in the order of their names, which start with the second: a resume is later than a crash.
    now = time.time() + 60
    monkeypatch.setattr("tensorboard.summary.writer.event_file_writer.time.time", lambda: now)
    resumed = TensorboardTracker(tmp_path / "runs" / "p" / "e")
    resumed.log(2, {"x": 20.0})
    resumed.close()
    assert scalars(tmp_path / "runs" / "p" / "e", "x") == [(1, 1.0), (2, 20.0)]


def test_each_run_directory_has_a_tensorboard_folder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    assert folder_of(Path("/data/checkpoints/p/e"), "p", "e") == Path("runs/p/e")
    assert folder_of(Path("/data/run7"), "p", "e") == Path("runs/p/e/run7")
    monkeypatch.setenv("TENSORBOARD_DIR", "/logs/mine")
    assert folder_of(Path("/data/run7"), "p", "e") == Path("/logs/mine")


def test_tensorboard_shows_answers_as_text_and_renders_none_of_their_markup(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tracker = TensorboardTracker(tmp_path)
    tracker.table(4, "val/generations", ["output", "score"], [["# no title\n| no table |", 0.5], ["", None]])
    tracker.close()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    (event,) = events.Tensors("val/generations/text_summary")
    assert event.step == 4
    assert event.tensor_proto.string_val[0].decode() == (
        "**output**\n\n    # no title\n    | no table |\n\n**score**\n\n    0.5"
        "\n\n---\n\n**output**\n\n    \n\n**score**\n\n    None"
    )


def test_a_tensorboard_that_logged_nothing_leaves_nothing(tmp_path: Path) -> None:
    TensorboardTracker(tmp_path / "runs" / "p" / "e").close()
    assert list(tmp_path.iterdir()) == []


# ---- Weights & Biases


@pytest.fixture
def no_login(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    for name in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))


@pytest.mark.usefixtures("no_login")
def test_without_a_login_wandb_records_offline_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    tracker = start_wandb(tmp_path / "run", said)
    tracker.log(1, {"critic/score/mean": 0.5})
    tracker.log(1, {"val-core/s/acc/mean@1": 0.5})
    tracker.table(1, "val/generations", ["output", "score"], [["four", 1.0], ["five", None]])
    tracker.log(2, {"critic/score/mean": 0.75})
    tracker.close()
    assert len(said) == 1
    assert "not logged in, recording offline" in said[0]
    (record,) = (tmp_path / "run" / "wandb").glob("offline-run-*/run-*.wandb")
    # wandb's own process writes it, and on a busy machine ends after us
    wait_until(lambda: all(name in record.read_bytes() for name in (b"critic/score/mean", b"val-core/s/acc/mean@1")))
    (table,) = (tmp_path / "run" / "wandb").glob("offline-run-*/files/media/table/val/generations_*.table.json")
    assert json.loads(table.read_text())["data"] == [["four", 1.0], ["five", None]]
    assert capfd.readouterr() == ("", "")


@pytest.mark.usefixtures("no_login")
@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_a_wish_to_stay_offline_is_obeyed_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("WANDB_MODE", mode)
    said: list[str] = []
    tracker = start_wandb(tmp_path, said)
    tracker.log(1, {"x": 1.0})
    tracker.close()
    assert said == []
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == (1 if mode == "offline" else 0)


@pytest.mark.usefixtures("no_login")
def test_a_login_is_an_entry_for_the_host_or_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not logged_in("api.wandb.ai")
    (tmp_path / "netrc").write_text("machine wandb.example.org\n  login user\n  password nothing\n")
    assert logged_in("wandb.example.org")
    assert not logged_in("api.wandb.ai")
    (tmp_path / "netrc").write_text("machine api.wandb.ai\n  login user\n  password nothing\n")
    assert logged_in("api.forge.coreweave.com")  # the same server under its newer name
    assert not logged_in("wandb.example.org")
    monkeypatch.setenv("WANDB_API_KEY", "nothing")
    assert logged_in("wandb.example.org")


@pytest.mark.usefixtures("no_login")
def test_a_server_out_of_reach_means_offline_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    wandb = pytest.importorskip("wandb")
    modes: list[str | None] = []

    def init(*, mode: str | None, **_: Any) -> str:
        modes.append(mode)
        if mode is None:
            raise wandb.errors.CommError("no way to the server\nand advice nobody can use")
        return "the offline run"

    monkeypatch.setattr(wandb, "init", init)
    said: list[str] = []
    start_wandb(tmp_path, said)
    assert modes == [None, "offline"]
    assert said == [
        f"wandb: no way to the server; recording offline in {tmp_path / 'wandb'}; upload it later with `wandb sync`"
    ]


@pytest.mark.usefixtures("no_login")
def test_a_resumed_run_continues_its_wandb_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    wandb = pytest.importorskip("wandb")
    given: list[tuple[Any, Any]] = []

    def init(**arguments: Any) -> Any:
        given.append((arguments.get("id"), arguments.get("resume")))
        return SimpleNamespace(id=f"run{len(given)}", url=None)

    monkeypatch.setattr(wandb, "init", init)
    for resumed in (True, False, True):  # the first has nothing to continue, the second begins anew
        start_wandb(tmp_path, [], resumed=resumed)
    assert given == [(None, None), (None, None), ("run2", "allow")]
