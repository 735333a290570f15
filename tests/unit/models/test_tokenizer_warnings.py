"""transformers' warning about the pattern of a tokenizer, with transformers' own check."""

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rloom.models.load import load_tokenizer
from rloom.models.source import ModelSource


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer with more than 100,000 words, which transformers checks."""
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(100_001)}, unk_token="w0"))
    tokenizer.pre_tokenizer = Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="w0").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    return tmp_path


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


def messages(load: Callable[[], object]) -> list[str]:
    """Of transformers, whose logger does not propagate, and of rloom."""
    handler, loggers = Messages(), [logging.getLogger(name) for name in ("transformers", "rloom")]
    for logger in loggers:
        logger.addHandler(handler)
    load()
    for logger in loggers:
        logger.removeHandler(handler)
    return handler.found


def warnings_of(folder: Path, **config: str) -> list[str]:
    (folder / "config.json").write_text(json.dumps(config))
    return messages(lambda: load_tokenizer(ModelSource(str(folder), key="actor_rollout_ref.model.path")))


def test_a_copy_of_qwen_is_no_mistral(folder: Path) -> None:
    """Its config.json does not say which version of transformers wrote it."""
    assert warnings_of(folder, model_type="qwen2") == []
    [warning] = messages(lambda: AutoTokenizer.from_pretrained(folder))  # without rloom
    assert "incorrect regex pattern" in warning


def test_an_old_mistral_is_explained_once(folder: Path) -> None:
    [note] = warnings_of(folder, model_type="mistral", transformers_version="4.40.0")
    assert "fix_mistral_regex=True" in note and f"actor_rollout_ref.model.path={folder}" in note
    assert warnings_of(folder, model_type="mistral", transformers_version="4.40.0") == []
