"""The 337 entries of the users' documents: what they name, its state, and the proof (entries.yaml).

A check is a kind and an argument: `key algorithm.lam`.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rloom.tables import LOADER

FILE = Path(__file__).with_name("entries.yaml")

# What a check looks at: something that is run, or something that exists or is accepted.
KINDS = {"test", "run", "metric", "command"}
KINDS |= {"key", "keys", "yaml", "flag", "variable", "openrlhf", "extra", "file", "page"}
STATES = ("works", "small", "gpus", "network", "differs")
# What ran in place of what the document names: [small, KIND].
TRIED = {
    "stand_ins": (
        "One step, after the commands printed before it and in the same folder: small random models and a few"
        " rows of data under the printed names, at most two workers on a CPU, the native engine"
    ),
    "server": "A server on this machine that answers by the engine's protocol",
    "workers": "Two workers on a CPU in place of 8 or 16 GPUs",
    "machines": "Two nodes of Ray on one machine in place of several machines",
    "tensor_parallel": (
        "Two workers on a CPU that share an engine of vLLM (`make test-vllm`); numbers of engines by `rloom plan`"
    ),
    "megatron": "megatron-core on up to four ranks of a CPU, with a tiny model",
    "judge": "A server on this machine that answers by the provider's protocol",
    "hub": "A hub on this machine with a few rows of data",
    "family": "Small random models of the family",
    "classifier": "A small random model of the same structure",
}


@dataclass(frozen=True)
class Check:
    kind: str
    argument: str


@dataclass(frozen=True)
class Entry:
    number: str
    what: str
    state: str
    reason: str  # the kind of TRIED where it was tried small; "" where it works
    checks: tuple[Check, ...]


def read() -> list[Entry]:
    documents = yaml.load(FILE.read_text(encoding="utf-8"), LOADER)
    return [entry_of(row) for document in documents.values() for row in document["entries"]]


def entry_of(row: dict[str, Any]) -> Entry:
    state, reason = row.get("state", ("works", ""))
    checks = tuple(Check(*text.split(" ", 1)) for text in row["checks"])
    return Entry(row["id"], row["what"], state, reason, checks)
