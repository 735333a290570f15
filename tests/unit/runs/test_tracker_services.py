"""SwanLab, MLflow and Trackio: what is written is read back with their own readers."""

import importlib
import json
import shutil
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest

from rloom.config.load import load_config
from rloom.runs.trackers import make_trackers
from rloom.runs.trackers.base import Start, Tracker, silent
from rloom.trainer import main_ppo

COLUMNS = ["input", "output", "score"]
ROWS = [["2+2", "<b>4</b>", 1.0], ["2+3", "4\n", None]]
CONFIG = {"algorithm": {"adv_estimator": "grpo", "lam": 0.95}, "data": {"train_files": ["a", "b"]}}


def run_of(name: str, start: Start, values: dict[int, float]) -> None:
    """Log a score in each step and a table in the last one."""
    tracker = tracker_of(name, start)
    for step, value in values.items():
        tracker.log(step, {"critic/score/mean": value})
        tracker.log(step, {"val-core/openai/gsm8k/acc/mean@1": value / 2})
    tracker.table(max(values), "val/generations", COLUMNS, ROWS)
    tracker.close()


def tracker_of(name: str, start: Start) -> Tracker:
    _, tracker = make_trackers(["console", name], start)
    return tracker


# ---- SwanLab


@pytest.fixture
def swanlab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("swanlab", reason="the extra swanlab is not installed")
    for variable in ("API_KEY", "MODE", "LOG_DIR", "LOGDIR", "API_HOST", "RUN_ID", "RESUME"):
        monkeypatch.delenv(f"SWANLAB_{variable}", raising=False)
    monkeypatch.setenv("SWANLAB_ROOT", str(tmp_path / "home"))  # where a login would be
    monkeypatch.chdir(tmp_path)
    return library


def swanlab_records(folder: Path) -> list[Any]:
    """With SwanLab's own reader, the one of `swanlab sync`."""
    store = pytest.importorskip("swanlab.sdk.internal.core_python.store")
    record = pytest.importorskip("swanlab.proto.swanlab.record.v1.record_pb2").Record
    (file,) = folder.glob("run-*/run-*.swanlab")
    reader = store.DataStoreReader()
    reader.open(file)
    records = [record.FromString(line) for line in reader]
    reader.close()
    return records


@pytest.mark.usefixtures("swanlab")
def test_without_a_login_swanlab_records_offline_and_says_so_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    run_of("swanlab", Start(tmp_path / "run", "p", "e", CONFIG, report=said.append), {1: 0.5, 2: 0.75})
    folder = tmp_path / "run" / "swanlog"
    assert said == [
        f"swanlab: not logged in, recording offline in {folder}; `swanlab login`, then `swanlab sync {folder}/run-*`"
    ]
    assert capfd.readouterr() == ("", "")
    records = swanlab_records(folder)
    scalars = [each.scalar for each in records if each.HasField("scalar")]
    assert [(each.key, each.step, each.value.number) for each in scalars] == [
        ("critic/score/mean", 1, 0.5),
        ("val-core/openai/gsm8k/acc/mean@1", 1, 0.25),
        ("critic/score/mean", 2, 0.75),
        ("val-core/openai/gsm8k/acc/mean@1", 2, 0.375),
    ]
    (start,) = (each.start for each in records if each.HasField("start"))
    assert (start.project, start.name) == ("p", "e")
    (table,) = folder.glob("run-*/media/echarts/*.json")
    assert "2+2" in table.read_text()
    (config,) = folder.glob("run-*/files/config.yaml")
    assert "grpo" in config.read_text()


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_a_wish_to_stay_offline_is_obeyed_by_swanlab_without_a_word(
    swanlab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: str
) -> None:
    monkeypatch.setenv("SWANLAB_MODE", mode)
    monkeypatch.setenv("SWANLAB_API_KEY", "0" * 21)
    monkeypatch.setenv("SWANLAB_LOG_DIR", str(tmp_path / "logs"))
    said: list[str] = []
    run_of("swanlab", Start(tmp_path / "run", "p", "e", {}, report=said.append), {1: 0.5})
    assert said == []
    assert len(list(tmp_path.glob("logs/run-*"))) == (1 if mode == "offline" else 0)


def test_a_swanlab_service_out_of_reach_means_offline_and_a_reached_one_is_continued(
    swanlab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        id, url = "abc", "https://swanlab.cn/@me/p/runs/abc"

    given: list[tuple[str, Any]] = []

    def init(*, mode: str, **arguments: Any) -> Any:
        given.append((mode, arguments.get("id")))
        if len(given) == 1:
            raise swanlab.exceptions.AuthenticationError("no way to the service\nand advice")
        return Run()

    monkeypatch.setenv("SWANLAB_API_KEY", "0" * 21)
    monkeypatch.setattr(swanlab, "init", init)
    said: list[str] = []
    for resumed in (False, False, True):
        tracker_of("swanlab", Start(tmp_path, "p", "e", {}, resumed, said.append))
    assert given == [("online", None), ("offline", None), ("online", None), ("online", "abc")]
    assert said[0].startswith(f"swanlab: no way to the service; recording offline in {tmp_path / 'swanlog'}")
    assert said[1:] == ["swanlab: https://swanlab.cn/@me/p/runs/abc"] * 2


# ---- MLflow


@pytest.fixture(scope="module")
def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """One database for all tests: MLflow creates its tables in seconds."""
    for module in ("mlflow", "sqlalchemy", "alembic"):
        pytest.importorskip(module, reason="the extra mlflow is not installed")
    folder = tmp_path_factory.mktemp("mlflow")
    uri = f"sqlite:///{folder}/mlflow.db"
    with chdir(folder), silent():  # artifacts are in ./mlruns of the place where a process opened the database first
        importlib.import_module("mlflow").MlflowClient(uri).search_experiments()
    return uri


@pytest.fixture
def mlflow(mlflow_uri: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    import mlflow

    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", mlflow_uri)
    return mlflow


@pytest.mark.filterwarnings("ignore::Warning")  # of MLflow's own reader
def test_mlflow_reads_back_metrics_parameters_and_the_table(
    mlflow: Any, mlflow_uri: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    run_of("mlflow", Start(tmp_path / "run", "numbers", "e", CONFIG, report=said.append), {1: 0.5, 2: 0.75})
    assert said == [f"mlflow: recording in {mlflow_uri}; `mlflow ui --backend-store-uri {mlflow_uri}` shows it"]
    assert capfd.readouterr() == ("", "")

    client = mlflow.MlflowClient(mlflow_uri)
    (run,) = client.search_runs([client.get_experiment_by_name("numbers").experiment_id])
    assert (run.info.run_name, run.info.status) == ("e", "FINISHED")
    history = {
        name: [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }
    assert history == {
        "critic/score/mean": [(1, 0.5), (2, 0.75)],
        "val-core/openai/gsm8k/acc/mean_at_1": [(1, 0.25), (2, 0.375)],
    }
    assert run.data.params == {
        "algorithm.adv_estimator": "grpo",
        "algorithm.lam": "0.95",
        "data.train_files": "['a', 'b']",
    }
    table = client.load_table(run.info.experiment_id, "val/generations.json", run_ids=[run.info.run_id])
    assert table[["step", "input", "output"]].values.tolist() == [[2, "2+2", "<b>4</b>"], [2, "2+3", "4\n"]]


@pytest.mark.filterwarnings("ignore::Warning")
def test_a_resumed_run_continues_its_mlflow_run_and_a_new_one_does_not(
    mlflow: Any, mlflow_uri: str, tmp_path: Path
) -> None:
    for resumed, values in ((False, {1: 0.5}), (True, {2: 0.75}), (False, {1: 0.25})):
        config = {"lr": values[max(values)]}  # a parameter of MLflow keeps its first value
        run_of("mlflow", Start(tmp_path / "run", "resumed", "e", config, resumed, lambda line: None), values)
    client = mlflow.MlflowClient(mlflow_uri)
    new, first = client.search_runs([client.get_experiment_by_name("resumed").experiment_id])
    found = [
        [(each.step, each.value) for each in client.get_metric_history(run.info.run_id, "critic/score/mean")]
        for run in (first, new)
    ]
    assert found == [[(1, 0.5), (2, 0.75)], [(1, 0.25)]]
    assert [run.data.params for run in (first, new)] == [{"lr": "0.5"}, {"lr": "0.25"}]
    table = client.load_table(first.info.experiment_id, "val/generations.json", run_ids=[first.info.run_id])
    assert table["step"].tolist() == [1, 1, 2, 2]


@pytest.mark.filterwarnings("ignore::Warning")
def test_an_mlflow_server_out_of_reach_means_a_database_in_the_run_directory(
    mlflow: Any, mlflow_uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "run").mkdir()
    shutil.copy(mlflow_uri.removeprefix("sqlite:///"), tmp_path / "run" / "mlflow.db")  # saves creating the tables
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:secret@127.0.0.1:9")  # a port where nothing listens
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    said: list[str] = []
    run_of("mlflow", Start(tmp_path / "run", "away", "e", CONFIG, report=said.append), {1: 0.5})
    (line,) = said
    local = f"sqlite:///{tmp_path / 'run' / 'mlflow.db'}"
    assert line.endswith(f"recording in {local}; `mlflow ui --backend-store-uri {local}` shows it")
    assert "127.0.0.1:9" in line and "secret" not in line
    client = mlflow.MlflowClient(local)
    (run,) = client.search_runs([client.get_experiment_by_name("away").experiment_id])
    assert run.data.metrics["critic/score/mean"] == 0.5
    assert len(list(tmp_path.glob("run/mlflow_artifacts/*/artifacts/val/generations.json"))) == 1


# ---- Trackio


@pytest.fixture
def trackio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    library = pytest.importorskip("trackio", reason="the extra trackio is not installed")
    for variable in ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL", "TRACKIO_WRITE_TOKEN"):
        monkeypatch.delenv(variable, raising=False)
    for module in ("trackio", "trackio.utils", "trackio.sqlite_storage"):  # TRACKIO_DIR is read when it is imported
        monkeypatch.setattr(f"{module}.TRACKIO_DIR", tmp_path / "trackio")
    return library


def trackio_values(trackio: Any, project: str) -> list[list[tuple[int, Any, Any]]]:
    """(step, score, accuracy) of each run, newest last."""
    storage = trackio.SQLiteStorage
    return [
        [
            (line["step"], line.get("critic/score/mean"), line.get("val-core/openai/gsm8k/acc/mean@1"))
            for line in storage.get_logs(project, run.name, run_id=run.id)
            if "val/generations" not in line
        ]
        for run in sorted(trackio.Api().runs(project), key=lambda run: run.config["_Created"])
    ]


def test_trackio_reads_back_metrics_configuration_and_the_table(
    trackio: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    run_of("trackio", Start(tmp_path / "run", "p", "e", CONFIG, report=said.append), {1: 0.5, 2: 0.75})
    assert said == [f"trackio: recording in {tmp_path / 'trackio'}; `trackio show --project p` shows it"]
    assert capfd.readouterr() == ("", "")
    assert trackio_values(trackio, "p") == [
        [(1, 0.5, None), (1, None, 0.25), (2, 0.75, None), (2, None, 0.375)],
    ]
    (run,) = trackio.Api().runs("p")
    assert run.name == "e" and run.config["algorithm"] == CONFIG["algorithm"]
    logs = trackio.SQLiteStorage.get_logs("p", "e", run_id=run.id)
    (table,) = (line["val/generations"] for line in logs if "val/generations" in line)
    assert json.loads(json.dumps(table))["_value"] == [dict(zip(COLUMNS, row, strict=True)) for row in ROWS]


def test_a_resumed_run_continues_its_trackio_run_and_a_new_one_does_not(trackio: Any, tmp_path: Path) -> None:
    for resumed, values in ((False, {1: 0.5}), (True, {2: 0.75}), (False, {1: 0.25})):
        run_of("trackio", Start(tmp_path / "run", "p", "e", {}, resumed, lambda line: None), values)
    assert trackio_values(trackio, "p") == [
        [(1, 0.5, None), (1, None, 0.25), (2, 0.75, None), (2, None, 0.375)],
        [(1, 0.25, None), (1, None, 0.125)],
    ]


def test_a_trackio_service_that_cannot_be_used_means_the_local_database(
    trackio: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_SERVER_URL", "http://127.0.0.1:9?token=secret")  # without a token for writing
    said: list[str] = []
    run_of("trackio", Start(tmp_path / "run", "p", "e", CONFIG, report=said.append), {1: 0.5})
    (line,) = said
    assert line.startswith("trackio: http://127.0.0.1:9: Self-hosted logging requires a write token")
    assert f"recording in {tmp_path / 'trackio'}" in line
    assert trackio_values(trackio, "p") == [[(1, 0.5, None), (1, None, 0.25)]]


# ---- a run


def test_a_run_gives_answers_of_its_validation_to_the_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    monkeypatch.setenv("TENSORBOARD_DIR", str(tmp_path / "events"))
    keys = {"val_only": True, "logger": "tensorboard", "log_val_generations": 2, "default_local_dir": tmp_path / "run"}
    main_ppo.train(load_config([*(f"trainer.{key}={value}" for key, value in keys.items()), "data.val_max_samples=4"]))
    events = accumulator.EventAccumulator(str(tmp_path / "events"))
    events.Reload()
    (event,) = events.Tensors("val/generations/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert (event.step, text.count("**output**"), text.count("**gts**")) == (0, 2, 2)
