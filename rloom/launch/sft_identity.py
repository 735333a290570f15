"""What a run of supervised fine-tuning is, by content: see `identity.py`."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rloom.config.schema import SftConfig
from rloom.data.examples import Example
from rloom.launch.identity import (
    SHAPES,
    VERSION,
    Continuation,
    Difference,
    Record,
    continuation,
    data_differences,
    lora_record,
    model_differences,
    read_record,
)
from rloom.launch.model_sources import sft_source
from rloom.launch.sft import SftInputs
from rloom.models.fingerprint import fingerprint, tokenizer_digest

KIND = "sft"


def describe_sft(config: SftConfig, inputs: SftInputs) -> dict[str, Any]:
    return {
        "version": VERSION,
        "kind": KIND,
        "model": fingerprint(sft_source(config)).record(),
        "tokenizer": tokenizer_digest(inputs.tokenizer),
        "lora": lora_record(config.model),
        "data": rows_record(inputs.rows),
        "held_out": rows_record(inputs.held_out),
        "shuffle": config.data.shuffle,
        "seed": config.data.seed,
    }


def rows_record(rows: Sequence[Example]) -> dict[str, Any]:
    found = hashlib.sha256()
    for row in rows:
        found.update(json.dumps([row.index, row.text]).encode())
    return {"rows": len(rows), "content": found.hexdigest()}


def compare_sft(checkpoint: Path, config: SftConfig, own: Record) -> Continuation:
    """How this run goes on from a checkpoint; an error where that would be another run under the same name."""
    strict = config.trainer.resume_mode != "resume_path"
    found = list(differences(read_record(checkpoint, SHAPES, KIND), own, strict))
    return continuation(checkpoint, config, found)


def differences(saved: Record, own: Record, strict: bool) -> Iterator[Difference]:
    yield from model_differences(saved, own, strict, "model.path")
    yield from data_differences(saved, own, strict)
    if saved["held_out"] != own["held_out"]:
        yield Difference("the validation data is another: losses before and after do not compare", refused=False)
