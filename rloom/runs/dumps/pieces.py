"""The text of each token of an answer."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from rloom.runs.json_lines import open_regular


class TokenTexts:
    def __init__(self, tokenizer: Path) -> None:
        self._file = tokenizer

    @cached_property
    def _tokenizer(self) -> Any:
        from tokenizers import Tokenizer  # without transformers: it imports in milliseconds

        with open_regular(self._file) as file:
            return Tokenizer.from_buffer(file.read())

    def split(self, tokens: Sequence[int]) -> list[str] | None:
        """One text for each token. A character that several tokens make up is the text of the last of them.

        None: the run's tokenizer has no such file, or it cannot be read.
        """
        from tokenizers.decoders import DecodeStream

        try:
            stream = DecodeStream(skip_special_tokens=False)
            return [stream.step(self._tokenizer, token) or "" for token in tokens]
        except BaseException:  # the library raises plain Exceptions; its panics are not even Exceptions
            return None
