"""What a run says at its end: what it reached, how long it took, what its judges cost. Imports no torch."""

from collections.abc import Mapping, Sequence

from rloom.runs.measures import TITLES, shown
from rloom.runs.remaining import PARTS, STEP, clock_time
from rloom.runs.run_folder import RunFolder, accuracies, recorded_measures

Records = Sequence[Mapping[str, float]]
TOKENS = "perf/total_num_tokens"


def summary_lines(run: RunFolder) -> list[str]:
    """Of the whole run, with what it did before it was resumed."""
    records = run.metrics
    return [*validation_lines(run), *loss_lines(records), *time_lines(run), *judge_lines(records)]


def validation_lines(run: RunFolder) -> list[str]:
    """The first, the last and the best validation: there need not have been one before the first step."""
    validations = {int(record["step"]): record for record in run.metrics}
    lines = []
    for source, found in accuracies(validations, recorded_measures(run.events)).items():
        first, last, best = (shown(value, found.measure) for value in (found.first, found.last, found.best))
        line = f"{TITLES[found.measure]} {source}: {first} {when(found.first_step)}"
        if found.last_step > found.first_step:
            line += f", {last} now, best {best} at step {found.best_step}"
        lines.append(line)
    return lines


def loss_lines(records: Records) -> list[str]:
    """Of supervised fine-tuning."""
    found = [(int(record["step"]), record["val/loss"]) for record in records if "val/loss" in record]
    if not found:
        return []
    (first_step, first), (last_step, last) = found[0], found[-1]
    line = f"Validation loss: {first:.3f} {when(first_step)}"
    if last_step > first_step:
        best_step, best = min(found, key=lambda point: point[1])
        line += f", {last:.3f} now, lowest {best:.3f} at step {best_step}"
    return [line]


def when(step: int) -> str:
    return "at the start" if step == 0 else f"after step {step}"


def time_lines(run: RunFolder) -> list[str]:
    """Steps, validations and checkpoints; the tokens of prompts and answers, and those a second while a step ran."""
    seconds = dict.fromkeys(PARTS, 0.0)
    for event in run.events:
        if event["event"] == "stage_end" and event["stage"] in seconds:
            seconds[event["stage"]] += event["seconds"]
    tokens = sum(record.get(TOKENS, 0.0) for record in run.metrics)
    if not tokens or not seconds[STEP]:
        return []
    return [f"Time: {clock_time(sum(seconds.values()))}; {tokens:,.0f} tokens, {tokens / seconds[STEP]:,.0f} a second"]


def judge_lines(records: Records) -> list[str]:
    """What was sent to API judges; the cost where their prices are set."""
    names = ("requests", "input_tokens", "output_tokens", "cost")
    sums = dict.fromkeys(names, 0.0)
    for record in records:
        for metric, value in record.items():
            prefix, _, name = metric.rpartition("/")
            if name in sums and (prefix == "reward" or prefix.startswith("reward/")):
                sums[name] += value
    if not sums["requests"]:
        return []
    cost = f", cost {sums['cost']:.3g}" if sums["cost"] else ""
    calls = f"{sums['requests']:,.0f} request{'s' * (sums['requests'] != 1)}"
    return [f"Judge: {calls}, {sums['input_tokens']:,.0f} tokens in, {sums['output_tokens']:,.0f} out{cost}"]
