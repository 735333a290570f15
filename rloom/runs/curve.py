"""Plot of the learning curve of a run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rloom.runs.display import validation_accuracies
from rloom.runs.names import KL_METRICS
from rloom.runs.records import read_metrics

INK = "#1f2933"
FAINT = "#8a94a0"
GRID = "#e6e9ed"
BLUE = "#2563c9"
SLATE = "#5b6b7c"
SOURCE_COLOURS = ("#0f9d76", "#d9622b", "#7a4fd0", "#c2388a", "#a07c10", "#3a8fb7")

STYLE = {
    "text.parse_math": False,  # the name of a data source may contain $
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.labelpad": 6,
    "axes.edgecolor": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlepad": 10,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
    "legend.edgecolor": "white",
    "legend.framealpha": 0.9,
}


class Series(NamedTuple):
    steps: NDArray[np.float64]
    values: NDArray[np.float64]


def draw_learning_curve(metrics_file: Path, picture: Path) -> Path:
    """Plot the metrics of `metrics_file`. A metric that was not recorded has no panel."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    records = read_metrics(metrics_file)
    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12)
        figure = Figure(figsize=(10, 6.2), dpi=150, layout=layout, facecolor="white")
        _draw_panels(figure, _panels(records), [record["step"] for record in records])
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, format="png")
    return picture


Panel = Callable[[Any], None]  # draws on the given axes


def _panels(records: Sequence[Mapping[str, float]]) -> tuple[list[Panel], list[Panel]]:
    """(large panels on top, small panels below)"""
    accuracies = _accuracy_series(records)
    top: list[Panel] = []
    if (reward := _series(records, "critic/score/mean")) is not None:
        top.append(lambda axes: _draw_smoothed(axes, reward, "Training reward", "mean score", BLUE))
    if (loss := _series(records, "train/loss")) is not None:
        top.append(lambda axes: _draw_smoothed(axes, loss, "Training loss", "nats per token", BLUE))
    if (held_out := _series(records, "val/loss")) is not None:
        top.append(lambda axes: _draw_smoothed(axes, held_out, "Validation loss", "nats per token", SLATE))
    if accuracies:
        top.append(lambda axes: _draw_accuracies(axes, accuracies))
    below: list[Panel] = []
    for title, unit, names in (
        ("Response length", "tokens", ("response_length/mean",)),
        ("KL", "nats", (*KL_METRICS, "actor/ppo_kl")),
        ("Entropy", "nats", ("actor/entropy",)),
    ):
        found = next((s for name in names if (s := _series(records, name)) is not None), None)
        if found is not None:
            below.append(_small_panel(found, title, unit))
    return top, below


def _small_panel(series: Series, title: str, unit: str) -> Panel:
    return lambda axes: _draw_smoothed(axes, series, title, unit, SLATE)


def _draw_panels(figure: Any, panels: tuple[list[Panel], list[Panel]], steps: list[float]) -> None:
    rows = [row for row in panels if row]
    if not rows:
        figure.text(0.5, 0.5, "No step has been recorded yet.", ha="center", va="center", color=FAINT, size=13)
        return
    heights = [2.0, 1.0] if len(rows) == 2 else [1.0]
    for strip, row in zip(np.atleast_1d(figure.subfigures(len(rows), 1, height_ratios=heights)), rows, strict=True):
        for axes, draw in zip(strip.subplots(1, len(row), squeeze=False)[0], row, strict=True):
            draw(axes)
            axes.margins(y=0.15)
            axes.locator_params(axis="y", nbins=8 if row is panels[0] else 4)
            _draw_step_axis(axes, min(steps), max(steps))


def _draw_step_axis(axes: Any, first: float, last: float) -> None:
    """The same range on every panel, so that steps align; a single step is in the middle."""
    room = 0.03 * (last - first) if first < last else 0.5
    axes.set_xlim(first - room, last + room)
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.set_xlabel("step")


def _draw_smoothed(axes: Any, series: Series, title: str, unit: str, colour: str) -> None:
    axes.set_title(title)
    axes.set_ylabel(unit)
    if len(series.steps) == 1:
        axes.plot(*series, "o", color=colour)
        return
    axes.plot(*series, color=colour, alpha=0.3, linewidth=1.0)
    axes.plot(series.steps, smoothed(series.values), color=colour, linewidth=2.2, solid_capstyle="round")


def _draw_accuracies(axes: Any, accuracies: Mapping[str, Series]) -> None:
    axes.set_title("Validation accuracy")
    shares = all(0 <= value <= 1 for series in accuracies.values() for value in series.values)
    axes.set_ylabel("accuracy" if shares else "mean score")
    axes.yaxis.set_major_formatter("{x:.0%}" if shares else "{x:g}")
    for place, (source, series) in enumerate(accuracies.items()):
        ends = dict.fromkeys(f"{100 * v:.1f} %" if shares else f"{v:.3g}" for v in series.values[[0, -1]])
        axes.plot(
            *series,
            "o-",
            color=SOURCE_COLOURS[place % len(SOURCE_COLOURS)],
            linewidth=2.2,
            markersize=6,
            markeredgecolor="white",
            label=f"{source}  {' → '.join(ends)}",
        )
    axes.legend(loc="best")


def _series(records: Sequence[Mapping[str, float]], name: str) -> Series | None:
    points = [(record["step"], record[name]) for record in records if name in record]
    return _from_points(points) if points else None


def _accuracy_series(records: Sequence[Mapping[str, float]]) -> dict[str, Series]:
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        for source, accuracy in validation_accuracies(record).items():
            points.setdefault(source, []).append((record["step"], accuracy))
    return {source: _from_points(found) for source, found in points.items()}


def _from_points(points: list[tuple[float, float]]) -> Series:
    steps, values = np.array(points, dtype=np.float64).T
    return Series(steps, values)


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred moving average over a tenth of the run. Centred, so that it does not lag."""
    reach = min(len(values) // 20 + 1, (len(values) - 1) // 2)
    window = np.ones(2 * reach + 1)
    counts = np.convolve(np.ones_like(values), window, mode="same")
    means: NDArray[np.float64] = np.convolve(values, window, mode="same") / counts
    return means
