"""Plot of the learning curve of a run."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rloom.runs.measures import ACCURACY, measures_of, shown
from rloom.runs.names import KL_METRICS
from rloom.runs.records import EVENTS_FILE, read_metrics
from rloom.runs.run_folder import accuracy_curves, last_events, recorded_measures

INK, FAINT, GRID = "#1f2933", "#8a94a0", "#e6e9ed"
BLUE, SLATE = "#2563c9", "#5b6b7c"
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

Records = Sequence[Mapping[str, float]]


class Panel(NamedTuple):
    title: str
    unit: str
    colour: str
    metrics: tuple[str, ...]  # the first that was recorded is drawn


LARGE_PANELS = (
    Panel("Training reward", "mean score", BLUE, ("critic/score/mean",)),
    Panel("Training loss", "nats per token", BLUE, ("train/loss",)),
    Panel("Validation loss", "nats per token", SLATE, ("val/loss",)),
)
SMALL_PANELS = (
    Panel("Response length", "tokens", SLATE, ("response_length/mean",)),
    Panel("KL", "nats", SLATE, (*KL_METRICS, "actor/ppo_kl")),
    Panel("Entropy", "nats", SLATE, ("actor/entropy",)),
)


def draw_learning_curve(metrics_file: Path, picture: Path) -> Path:
    """Plot the metrics of `metrics_file`. A metric that was not recorded has no panel."""
    import matplotlib
    from matplotlib.figure import Figure  # without pyplot: no window, no global state
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with matplotlib.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.14, h_pad=0.12)
        figure = Figure(figsize=(10, 6.2), dpi=150, layout=layout, facecolor="white")
        records = read_metrics(metrics_file)
        recorded = recorded_measures(last_events(metrics_file.with_name(EVENTS_FILE)))
        _draw_panels(figure, records, measures_of(records, recorded))
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, format="png")
    return picture


def _draw_panels(figure: Any, records: Records, measures: Mapping[str, str]) -> None:
    top, below = (
        [partial(_draw_smoothed, panel=panel, curve=curve) for panel in row if len(curve := _curve(records, panel))]
        for row in (LARGE_PANELS, SMALL_PANELS)
    )
    curves = {source: np.array(list(curve.items())) for source, curve in accuracy_curves(records).items()}
    large = [*top, *([partial(_draw_accuracies, curves=curves, measures=measures)] if curves else [])]
    rows = [(row, ticks) for row, ticks in ((large, 8), (below, 4)) if row]
    if not rows:
        figure.text(0.5, 0.5, "No step has been recorded yet.", ha="center", va="center", color=FAINT, size=13)
        return
    strips = np.atleast_1d(figure.subfigures(len(rows), 1, height_ratios=[2.0, 1.0][: len(rows)]))
    first, last = records[0]["step"], records[-1]["step"]
    room = 0.03 * (last - first) if first < last else 0.5  # a single step is in the middle
    for strip, (row, ticks) in zip(strips, rows, strict=True):
        for axes, draw in zip(strip.subplots(1, len(row), squeeze=False)[0], row, strict=True):
            draw(axes)
            axes.margins(y=0.15)
            axes.locator_params(axis="y", nbins=ticks)
            axes.set_xlim(first - room, last + room)  # equal on every panel, so that steps align
            axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
            axes.set_xlabel("step")


def _curve(records: Records, panel: Panel) -> NDArray[np.float64]:
    """(step, value) of the panel's metric, one row a step; empty if none was recorded."""
    name = next((name for name in panel.metrics if any(name in record for record in records)), "")
    return np.array([(record["step"], record[name]) for record in records if name in record])


def _draw_smoothed(axes: Any, panel: Panel, curve: NDArray[np.float64]) -> None:
    axes.set_title(panel.title)
    axes.set_ylabel(panel.unit)
    if len(curve) == 1:
        axes.plot(*curve.T, "o", color=panel.colour)
        return
    axes.plot(*curve.T, color=panel.colour, alpha=0.3, linewidth=1.0)
    axes.plot(curve[:, 0], smoothed(curve[:, 1]), color=panel.colour, linewidth=2.2, solid_capstyle="round")


def _draw_accuracies(axes: Any, curves: Mapping[str, NDArray[np.float64]], measures: Mapping[str, str]) -> None:
    """In percent only if every source has an accuracy: the sources share one axis."""
    shares = all(measure == ACCURACY for measure in measures.values())
    axes.set_title("Validation accuracy" if shares else "Validation score")
    axes.set_ylabel("accuracy" if shares else "mean score")
    axes.yaxis.set_major_formatter("{x:.0%}" if shares else "{x:g}")
    look = {"linewidth": 2.2, "markersize": 6, "markeredgecolor": "white"}
    for place, (source, curve) in enumerate(curves.items()):
        ends = dict.fromkeys(shown(value, measures[source]) for value in curve[[0, -1], 1])
        label, colour = f"{source}  {' → '.join(ends)}", SOURCE_COLOURS[place % len(SOURCE_COLOURS)]
        axes.plot(*curve.T, "o-", color=colour, label=label, **look)
    axes.legend(loc="best")


def smoothed(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred moving average over a tenth of the run. Centred, so that it does not lag."""
    reach = min(len(values) // 20 + 1, (len(values) - 1) // 2)
    window = np.ones(2 * reach + 1)
    counts = np.convolve(np.ones_like(values), window, mode="same")
    means: NDArray[np.float64] = np.convolve(values, window, mode="same") / counts
    return means
