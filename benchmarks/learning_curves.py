"""Learning curves on the embedded task: every estimator beside the others, several seeds each.

    python benchmarks/learning_curves.py [--estimators gae rloo] [--seeds 1 2 3] [--at_once 2] [--out DIR] [key=value]

Prints a table of held-out accuracy by step and draws DIR/learning_curves.png.
"""

import argparse
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from os import environ
from pathlib import Path

from rloom.algos.registry import ALGORITHMS
from rloom.runs.records import METRICS_FILE, read_metrics

ACCURACY = "val-core/math_reasoning/acc/mean@1"
Curve = dict[int, float]


def train(directory: Path, estimator: str, seed: int, overrides: list[str]) -> list[dict[str, float]]:
    """The records of a run in a process of its own, on one thread, validated every fourth step."""
    command = [sys.executable, "-m", "rloom.trainer.main_ppo", f"algorithm.adv_estimator={estimator}"]
    keys = [
        f"data.seed={seed}",
        f"trainer.default_local_dir={directory}",
        "trainer.save_freq=-1",
        "trainer.test_freq=4",
    ]
    with (directory.parent / f"{directory.name}.log").open("w") as log:
        one_thread = {**environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([*command, *keys, *overrides], stdout=log, stderr=log, check=True, env=one_thread)
    return read_metrics(directory / METRICS_FILE)


def accuracies(records: list[dict[str, float]]) -> Curve:
    return {int(record["step"]): record[ACCURACY] for record in records if ACCURACY in record}


def draw(curves: dict[str, list[Curve]], picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for (estimator, runs), colour in zip(curves.items(), pyplot.get_cmap("tab10").colors, strict=False):
        for number, run in enumerate(runs):
            label = estimator if number == 0 else None
            axes.plot(list(run), [100 * value for value in run.values()], color=colour, alpha=0.85, label=label)
    axes.set(xlabel="step", ylabel="held-out accuracy, %", ylim=(30, 101), title="The embedded task, greedy answers")
    axes.grid(alpha=0.3)
    axes.legend(ncols=2, loc="lower right", frameon=False)
    figure.savefig(picture, dpi=110, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--estimators", nargs="+", default=sorted(ALGORITHMS), choices=sorted(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1])
    parser.add_argument("--at_once", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("outputs/learning_curves"))
    given, overrides = parser.parse_known_args()
    given.out.mkdir(parents=True, exist_ok=True)
    runs = [(estimator, seed) for estimator in given.estimators for seed in given.seeds]
    with ThreadPoolExecutor(given.at_once) as pool:
        found = list(pool.map(lambda run: accuracies(train(given.out / f"{run[0]}-{run[1]}", *run, overrides)), runs))
    curves: dict[str, list[Curve]] = {}
    for (estimator, _), curve in zip(runs, found, strict=True):
        curves.setdefault(estimator, []).append(curve)
    steps = sorted({step for curve in found for step in curve})
    print("| estimator | seed | " + " | ".join(f"step {step}" for step in steps) + " |")
    print("| --- " * (len(steps) + 2) + "|")
    for (estimator, seed), curve in zip(runs, found, strict=True):
        print(f"| {estimator} | {seed} | " + " | ".join(f"{100 * curve[step]:.1f}" for step in steps) + " |")
    draw(curves, given.out / "learning_curves.png")


if __name__ == "__main__":
    main()
