"""Identify a model by content: two folders with the same files are the same model, whatever their names."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from rloom.models.source import ModelSource

BLOCK, BLOCKS = 1 << 14, 256  # read from a weight file: 4 MiB at most
IGNORED_ENTRIES = ("transformers_version", "_name_or_path")  # entries of config.json that do not describe the model


@dataclass(frozen=True)
class Fingerprint:
    path: str  # as it was given
    config: str | None  # hash of config.json and the overrides; None: not available
    weights: str | None  # hash of blocks of the weight files; None for a hub name
    revision: str | None  # commit, for a hub name

    def same_model(self, other: "Fingerprint") -> bool:
        """Another commit of the same hub name counts as the same model: most commits change the model card only."""
        if self.weights is None and other.weights is None:
            return (self.path, self.config) == (other.path, other.config)
        return (self.config, self.weights) == (other.config, other.weights)

    def record(self) -> dict[str, str | None]:
        return asdict(self)


def fingerprint(source: ModelSource) -> Fingerprint:
    folder = Path(source.location)
    if folder.is_dir():
        return Fingerprint(source.path, config_digest(folder / "config.json", source), weights_digest(folder), None)
    try:
        file = cached_file(source.location, "config.json")
    except OSError:  # neither downloaded nor reachable
        file = None
    if file is None:
        return Fingerprint(source.path, None, None, None)
    return Fingerprint(source.path, config_digest(Path(file), source), None, Path(file).parent.name)


def config_digest(file: Path, source: ModelSource) -> str:
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # loading the model reports the fault
        content = file.read_bytes().hex()
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in IGNORED_ENTRIES}
    return digest([content, dict(source.overrides)])


def weights_digest(folder: Path) -> str:
    """Hash the sizes and evenly spaced blocks of the files that would be loaded, the first and last block included.

    Reading a large model whole takes minutes, and training changes nearly every tensor.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return digest([file_digest(file) for file in files])


def file_digest(file: Path) -> list[Any]:
    size, content_hash = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as stream:
        if size <= BLOCK * BLOCKS:
            content_hash.update(stream.read())
        else:
            for block in range(BLOCKS):
                stream.seek((size - BLOCK) * block // (BLOCKS - 1))
                content_hash.update(stream.read(BLOCK))
    return [size, content_hash.hexdigest()]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    return digest([sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map])


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
