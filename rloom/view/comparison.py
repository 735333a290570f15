"""Two or more runs beside each other. Values of a run are in the order of `runs`."""

from collections.abc import Sequence
from contextlib import ExitStack

from rloom.runs.compare import Point, accuracy_curves, compare_accuracies, compare_configs
from rloom.view.faults import BadRequest
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRuns
from rloom.view.query import Query, shown, whole_number

MOST_RUNS = 20


def comparison(runs: OpenedRuns, query: Query) -> Json:
    numbers = numbers_of(query.text("runs"))
    with ExitStack() as locks:
        # always in the same order: two requests that wait for each other's run would wait for ever
        folders = {number: locks.enter_context(runs[number].folder()) for number in sorted(numbers)}
        configs = [folders[number].config for number in numbers]
        metrics = [folders[number].metrics for number in numbers]
        curves = [accuracy_curves(rows) for rows in metrics]
        return {
            "runs": numbers,
            "config": [
                {"key": found.key, "values": found.values, "present": found.present}
                for found in compare_configs(configs, {})
            ],
            "accuracy": [
                {
                    "source": found.source,
                    "first": [next(iter(curve.get(found.source, {}).items()), None) for curve in curves],
                    "best": points(found.best),
                    "last": points(found.last),
                    "first_common": points(found.first_common),
                    "last_common": points(found.last_common),
                }
                for found in compare_accuracies(metrics)
            ],
        }


def points(found: Sequence[Point | None]) -> list[tuple[int, float] | None]:
    return [None if point is None else (point.step, point.value) for point in found]


def numbers_of(text: str) -> list[int]:
    numbers = [whole_number(part) for part in text.split(",")]
    known = [number for number in dict.fromkeys(numbers) if number is not None]
    if None in numbers or not 2 <= len(known) <= MOST_RUNS:
        raise BadRequest(f"runs={shown(text)}: use the numbers of 2 to {MOST_RUNS} runs, as in runs=0,1")
    return known
