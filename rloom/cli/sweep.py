"""`rloom sweep KEY=V1,V2 ... [-- key=value ...]`: one run for each combination of values, one after the other."""

import argparse
import hashlib
import itertools
import json
import math
import random
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from rloom.atomic import replace_text
from rloom.cli.parsing import CommandParser, epilog
from rloom.config.frontends.short_names import SHORT_NAMES, consequences
from rloom.config.keys import all_keys, did_you_mean
from rloom.console import FAULTS, INTERRUPTED, OK, run_safely
from rloom.errors import ConfigError
from rloom.import_path import child_command
from rloom.language import translate
from rloom.terminal import printable

if TYPE_CHECKING:
    from rloom.runs.run_folder import RunSummary

SETTINGS = "sweep.json"
FINISHED = "finished"
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
RUN_DIRECTORY = "trainer.default_local_dir"
LONGEST = 150  # characters of a folder's name
PIECES = re.compile(r"(?:[^,\[\](){}'\"]|\[[^\]]*\]|\([^)]*\)|\{[^}]*\}|'[^']*'|\"[^\"]*\")+")  # between outer commas


@dataclass(frozen=True)
class Axis:
    """One key and its values: a list, or a range from which `--random` draws."""

    name: str  # as given: a short name or a key
    values: Sequence[str] = ()
    low: float = 0.0
    high: float = 0.0
    whole: bool = False  # a range of whole numbers

    def draw(self, seed: str) -> str:
        """A value of the list, or a number of the range whose logarithm is uniform."""
        source = random.Random(f"{seed}/{self.name}")
        if self.values:
            return source.choice(self.values)
        found = math.exp(source.uniform(math.log(self.low), math.log(self.high)))
        return str(round(found)) if self.whole else f"{found:.3g}"


@dataclass(frozen=True)
class SweptRun:
    chosen: Mapping[str, str]  # axis -> value
    keys: Mapping[str, str]
    folder: Path

    @property
    def title(self) -> str:
        return " ".join(f"{name}={value}" for name, value in self.chosen.items())


def main(arguments: Sequence[str]) -> int:
    parser = CommandParser(
        "rloom sweep",
        usage="%(prog)s KEY=V1,V2 ... [--random N] [--dir DIR] [-- key=value ...]",
        description="Train once for each combination of values, one run after the other, and list them by validation. "
        "KEY is a key or a short name such as lr or n. LOW..HIGH is a range that --random draws from, by logarithm.",
        allow_abbrev=False,
        **epilog(
            "rloom sweep lr=1e-4,2e-4 n=4,8 -- algorithm.adv_estimator=grpo trainer.total_training_steps=8",
            "0 done · 1 a run failed · 2 an error that you can correct · 130 interrupted",
        ),
    )
    parser.add_argument("keys", nargs="*", metavar="KEY=V1,V2", help="a key with several values, or with one")
    parser.add_argument("--random", type=int, metavar="N", help="N runs with random values instead of all combinations")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random values")
    parser.add_argument(
        "--dir", type=Path, metavar="DIR", help="the folder of the runs; default: checkpoints/sweeps/KEYS"
    )
    before, after = split_arguments(list(arguments))
    given = parser.parse_intermixed_args(before)

    def run() -> int:
        axes, fixed = read_axes(given.keys, after)
        folder = given.dir or Path("checkpoints", "sweeps", "_".join(file_name(axis.name) for axis in axes))
        runs = list(combinations(axes, fixed, folder, given))
        check_runs(runs)
        check_folder(folder, fixed)
        return train_all(runs, folder)

    return run_safely(run)


def split_arguments(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    middle = arguments.index("--")
    return arguments[:middle], arguments[middle + 1 :]


def read_axes(given: Sequence[str], after: Sequence[str]) -> tuple[list[Axis], dict[str, str]]:
    """(keys with several values, keys with one). What follows `--` has one."""
    axes, fixed = [], dict[str, str]()
    for text in given:
        name, value = checked_pair(text)
        values = PIECES.findall(value)
        if (axis := range_axis(name, value)) is not None:
            axes.append(axis)
        elif len(values) > 1:
            axes.append(Axis(name, tuple(part.strip() for part in values)))
        else:
            fixed[name] = value
    further = dict(map(checked_pair, after))
    check_twice([axis.name for axis in axes], [*fixed, *further])
    fixed |= further
    if not axes:
        raise ConfigError("no key has several values; write them with commas: rloom sweep lr=1e-5,1e-6")
    return axes, fixed


def check_twice(several: Sequence[str], one: Sequence[str]) -> None:
    """Short names and keys that mean the same. `several`: names with several values."""
    twice = next((name for name in several if key_of(name) in map(key_of, one)), None)
    if twice is not None:
        raise ConfigError(f"{twice} has several values and one; keep one of the two")
    seen = dict[str, str]()
    for name in (*several, *one):
        former = seen.setdefault(key_of(name), name)
        if key_of(name) == RUN_DIRECTORY:
            raise ConfigError(f"{name}: each run of a sweep has a folder of its own; --dir DIR is the one of them all")
        if former != name or several.count(name) > 1:
            raise ConfigError(f"{key_of(name)} is given twice, as {former} and as {name}; keep one of the two")


def checked_pair(text: str) -> tuple[str, str]:
    name, equals, value = text.lstrip("+").partition("=")
    if not equals or not name or name.startswith("-"):
        raise ConfigError(f"{text!r} is not a key=value pair; `rloom config` lists the keys")
    if name not in SHORT_NAMES and "." not in name and name not in all_keys():
        short = f"; short names are {', '.join(SHORT_NAMES)}"
        raise ConfigError(f"{name}: there is no such key{did_you_mean(name) or short}")
    return name, value


def key_of(name: str) -> str:
    return SHORT_NAMES[name].key if name in SHORT_NAMES else name


def range_axis(name: str, value: str) -> Axis | None:
    """None: `value` is not two numbers; a path may have two dots, too."""
    low, _, high = value.partition("..")
    try:
        ends = float(low), float(high)
    except ValueError:
        return None
    if not 0 < ends[0] < ends[1] < math.inf:
        raise ConfigError(f"{name}={value}: a range needs two numbers above 0, the smaller one first")
    return Axis(name, low=ends[0], high=ends[1], whole=low.isdigit() and high.isdigit())


def combinations(
    axes: Sequence[Axis], fixed: Mapping[str, str], folder: Path, given: argparse.Namespace
) -> Iterator[SweptRun]:
    names = [axis.name for axis in axes]
    if given.random is None:
        unlisted = next((axis.name for axis in axes if not axis.values), None)
        if unlisted is not None:
            raise ConfigError(f"{unlisted}: a range needs --random N, the number of runs; or list values with commas")
        chosen: Iterator[Sequence[str]] = itertools.product(*(axis.values for axis in axes))
    elif given.random < 1:
        raise ConfigError(f"--random {given.random}: use 1 or more")
    else:
        chosen = ([axis.draw(f"{given.seed}/{number}") for axis in axes] for number in range(given.random))
    for values in dict.fromkeys(tuple(each) for each in chosen):
        pairs = dict(zip(names, values, strict=True))
        keys = {key_of(name): value for name, value in {**fixed, **pairs}.items()}
        own = folder / folder_name(pairs)
        short = {key_of(name): value for name, value in {**fixed, **pairs}.items() if name in SHORT_NAMES}
        further = {key: str(value) for key, value in consequences(short).items()}
        yield SweptRun(pairs, {**further, **keys, RUN_DIRECTORY: quoted(str(own))}, own)


def folder_name(pairs: Mapping[str, str]) -> str:
    """With a digest where characters are left out: `a/b` and `a-b` are two runs."""
    texts = [f"{name}-{value}" for name, value in pairs.items()]
    found = "_".join(map(file_name, texts))
    if found == "_".join(texts) and len(found) <= LONGEST:
        return found
    return f"{found[:LONGEST]}-{hashlib.sha256(repr(texts).encode()).hexdigest()[:8]}"


def quoted(text: str) -> str:
    """As Hydra reads it: a quote after a backslash is a part of the text."""
    return "'" + re.sub(r"(\\*)'", r"\1\1\\'", text) + "'"


def file_name(text: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", text).strip("-.")


def check_runs(runs: Sequence[SweptRun]) -> None:
    """Every configuration is checked before the first run begins."""
    from rloom.config.load import load_config
    from rloom.launch.early_checks import check_keys

    for run in runs:
        try:
            check_keys(load_config(overrides(run)))
        except ConfigError as error:
            raise ConfigError(f"{run.title}: {error}") from error


def overrides(run: SweptRun) -> list[str]:
    return [f"{key}={value}" for key, value in run.keys.items()]


def check_folder(folder: Path, fixed: Mapping[str, str]) -> None:
    """The runs of a sweep that is continued have the same keys beside those that vary."""
    file, own = folder / SETTINGS, {key_of(name): value for name, value in fixed.items()}
    if file.is_file():
        former = json.loads(file.read_text(encoding="utf-8"))
        if former != own:
            changed = sorted(key for key in {*former, *own} if former.get(key) != own.get(key))
            raise ConfigError(
                f"{folder} holds a sweep with another {changed[0]} ({former.get(changed[0])}); use another --dir"
            )
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(file, json.dumps(own, indent=1))


def train_all(runs: Sequence[SweptRun], folder: Path) -> int:
    from rloom.runs.run_folder import summarize

    status = OK
    for number, run in enumerate(runs, start=1):
        if run.folder.is_dir() and summarize(run.folder).state.status == FINISHED:
            print_line(f"Run {number} of {len(runs)} is finished: {run.title}")
            continue
        print_line(f"Run {number} of {len(runs)}: {run.title} · {run.folder}")
        ended = train_once(run)
        if ended == INTERRUPTED:
            status = INTERRUPTED
            print_line("Interrupted; the same command goes on.")
            break
        if ended != OK:
            status = FAULTS
            print_line(f"Run {number} of {len(runs)} failed, with exit code {ended}; the sweep goes on.")
    show(runs, folder)
    return status


def train_once(run: SweptRun) -> int:
    """Exit code of one run. Its process has a group of its own: a signal to the sweep or to its group reaches the run
    once, by `stop`; the run saves its step and ends, and at a second one it ends at once."""
    stopped = False
    # a background job of a shell ignores SIGINT, and so does the process that it starts
    passed_on = signal.SIGTERM if signal.getsignal(signal.SIGINT) == signal.SIG_IGN else signal.SIGINT
    process: subprocess.Popen[bytes] | None = None

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal stopped
        stopped = True
        if process is not None:
            process.send_signal(passed_on)

    previous = {
        number: signal.signal(number, stop) for number in STOPPING if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        process = subprocess.Popen(child_command("rloom.__main__", "train", *overrides(run)), process_group=0)
        if stopped:
            process.send_signal(passed_on)
        status = process.wait()
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return INTERRUPTED if stopped else status


def print_line(text: str) -> None:
    print(printable(translate(text)), flush=True)


def show(runs: Sequence[SweptRun], folder: Path) -> None:
    """One table, the best validation first, and the commands that compare the runs."""
    from rloom.cli.runs import print_table, progress
    from rloom.runs.run_folder import summarize

    found = [(run, summarize(run.folder)) for run in runs if run.folder.is_dir()]
    found.sort(key=lambda each: rank(each[1]), reverse=True)
    names = ("run", "state", "step", "reward", "validation", "best")
    rows = [(run.title, *progress(summary), *validations(summary)) for run, summary in found]
    print_table(names, rows)
    if len(found) > 1:
        best = " ".join(shlex.quote(str(run.folder)) for run, _ in found[:4])
        print_line(f"Compare: rloom compare {best}")
    print_line(f"In the browser: rloom view {shlex.quote(str(folder))}")


def rank(summary: "RunSummary") -> tuple[float, float]:
    """By the mean of the best validations, then by the reward of the last step."""
    best = [found.best for found in summary.accuracy.values()]
    nothing = -math.inf
    return sum(best) / len(best) if best else nothing, nothing if summary.reward is None else summary.reward


def validations(summary: "RunSummary") -> tuple[str, str]:
    """The last and the best of each data source."""
    last = [f"{found.last:.3g}" for found in summary.accuracy.values()]
    best = [f"{found.best:.3g} ({found.best_step})" for found in summary.accuracy.values()]
    return ", ".join(last), ", ".join(best)
