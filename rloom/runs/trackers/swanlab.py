"""SwanLab. Without a login or a connection it records offline and reports that."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rloom.runs.trackers.base import Cell, Start, first_line, import_library, silent

LOG_DIR_VARIABLES = ("SWANLAB_LOG_DIR", "SWANLAB_LOGDIR")  # the new and the old name
ONLINE = ("online", "cloud")  # the new and the old name


class SwanlabTracker:
    """Online, a resumed run continues its SwanLab run. Offline, each start is a SwanLab run."""

    def __init__(self, given: Start) -> None:
        self._swanlab = import_library("swanlab", logger="swanlab")
        self._given = given
        folder = next((os.environ[name] for name in LOG_DIR_VARIABLES if os.environ.get(name)), None)
        self._folder = given.run_dir / "swanlog" if folder is None else Path(folder)
        self._run = self._start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with silent():
            self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        table = self._swanlab.echarts.Table()
        table.add(headers=[*columns], rows=[[*row] for row in rows])
        with silent():
            self._run.log({name: table}, step=step)

    def close(self, *, failed: bool = False) -> None:
        with silent():
            if failed:
                self._run.finish(state="crashed", error="the training did not end as planned")
            else:
                self._run.finish()

    def _start(self) -> Any:
        report = self._given.report
        settings = self._swanlab.Settings()  # reads the environment, SwanLab's files and a stored login
        if settings.mode not in ONLINE:
            return self._init(settings.mode)
        if not settings.api_key:
            report(
                f"swanlab: not logged in, recording offline in {self._folder}; `swanlab login`, then "
                f"`swanlab sync {self._folder}/run-*`"
            )
            return self._init("offline")
        try:
            run = self._init("online")
        except Exception as error:  # SwanLab has no class of its own for a service out of reach
            report(
                f"swanlab: {first_line(error)}; recording offline in {self._folder}; upload it later with "
                f"`swanlab sync {self._folder}/run-*`"
            )
            return self._init("offline")
        self._given.keep_run_id("swanlab", run.id)
        report(f"swanlab: {run.url}")
        return run

    def _init(self, mode: str) -> Any:
        given, settings = self._given, self._swanlab.Settings
        former = given.run_id("swanlab") if mode == "online" else None
        with silent():
            return self._swanlab.init(
                project=given.project,
                name=given.experiment,
                config=dict(given.config),
                log_dir=str(self._folder),
                mode=mode,
                # no prompt; and the capture of stdout would break the progress bars
                settings=settings(interactive=False, terminal=settings.Terminal(proxy_type="none")),
                **({"id": former, "resume": "allow"} if former else {}),
            )
