"""What the device knows of the sequences under way. S slots, and one more for rows that only fill a batch up."""

from collections.abc import Sequence

import torch
from torch import Tensor

from rloom.errors import ConfigError
from rloom.rollout.base import Sampling
from rloom.rollout.native.graphs import batch_of
from rloom.transfer import send

MOST_STOP_IDS = 64


class Slots:
    """State of every slot on the device. Nothing of it moves when sequences leave: rows of the batch name slots."""

    def __init__(self, count: int, longest_answer: int, device: torch.device) -> None:
        def numbers(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.count, self.longest_answer, self.device = count, longest_answer, device
        self.token = numbers(count + 1)  # the last one written: what the next pass reads
        self.prompt_start, self.prompt_length = numbers(count + 1), numbers(count + 1)
        self.own_start = numbers(count + 1)
        self.written, self.limit = numbers(count + 1), numbers(count + 1)
        self.stopped, self.done = numbers(count + 1), numbers(count + 1)
        self.uniform = numbers(count + 1, longest_answer, dtype=torch.float32)
        self.tokens = numbers(count + 1, longest_answer)
        self.logprobs = numbers(count + 1, longest_answer, dtype=torch.float32)
        self.row_slot = numbers(batch_of(count))  # of each row of the batch
        self.identity = torch.arange(batch_of(count), dtype=torch.int32, device=device)
        self.settings = numbers(4, dtype=torch.float32)  # 1 / temperature, greedy, top-p, top-k (0: off)
        self.stop_ids = numbers(MOST_STOP_IDS)
        self.written[count], self.done[count] = 1, 1  # the spare slot never goes on

    def set_sampling(self, sampling: Sampling) -> None:
        """These live on the device too: one captured graph serves training and validation."""
        stop_ids = () if sampling.ignore_eos else sampling.stop_ids
        if len(stop_ids) > MOST_STOP_IDS:
            raise ConfigError(
                f"the model has {len(stop_ids)} stop tokens; the native engine takes {MOST_STOP_IDS} on a GPU: "
                "use actor_rollout_ref.rollout.name=hf"
            )
        greedy = sampling.temperature == 0
        numbers = [1.0 if greedy else 1.0 / sampling.temperature, float(greedy), sampling.top_p, max(sampling.top_k, 0)]
        self.settings.copy_(torch.tensor(numbers))
        self.stop_ids.copy_(torch.tensor([*stop_ids, *[-1] * (MOST_STOP_IDS - len(stop_ids))]))

    def begin(self, rows: Sequence[tuple[int, int, int, int, int]], draws: Tensor | None) -> Tensor:
        """Start a sequence in each (slot, prompt's start, its length, own start, limit). Returns the slots."""
        table = send(torch.tensor(rows, dtype=torch.int32), self.device)
        slot, prompt_start, prompt_length, own_start, limit = table.unbind(1)
        place = slot.long()
        self.prompt_start[place], self.prompt_length[place] = prompt_start, prompt_length
        self.own_start[place], self.limit[place] = own_start, limit
        for state in (self.written, self.stopped, self.done):
            state[place] = 0
        if draws is not None:
            self.uniform[place, : draws.shape[1]] = send(draws, self.device)
        return slot.contiguous()

    def set_rows(self, slots: Sequence[int], rows: int) -> None:
        """The batch's rows; those beyond the sequences only fill it up."""
        padded = torch.tensor([*slots, *[self.count] * (rows - len(slots))], dtype=torch.int32)
        self.row_slot[:rows].copy_(send(padded, self.device))

    def inputs(self, slot_B: Tensor) -> tuple[Tensor, Tensor]:
        """The token each row reads next, and its position."""
        place_B = slot_B.long()
        position_B = self.prompt_length[place_B] + self.written[place_B] - 1
        return self.token[place_B].long(), position_B.long()
