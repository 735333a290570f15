"""A table and pictures of finished runs, from their run directories.

    python recipes/results.py RUN [RUN ...] [--pictures DIR]

Prints a Markdown table: a row for each recipe, model, algorithm, setting and held-out set; runs that differ by the
seed share a row. A setting is named by the keys in which the given runs of an algorithm differ.
Draws DIR/results_RECIPE.png (docs/images): held-out accuracy, mean score and length of the training answers by step.

The size of a held-out set, for its standard error, comes from the answers of trainer.validation_data_dir
(RUN/answers), the time of the whole command from RUN/seconds.txt, which the recipes' train.sh writes.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from rloom.config.from_checkpoint import flattened
from rloom.config.given_keys import leaf_keys
from rloom.runs.curve import STYLE
from rloom.runs.run_folder import RunFolder, accuracy_curves

ALGORITHMS = {"gae": "PPO", "grpo": "GRPO", "rloo": "RLOO"}
NAMES = {"openai/gsm8k": "GSM8K test", "openai/openai_humaneval": "HumanEval", "mbpp": "MBPP test"}
NAMES |= {"HuggingFaceH4/MATH-500": "MATH-500", "math_reasoning": "embedded test"}
COLUMNS = ("recipe", "model", "algorithm", "seeds", "steps", "held-out set", "step 0, %", "last step, %")
COLUMNS += ("standard error", "whole command", "s a step (median)")
Key = tuple[str, str, str]
SEED = "data.seed"
Curve = Mapping[int, float]
PANELS = {"mean score in training": "critic/score/mean", "tokens of an answer in training": "response_length/mean"}


@dataclass(frozen=True)
class Run:
    folder: RunFolder

    @property
    def key(self) -> Key:
        """Recipe, model, algorithm."""
        algorithm = self.values["algorithm.adv_estimator"]
        model = Path(self.values["actor_rollout_ref.model.path"]).name
        return self.values["trainer.project_name"], model, ALGORITHMS.get(algorithm, algorithm)

    @property
    def seed(self) -> int:
        return int(self.values[SEED])

    @property
    def steps(self) -> int:
        return self.folder.state.step

    @cached_property
    def values(self) -> dict[str, Any]:
        """Of all keys. One that is younger than the run had no effect then, as at its default."""
        defaults = {path: key.default for path, key in leaf_keys().items()}
        return defaults | dict(flattened(self.folder.config))

    @property
    def trained_by(self) -> dict[str, Any]:
        """The keys that decide what is learned, but for the seed; the steps have a column of their own."""
        return {path: self.values[path] for path, key in leaf_keys().items() if not (key.same_run or path == SEED)}

    @cached_property
    def accuracies(self) -> dict[str, dict[int, float]]:
        """In percent: by held-out set, by step."""
        curves = accuracy_curves(self.folder.metrics).items()
        return {source: {step: 100 * value for step, value in curve.items()} for source, curve in curves}

    @cached_property
    def sizes(self) -> Counter[str]:
        """Problems by held-out set; empty if the answers were not kept."""
        files = sorted((self.folder.path / "answers").glob("*.jsonl"))
        if not files:
            return Counter()
        with files[0].open(encoding="utf-8") as lines:
            return Counter(json.loads(line)["data_source"] for line in lines)

    def curve(self, metric: str) -> Curve:
        return {int(record["step"]): record[metric] for record in self.folder.metrics if metric in record}

    @property
    def seconds(self) -> int | None:
        file = self.folder.path / "seconds.txt"
        return int(file.read_text()) if file.is_file() else None


def standard_error(percent: float, problems: int) -> float:
    """Of one test, in points: by the draw of its problems."""
    return math.sqrt(percent * (100 - percent) / problems)


def minutes(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def several(values: Sequence[float]) -> str:
    shown = ", ".join(f"{value:.1f}" for value in values)
    return shown if len(values) == 1 else f"{shown} (mean {mean(values):.1f})"


def unlike(runs: Sequence[Run]) -> list[str]:
    """The keys in which the runs differ."""
    first, *others = [run.trained_by for run in runs]
    return [path for path, value in first.items() if any(other[path] != value for other in others)]


def setting(run: Run, keys: Collection[str]) -> str:
    """The values of these keys, each named by as much of its end as no other one has."""
    shown = []
    for key in keys:
        parts = key.split(".")
        ends = [".".join(parts[start:]) for start in reversed(range(len(parts)))]
        name = next(end for end in ends if sum(f".{other}".endswith(f".{end}") for other in keys) == 1)
        shown.append(f"{name}={run.values[key]}")
    return ", ".join(shown)


@dataclass(frozen=True)
class Row:
    """Runs that differ by the seed."""

    key: Key
    setting: str
    steps: int
    runs: Sequence[Run]


def grouped(runs: Sequence[Run]) -> Iterator[Row]:
    for key, of_key in groupby(sorted(runs, key=lambda run: run.key), key=lambda run: run.key):
        alike = list(of_key)
        keys = unlike(alike)
        rows: dict[tuple[str, int], list[Run]] = {}
        for run in sorted(alike, key=lambda run: (run.steps, run.seed)):
            rows.setdefault((setting(run, keys), run.steps), []).append(run)
        yield from (Row(key, *of_row, found) for of_row, found in rows.items())


def table_rows(row: Row) -> Iterator[list[str]]:
    recipe, model, algorithm = row.key
    commands = [run.seconds for run in row.runs if run.seconds is not None]
    step_s = median(seconds for run in row.runs for seconds in run.curve("timing_s/step").values())
    for source in dict.fromkeys(source for run in row.runs for source in run.accuracies):
        curves = [run.accuracies[source] for run in row.runs if source in run.accuracies]
        last = [curve[row.steps] for curve in curves if row.steps in curve]  # not of a run that was ended between tests
        problems = max(run.sizes[source] for run in row.runs)
        yield [
            recipe,
            model,
            f"{algorithm}, {row.setting}" if row.setting else algorithm,
            ", ".join(str(run.seed) for run in row.runs),
            str(row.steps),
            NAMES.get(source, source) + (f" ({problems:,})" if problems else ""),
            f"{mean(curve[min(curve)] for curve in curves):.1f}",
            several(last) if last else "–",
            f"{standard_error(mean(last), problems):.1f}" if last and problems else "–",
            minutes(mean(commands)) if commands else "–",
            f"{step_s:.1f}",
        ]


def table(runs: Sequence[Run]) -> str:
    rows = [cells for row in grouped(runs) for cells in table_rows(row)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(COLUMNS), ["---"] * len(COLUMNS), *rows])


def draw(rows: Sequence[Row], picture: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    runs = [(row, run) for row in rows for run in row.runs]
    sources = list(dict.fromkeys(source for _, run in runs for source in run.accuracies))
    titles = {f"{NAMES.get(source, source)}, greedy, %": source for source in sources}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * (len(titles) + len(PANELS)), 3.6), dpi=110, layout="constrained")
        panels = figure.subplots(1, len(titles) + len(PANELS))
        for row, run in runs:
            label = ", ".join(part for part in (row.key[2], row.setting, f"seed {run.seed}") if part)
            curves: list[Curve] = [run.accuracies.get(source, {}) for source in titles.values()]
            curves += [run.curve(metric) for metric in PANELS.values()]
            for axes, curve in zip(panels, curves, strict=True):
                axes.plot(
                    list(curve), list(curve.values()), "o-" if len(curve) < 15 else "-", label=label, markersize=4
                )
        for axes, title in zip(panels, [*titles, *PANELS], strict=True):
            axes.set_title(title)
            axes.set_xlabel("step")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), metavar="DIR")
    given = parser.parse_args()
    runs = [Run(RunFolder(path)) for path in given.runs]
    print(table(runs))
    for recipe, rows in groupby(grouped(runs), key=lambda row: row.key[0]):
        draw(list(rows), given.pictures / f"results_{recipe}.png")


if __name__ == "__main__":
    main()
