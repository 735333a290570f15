"""The native engine's kernels against plain torch: attention over pages of a cache, and sampling.

Without a CUDA device they run in Triton's interpreter.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from rloom.models.attention import AttentionOptions, attend_with_mask
from rloom.rollout.base import Sampling
from rloom.rollout.limits import pages_of
from rloom.rollout.native import sampler
from rloom.rollout.native.page_table import PageEntry, PageTable
from rloom.rollout.native.slots import Slots

pytestmark = [
    pytest.mark.usefixtures("interpreted_kernels"),
    # the interpreter makes a number of an array to know where a loop ends
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
]

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ATTEND, SAMPLE = "rloom.rollout.native.kernels.attend", "rloom.rollout.native.kernels.sample"


def numbers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


# --- attention


@dataclass
class Bench:
    """Slots with their pages in a layer of the cache, and the new tokens' queries, keys and values."""

    slots: Slots
    table: PageTable
    slot_B: Tensor
    keys: Tensor  # [key heads, tokens of all pages and of a spare one, size]
    values: Tensor
    query: Tensor  # [B, heads, size]
    key: Tensor
    value: Tensor

    @classmethod
    def drawn(
        cls,
        lengths: list[tuple[int, int]],  # of the prompt, and tokens of its own before the new one
        shared: int = 1,  # so many of the first slots have one prompt
        heads: int = 4,
        key_heads: int = 2,
        size: int = 8,
        value_size: int | None = None,  # None: as the keys
        dtype: torch.dtype = torch.float32,
        page_tokens: int = 128,
    ) -> "Bench":
        count, prompt, entries = len(lengths), [], []
        parts = [(pages_of(length, page_tokens), pages_of(before + 1, page_tokens)) for length, before in lengths]
        draw = torch.Generator().manual_seed(sum(map(sum, lengths)))
        spare = sum(map(sum, parts)) + 2  # two pages are unused
        free = torch.randperm(spare, generator=draw).tolist()  # the pages of a sequence are apart
        for slot, (prompt_pages, own_pages) in enumerate(parts):
            if slot == 0 or slot >= shared:
                prompt = [free.pop() for _ in range(prompt_pages)]
            pages = [*prompt, *(free.pop() for _ in range(own_pages))]
            entries += [PageEntry(slot, column, page) for column, page in enumerate(pages)]
        slots = Slots(count, 1000, DEVICE)
        slots.begin([(slot, length, 0, before + 1, before + 2) for slot, (length, before) in enumerate(lengths)], None)
        table = PageTable(count, max(map(sum, parts)), page_tokens, spare, DEVICE)
        table.write(entries)
        batch, tokens, sizes = count + 1, (spare + 1) * page_tokens, (size, size if value_size is None else value_size)
        shapes = [*((key_heads, tokens, one) for one in sizes), (batch, heads, size)]
        shapes += [(batch, key_heads, one) for one in sizes]
        tensors = [torch.randn(*shape, generator=draw).to(DEVICE, dtype) for shape in shapes]
        return cls(slots, table, numbers([*range(count)[::-1], count]), *tensors)  # rows in another order than slots

    def attend(self, options: AttentionOptions) -> Tensor:
        from rloom.rollout.native.kernels.attend import attend_to_slots

        out = attend_to_slots(
            self.query, self.key, self.value, self.keys, self.values, self.slot_B, self.slots, self.table, options
        )  # fmt: skip
        assert not self.slots.arrived.any()  # the next layer counts with them
        return out

    def indices(self, slot: int) -> list[int]:
        """Places of a slot's tokens in their order, that of the new one last."""
        length, written = int(self.slots.prompt_length[slot]), int(self.slots.written[slot])
        pages, size, places = self.table.pages[slot].tolist(), self.table.page_tokens, []
        for tokens in (length, written):
            places += [pages[token // size] * size + token % size for token in range(tokens)]
            pages = pages[pages_of(tokens, size) :]
        return places

    def plainly(self, options: AttentionOptions) -> "tuple[Tensor, Tensor, Tensor]":
        """(what each row gets, keys and values afterwards), a row at a time."""
        keys, values, rows = self.keys.clone(), self.values.clone(), []
        for row, slot in enumerate(self.slot_B.tolist()):
            index = self.indices(slot)
            keys[:, index[-1]], values[:, index[-1]] = self.key[row], self.value[row]
            distance = torch.arange(len(index), device=DEVICE).flip(0)
            seen = (distance < (options.window or len(index)))[None]
            query = self.query[row][None, :, None]
            rows.append(attend_with_mask(query, keys[None, :, index], values[None, :, index], seen, options)[0, :, 0])
        return torch.stack(rows), keys, values


def assert_attends_plainly(bench: Bench, options: AttentionOptions) -> None:
    expected, keys, values = bench.plainly(options)
    torch.testing.assert_close(bench.attend(options), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(bench.keys, keys) and torch.equal(bench.values, values)


@pytest.fixture
def splits(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> int:
    """Four rows of two key heads: so many programs for each."""
    monkeypatch.setattr(f"{ATTEND}.MOST_PROGRAMS", 8 * request.param)
    return int(request.param)


SHORT = [(6, 0), (6, 5), (3, 1)]  # the first two share a prompt
LONG = [(300, 0), (300, 5), (2, 140)]  # three blocks of 128, and two of an answer's own


@pytest.mark.parametrize("splits", [1, 2], indirect=True)
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.35),
        AttentionOptions(0.35, softcap=2.0),
        *(AttentionOptions(0.5, window) for window in (1, 3, 6, 7, 50)),
        AttentionOptions(0.5, 4, 1.5),
    ],
    ids=str,
)
def test_a_token_attends_to_its_prompt_and_to_what_was_written_since(splits: int, options: AttentionOptions) -> None:
    assert_attends_plainly(Bench.drawn(SHORT, shared=2), options)


def test_tokens_of_earlier_turns_are_own_ones(few_splits: None) -> None:
    bench, options = Bench.drawn(LONG, shared=2), AttentionOptions(0.35)
    expected, keys, values = bench.plainly(options)
    bench.slots.earlier[:3] = bench.slots.written[:3] - 1
    bench.slots.written[:3] = 1
    torch.testing.assert_close(bench.attend(options), expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(bench.keys, keys) and torch.equal(bench.values, values)


@pytest.fixture
def few_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ATTEND}.MOST_PROGRAMS", 1)


@pytest.mark.parametrize("splits", [1, 2, 5], indirect=True)  # five: more than there are blocks
@pytest.mark.parametrize(
    "options",
    [
        AttentionOptions(0.35, softcap=2.0),
        AttentionOptions(0.5, 40),
        AttentionOptions(0.5, 145),
        AttentionOptions(0.5, 200),
    ],
    ids=str,
)
def test_long_ranges_are_read_in_blocks_by_as_many_programs_as_there_are(
    splits: int, options: AttentionOptions
) -> None:
    assert_attends_plainly(Bench.drawn(LONG, shared=2), options)


def test_a_long_sequence_is_read_in_more_parts_than_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """747 tokens in the batch and two key heads, for about eight programs: parts of 186 tokens."""
    from rloom.rollout.native.kernels import attend

    monkeypatch.setattr(attend, "PROGRAMS", 8)
    kernel, parts = attend.attend_kernel, list[list[int]]()

    class Recorded:
        def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
            def run(*arguments: Tensor, **constants: object) -> None:
                kernel[grid](*arguments, **constants)
                weight = arguments[8]  # [splits, 2, rows, heads]: written by programs whose sequence has several parts
                parts.append((~weight[:, 0, :, 0].isnan()).sum(0).tolist())

            return run

    monkeypatch.setattr(attend, "attend_kernel", Recorded())
    bench = Bench.drawn(LONG, shared=2)
    bench.slots.inputs(bench.slot_B)
    assert bench.slots.batch_tokens.tolist() == [300 + 305 + 142]
    torch.use_deterministic_algorithms(True)  # memory that nobody has written is NaN
    try:
        assert_attends_plainly(bench, AttentionOptions(0.35))
        assert_attends_plainly(bench, AttentionOptions(0.35, window=200))
    finally:
        torch.use_deterministic_algorithms(False)
    assert parts == [[0, 2, 2, 0], [0, 0, 0, 0]]  # rows of the slots 2, 1 and 0, and a padding row; 0: a single part


@pytest.mark.parametrize("splits", [1, 3], indirect=True)
@pytest.mark.parametrize("window", [None, 20, 45])
def test_pages_of_a_sequence_are_anywhere(splits: int, window: int | None) -> None:
    """A page of 16 is the smallest block; a prompt and an answer that fill their pages, and ones that do not."""
    bench = Bench.drawn([(33, 16), (33, 31), (16, 47)], shared=2, page_tokens=16)
    assert_attends_plainly(bench, AttentionOptions(0.5, window))


def test_a_page_may_hold_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of 256 in float32: blocks of 16, the smallest, in pages of 32."""
    monkeypatch.setattr(f"{ATTEND}.MOST_PROGRAMS", 1)
    lengths = [(50, 20), (7, 33)]
    assert_attends_plainly(Bench.drawn(lengths, 1, 1, 1, 256, page_tokens=32), AttentionOptions(0.02, 40))


@pytest.mark.parametrize(("heads", "key_heads", "size"), [(2, 2, 16), (6, 1, 32), (3, 1, 24), (4, 2, 80)])
def test_heads_come_in_groups_of_any_number_and_size(
    monkeypatch: pytest.MonkeyPatch, heads: int, key_heads: int, size: int
) -> None:
    monkeypatch.setattr(f"{ATTEND}.MOST_PROGRAMS", 1)
    assert_attends_plainly(Bench.drawn([(70, 2)], heads=heads, key_heads=key_heads, size=size), AttentionOptions(0.2))


@pytest.mark.parametrize("splits", [1, 2], indirect=True)
@pytest.mark.parametrize(("size", "value_size"), [(24, 16), (12, 6), (8, 20)])
def test_values_may_have_another_size_than_keys(splits: int, size: int, value_size: int) -> None:
    assert_attends_plainly(Bench.drawn(SHORT, shared=2, size=size, value_size=value_size), AttentionOptions(0.35))


@pytest.mark.parametrize("splits", [1, 2], indirect=True)
@pytest.mark.parametrize("window", [None, 3])
def test_sinks_take_part_in_the_softmax(splits: int, window: int | None) -> None:
    sinks = torch.tensor([0.5, -1.0, 3.0, 0.0], device=DEVICE)
    assert_attends_plainly(Bench.drawn(SHORT, shared=2), AttentionOptions(0.35, window, sinks=sinks))


def test_a_sink_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ATTEND}.MOST_PROGRAMS", 1)
    bench = Bench.drawn([(1, 0)], heads=1, key_heads=1, size=16)
    for tensor in (bench.keys, bench.values, bench.query, bench.key, bench.value):
        tensor.zero_()
    bench.values[0, bench.indices(0)[0], 5], bench.value[0, 0, 6] = (
        8.0,
        4.0,
    )  # scores 0 and 0, and the sink log 2: weights 1, 1, 2
    sinks = torch.log(torch.tensor([2.0], device=DEVICE))
    assert bench.attend(AttentionOptions(1.0, sinks=sinks))[0, 0].tolist() == pytest.approx(
        [0, 0, 0, 0, 0, 2, 1, *[0] * 9]
    )


def test_two_tokens_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ATTEND}.MOST_PROGRAMS", 1)
    bench = Bench.drawn([(1, 0)], heads=1, key_heads=1, size=16)
    for tensor in (bench.keys, bench.values, bench.query, bench.key, bench.value):
        tensor.zero_()
    bench.query[0, 0, 0] = 1.0
    token = bench.indices(0)[0]  # the prompt's only one
    bench.keys[0, token, 0], bench.values[0, token, 5] = torch.log(torch.tensor(3.0)), 8.0
    bench.value[0, 0, 6] = 4.0
    out = bench.attend(AttentionOptions(1.0))[0, 0].tolist()
    assert out == pytest.approx([0, 0, 0, 0, 0, 6, 1, *[0] * 9])  # weights 3 and 1: three quarters of 8, one of 4


def test_rows_that_only_fill_the_batch_write_to_the_spare_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{ATTEND}.MOST_PROGRAMS", 1)
    bench = Bench.drawn([(2, 0)])
    spare, keys = bench.keys.shape[1] - 128, bench.keys.clone()
    bench.slot_B = numbers([1, 1])  # two of them, and no others
    out = bench.attend(AttentionOptions(0.35))
    changed = (bench.keys != keys).any(2).any(0).nonzero().flatten().tolist()
    assert changed == [spare]
    groups = bench.value.repeat_interleave(2, dim=1)  # each sees itself alone
    torch.testing.assert_close(out, groups)


def test_queries_and_keys_may_lie_as_the_model_leaves_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """[heads, B, size] in memory."""
    monkeypatch.setattr(f"{ATTEND}.MOST_PROGRAMS", 1)
    bench = Bench.drawn(SHORT, shared=2)
    turned = {name: getattr(bench, name).transpose(0, 1).contiguous() for name in ("query", "key", "value")}
    bench = replace(bench, **{name: tensor.transpose(0, 1) for name, tensor in turned.items()})
    assert not bench.query.is_contiguous()
    assert_attends_plainly(bench, AttentionOptions(0.35))


@pytest.mark.parametrize("splits", [1, 2], indirect=True)
def test_a_cache_in_half_precision_takes_float32_queries_and_keys(splits: int) -> None:
    """A model's rotation may hand them over in float32. (The interpreter cannot multiply bfloat16.)"""
    bench = Bench.drawn(SHORT, shared=2, dtype=torch.float16)
    expected, keys, values = bench.plainly(AttentionOptions(0.35))
    bench.query, bench.key = bench.query.float(), bench.key.float()
    out = bench.attend(AttentionOptions(0.35))
    assert out.dtype == torch.float16
    torch.testing.assert_close(out.float(), expected.float(), rtol=2e-3, atol=2e-3)
    assert torch.equal(bench.keys, keys) and torch.equal(bench.values, values)


# --- choosing


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a vocabulary: 16 tokens each."""
    monkeypatch.setattr(f"{SAMPLE}.BLOCK", 16)


def slots_for(uniform: Tensor, sampling: Sampling, limit: int = 9) -> Slots:
    """A sequence in each slot, its luck a row of `uniform`."""
    count, longest = uniform.shape
    slots = Slots(count, longest, DEVICE)
    slots.set_sampling(sampling)
    slots.begin([(slot, 1, 0, 0, limit) for slot in range(count)], uniform)
    return slots


def choose(logits_PV: Tensor, slots: Slots, source: list[int] | None = None, slot: list[int] | None = None) -> None:
    from rloom.rollout.native.kernels.sample import sample_and_record

    slot = list(range(slots.count)) if slot is None else slot
    source = [0] * len(slot) if source is None else source
    sample_and_record(logits_PV.to(DEVICE), numbers(source), numbers(slot), slots)


def drawn(logits_V: Tensor, uniform_B: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """(token, log-prob) of many rows that draw from one distribution."""
    slots = slots_for(uniform_B[:, None], sampling)
    choose(logits_V[None], slots)
    return slots.tokens[:-1, 0].cpu().long(), slots.logprobs[:-1, 0].cpu()


VOCABULARY = 37  # two blocks of 16 and one of 5
PLAIN = Sampling(9)
SAMPLINGS = {
    "plain": PLAIN,
    "temperature": Sampling(9, temperature=0.7),
    "top_k": Sampling(9, temperature=2.0, top_k=5),
    "top_k of all": Sampling(9, top_k=37),
    "top_p": Sampling(9, temperature=1.5, top_p=0.6),
    "top_p of one": Sampling(9, top_p=0.01),
    "both": Sampling(9, temperature=2.0, top_k=9, top_p=0.8),
    "greedy": Sampling(9, temperature=0.0, top_k=3, top_p=0.5),
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_the_kernels_choose_what_the_host_chooses(small_blocks: None, sampling: Sampling) -> None:
    draw = torch.Generator().manual_seed(3)
    logits_PV = 3 * torch.randn(2, VOCABULARY, generator=draw)
    uniform_B = torch.cat([torch.tensor([0.0]), torch.rand(19, generator=draw)])
    source = [row % 2 for row in range(20)]  # several rows draw from one distribution
    slots = slots_for(uniform_B[:, None], sampling)
    choose(logits_PV, slots, source)
    token_B, logprob_B = sampler.sample_tokens(logits_PV[source], uniform_B, sampling)
    assert slots.tokens[:-1, 0].tolist() == slots.token[:-1].tolist() == token_B.tolist()
    torch.testing.assert_close(slots.logprobs[:-1, 0].cpu(), logprob_B, rtol=0, atol=1e-5)
    assert slots.written.tolist() == [1] * 21


def test_four_tokens_by_hand() -> None:
    logits_V = torch.tensor([0.1, 0.2, 0.0, 0.7]).log()
    uniform_B = torch.tensor([0.0, 0.05, 0.15, 0.301, 0.99999])
    token_B, logprob_B = drawn(logits_V, uniform_B, PLAIN)
    assert token_B.tolist() == [0, 0, 1, 3, 3]
    torch.testing.assert_close(logprob_B.exp(), torch.tensor([0.1, 0.1, 0.2, 0.7, 0.7]))
    token_B, logprob_B = drawn(logits_V, uniform_B, replace(PLAIN, top_k=2))
    assert token_B.tolist() == [1, 1, 1, 3, 3]  # shares 2/9 and 7/9
    torch.testing.assert_close(logprob_B.exp(), torch.tensor([0.2, 0.2, 0.2, 0.7, 0.7]))  # before the cut
    token_B, _ = drawn(logits_V, uniform_B, replace(PLAIN, top_p=0.69))
    assert token_B.tolist() == [3] * 5
    token_B, _ = drawn(logits_V, uniform_B, replace(PLAIN, top_p=0.71))
    assert token_B.tolist() == [1, 1, 1, 3, 3]


def test_greedily_the_first_of_equals_is_chosen(small_blocks: None) -> None:
    greedy = replace(PLAIN, temperature=0.0)
    for all_reduce_max in ([20, 21, 36], [5, 20], [35, 36]):  # within a block and across blocks
        logits_V = torch.zeros(VOCABULARY)
        logits_V[all_reduce_max] = 1.0
        assert drawn(logits_V, torch.zeros(1), greedy)[0].tolist() == all_reduce_max[:1]


def test_all_that_equal_the_last_one_kept_are_kept(small_blocks: None) -> None:
    """Top-k does so on the host too. There top-p keeps only as many of the equals as it needs."""
    shares_V = torch.full((VOCABULARY,), 1e-30)
    shares_V[[3, 17, 18, 36]] = torch.tensor([0.4, 0.2, 0.2, 0.2])
    uniform_B = torch.tensor([0.1, 0.5, 0.7, 0.9])
    for sampling in (replace(PLAIN, top_k=2), replace(PLAIN, top_p=0.5)):
        assert drawn(shares_V.log(), uniform_B, sampling)[0].tolist() == [3, 17, 18, 36]
    token_B, _ = sampler.sample_tokens(shares_V.log().expand(4, -1), uniform_B, replace(PLAIN, top_k=2))
    assert token_B.tolist() == [3, 17, 18, 36]
    token_B, _ = sampler.sample_tokens(shares_V.log().expand(4, -1), uniform_B, replace(PLAIN, top_p=0.5))
    assert len(set(token_B.tolist())) == 2


def test_blocks_without_probability_are_passed_over(small_blocks: None) -> None:
    logits_V = torch.full((80,), -torch.inf)  # five blocks, of which the second and the fourth have a token
    logits_V[[20, 50]] = torch.tensor([1.0, 3.0]).log()
    token_B, logprob_B = drawn(logits_V, torch.tensor([0.0, 0.2, 0.3, 0.999]), PLAIN)
    assert token_B.tolist() == [20, 20, 50, 50]
    torch.testing.assert_close(logprob_B.exp(), torch.tensor([0.25, 0.25, 0.75, 0.75]))


def test_a_vocabulary_in_bfloat16_is_drawn_from_as_it_is() -> None:
    logits_V = torch.tensor([0.5, 1.5, 0.25]).bfloat16()
    _, logprob_B = drawn(logits_V, torch.tensor([0.0, 0.5, 0.999]), PLAIN)
    torch.testing.assert_close(logprob_B, logits_V.float().log_softmax(-1))


def test_draws_of_the_whole_range_of_luck_have_the_right_shares(small_blocks: None) -> None:
    logits_V = torch.randn(VOCABULARY, generator=torch.Generator().manual_seed(1))
    uniform_B = (torch.arange(100) + 0.5) / 100
    token_B, _ = drawn(logits_V, uniform_B, PLAIN)
    share_V = torch.bincount(token_B, minlength=VOCABULARY) / 100
    assert float((share_V - logits_V.softmax(-1)).abs().max()) < 1 / 100  # one more or less at either end
    assert token_B.tolist() == sorted(token_B.tolist())


def scan_in_parallel(values: np.ndarray, axis: int) -> np.ndarray:
    """Prefix sums as a GPU's threads compute them: in log2 rounds, each element in an order of its own."""
    assert axis == 0
    sums, distance = values.copy(), 1
    while distance < len(sums):
        sums[distance:] = sums[distance:] + sums[:-distance]
        distance *= 2
    return sums


def test_the_highest_uniform_numbers_draw_a_token_of_the_vocabulary(
    small_blocks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parallel prefix sums also fall: behind the last token with a probability, and behind the vocabulary."""
    if DEVICE.type == "cpu":
        monkeypatch.setattr("triton.runtime.interpreter.np.cumsum", scan_in_parallel)
    monkeypatch.setattr(f"{SAMPLE}.BLOCK", 128)
    draw = torch.Generator().manual_seed(2)
    logits_PV = 2.5 * torch.randn(60, 1100, generator=draw)  # nine blocks, the last with 76 tokens, and seven without
    logits_PV[:, 1060] = logits_PV.max(-1).values + torch.linspace(-3, 3, 60)  # as the token that ends an answer
    uniform_B = 1 - torch.tensor([1, 2, 3, 4]).repeat(60) * 2.0**-24
    slots = slots_for(uniform_B[:, None], PLAIN)
    choose(logits_PV, slots, [row // 4 for row in range(240)])
    token_PB = slots.token[:-1].cpu().view(60, 4)
    assert int(token_PB.max()) < 1100
    cumulative_PV = logits_PV.double().softmax(-1).cumsum(-1)
    reached_PB = cumulative_PV.gather(1, token_PB.long())
    assert float(reached_PB.min()) > 1 - 1e-6  # as high as the uniform number, up to rounding


# --- noting down


def state_of(slots: Slots) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in vars(slots).items() if isinstance(value, Tensor)}


def sure_of(*tokens: int) -> Tensor:
    """Rows of logits, each sure of one token."""
    return 100 * torch.nn.functional.one_hot(torch.tensor(tokens), 8).float()


def test_answers_end_with_a_stop_token_or_at_their_limit() -> None:
    slots = slots_for(torch.full((4, 3), 0.5), replace(PLAIN, stop_ids=(6, 7)))
    slots.limit.copy_(numbers([3, 3, 1, 1, 0]))
    choose(sure_of(5, 7, 5, 6), slots, [0, 1, 2, 3])
    assert slots.done.tolist() == [0, 1, 1, 1, 1]
    assert slots.stopped.tolist() == [0, 1, 0, 1, 0]
    choose(sure_of(4), slots)
    choose(sure_of(3), slots)
    assert slots.done.tolist() == [1, 1, 1, 1, 1]
    assert slots.written.tolist() == [3, 1, 1, 1, 1]  # the last is the spare slot's
    assert slots.tokens[0].tolist() == [5, 4, 3] and slots.stopped.tolist() == [0, 1, 0, 1, 0]


def test_a_row_that_is_done_changes_nothing() -> None:
    slots = slots_for(torch.full((2, 3), 0.5), PLAIN)
    slots.done.fill_(1)
    for state in (slots.token, slots.tokens, slots.logprobs):
        state.fill_(7)
    slots.written.copy_(numbers([3, 2, 1]))  # the first one filled its row: behind it begins the next slot's
    before = state_of(slots)
    choose(sure_of(5, 4), slots, [0, 1, 1], [0, 1, 2])
    after = state_of(slots)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_rows_write_to_the_slots_they_name_from_the_distributions_they_name() -> None:
    slots = slots_for(torch.full((4, 2), 0.5), PLAIN)
    slots.written[3] = 1
    choose(sure_of(5, 2), slots, [1, 0, 1], [3, 0, 1])
    assert slots.tokens.tolist() == [[5, 0], [2, 0], [0, 0], [0, 2], [0, 0]]
    assert slots.token.tolist() == [5, 2, 0, 2, 0]
    assert slots.written.tolist() == [1, 1, 0, 2, 1]
    assert not slots.done[:4].any()


def test_each_token_is_drawn_by_a_number_of_its_own() -> None:
    logits_V = torch.tensor([1.0, 1.0, 1.0, 1.0]).log()
    slots = slots_for(torch.tensor([[0.9, 0.1, 0.6], [0.3, 0.8, 0.2]]), PLAIN)
    for _ in range(3):
        choose(logits_V[None], slots)
    assert slots.tokens[:2].tolist() == [[3, 0, 2], [1, 3, 0]]


# --- at the edges of float32


def test_luck_at_the_border_of_two_blocks_never_draws_what_has_no_probability(small_blocks: None) -> None:
    for seed in (1, 3):
        logits_V = 2 * torch.randn(256, generator=torch.Generator().manual_seed(seed))
        logits_V.view(16, 16)[:, :8] = -torch.inf  # the first half of each block
        border_J = logits_V.double().softmax(-1).view(16, 16).sum(1).cumsum(0)[:-1]
        uniform_B = torch.cat([(border_J * 2**24).round() + step for step in range(-2, 3)]) / 2**24
        _, logprob_B = drawn(logits_V, uniform_B.float(), PLAIN)
        assert not logprob_B.isinf().any()


def test_the_highest_luck_there_is_does_not_draw_the_unlikeliest_token() -> None:
    logits_PV = 2 * torch.randn(16, 9000, generator=torch.Generator().manual_seed(0))
    logits_PV[:, -1] = -90.0
    slots = slots_for(torch.full((16, 1), 1 - 2**-24), PLAIN)
    choose(logits_PV, slots, list(range(16)))
    assert 8999 not in slots.tokens[:16, 0].tolist()
