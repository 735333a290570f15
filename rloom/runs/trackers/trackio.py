"""Trackio: a database in TRACKIO_DIR, a Space of Hugging Face (TRACKIO_SPACE_ID), or a server (TRACKIO_SERVER_URL)."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from rloom.runs.trackers.base import Cell, Start, first_line, import_library, silent, without_login

REMOTE_VARIABLES = ("TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL")


class TrackioTracker:
    """A resumed run continues the newest Trackio run of its name. Trackio keeps both values of a repeated step."""

    def __init__(self, given: Start) -> None:
        with silent():
            self._trackio = import_library("trackio", logger="trackio")
        self._given = given
        self._run = self._start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with silent():
            self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        with silent():
            table = self._trackio.Table(columns=[*columns], data=[[*row] for row in rows])
            self._run.log({name: table}, step=step)

    def close(self, *, failed: bool = False) -> None:
        with silent():
            self._trackio.finish()  # unlike `Run.finish`, it is not repeated when Python ends

    def _start(self) -> Any:
        report = self._given.report
        given = next((os.environ[name] for name in REMOTE_VARIABLES if os.environ.get(name)), None)
        local = f"recording in {self._trackio.TRACKIO_DIR}; `trackio show --project {self._given.project}` shows it"
        if given is None:
            report(f"trackio: {local}")
            return self._init()
        remote = without_login(given.partition("?")[0])  # the address of a server may hold a token
        try:
            run = self._init()
        except Exception as error:  # from huggingface_hub, httpx or Trackio: no token, no such Space, no connection
            report(f"trackio: {remote}: {first_line(error)}; {local}")
            with _without(REMOTE_VARIABLES):
                return self._init()
        report(f"trackio: sending to {remote}; what cannot be sent stays in {self._trackio.TRACKIO_DIR}")
        return run

    def _init(self) -> Any:
        given = self._given
        with silent():
            return self._trackio.init(
                project=given.project,
                name=given.experiment,
                config=dict(given.config),
                resume="allow" if given.resumed else "never",
                embed=False,
            )


@contextmanager
def _without(names: Sequence[str]) -> Iterator[None]:
    """Without these environment variables: Trackio reads them whatever its arguments are."""
    former = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(former)
