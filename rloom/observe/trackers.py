"""Trackers of a run's metrics: metrics.jsonl always, TensorBoard and Weights & Biases if configured."""

import importlib
import netrc
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from rloom.errors import ConfigError
from rloom.extras import install_command
from rloom.observe.records import METRICS_FILE, append_metrics, truncate_metrics

LOGGERS = ("console", "file", "tensorboard", "wandb")

TENSORBOARD_ROOT = "runs"
TENSORBOARD_VARIABLE = "TENSORBOARD_DIR"  # the whole folder, as in verl
WANDB_START_TIMEOUT_S = 30

# The old and the new name of the public server: a login for either is valid for both.
WANDB_PUBLIC_HOSTS = {"api.wandb.ai", "api.forge.coreweave.com"}


class Tracker(Protocol):
    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """May be called more than once per step, with other names."""

    def close(self) -> None: ...


class FileTracker:
    """`metrics.jsonl`: one JSON object per line, on disk when `log` returns."""

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self._file = run_dir / METRICS_FILE
        truncate_metrics(self._file)  # removes a line that a crash left incomplete

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        append_metrics(self._file, step, metrics)

    def close(self) -> None:
        pass  # `log` opens and closes the file


class TensorboardTracker:
    def __init__(self, folder: Path) -> None:
        self._module = _import(
            "torch.utils.tensorboard", logger="tensorboard", install=f"{sys.executable} -m pip install tensorboard"
        )
        self._folder = folder
        self._writer: Any = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._writer is None:
            # a resumed run may start before the last logged step: hide the later steps of the previous run
            self._writer = self._module.SummaryWriter(str(self._folder), purge_step=step)
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WandbTracker:
    """One W&B run per start. Without a login or a connection it records offline and reports that."""

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str,
        experiment: str,
        config: Mapping[str, Any],
        report: Callable[[str], None] = print,
    ) -> None:
        self._wandb = _import("wandb", logger="wandb", install=install_command("wandb"))
        run_dir.mkdir(parents=True, exist_ok=True)
        self._folder = run_dir / "wandb"
        self._arguments = {"project": project, "name": experiment, "config": dict(config), "dir": str(run_dir)}
        self._run = self._start(report)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        self._run.finish()

    def _start(self, report: Callable[[str], None]) -> Any:
        mode = os.environ.get("WANDB_MODE")
        if mode in ("offline", "dryrun", "disabled"):
            return self._init("disabled" if mode == "disabled" else "offline")
        if not _logged_in(urlsplit(self._wandb.setup().settings.base_url).netloc):
            report(f"wandb: not logged in, recording offline in {self._folder}; `wandb login`, then `wandb sync` it")
            return self._init("offline")
        try:
            run = self._init(None)
        except (self._wandb.errors.Error, TimeoutError) as error:
            reason = str(error).partition("\n")[0]
            report(f"wandb: {reason}; recording offline in {self._folder}; upload it later with `wandb sync`")
            return self._init("offline")
        if run.url:
            report(f"wandb: {run.url}")
        return run

    def _init(self, mode: str | None) -> Any:
        # W&B's terminal output and its capture of stdout would break the progress bars
        os.environ.setdefault("WANDB_DISABLE_WEAVE", "true")  # with a judge's SDK loaded, it would print an offer
        settings = self._wandb.Settings(
            silent=True, console="off", init_timeout=WANDB_START_TIMEOUT_S, login_timeout=WANDB_START_TIMEOUT_S
        )
        return self._wandb.init(**self._arguments, mode=mode, settings=settings)


def make_trackers(
    names: Sequence[str],
    *,
    run_dir: Path,
    project: str,
    experiment: str,
    config: Mapping[str, Any],
    report: Callable[[str], None] = print,
) -> list[Tracker]:
    """The trackers of `trainer.logger`, and always metrics.jsonl, which the learning curve reads."""
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(f"trainer.logger={list(names)}: there is no logger {name!r}; use any of {list(LOGGERS)}")
    trackers: list[Tracker] = [FileTracker(run_dir)]
    if "tensorboard" in names:
        folder = tensorboard_folder(run_dir, project, experiment)
        trackers.append(TensorboardTracker(folder))
        report(f"tensorboard: events in {folder}; `tensorboard --logdir {TENSORBOARD_ROOT}` shows all runs")
    if "wandb" in names:
        trackers.append(WandbTracker(run_dir, project=project, experiment=experiment, config=config, report=report))
    return trackers


def tensorboard_folder(run_dir: Path, project: str, experiment: str) -> Path:
    """`runs/PROJECT/EXPERIMENT` below the current directory, or TENSORBOARD_DIR.

    A run directory of another name is appended: runs with equal names would hide each other's curves.
    """
    if TENSORBOARD_VARIABLE in os.environ:
        return Path(os.environ[TENSORBOARD_VARIABLE]).expanduser()
    folder = Path(TENSORBOARD_ROOT, project, experiment)
    is_default = run_dir.parts[-2:] == (project, experiment)
    return folder if is_default else folder / run_dir.name


def _import(module: str, *, logger: str, install: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"trainer.logger={logger!r} is not installed ({error}); remove it from trainer.logger, or install it: "
            f"{install}"
        ) from error


def _logged_in(host: str) -> bool:
    """Whether W&B finds an API key. Without one it would prompt for it."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    hosts = WANDB_PUBLIC_HOSTS if host in WANDB_PUBLIC_HOSTS else {host}
    candidates = [os.environ["NETRC"]] if "NETRC" in os.environ else ["~/.netrc", "~/_netrc"]
    for file in map(os.path.expanduser, candidates):
        try:
            known = netrc.netrc(file).hosts
        except (OSError, netrc.NetrcParseError):
            continue
        if not hosts.isdisjoint(known):
            return True
    return False
