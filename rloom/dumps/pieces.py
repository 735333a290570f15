"""The text of each token of an answer."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any


class TokenTexts:
    def __init__(self, tokenizer: Path) -> None:
        self._file = tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer  # without transformers: it imports in milliseconds

        return Tokenizer.from_file(str(self._file))

    def split(self, tokens: Sequence[int]) -> list[str] | None:
        """One text for each token. A character that several tokens make up is the text of the last of them.

        None: the run's tokenizer has no such file, or it cannot be read.
        """
        from tokenizers.decoders import DecodeStream

        if not self._file.is_file():
            return None
        try:
            stream = DecodeStream(skip_special_tokens=False)
            return [stream.step(self._tokenizer, token) or "" for token in tokens]
        except Exception:  # of any kind: the library raises plain Exceptions
            return None
