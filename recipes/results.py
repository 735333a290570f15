"""A table and pictures of finished runs, from their run directories.

    python recipes/results.py RUN [RUN ...] [--pictures DIR]

Prints a Markdown table: a row for each recipe, model, algorithm and held-out set; runs that differ by the seed
share a row.
Draws DIR/results_RECIPE.png (docs/images): held-out accuracy, mean score and length of the training answers by step.

The size of a held-out set, for its standard error, comes from the answers of trainer.validation_data_dir
(RUN/answers), the time of the whole command from RUN/seconds.txt, which the recipes' train.sh writes.
"""

import argparse
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from statistics import mean, median
from typing import Any

from rloom.runs.curve import STYLE
from rloom.runs.measures import validation_accuracies
from rloom.runs.run_folder import RunFolder

ALGORITHMS = {"gae": "PPO", "grpo": "GRPO", "rloo": "RLOO"}
NAMES = {"openai/gsm8k": "GSM8K test", "openai/openai_humaneval": "HumanEval", "mbpp": "MBPP test"}
NAMES |= {"HuggingFaceH4/MATH-500": "MATH-500", "math_reasoning": "embedded test"}
COLUMNS = ("recipe", "model", "algorithm", "seeds", "steps", "held-out set", "step 0, %", "last step, %")
COLUMNS += ("standard error", "whole command", "s a step (median)")
Key = tuple[str, str, str, int]
Curve = Mapping[int, float]
PANELS = {"mean score in training": "critic/score/mean", "tokens of an answer in training": "response_length/mean"}


@dataclass(frozen=True)
class Run:
    folder: RunFolder

    @property
    def key(self) -> Key:
        """Equal for runs that differ by the seed."""
        trainer, algorithm = self._section("trainer"), self._section("algorithm")["adv_estimator"]
        model = Path(self._section("actor_rollout_ref")["model"]["path"]).name
        return trainer["project_name"], model, ALGORITHMS.get(algorithm, algorithm), self.folder.state.step

    @property
    def seed(self) -> int:
        return int(self._section("data")["seed"])

    def _section(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.folder.config[name]
        return found

    @cached_property
    def accuracies(self) -> dict[str, dict[int, float]]:
        """In percent: by held-out set, by step."""
        found: dict[str, dict[int, float]] = {}
        for record in self.folder.metrics:
            for source, value in validation_accuracies(record).items():
                found.setdefault(source, {})[int(record["step"])] = 100 * value
        return found

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


def grouped(runs: Sequence[Run]) -> Iterator[tuple[Key, list[Run]]]:
    for key, found in groupby(sorted(runs, key=lambda run: (run.key, run.seed)), key=lambda run: run.key):
        yield key, list(found)


def table_rows(key: Key, runs: Sequence[Run]) -> Iterator[list[str]]:
    recipe, model, algorithm, steps = key
    commands = [run.seconds for run in runs if run.seconds is not None]
    step_s = median(seconds for run in runs for seconds in run.curve("timing_s/step").values())
    for source in dict.fromkeys(source for run in runs for source in run.accuracies):
        curves = [run.accuracies[source] for run in runs if source in run.accuracies]
        first, last = ([curve[end(curve)] for curve in curves] for end in (min, max))
        problems = max(run.sizes[source] for run in runs)
        yield [
            recipe,
            model,
            algorithm,
            ", ".join(str(run.seed) for run in runs),
            str(steps),
            NAMES.get(source, source) + (f" ({problems:,})" if problems else ""),
            f"{mean(first):.1f}",
            several(last),
            f"{standard_error(mean(last), problems):.1f}" if problems else "–",
            minutes(mean(commands)) if commands else "–",
            f"{step_s:.1f}",
        ]


def table(runs: Sequence[Run]) -> str:
    rows = [row for key, found in grouped(runs) for row in table_rows(key, found)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [list(COLUMNS), ["---"] * len(COLUMNS), *rows])


def draw(recipe: str, runs: Sequence[Run], picture: Path) -> None:
    import matplotlib
    from matplotlib.figure import Figure

    sources = list(dict.fromkeys(source for run in runs for source in run.accuracies))
    titles = {f"{NAMES.get(source, source)}, greedy, %": source for source in sources}
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.2 * (len(titles) + len(PANELS)), 3.6), dpi=110, layout="constrained")
        panels = figure.subplots(1, len(titles) + len(PANELS))
        for run in runs:
            label = f"{run.key[2]}, {run.key[3]} steps, seed {run.seed}"
            curves: list[Curve] = [run.accuracies.get(source, {}) for source in titles.values()]
            curves += [run.curve(metric) for metric in PANELS.values()]
            for axes, curve in zip(panels, curves, strict=True):
                axes.plot(
                    list(curve), list(curve.values()), "o-" if len(curve) < 15 else "-", label=label, markersize=4
                )
        for axes, title in zip(panels, [*titles, *PANELS], strict=True):
            axes.set_title(title)
            axes.set_xlabel("step")
        panels[0].legend(loc="lower right", title=recipe)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN")
    parser.add_argument("--pictures", type=Path, default=Path("docs/images"), metavar="DIR")
    given = parser.parse_args()
    runs = [Run(RunFolder(path)) for path in given.runs]
    print(table(runs))
    for recipe, found in groupby(sorted(runs, key=lambda run: run.key), key=lambda run: run.key[0]):
        draw(recipe, list(found), given.pictures / f"results_{recipe}.png")


if __name__ == "__main__":
    main()
