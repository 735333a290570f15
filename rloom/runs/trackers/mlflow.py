"""MLflow: the server of MLFLOW_TRACKING_URI, or `mlflow.db` in the current directory."""

import logging
import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from rloom.runs.run_folder import flat_config
from rloom.runs.trackers.base import Cell, Start, first_line, import_library, silent, without_login

MAX_NAME = 250
MAX_PARAM = 500  # accepted by servers before version 2; newer ones accept 6,000. `config.yaml` has the whole value


def metric_name(name: str) -> str:
    """`val-core/gsm8k/acc/mean@1` -> `val-core/gsm8k/acc/mean_at_1`, as verl writes it.

    MLflow accepts letters, digits, `_`, `-`, `.`, spaces and `/`, and no empty or relative part of a path.
    """
    allowed = re.sub(r"[^\w.\- /]", "_", name.replace("@", "_at_"))
    parts = [part for part in allowed.split("/") if part not in ("", ".", "..")]
    return "/".join(parts)[:MAX_NAME] or "_"


def params(config: Mapping[str, Any]) -> dict[str, str]:
    """The configuration as MLflow's parameters: dotted keys, short texts."""
    return {metric_name(key): str(value)[:MAX_PARAM] for key, value in flat_config(config).items()}


PARAMS_PER_REQUEST = 100  # the server refuses more
# MLflow's own values let a server out of reach stop a run for minutes.
TIME_LIMITS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "20", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
NOT_THERE = ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE", "INVALID_STATE")  # also: it was deleted
NO_BARS = {"MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false"}


class MlflowTracker:
    """A resumed run continues its MLflow run. MLflow keeps both values of a step that is logged twice."""

    def __init__(self, given: Start) -> None:
        for name, value in {**TIME_LIMITS, **NO_BARS}.items():
            os.environ.setdefault(name, value)
        with silent():
            self._mlflow = import_library("mlflow", logger="mlflow")
        if "MLFLOW_LOGGING_LEVEL" not in os.environ:
            logging.getLogger("mlflow").setLevel(logging.ERROR)
            logging.getLogger("alembic").setLevel(logging.ERROR)
        self._given = given
        self._client, self._run_id = self._start()
        try:
            self._record_config()
        except Exception as error:
            given.report(f"mlflow: the configuration was not recorded: {first_line(error)}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        metric, now_ms = self._mlflow.entities.Metric, int(time.time() * 1000)
        found = [metric(metric_name(name), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=found)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        """One table a run, which grows: the number of tables of a run is limited in MLflow."""
        values = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        if "step" not in values:
            values = {"step": [step] * len(rows), **values}
        with silent():
            self._client.log_table(self._run_id, values, f"{metric_name(name)}.json")

    def close(self, *, failed: bool = False) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if failed else "FINISHED")

    def _start(self) -> tuple[Any, str]:
        given, uri = self._given, self._mlflow.get_tracking_uri()  # MLFLOW_TRACKING_URI or MLflow's default
        try:
            client, run_id = self._open(uri, "mlflow")
        except Exception as error:  # from a server: MlflowException; from a database: those of its driver
            given.run_dir.mkdir(parents=True, exist_ok=True)
            local = f"sqlite:///{(given.run_dir / 'mlflow.db').absolute()}"
            given.report(f"mlflow: {first_line(error)}; {recording_in(local)}")
            return self._open(
                local, "mlflow_offline", artifacts=(given.run_dir / "mlflow_artifacts").absolute().as_uri()
            )
        given.report(f"mlflow: {recording_in(uri)}")
        return client, run_id

    def _open(self, uri: str, name: str, artifacts: str | None = None) -> tuple[Any, str]:
        """`name`: under which the id of the run is kept."""
        given = self._given
        with silent():
            client = self._mlflow.MlflowClient(tracking_uri=uri)
            former = os.environ.get("MLFLOW_RUN_ID") or given.run_id(name)
            if former is not None:
                try:
                    client.update_run(former, status="RUNNING")
                    return client, former
                except self._mlflow.MlflowException as error:
                    if error.error_code not in NOT_THERE:
                        raise
            found = client.get_experiment_by_name(given.project)
            experiment = (
                found.experiment_id if found is not None else client.create_experiment(given.project, artifacts)
            )
            run_id = client.create_run(experiment, run_name=given.experiment).info.run_id
        given.keep_run_id(name, run_id)
        return client, run_id

    def _record_config(self) -> None:
        """Parameters cannot be changed: those of the first start stay, `config.yaml` is that of the last one."""
        with silent():
            known = self._client.get_run(self._run_id).data.params
            given = [(name, value) for name, value in params(self._given.config).items() if name not in known]
            for first in range(0, len(given), PARAMS_PER_REQUEST):
                batch = given[first : first + PARAMS_PER_REQUEST]
                self._client.log_batch(self._run_id, params=[self._mlflow.entities.Param(*each) for each in batch])
            self._client.log_dict(self._run_id, dict(self._given.config), "config.yaml")


def recording_in(uri: str) -> str:
    """Where, and how to look at it."""
    show = f"; `mlflow ui --backend-store-uri {uri}` shows it" if uri.startswith("sqlite:") else ""
    return f"recording in {without_login(uri)}{show}"
