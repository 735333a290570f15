"""Trajectories as a table, without a loop over tokens: a step may have half a million."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from rloom.runs.dumps.layout import SCHEMA
from rloom.runs.records import plain

if TYPE_CHECKING:  # they import torch, which readers of a dump do not need
    from torch import Tensor

    from rloom.batch import Batch, TokenRecord, TrainBatch, Trajectory

LARGEST = np.finfo(np.float16).max


def validation_table(trajectories: "Sequence[Trajectory]") -> pa.Table:
    from rloom.batch import Batch

    batch = Batch.pack(trajectories)
    return _table(trajectories, batch, {"logprobs": batch.rollout_logprobs_T})


def training_table(trajectories: "Sequence[Trajectory]", batch: "TrainBatch", record: "TokenRecord | None") -> pa.Table:
    """`batch`: packed of the trajectories. `record`: None in a step that does not update the policy."""
    values_T = {"logprobs": batch.rollout_logprobs_T, "advantages": batch.advantages_T}
    if record is not None:
        values_T["entropy"] = record.entropy_T
        values_T["ratio"] = record.ratio_T
    return _table(trajectories, batch, values_T)


def _table(trajectories: "Sequence[Trajectory]", batch: "Batch", values_T: "dict[str, Tensor]") -> pa.Table:
    length_N = batch.length_N.numpy()
    prompt_N = np.array([len(t.prompt.tokens) for t in trajectories], dtype=np.int64)
    start_N = np.cumsum(length_N) - length_N
    # the tokens after the prompt of each sample
    kept_T = np.arange(len(batch.tokens_T)) >= np.repeat(start_N + prompt_N, length_N)
    offsets = np.concatenate([[0], np.cumsum(length_N - prompt_N)]).astype(np.int32)
    columns: dict[str, Any] = {
        **_answer_columns(trajectories),
        "tokens": _lists(offsets, batch.tokens_T.numpy()[kept_T].astype(np.int32)),
        **{name: _lists(offsets, _half(value_T.numpy()[kept_T])) for name, value_T in values_T.items()},
    }
    rows = len(trajectories)
    return pa.table(
        [columns[field.name] if field.name in columns else pa.nulls(rows, field.type) for field in SCHEMA],
        schema=SCHEMA,
    )


def _answer_columns(trajectories: "Sequence[Trajectory]") -> dict[str, pa.Array]:
    found: dict[str, list[Any]] = {
        "group": [t.group for t in trajectories],
        "index": [t.prompt.index for t in trajectories],
        "data_source": [t.prompt.data_source for t in trajectories],
        "prompt": [t.prompt.text for t in trajectories],
        "ground_truth": [_text(t.prompt.ground_truth) for t in trajectories],
        "output": [t.text for t in trajectories],
        "score": [t.score.value for t in trajectories],
        "accuracy": [t.score.accuracy for t in trajectories],
        "parts": [_text(t.score.parts) if t.score.parts else None for t in trajectories],
        "prediction": [t.score.prediction for t in trajectories],
        "reason": [t.score.reason for t in trajectories],
        "detail": [t.score.detail for t in trajectories],
        "finished": [t.finished for t in trajectories],
        "version": [min((turn.version for turn in t.turns), default=0) for t in trajectories],
        "length": [sum(turn.stop - turn.start for turn in t.turns) for t in trajectories],
        "turns": [[end - len(t.prompt.tokens) for x in t.turns for end in (x.start, x.stop)] for t in trajectories],
    }
    return {name: _array(values, SCHEMA.field(name).type) for name, values in found.items()}


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(values, kind)
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON files may hold
        return pa.array([None if v is None else v.encode("utf-8", "replace").decode() for v in values], kind)


def _lists(offsets: NDArray[np.int32], values: NDArray[Any]) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(values))


def _half(values: NDArray[np.float32]) -> NDArray[np.float16]:
    return values.clip(-LARGEST, LARGEST).astype(np.float16)


def _text(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False)
