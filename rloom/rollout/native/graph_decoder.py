"""Decode steps as CUDA graphs: forward pass, sampling, recording and the check for stop tokens, all on the device.

A sequence has a slot; each row of the batch refers to a slot. So nothing moves when sequences start or finish.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from rloom.models.attention import OpaqueAttention, active
from rloom.models.network import PolicyNetwork
from rloom.models.routing import RoutingRecord, routed, with_last_token
from rloom.rollout.native.graphs import Graphs, batch_of
from rloom.rollout.native.kernels.sample import sample_and_record
from rloom.rollout.native.page_table import PageTable
from rloom.rollout.native.scheduler import RunningSequence
from rloom.rollout.native.session import Finished
from rloom.rollout.native.slots import Slots
from rloom.rollout.native.token_cache import AnswerAttention, PromptAttention, TokenCache
from rloom.transfer import send

OPAQUE_ATTENTION = OpaqueAttention()


@dataclass(frozen=True)
class DoneSnapshot:
    """Which sequences were done after some step. The copy to the host may still be under way."""

    sequences: list[RunningSequence]  # that ran then
    done_S: Tensor
    copied: torch.cuda.Event | None

    def done(self) -> list[RunningSequence]:
        if self.copied is not None:
            self.copied.synchronize()
        done_S = self.done_S.tolist()
        return [sequence for sequence in self.sequences if done_S[sequence.slot] and not sequence.collected]


class GraphDecoder:
    """A cache, slots with their pages, and captured decode steps for one model on one device."""

    def __init__(
        self, network: PolicyNetwork, cache: TokenCache, slots: Slots, longest_pages: int, *, capture: bool
    ) -> None:
        self.network, self.cache, self.slots = network, cache, slots
        self.device = slots.device
        self.longest_pages = longest_pages  # of a prompt and its answer
        # One more: a longer prompt and a shorter answer may take it. Rows that pad the batch write to the spare page.
        self.table = PageTable(slots.count, longest_pages + 1, cache.page_tokens, cache.pages, self.device)
        self.weights = weights_of(network)
        self.graphs = Graphs(self.step, capture=capture and self.device.type == "cuda")
        self.rows: list[int] = []  # slots of the batch's rows, as the device has them
        self.copies = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self.prefilled: torch.cuda.Event | None = None  # the last prefill pass, iff routing is recorded on a GPU

    def weights_stayed(self) -> bool:
        """Whether the weights are at the addresses that the graphs hold."""
        return self.weights == weights_of(self.network)

    @torch.no_grad()
    def prefill(self, answers: Sequence[RunningSequence], draws: Tensor | None) -> None:
        """Run the prompts, each once whatever the number of its answers, and sample the first tokens.

        A resumed answer runs with its prompt and all of its tokens, and its next token is sampled. A continued one runs
        with the tokens that are not in the cache.
        """
        passes = {answer.prefill_key: answer for answer in answers}
        order = {key: i for i, key in enumerate(passes)}
        source_B = send(torch.tensor([order[answer.prefill_key] for answer in answers]).int(), self.device)
        starts = [(a.slot, len(a.prompt.tokens), len(a.earlier), a.resumed_tokens, a.limit) for a in answers]
        slot_B = self.slots.begin(starts, draws)
        resumed = [(answer.slot, *answer.progress) for answer in answers if answer.progress is not None]
        if resumed:
            self.slots.restore(*zip(*resumed, strict=True))
        tokens = [answer.prefill_tokens for answer in passes.values()]
        length_P = torch.tensor([len(one) for one in tokens])
        slot_P = send(torch.tensor([answer.slot for answer in passes.values()]), self.device)
        tokens_T = send(torch.tensor([token for one in tokens for token in one]), self.device)
        last_P = send(torch.cumsum(length_P, 0) - 1, self.device)
        reused_P = torch.tensor([answer.reused_tokens for answer in passes.values()])
        attend = PromptAttention(length_P, reused_P, slot_P, self.cache, self.slots, self.table)
        record = self.new_record(len(tokens_T))
        with active(attend), routed(record), self.network.decoder.joined_products():
            hidden_TH = self.network.decoder.packed_hidden(tokens_T, OPAQUE_ATTENTION, attend.position_T)
        if record is not None:
            self.write_experts(attend.index_T, record)
            if self.copies is not None:
                self.prefilled = torch.cuda.Event()
                self.prefilled.record()
        sample_and_record(self.network.logits(hidden_TH[last_P]), source_B, slot_B, self.slots)

    @torch.no_grad()
    def step(self, rows: int) -> None:
        """One more token for each row. This is what a graph holds."""
        slot_B = self.slots.row_slot[:rows]
        token_B, position_B = self.slots.inputs(slot_B)
        record = self.new_record(rows)
        attend = AnswerAttention(self.cache, self.slots, self.table, slot_B)
        with active(attend), routed(record), self.network.decoder.joined_products():
            hidden_BH = self.network.decoder.packed_hidden(token_B, OPAQUE_ATTENTION, position_B)
        if record is not None:
            slot_index_B = slot_B.long()
            self.write_experts(
                self.table.places(slot_index_B, position_B, self.slots.prompt_length[slot_index_B]), record
            )
        sample_and_record(self.network.logits(hidden_BH), self.slots.identity[:rows], slot_B, self.slots)

    def new_record(self, tokens: int) -> RoutingRecord | None:
        routing = self.cache.shape.routing
        return None if routing is None else RoutingRecord(tokens, routing, self.device)

    def write_experts(self, index_T: Tensor, record: RoutingRecord) -> None:
        assert self.cache.experts is not None
        self.cache.experts[index_T] = record.experts_TMK

    def run(self, answers: Sequence[RunningSequence], steps: int) -> None:
        rows = [answer.slot for answer in answers]
        if rows != self.rows:
            self.slots.set_rows(rows, batch_of(len(rows)))
            self.rows = rows
        self.graphs.run(batch_of(len(rows)), steps)

    def snapshot_done(self, sequences: Sequence[RunningSequence]) -> DoneSnapshot:
        """Copy the done flags to the host without waiting for them."""
        if self.copies is None:
            return DoneSnapshot(list(sequences), self.slots.done.clone(), None)
        done_S = torch.empty(self.slots.count + 1, dtype=torch.int32, pin_memory=True)
        done_S.copy_(self.slots.done, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return DoneSnapshot(list(sequences), done_S, copied)

    def read_answers(self, sequences: Sequence[RunningSequence]) -> list[Finished]:
        """The tokens of sequences to which no step in flight writes, read on a stream of its own."""
        with self.reading():
            slot = send(torch.tensor([sequence.slot for sequence in sequences]), self.device)
            written, stopped = self.slots.written[slot].tolist(), self.slots.stopped[slot].tolist()
            longest = max(written)
            tokens = self.slots.tokens[slot, :longest].cpu().long()
            logprobs = self.slots.logprobs[slot, :longest].cpu()
        return [
            Finished(
                sequence.request,
                tokens[i, :length].clone(),
                logprobs[i, :length].clone(),
                bool(stopped[i]),
                sequence.reused_tokens,
            )
            for i, (sequence, length) in enumerate(zip(sequences, written, strict=True))
        ]

    def reading(self) -> AbstractContextManager[Any]:
        return torch.cuda.stream(self.copies) if self.copies is not None else nullcontext()

    def read_experts(self, sequence: RunningSequence, answer: Finished) -> Finished:
        """The answer with the experts of all tokens but the last, which a step in flight may be computing.

        Those of a resumed answer are the ones of its last prefill pass.
        """
        if self.cache.experts is None:
            return answer
        prompt = len(sequence.prompt.tokens)
        position_L = torch.arange(prompt + len(sequence.earlier) + len(answer.tokens_L) - 1)
        with self.reading():
            if self.copies is not None and self.prefilled is not None:
                self.copies.wait_event(self.prefilled)  # it may write the experts of a shared prompt again
            position_L = send(position_L, self.device)
            slot_L = torch.full_like(position_L, sequence.slot)
            index_L = self.table.places(slot_L, position_L, torch.full_like(position_L, prompt))
            experts_LMK = self.cache.experts[index_L].cpu()
        return answer._replace(experts_LMK=with_last_token(experts_LMK))

    def close(self) -> None:
        self.graphs.graphs.clear()
        self.cache.close()


def weights_of(network: PolicyNetwork) -> tuple[int, ...]:
    """Where the weights are, and what else a model keeps (the angles of its rotary embedding)."""
    return tuple(tensor.data_ptr() for tensor in chain(network.module.parameters(), network.module.buffers()))
