"""Test accuracy of a run by several rules, from the answers it left behind.

    python recipes/gsm8k/report.py DIR

DIR is the run's trainer.validation_data_dir: a jsonl file for each step at which it was tested. A gain that shows by
every rule is in the solutions; one that shows by a single rule is in how they are written down.

    flexible   the last number of the answer is right; the rule of the training
    strict     the number after #### is right
    anywhere   the right number occurs somewhere in the answer; no format can hide it
    marked     the answer has a ####
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rloom.rewards.rules import gsm8k
from rloom.rewards.rules.numbers import close, numbers_in, parse_number

Row = dict[str, Any]


def by_rule(row: Row, method: str) -> float:
    score = gsm8k.compute_score(row["data_source"], row["output"], row["gts"], method=method)["score"]
    assert isinstance(score, float)
    return score


def anywhere(row: Row) -> float:
    truth = parse_number(str(row["gts"]))
    return float(truth is not None and any(close(number, truth) for number in numbers_in(row["output"])))


def accuracies(rows: Sequence[Row]) -> dict[str, float]:
    """Each in percent."""
    found = {
        "flexible": [by_rule(row, "flexible") for row in rows],
        "strict": [by_rule(row, "strict") for row in rows],
        "anywhere": [anywhere(row) for row in rows],
        "marked": [float("####" in row["output"]) for row in rows],
    }
    return {name: 100 * sum(values) / len(values) for name, values in found.items()}


def table(steps: dict[int, list[Row]]) -> str:
    lines = []
    for step in sorted(steps):
        found = accuracies(steps[step])
        if not lines:
            lines = [f"| step | answers | {' | '.join(found)} |", f"| {' | '.join(['---'] * (len(found) + 2))} |"]
        percents = " | ".join(f"{value:.1f}" for value in found.values())
        lines.append(f"| {step} | {len(steps[step]):,} | {percents} |")
    return "\n".join(lines)


def read(file: Path) -> list[Row]:
    with file.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines]


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    files = {int(file.stem): file for file in Path(sys.argv[1]).glob("*.jsonl") if file.stem.isdigit()}
    if not files:
        sys.exit(f"{sys.argv[1]}: there are no answers; set trainer.validation_data_dir to this folder in a run")
    print(table({step: read(file) for step, file in files.items()}))


if __name__ == "__main__":
    main()
