"""The files of `rollouts/`, the columns of a dump, and the index of the dumps.

rollouts/train/12.parquet        the answers of step 12, one row for each
rollouts/validation/0.parquet    those of the validation after step 0
rollouts/index.jsonl             what is in each dump, so that a reader opens only the dumps that it shows
rollouts/tokenizer.json          turns tokens into text

A line of the index is one of

    {"kind": "train", "step": 12, "bytes": 4194304, "groups": [0, 1], "prompts": [17, 3], "answers": [8, 8],
     "means": [0.5, null], "groups_of_step": 512}
    {"kind": "train", "step": 4, "removed": true}      the folder had reached its limit
    {"after": 7}                                       a run resumed: dumps of later steps are not valid any more

`prompts` are rows of the data set, in the order of the groups; `means` are their mean scores. `groups_of_step`, iff
these groups were drawn from more: their number.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from rloom.runs.records import JsonLines, finite, is_whole

FOLDER = "rollouts"
INDEX = "index.jsonl"
TOKENIZER = "tokenizer.json"

Kind = Literal["train", "validation"]
KINDS: tuple[Kind, ...] = ("train", "validation")

# Three significant digits are enough to look at, in half the bytes of float32.
NUMBERS = pa.list_(pa.float16())
TOKEN_COLUMNS = ("logprobs", "advantages", "entropy", "ratio")

SCHEMA = pa.schema(
    [
        ("group", pa.int32()),  # equal for the answers to one prompt
        ("index", pa.int32()),  # row of the prompt in the data set
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),  # JSON, unless it is a text
        ("output", pa.string()),
        ("score", pa.float64()),  # null: it failed
        ("accuracy", pa.float64()),
        ("parts", pa.string()),  # parts of the score, JSON
        ("prediction", pa.string()),
        ("reason", pa.string()),  # why the score failed
        ("detail", pa.string()),  # what the reward found: a judge's words
        ("finished", pa.bool_()),
        ("version", pa.int32()),  # version of the weights that generated it; the oldest of several
        ("length", pa.int32()),  # tokens that the policy generated
        ("turns", pa.list_(pa.int32())),  # start and stop of each turn, counted from the first token of `tokens`
        ("tokens", pa.list_(pa.int32())),  # those after the prompt, the environment's too
        ("logprobs", NUMBERS),  # from the rollout engine
        ("advantages", NUMBERS),
        ("entropy", NUMBERS),  # entropy of the policy's distribution, in the step's last update that used the token
        ("ratio", NUMBERS),  # the token's probability in that update over that of the old policy
    ]
)
# a dump of answers of several turns has these columns too, and one row for each branch of an episode (see episodes.py)
EPISODE_SCHEMA = pa.schema([*SCHEMA, ("branch", pa.int32()), ("calls", pa.int32()), ("episode", pa.string())])
# and a dump with answers that several versions of the weights generated has this one: for each run of generated tokens
# of one version, the place after its last token, counted from the first of `tokens`, and the version
VERSIONS = pa.field("versions", pa.list_(pa.int32()))
SCHEMAS = (SCHEMA, EPISODE_SCHEMA, SCHEMA.append(VERSIONS), EPISODE_SCHEMA.append(VERSIONS))


def file_name(kind: str, step: int) -> str:
    return f"{kind}/{step}.parquet"


Place = tuple[str, int]  # kind, step


@dataclass(frozen=True)
class DumpEntry:
    bytes: int
    groups: list[int]
    prompts: list[int]
    answers: list[int]
    means: list[float | None]  # None: every score of the prompt failed
    groups_of_step: int | None = None  # None: all of them are in the dump


@dataclass(frozen=True)
class IndexLine:
    """A checked line: a dump, one that was removed (`entry` is None), or a resume (`kind` is None)."""

    kind: str | None
    step: int  # step of the dump, or the one after which the run goes on
    entry: DumpEntry | None = None


def read_line(row: Mapping[str, Any]) -> IndexLine | None:
    """None: a field is missing or has another type."""
    if "after" in row:
        return IndexLine(None, row["after"]) if type(row["after"]) is int else None
    if row.get("kind") not in KINDS or not is_whole(row.get("step")):
        return None
    if row.get("removed") is True:
        return IndexLine(row["kind"], row["step"])
    lists: list[Any] = [row.get(name) for name in ("groups", "prompts", "answers", "means")]
    if not all(isinstance(each, list) for each in lists) or len({len(each) for each in lists}) != 1:
        return None
    groups, prompts, answers, means = lists
    every = row.get("groups_of_step")
    whole = all(is_whole(number) for number in [row.get("bytes"), *groups, *prompts, *answers, every or 0])
    if not whole or any(mean is not None and finite(mean) is None for mean in means):
        return None
    return IndexLine(row["kind"], row["step"], DumpEntry(row["bytes"], groups, prompts, answers, means, every))


class Index:
    """The entries in effect. `refresh` reads what was appended since."""

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / INDEX, read_line)
        self.entries: dict[Place, DumpEntry] = {}
        self.refresh()

    def refresh(self) -> bool:
        appended, replaced = self._lines.read()
        if replaced:
            self.entries = {}
        for line in appended:
            self._add(line)
        return bool(appended) or replaced

    @property
    def skipped(self) -> int:
        """Lines that do not fit."""
        return self._lines.skipped

    def _add(self, line: IndexLine) -> None:
        if line.kind is None:
            self.entries = {place: entry for place, entry in self.entries.items() if place[1] <= line.step}
        elif line.entry is None:
            self.entries.pop((line.kind, line.step), None)
        else:
            self.entries[line.kind, line.step] = line.entry

    def steps(self, kind: str) -> list[int]:
        return sorted(step for found, step in self.entries if found == kind)


def first_branches(table: pa.Table) -> pa.Table:
    """One row for each answer."""
    return table.filter(pc.equal(table["branch"], 0)) if "branch" in table.column_names else table


def index_line(kind: str, step: int, table: pa.Table, size: int, groups_of_step: int | None) -> str:
    table = first_branches(table)
    group_N, first_N, inverse_N = np.unique(table["group"].to_numpy(), return_index=True, return_inverse=True)
    score_N = np.array([np.nan if score is None else score for score in table["score"].to_pylist()], dtype=np.float64)
    valid_N = np.isfinite(score_N)
    count_G = np.bincount(inverse_N, valid_N, len(group_N))
    total_G = np.bincount(inverse_N, np.where(valid_N, score_N, 0.0), len(group_N))
    means = [round(total / count, 4) if count else None for total, count in zip(total_G, count_G, strict=True)]
    row = {
        "kind": kind,
        "step": step,
        "bytes": size,
        "groups": group_N.tolist(),
        "prompts": table["index"].to_numpy()[first_N].tolist(),
        "answers": np.bincount(inverse_N).tolist(),
        "means": means,
        **({} if groups_of_step is None else {"groups_of_step": groups_of_step}),
    }
    return json.dumps(row, separators=(",", ":")) + "\n"


def places_to_remove(entries: Mapping[Place, DumpEntry], limit: float) -> list[Place]:
    """The dumps whose removal brings the folder to its limit.

    Training steps go first, and of these always the one whose neighbours are nearest to each other, the oldest of
    equals: what is left is spread evenly over the run. The first and the last dump of each kind stay.
    """
    total = sum(entry.bytes for entry in entries.values())
    removed: list[Place] = []
    for kind in KINDS:
        steps = sorted(step for found, step in entries if found == kind)
        while total > limit and len(steps) > 2:
            gaps = [after - before for before, after in zip(steps, steps[2:], strict=False)]
            step = steps.pop(1 + gaps.index(min(gaps)))
            removed.append((kind, step))
            total -= entries[kind, step].bytes
    return removed
