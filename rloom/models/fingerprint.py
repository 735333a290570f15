"""Which model it is, by content: two folders with the same files are the same model, whatever their names."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from rloom.models.load import ModelSource

BLOCK, BLOCKS = 1 << 14, 256  # of a weight file: 4 MiB at most are read
NOT_THE_MODEL = ("transformers_version", "_name_or_path")  # of config.json: who saved it, and where


@dataclass(frozen=True)
class Fingerprint:
    path: str  # as it was given
    config: str | None  # hash of config.json with what overrides it; None: it cannot be had
    weights: str | None  # hash of samples of the weight files; None: a hub name
    revision: str | None  # commit of a hub name

    def same_model(self, other: "Fingerprint") -> bool:
        """A hub name stays the same model when its repository has another commit: most change its page alone."""
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
    except OSError:  # neither downloaded nor within reach
        file = None
    if file is None:
        return Fingerprint(source.path, None, None, None)
    return Fingerprint(source.path, config_digest(Path(file), source), None, Path(file).parent.name)


def config_digest(file: Path, source: ModelSource) -> str:
    try:
        content: Any = json.loads(file.read_text(encoding="utf-8"))
    except ValueError:  # loading the model says what is wrong with it
        content = file.read_bytes().hex()
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in NOT_THE_MODEL}
    return digest([content, dict(source.overrides)])


def weights_digest(folder: Path) -> str:
    """Of the files that would be loaded: their sizes and evenly spaced blocks of them, the first and the last too.

    Reading all of a large model takes minutes, and another training of it changes nearly every tensor.
    """
    files = sorted(folder.glob("*.safetensors")) or sorted(folder.glob("*.bin"))
    return digest([sampled(file) for file in files])


def sampled(file: Path) -> list[Any]:
    size, found = file.stat().st_size, hashlib.sha256()
    with file.open("rb") as stream:
        if size <= BLOCK * BLOCKS:
            found.update(stream.read())
        else:
            for number in range(BLOCKS):
                stream.seek((size - BLOCK) * number // (BLOCKS - 1))
                found.update(stream.read(BLOCK))
    return [size, found.hexdigest()]


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    return digest([sorted(tokenizer.get_vocab().items()), tokenizer.special_tokens_map])


def digest(content: Any) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=str).encode()).hexdigest()
