"""State of the running sequences on the device. S slots, and a spare one for the padding rows of a batch."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from rloom.errors import ConfigError
from rloom.rollout.base import Sampling
from rloom.rollout.native.graphs import batch_of
from rloom.transfer import send

MOST_STOP_IDS = 64
MOST_PROGRAMS = 4096  # of one decode attention


class Slots:
    """State per slot. It does not move when sequences finish: the batch maps rows to slots."""

    def __init__(self, count: int, longest_answer: int, device: torch.device) -> None:
        def zeros(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(*shape, dtype=dtype, device=device)

        self.count, self.longest_answer, self.device = count, longest_answer, device
        self.token = zeros(count + 1)  # the last sampled token: input of the next pass
        self.prompt_length = zeros(count + 1)
        self.earlier = zeros(count + 1)  # tokens between the shared prompt and the answer: earlier turns
        self.written, self.limit = zeros(count + 1), zeros(count + 1)
        self.batch_tokens = zeros(1, dtype=torch.int64)  # of all rows of the batch, which attention divides
        self.arrived = zeros(MOST_PROGRAMS)  # counters of attention's programs, zero between two layers
        self.stopped, self.done = zeros(count + 1), zeros(count + 1)
        self.uniform = zeros(count + 1, longest_answer, dtype=torch.float32)
        self.tokens = zeros(count + 1, longest_answer)
        self.logprobs = zeros(count + 1, longest_answer, dtype=torch.float32)
        self.row_slot = zeros(batch_of(count))  # slot of each row of the batch
        self.identity = torch.arange(batch_of(count), dtype=torch.int32, device=device)
        self.settings = zeros(4, dtype=torch.float32)  # 1 / temperature, greedy, top-p, top-k (0: off)
        self.stop_ids = zeros(MOST_STOP_IDS)
        self.written[count], self.done[count] = 1, 1  # the spare slot is never advanced

    def set_sampling(self, sampling: Sampling) -> None:
        """Settings are device tensors, so that the same CUDA graphs serve training and validation."""
        stop_ids = () if sampling.ignore_eos else sampling.stop_ids
        if len(stop_ids) > MOST_STOP_IDS:
            raise ConfigError(
                f"the model has {len(stop_ids)} stop tokens; the native engine takes {MOST_STOP_IDS} on a GPU; "
                "use actor_rollout_ref.rollout.name=hf"
            )
        greedy = sampling.temperature == 0
        values = [1.0 if greedy else 1.0 / sampling.temperature, float(greedy), sampling.top_p, max(sampling.top_k, 0)]
        self.settings.copy_(torch.tensor(values))
        self.stop_ids.copy_(torch.tensor([*stop_ids, *[-1] * (MOST_STOP_IDS - len(stop_ids))]))

    def begin(self, rows: Sequence[tuple[int, int, int, int, int]], draws: Tensor | None) -> Tensor:
        """Start a sequence for each (slot, prompt length, earlier tokens, tokens of the answer that it has, limit).

        Returns the slots.
        """
        columns = send(torch.tensor(rows, dtype=torch.int32), self.device).unbind(1)
        slot, prompt_length, earlier, written, limit = columns
        index = slot.long()
        self.prompt_length[index], self.earlier[index] = prompt_length, earlier
        self.written[index], self.limit[index] = written, limit
        for state in (self.stopped, self.done):
            state[index] = 0
        if draws is not None:
            self.uniform[index, : draws.shape[1]] = send(draws, self.device)
        return slot.contiguous()

    def restore(self, slots: Sequence[int], tokens: Sequence[Tensor], logprobs: Sequence[Tensor]) -> None:
        """Write the tokens and log-probs that resumed answers have."""
        index = send(torch.tensor(slots), self.device)
        for state, parts in ((self.tokens, tokens), (self.logprobs, logprobs)):
            padded = pad_sequence(list(parts), batch_first=True).to(state.dtype)
            state[index, : padded.shape[1]] = send(padded, self.device)

    def set_rows(self, slots: Sequence[int], rows: int) -> None:
        """Map the batch's rows to slots; padding rows get the spare slot."""
        padded = torch.tensor([*slots, *[self.count] * (rows - len(slots))], dtype=torch.int32)
        self.row_slot[:rows].copy_(send(padded, self.device))

    def inputs(self, slot_B: Tensor) -> tuple[Tensor, Tensor]:
        """The next input token of each row, and its position."""
        index_B = slot_B.long()
        position_B = self.prompt_length[index_B] + self.earlier[index_B] + self.written[index_B] - 1
        torch.sum(position_B, 0, keepdim=True, out=self.batch_tokens)
        return self.token[index_B].long(), position_B.long()
