"""The name of a run that the user does not name: model, algorithm and data, as in qwen2.5-0.5b-instruct_gae_gsm8k."""

import re
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

COMMON = ("train", "training", "data")  # names of files that say less than the name of their folder
LONGEST_PART = 60  # bytes


def experiment_name(model: Any, algorithm: Any, files: Any) -> str:
    """Values of keys that are not validated yet. `algorithm`: a name, or `file.py:name`; `files`: one or a list."""
    listed = files if isinstance(files, Sequence) and not isinstance(files, str) else [files]
    data = dict.fromkeys(data_name(str(file)) for file in listed)
    parts = (PurePosixPath(str(model)).name, str(algorithm).rpartition(":")[2], "-".join(data))
    return "_".join(file_name(part) for part in parts)


def data_name(file: str) -> str:
    path = PurePosixPath(file)
    return path.parent.name if path.stem.lower() in COMMON and path.parent.name else path.stem


def file_name(text: str) -> str:
    """In lower case, since some file systems do not distinguish upper and lower case."""
    safe = re.sub(r"[^\w.-]+", "-", text.lower()).encode()[:LONGEST_PART].decode(errors="ignore")
    return safe.strip("-.") or "run"
