"""In which pages of the key-value cache the tokens of each slot are, on the device."""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor

from rloom.transfer import send


class PageEntry(NamedTuple):
    slot: int
    column: int
    page: int


class PageTable:
    """[slots + 1 spare, pages of the longest sequence]: the pages of a slot's prompt, then those of its answer.

    The first token of an answer is the first of a page, since all answers to a prompt share the prompt's pages.
    """

    def __init__(self, slots: int, width: int, page_tokens: int, spare_page: int, device: torch.device) -> None:
        self.page_tokens, self.width, self.device = page_tokens, width, device
        self.pages = torch.full((slots + 1, width), spare_page, dtype=torch.int32, device=device)

    def write(self, entries: Sequence[PageEntry]) -> None:
        if entries:
            numbers = torch.tensor(list(chain.from_iterable(entries)))  # of a flat list: faster than of tuples
            slot, column, page = send(numbers.view(-1, 3), self.device).unbind(1)
            self.pages[slot, column] = page.int()

    def places(self, slot_T: Tensor, position_T: Tensor, prompt_length_T: Tensor) -> Tensor:
        """Indices into the cache of tokens at these positions of their sequences."""
        is_own_T, page_tokens = position_T >= prompt_length_T, self.page_tokens
        prompt_pages_T = (prompt_length_T + page_tokens - 1) // page_tokens
        offset_T = torch.where(is_own_T, position_T - prompt_length_T, position_T)
        column_T = torch.where(is_own_T, prompt_pages_T, 0) + offset_T // page_tokens
        return self.pages[slot_T, column_T].long() * page_tokens + offset_T % page_tokens
