"""The viewer beside a run that writes, was killed or resumed, and with files that are damaged or gone."""

import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from rloom.errors import DataError
from rloom.view.run_cache import RunCache
from tests.view_client import Viewer, viewing
from tests.view_runs import CONFIG, START, GrowingRun, cut_last_line, write_killed_run, write_run
from tests.waiting import wait_until

RUN = "/api/runs/0"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "sums" / "grpo"


@pytest.fixture
def growing(folder: Path) -> Iterator[GrowingRun]:
    run = GrowingRun(folder, total_steps=8)
    yield run
    run.dumps.close()


def dumped(viewer: Viewer, step: int) -> None:
    """Wait for the thread that writes dumps."""
    wait_until(lambda: step in viewer.get(f"{RUN}/dumps")["train"])


def test_a_running_run_is_followed(growing: GrowingRun, folder: Path) -> None:
    with viewing([folder]) as viewer:
        begun = viewer.get(f"{RUN}/metrics")
        assert (begun["steps"], begun["state"]["status"], begun["state"]["total_steps"]) == ([], "running", 8)
        assert viewer.get(f"{RUN}/dumps") == {"train": [], "validation": [], "skipped": 0}
        assert viewer.fault(f"{RUN}/validation") == (404, "the run has no dump of a validation yet")
        for step in (1, 2):
            growing.write_step(step)
            later = viewer.get(f"{RUN}/metrics?generation={begun['generation']}&after={step}")
            assert (later["complete"], later["steps"], later["state"]["step"]) == (False, [step], step)
            dumped(viewer, step)
            assert viewer.get(f"{RUN}/train/{step}/prompts")["total"] == 6
        growing.log_validation(2, {"val-core/sums/acc/mean@1": 0.5})
        later = viewer.get(f"{RUN}/metrics?generation={begun['generation']}&after=2")
        assert later["metrics"]["val-core/sums/acc/mean@1"] == [0.5]
        growing.close()
        assert viewer.get("/api/runs")["runs"][0]["state"]["status"] == "finished"


def test_a_resumed_run_replaces_the_later_steps_of_the_one_before(growing: GrowingRun, folder: Path) -> None:
    with viewing([folder]) as viewer:
        for step in (1, 2, 3):
            growing.write_step(step)
        before = viewer.get(f"{RUN}/metrics")
        dumped(viewer, 3)
        growing.begin(after=1)
        resumed = viewer.get(f"{RUN}/metrics?generation={before['generation']}&after=3")
        assert (resumed["complete"], resumed["steps"]) == (True, [0, 1])
        assert resumed["generation"] != before["generation"]
        growing.write_step(2)
        dumped(viewer, 2)
        assert viewer.get(f"{RUN}/dumps")["train"] == [1, 2]
        assert [at["step"] for at in viewer.get(f"{RUN}/prompts/7/history")["steps"]] == [1]


def test_lines_cut_short_are_left_out_and_what_follows_them_is_read(tmp_path: Path) -> None:
    folder = write_killed_run(tmp_path / "sums" / "killed")
    with viewing([folder]) as viewer:
        found = viewer.get(f"{RUN}/metrics")
        assert (found["steps"], found["state"]["status"], found["state"]["step"]) == ([0, 1, 2, 3], "killed", 3)
        assert viewer.get(f"{RUN}/dumps") == {"train": [1, 2, 3], "validation": [0], "skipped": 0}
        resumed = GrowingRun(folder, total_steps=8, after=3)
        resumed.write_step(4)
        resumed.close()
        assert viewer.get(f"{RUN}/metrics")["steps"] == [0, 1, 2, 3, 4]
        assert viewer.get(f"{RUN}/dumps") == {"train": [1, 2, 3, 4], "validation": [0, 4], "skipped": 1}


def test_a_stage_that_runs_lasts_until_the_last_event_and_the_time_between_processes_is_left_out(
    growing: GrowingRun, folder: Path
) -> None:
    """Step 1 ends 39 s after the start; another process repeats step 2."""
    growing.write_step(1)
    growing.events.write("stage_begin", time=1_790_000_100.0, step=2, stage="gen")
    growing.events.write("warning", time=1_790_000_103.0, step=2, kind="notice", message="")
    with viewing([folder]) as viewer:
        gen = {"row": "generation", "stage": "gen", "step": 2, "start": 0.0, "seconds": 3.0}
        found = viewer.get(f"{RUN}/timeline?first=2&last=2")
        assert (found["spans"], found["seconds"], found["idle"]["engines"]) == ([gen], 3.0, 0.0)
        growing.events.write("run", time=1_790_000_500.0, step=1, total_steps=8, host="", pid=1)
        growing.events.write("stage_begin", time=1_790_000_500.0, step=2, stage="gen")
        growing.events.write("stage_end", time=1_790_000_505.0, step=2, stage="gen", seconds=5.0)
        found = viewer.get(f"{RUN}/timeline?first=1&last=2")
        assert found["spans"][-1] == {**gen, "start": 39.0, "seconds": 5.0}


def test_generation_beside_training_is_cut_to_the_steps_that_are_shown(folder: Path) -> None:
    """Generation from 10 s on, and from 38 s into step 2, which begins at 40 s. In `gen` a step waits."""
    config = {**CONFIG, "trainer": {**CONFIG["trainer"], "v1": {"trainer_mode": "separate_async"}}}
    growing = GrowingRun(folder, total_steps=8, config=config)
    growing.write_step(1)
    with viewing([folder]) as viewer:
        idle = viewer.get(f"{RUN}/timeline?first=1&last=1")["idle"]
        assert idle == {"engines": None, "trainer": 1 - 13 / 38, "both": None}, "an older version recorded none"
        spans = [[START + 10.0, START + 36.0], [START + 37.5, START + 45.0]]
        growing.events.write("generation", time=START + 46.0, step=2, spans=spans)
        growing.write_step(2)
        found = viewer.get(f"{RUN}/timeline?first=1&last=1")
    of_rows = {
        row: [(s["start"], s["seconds"]) for s in found["spans"] if s["row"] == row]
        for row in ("generation", "waiting")
    }
    assert of_rows == {"generation": [(10.0, 26.0), (37.5, 0.5)], "waiting": [(0.0, 20.0), (20.0, 4.0)]}
    assert found["idle"] == pytest.approx({"engines": 1 - 26.5 / 38, "trainer": 1 - 13 / 38, "both": 1 - 28 / 38})


def test_a_dump_that_vanishes_is_an_error_and_the_others_stay(folder: Path) -> None:
    write_run(folder, steps=4)
    with viewing([folder]) as viewer:
        assert viewer.get(f"{RUN}/train/3/prompts")["total"] == 6
        (folder / "rollouts" / "train" / "3.parquet").unlink()
        for path in ("train/3/prompts", "train/3/prompts/0", "train/3/prompts?text=x"):
            status, error = viewer.fault(f"{RUN}/{path}")
            assert status == 404 and error.startswith("the dump of train step 3 cannot be read: ")
        # of its steps 1 and 3, the text of the prompt is in the one that is left
        assert [at["step"] for at in viewer.get(f"{RUN}/prompts/7/history")["steps"]] == [1, 3]
        (folder / "rollouts" / "train" / "1.parquet").unlink()
        assert viewer.fault(f"{RUN}/prompts/7/history")[0] == 404
        assert viewer.get(f"{RUN}/train/2/prompts")["total"] == 6


def test_a_damaged_dump_is_an_error_or_left_out_and_never_a_wrong_number(folder: Path) -> None:
    write_run(folder, steps=1)
    file = folder / "rollouts" / "train" / "1.parquet"
    whole = file.read_bytes()
    draw = random.Random(0)
    paths = [f"{RUN}/train/1/prompts", *(f"{RUN}/train/1/prompts/{group}" for group in (0, 5))]
    with viewing([folder]) as viewer:
        right = {path: viewer.get(path) for path in paths}
        for length in (0, 1, 100, len(whole) // 2, len(whole) - 1):
            file.write_bytes(whole[:length])
            assert {viewer.ask(path).status for path in paths} == {404}
        footer = int.from_bytes(whole[-8:-4], "little") + 8  # names and places of columns; has no checksum
        for _ in range(60):
            place = draw.randrange(len(whole) - footer)
            file.write_bytes(whole[:place] + bytes([whole[place] ^ (1 << draw.randrange(8))]) + whole[place + 1 :])
            for path in paths:
                answer = viewer.ask(path)
                assert answer.status == 404 or answer.json() == right[path], (place, path, answer.body[:300])
        file.write_bytes(whole)
        assert viewer.get(paths[0]) == right[paths[0]]


def test_files_that_are_no_longer_what_they_were_do_not_stop_the_viewer(folder: Path) -> None:
    write_run(folder, steps=2)
    with viewing([folder]) as viewer:
        (folder / "config.yaml").write_text("algorithm: [unclosed")
        config = viewer.get(f"{RUN}/config")
        assert config["config"] == {} and config["fault"].startswith("config.yaml cannot be read: ")
        (folder / "rollouts" / "tokenizer.json").write_text("{")
        answer = viewer.get(f"{RUN}/train/1/prompts/0")["answers"][0]
        assert answer["pieces"] is None and answer["text"] and len(answer["logprobs"]) == answer["length"]
        (folder / "rollouts" / "index.jsonl").write_bytes(b"\xff\xfe\n[1]\n{}\nnull\n")
        assert viewer.get(f"{RUN}/dumps") == {"train": [], "validation": [], "skipped": 4}
        shutil.rmtree(folder)
        assert viewer.fault(f"{RUN}/metrics") == (404, f"{folder} is no run directory any more")
        assert viewer.get("/api/runs") == {"runs": []}


def test_a_run_that_cannot_be_read_is_listed_with_the_reason(tmp_path: Path) -> None:
    write_run(tmp_path / "sums" / "first", steps=1)
    (tmp_path / "sums" / "second" / "events.jsonl").mkdir(parents=True)
    (tmp_path / "sums" / "second" / "config.yaml").write_text("model: {path: tiny}")
    with viewing([tmp_path]) as viewer:
        found = {run["name"]: run for run in viewer.get("/api/runs")["runs"]}
        assert found["sums/first"]["state"]["status"] == "finished"
        state = found["sums/second"]["state"]
        assert (state["status"], state["step"]) == ("unreadable", 0) and "is not a regular file" in state["error"]
        assert viewer.fault(f"/api/runs/{found['sums/second']['id']}/metrics")[0] == 404


def test_supervised_fine_tuning_is_told_from_reinforcement_learning(folder: Path) -> None:
    run = GrowingRun(folder, total_steps=2, config={"model": {"path": "tiny"}, "trainer": {"seed": 1}})
    run.log_step(1, {"train/loss": 2.5})
    run.close()
    with viewing([folder]) as viewer:
        (found,) = viewer.get("/api/runs")["runs"]
        assert [found[name] for name in ("kind", "algorithm", "model", "reward", "accuracy")] == [
            *("sft", "sft", "tiny", None, {}),
        ]


def test_an_internal_error_is_json_and_one_line_in_the_terminal(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(folder, steps=1)

    def broken(run: object) -> None:
        raise RuntimeError("a bug \x1b[31m")

    with viewing([folder]) as viewer:
        monkeypatch.setattr("rloom.view.routes.config", broken)
        assert viewer.fault(f"{RUN}/config") == (500, "internal error: RuntimeError: a bug \x1b[31m")
        assert viewer.ask(f"{RUN}/dumps").status == 200
    said = capsys.readouterr().err
    assert said == "rloom view: '/api/runs/0/config': 'internal error: RuntimeError: a bug \\x1b[31m'\n"


def test_a_run_that_begins_below_the_folder_gets_the_next_number(tmp_path: Path) -> None:
    write_run(tmp_path / "sums" / "first", steps=1)
    with viewing([tmp_path]) as viewer:
        assert [run["name"] for run in viewer.get("/api/runs")["runs"]] == ["sums/first"]
        write_run(tmp_path / "sums" / "a_second", steps=1)
        wait_until(lambda: len(viewer.get("/api/runs")["runs"]) == 2)  # folders are not searched all the time
        found = {run["id"]: run["name"] for run in viewer.get("/api/runs")["runs"]}
        assert found == {0: "sums/first", 1: "sums/a_second"}
        assert viewer.get("/api/runs/1/metrics")["steps"] == [0, 1]


def test_many_requests_at_once_while_the_run_writes_see_whole_steps(folder: Path) -> None:
    faults: list[str] = []

    def look(viewer: Viewer, stop: threading.Event) -> None:
        while not stop.is_set():
            found = viewer.get(f"{RUN}/metrics")
            if any(len(values) != len(found["steps"]) for values in found["metrics"].values()):
                faults.append("metrics")
            for step in viewer.get(f"{RUN}/dumps")["train"]:
                if viewer.get(f"{RUN}/train/{step}/prompts")["total"] != 6:
                    faults.append(f"prompts of {step}")

    with GrowingRun(folder, total_steps=8, interval_s=0.01) as run, viewing([folder]) as viewer:
        stop = threading.Event()
        threads = [threading.Thread(target=look, args=(viewer, stop)) for _ in range(4)]
        for thread in threads:
            thread.start()
        dumped(viewer, run.total_steps)
        stop.set()
        for thread in threads:
            thread.join()
    assert faults == []


def test_a_path_without_runs_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"empty is no run directory and has none below it; give the folder of"):
        RunCache([tmp_path / "empty"])
    with pytest.raises(DataError, match=r"absent is no folder; give a run directory"):
        RunCache([tmp_path / "absent"])
    write_run(tmp_path / "sums" / "grpo", steps=1)
    cut_last_line(tmp_path / "sums" / "grpo")
    with pytest.raises(DataError, match="empty is no run directory"):
        RunCache([tmp_path, tmp_path / "empty"])
    both = RunCache([tmp_path, tmp_path / "sums", tmp_path / "sums" / "grpo"]).search()
    assert [run.path for run in both] == [tmp_path / "sums" / "grpo"]
