"""Where a model comes from, and the faults of a folder that need no library to be found. Imports no torch."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloom.errors import ModelError

EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "embedded"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `key` is the configuration key that named it, for error messages."""

    path: str
    key: str = "actor_rollout_ref.model.path"
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None  # tokens of the longest sample of the run, if known

    @property
    def location(self) -> str:
        if self.path == "embedded":
            return str(EMBEDDED_FOLDER / "model")
        expanded = Path(self.path).expanduser()
        return str(expanded) if expanded.exists() else self.path


def check_folder(source: ModelSource) -> None:
    """Check for the common faults first: transformers' own errors are long."""
    for name, value in source.overrides.items():
        if "drop" in name and value:
            raise ModelError(
                f"{source.key.rsplit('.', 1)[0]}.override_config.{name}={value}: rloom trains without "
                "dropout, so that log-probs are deterministic, and the entry has no effect; remove it"
            )
    folder = Path(source.location)
    if not folder.exists():
        if source.path.startswith((".", "/", "~")):
            raise ModelError(f"{source.key}={source.path}: there is no such folder; give a folder or a hub name")
        from rloom.hub import check_model  # imports huggingface_hub, which a folder does not need

        check_model(source.path, source.key)
        return
    if not (folder / "config.json").is_file():
        raise ModelError(f"{source.key}={source.path}: the folder has no config.json, so it is no Hugging Face model")
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        raise ModelError(
            f"{source.key}={source.path}: the folder has no weights (*.safetensors); "
            f"it holds {', '.join(sorted(file.name for file in folder.iterdir())[:8])}. Download or copy them there"
        )


def read_config(source: ModelSource) -> dict[str, Any]:
    """config.json with the entries that the run replaces. Of a hub name, only that file is downloaded."""
    if (Path(source.location) / "config.json").is_file():
        file = Path(source.location) / "config.json"
    else:
        from rloom.hub import config_file

        file = config_file(source.path, source.key)
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{source.key}={source.path}: {file} cannot be read: {error}") from error
    return {**fields, **source.overrides}
