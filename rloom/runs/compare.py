"""Two or more runs side by side: configuration, accuracy, metrics at equal steps. Values of a run are in its order."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rloom.runs.measures import ACCURACY, SCORE
from rloom.runs.names import KL_METRICS
from rloom.runs.provenance import shown_value
from rloom.runs.run_folder import RunFolder, accuracy_curves, flat_config

# label -> names of the metric; the first that a run has
KEY_METRICS: Mapping[str, Sequence[str]] = {
    "reward": ("critic/score/mean",),
    "KL to the reference": KL_METRICS,
    "ppo_kl": ("actor/ppo_kl",),
    "entropy": ("actor/entropy",),
    "answer length": ("response_length/mean",),
    "clip fraction": ("actor/pg_clipfrac",),
    "loss": ("train/loss",),  # supervised fine-tuning
    "validation loss": ("val/loss",),
    "seconds a step": ("timing_s/step", "perf/time_per_step"),
    "tokens/s": ("perf/throughput", "train/tokens_per_s"),
    "memory (GB)": ("perf/max_memory_allocated_gb",),
}
OWN_FOLDER = "trainer.default_local_dir"

Series = Mapping[int, float]  # by step


@dataclass(frozen=True)
class ConfigDifference:
    key: str
    values: Sequence[Any]  # None also where a run has no such key
    present: Sequence[bool]  # whether a run has the key: versions of rloom differ in their keys
    default: Any
    is_default: Sequence[bool]


@dataclass(frozen=True)
class Point:
    step: int
    value: float


@dataclass(frozen=True)
class AccuracyComparison:
    """Accuracies on one data source, or mean scores. A run without validations of it has no points."""

    source: str
    measure: str  # accuracy if it is that in all runs, else score
    common_steps: Sequence[int]  # at which all runs have validated
    first_common: Sequence[Point | None]
    last_common: Sequence[Point | None]
    best: Sequence[Point | None]  # one for each run, at any step
    last: Sequence[Point | None]  # one for each run, at its own last validation


@dataclass(frozen=True)
class MetricComparison:
    label: str
    series: Sequence[Series]
    steps: Sequence[int]  # every tenth of the steps that all runs have
    rows: Sequence[Sequence[float]]  # for each of `steps`, the values of the runs


@dataclass(frozen=True)
class Comparison:
    names: Sequence[str]
    last_steps: Sequence[int]
    config: Sequence[ConfigDifference]
    accuracy: Sequence[AccuracyComparison]
    metrics: Sequence[MetricComparison]


def compare(runs: Sequence[RunFolder], defaults: Mapping[str, Any] | None = None) -> Comparison:
    """`defaults`: of the keys of the configuration."""
    metrics = [run.metrics for run in runs]
    return Comparison(
        names=[run.name for run in runs],
        last_steps=[int(rows[-1]["step"]) if rows else 0 for rows in metrics],
        config=compare_configs([run.config for run in runs], defaults or {}),
        accuracy=compare_accuracies(runs),
        metrics=compare_metrics(metrics),
    )


def compare_configs(configs: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]) -> list[ConfigDifference]:
    """The keys whose values differ, without secrets. A run whose config.yaml is missing or empty takes no part."""
    flat = [without_own_folder(flat_config(config)) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    found = []
    for key in keys:
        values = [config.get(key) for config in flat]
        known = [value for value, config in zip(values, flat, strict=True) if config]
        if any(value != known[0] for value in known):
            default = defaults.get(key)
            is_default = [key in defaults and bool(config) and config.get(key) == default for config in flat]
            shown = [shown_value(key, value) for value in values]
            found.append(ConfigDifference(key, shown, [key in config for config in flat], default, is_default))
    return found


def without_own_folder(config: dict[str, Any]) -> dict[str, Any]:
    """Files that a run writes are in its folder: they are at the same place in every run."""
    own = config.get(OWN_FOLDER)
    if not isinstance(own, str) or not own:
        return config

    def within(value: Any) -> Any:
        is_below = isinstance(value, str) and f"{value}/".startswith(f"{own}/")
        return f"${{{OWN_FOLDER}}}{value.removeprefix(own)}" if is_below else value

    return {key: within(value) for key, value in config.items()}


def compare_accuracies(runs: Sequence[RunFolder]) -> list[AccuracyComparison]:
    curves = [accuracy_curves(run.metrics) for run in runs]
    measures = [run.measures for run in runs]
    found = []
    for source in dict.fromkeys(source for curve in curves for source in curve):
        series = [curve.get(source, {}) for curve in curves]
        common = common_steps(series)
        found.append(
            AccuracyComparison(
                source,
                ACCURACY if all(found.get(source, ACCURACY) == ACCURACY for found in measures) else SCORE,
                common,
                first_common=[Point(common[0], each[common[0]]) if common else None for each in series],
                last_common=[Point(common[-1], each[common[-1]]) if common else None for each in series],
                best=[Point(step := max(each, key=lambda s: each[s]), each[step]) if each else None for each in series],
                last=[Point(step := max(each), each[step]) if each else None for each in series],
            )
        )
    return found


def compare_metrics(metrics: Sequence[Sequence[Mapping[str, float]]]) -> list[MetricComparison]:
    """Those of `KEY_METRICS` that any run has."""
    found = []
    for label, names in KEY_METRICS.items():
        series = [series_of(rows, names) for rows in metrics]
        if any(series):
            steps = tenths(common_steps(series))
            rows = [[each[step] for each in series] for step in steps]
            found.append(MetricComparison(label, series, steps, rows))
    return found


def series_of(rows: Sequence[Mapping[str, float]], names: Sequence[str]) -> dict[int, float]:
    """The first of the metrics that the run has."""
    for name in names:
        found = {int(row["step"]): row[name] for row in rows if name in row}
        if found:
            return found
    return {}


def common_steps(series: Sequence[Series]) -> list[int]:
    return sorted(set(series[0]).intersection(*series[1:])) if series else []


def tenths(steps: Sequence[int]) -> list[int]:
    """The first step, every tenth of the way, the last step."""
    return [steps[index] for index in spread(len(steps), 11)]


def spread(count: int, most: int) -> list[int]:
    """Up to `most` indices below `count`, evenly spread, with the first and the last."""
    most = max(2, min(most, count))
    return sorted({round((count - 1) * part / (most - 1)) for part in range(most)}) if count else []


BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], low: float, high: float, width: int = 24) -> str:
    """The means of `width` equal parts of the curve, from `low` (the lowest bar) to `high` (the highest)."""
    width = min(width, len(values))
    span = high - low
    text = ""
    for part in range(width):
        inside = values[part * len(values) // width : (part + 1) * len(values) // width]
        height = (sum(inside) / len(inside) - low) / span if span > 0 else 0.0
        text += BARS[round(height * (len(BARS) - 1))]
    return text
