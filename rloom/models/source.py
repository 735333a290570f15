"""Where a model comes from, and the faults of a folder that need no library to be found. Imports no torch."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rloom.errors import ModelError

EMBEDDED_FOLDER = Path(__file__).parents[1] / "assets" / "embedded"
WEIGHT_FILES = ("*.safetensors", "*.bin", "*.safetensors.index.json")


class UnknownSize(ModelError):
    """The model may well train, but its parameters cannot be counted here."""


@dataclass(frozen=True)
class ModelSource:
    """Where a model comes from. `key` is the configuration key that named it, for error messages."""

    path: str
    key: str = "actor_rollout_ref.model.path"
    trust_remote_code: bool = False
    overrides: Mapping[str, Any] = field(default_factory=dict)
    longest: int | None = None  # tokens of the longest sample of the run, if known
    chat_template: str | None = None  # replaces the tokenizer's, also in checkpoints and exported models

    @property
    def location(self) -> str:
        if self.path == "embedded":
            return str(EMBEDDED_FOLDER / "model")
        expanded = Path(os.path.expandvars(self.path)).expanduser()
        return str(expanded) if expanded.exists() else self.path


def check_folder(source: ModelSource) -> None:
    """Check for the common faults first: transformers' own errors are long."""
    for name, value in source.overrides.items():
        if "drop" in name and value:
            raise ModelError(
                f"{source.key.rsplit('.', 1)[0]}.override_config.{name}={value}: rloom trains without "
                "dropout, so that log-probs are deterministic, and the entry has no effect; remove it"
            )
    folder = local_folder(source)
    if folder is None:
        from rloom.hub import check_model  # imports huggingface_hub, which a folder does not need

        check_model(source.path, source.key)
        return
    if not any(file for pattern in WEIGHT_FILES for file in folder.glob(pattern)):
        raise ModelError(
            f"{source.key}={source.path}: the folder has no weights (*.safetensors); "
            f"it holds {', '.join(sorted(file.name for file in folder.iterdir())[:8])}. Download or copy them there"
        )


def local_folder(source: ModelSource) -> Path | None:
    """The folder of a model, which has a config.json. None: it is a hub name."""
    folder = Path(source.location)
    if not folder.exists():
        if source.path.startswith((".", "/", "~")):
            raise ModelError(f"{source.key}={source.path}: there is no such folder; give a folder or a hub name")
        return None
    if not (folder / "config.json").is_file():
        raise ModelError(f"{source.key}={source.path}: the folder has no config.json, so it is no Hugging Face model")
    return folder


def read_config(source: ModelSource, *, download: bool = True) -> dict[str, Any]:
    """config.json with the entries that the run replaces. Of a hub name, only that file is downloaded."""
    file = config_path(source, download=download)
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{source.key}={source.path}: {file} cannot be read: {error}") from error
    return {**fields, **source.overrides}


def config_path(source: ModelSource, *, download: bool) -> Path:
    folder = local_folder(source)
    if folder is not None:
        return folder / "config.json"
    from rloom.hub import cached_config, config_file

    if download:
        return config_file(source.path, source.key)
    cached = cached_config(source.path, source.key)
    if cached is None:
        raise UnknownSize(
            f"{source.key}={source.path}: its config.json is not in the Hugging Face cache, and a plan downloads "
            f"nothing; `hf download {source.path} config.json` fetches that one file, or give a folder"
        )
    return cached
