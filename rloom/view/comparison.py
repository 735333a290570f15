"""Two or more runs beside each other."""

from rloom.observe.run_folder import flat_config
from rloom.view.faults import BadRequest
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRuns
from rloom.view.query import Query, shown, whole_number
from rloom.view.runs import accuracies, plain

MOST_RUNS = 20


def comparison(runs: OpenedRuns, query: Query) -> Json:
    numbers = numbers_of(query.text("runs"))
    configs, measured = [], []
    for number in numbers:
        with runs[number].folder() as folder:
            configs.append(flat_config(folder.config))
            measured.append(accuracies(folder.metrics))
    keys = sorted({key for config in configs for key in config})
    different = [(key, [plain(config.get(key)) for config in configs]) for key in keys]
    sources = sorted({source for found in measured for source in found})
    return {
        "runs": numbers,
        "config": [{"key": key, "values": values} for key, values in different if any(v != values[0] for v in values)],
        "accuracy": [
            {"source": source, **{w: [f.get(source, {}).get(w) for f in measured] for w in ("first", "best", "last")}}
            for source in sources
        ],
    }


def numbers_of(text: str) -> list[int]:
    numbers = [whole_number(part) for part in text.split(",")]
    known = [number for number in dict.fromkeys(numbers) if number is not None]
    if None in numbers or not 2 <= len(known) <= MOST_RUNS:
        raise BadRequest(f"runs={shown(text)}: use the numbers of 2 to {MOST_RUNS} runs, as in runs=0,1")
    return known
