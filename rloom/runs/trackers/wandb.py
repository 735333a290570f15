"""Weights & Biases. Without a login or a connection it records offline and reports that."""

import netrc
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from rloom.runs.trackers.base import Cell, Start, first_line, import_library

START_TIMEOUT_S = 30

# The old and the new name of the public server: a login for either is valid for both.
PUBLIC_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}


class WandbTracker:
    """Online, a resumed run continues its W&B run. Offline, each start is a W&B run."""

    def __init__(self, given: Start) -> None:
        self._wandb = import_library("wandb", logger="wandb")
        given.run_dir.mkdir(parents=True, exist_ok=True)
        self._given = given
        self._folder = given.run_dir / "wandb"
        self._run = self._start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def table(self, step: int, name: str, columns: Sequence[str], rows: Sequence[Sequence[Cell]]) -> None:
        data = [[*row] for row in rows]
        # a column may hold numbers in one row and null or text in another
        self._run.log({name: self._wandb.Table(columns=[*columns], data=data, allow_mixed_types=True)}, step=step)

    def close(self, *, failed: bool = False) -> None:
        self._run.finish(exit_code=int(failed))

    def _start(self) -> Any:
        report = self._given.report
        mode = os.environ.get("WANDB_MODE")
        if mode in ("offline", "dryrun", "disabled"):
            return self._init("disabled" if mode == "disabled" else "offline")
        if not logged_in(urlsplit(self._wandb.setup().settings.base_url).netloc):
            report(f"wandb: not logged in, recording offline in {self._folder}; `wandb login`, then `wandb sync` it")
            return self._init("offline")
        try:
            run = self._init(None)
        except (self._wandb.errors.Error, TimeoutError) as error:
            report(
                f"wandb: {first_line(error)}; recording offline in {self._folder}; upload it later with `wandb sync`"
            )
            return self._init("offline")
        self._given.keep_run_id("wandb", run.id)
        if run.url:
            report(f"wandb: {run.url}")
        return run

    def _init(self, mode: str | None) -> Any:
        # W&B's terminal output and its capture of stdout would break the progress bars
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # it would print an offer where vLLM has imported openai
        settings = self._wandb.Settings(
            silent=True, console="off", init_timeout=START_TIMEOUT_S, login_timeout=START_TIMEOUT_S
        )
        given = self._given
        former = given.run_id("wandb") if mode is None else None  # W&B resumes nothing offline
        return self._wandb.init(
            project=given.project,
            name=given.experiment,
            config=dict(given.config),
            dir=str(given.run_dir),
            mode=mode,
            settings=settings,
            **({"id": former, "resume": "allow"} if former else {}),
        )


def logged_in(host: str) -> bool:
    """Whether W&B finds an API key. Without one it would prompt for it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = PUBLIC_HOSTS if host in PUBLIC_HOSTS else {host}
    candidates = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for file in map(os.path.expanduser, candidates):
        try:
            known = netrc.netrc(file).hosts
        except (OSError, netrc.NetrcParseError):
            continue
        if not hosts.isdisjoint(known):
            return True
    return False
