"""Log-prob and entropy from hidden states a chunk at a time equal the plain computation, and so do their gradients.

Without a CUDA device the kernels run in Triton's interpreter.
"""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from rloom.models import head
from rloom.models.head import (
    LogitOptions,
    fused_logprobs,
    linear_float32,
    logprob_and_entropy,
    matmul_float32,
    rows_per_chunk,
)

pytestmark = pytest.mark.usefixtures("interpreted_kernels")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLAIN = LogitOptions()
GEMMA = LogitOptions(temperature=0.7, scale=1.5, softcap=4.0)
GRANITE = LogitOptions(temperature=1.3, scale=0.25)


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks a row and several chunks, of few numbers: 16 logits a block, 3 rows of 37 a chunk."""
    monkeypatch.setattr("rloom.models.head_kernels.BLOCK", 16)
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 3 * 37)


@dataclass
class Case:
    hidden_TH: Tensor
    weight_VH: Tensor
    target_T: Tensor

    @classmethod
    def drawn(cls, tokens: int, vocabulary: int = 37, size: int = 5, dtype: torch.dtype = torch.float32) -> "Case":
        draw = torch.Generator().manual_seed(tokens)
        hidden_TH = torch.randn(tokens, size, generator=draw).to(DEVICE, dtype)
        weight_VH = torch.randn(vocabulary, size, generator=draw).to(DEVICE, dtype)
        target_T = torch.randint(vocabulary, (tokens,), generator=draw).to(DEVICE)
        return cls(hidden_TH.requires_grad_(), weight_VH.requires_grad_(), target_T)

    def fused(self, form: LogitOptions, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        return fused_logprobs(self.hidden_TH, self.weight_VH, self.target_T, form, entropy_gradient=entropy_gradient)

    def in_float64(self) -> "Case":
        hidden_TH, weight_VH = (x.detach().double().requires_grad_() for x in (self.hidden_TH, self.weight_VH))
        return Case(hidden_TH, weight_VH, self.target_T)

    def plain(self, form: LogitOptions, entropy_gradient: bool) -> tuple[Tensor, Tensor]:
        logits_TV = self.hidden_TH @ self.weight_VH.T * form.scale
        if form.softcap is not None:
            logits_TV = form.softcap * torch.tanh(logits_TV / form.softcap)
        return logprob_and_entropy(logits_TV / form.temperature, self.target_T, entropy_gradient)


def loss(logprob_T: Tensor, entropy_T: Tensor) -> Tensor:
    """Of every token's numbers another weight, so that no two tokens can be mixed up."""
    weight_T = torch.arange(1, len(logprob_T) + 1, device=DEVICE, dtype=logprob_T.dtype)
    return (weight_T * logprob_T).sum() + (entropy_T / weight_T).sum()


def assert_alike(
    case: Case, form: LogitOptions, *, entropy_gradient: bool, rtol: float = 1e-4, atol: float = 1e-5
) -> None:
    exact = case.in_float64()
    ours, theirs = case.fused(form, entropy_gradient), exact.plain(form, entropy_gradient)
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == torch.float32
        torch.testing.assert_close(one.double(), other, rtol=rtol, atol=atol)
    loss(*ours).backward()
    loss(*theirs).backward()
    for mine, yours in ((case.hidden_TH, exact.hidden_TH), (case.weight_VH, exact.weight_VH)):
        assert mine.grad is not None and yours.grad is not None and mine.grad.dtype == mine.dtype
        scale = max(float(yours.grad.abs().max()), 1e-2) if len(yours) else 1.0
        torch.testing.assert_close(mine.grad.double(), yours.grad, rtol=rtol, atol=atol * scale)


def test_three_tokens_by_hand() -> None:
    # z = ln(5, 3, 2) + c: probabilities 0.5, 0.3, 0.2, whatever c is
    weight_VH = torch.tensor([[math.log(5)], [math.log(3)], [math.log(2)]], device=DEVICE).add(1.0).requires_grad_()
    hidden_TH = torch.ones(1, 1, device=DEVICE, requires_grad=True)
    logprob_T, entropy_T = fused_logprobs(
        hidden_TH, weight_VH, torch.tensor([1], device=DEVICE), PLAIN, entropy_gradient=True
    )
    assert logprob_T.tolist() == pytest.approx([math.log(0.3)])
    assert entropy_T.tolist() == pytest.approx([1.029653])  # -0.5 ln 0.5 - 0.3 ln 0.3 - 0.2 ln 0.2

    (of_weight_VH,) = torch.autograd.grad(logprob_T.sum(), weight_VH, retain_graph=True)
    assert of_weight_VH.flatten().tolist() == pytest.approx([-0.5, 0.7, -0.2])  # 1 at the target, less p

    (of_weight_VH,) = torch.autograd.grad(entropy_T.sum(), weight_VH)
    # -p (ln p + entropy)
    assert of_weight_VH.flatten().tolist() == pytest.approx([-0.168253, 0.052296, 0.115957], abs=1e-6)


def test_temperature_scale_and_softcap_by_hand() -> None:
    # logits 0 and 2; scaled by 3: 0 and 6; capped at 6: 0 and 6 tanh(1) = 4.569565; at temperature 2: 0 and 2.284782
    hidden_TH = torch.ones(1, 1, device=DEVICE)
    weight_VH = torch.tensor([[0.0], [2.0]], device=DEVICE, requires_grad=True)
    form = LogitOptions(temperature=2.0, scale=3.0, softcap=6.0)
    logprob_T, _ = fused_logprobs(hidden_TH, weight_VH, torch.tensor([0], device=DEVICE), form, entropy_gradient=False)
    assert logprob_T.tolist() == pytest.approx([-2.381724], abs=1e-5)  # -ln(1 + exp(2.284782))
    logprob_T.sum().backward()
    # p = 0.907609 at the second; dz/dlogit = 3 / 2 at the first, and there times 1 - tanh(1)^2 = 0.419974
    assert weight_VH.grad is not None
    assert weight_VH.grad.flatten().tolist() == pytest.approx([1.361413, -0.571759], abs=1e-5)


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("form", [PLAIN, GRANITE, GEMMA], ids=["plain", "granite", "gemma"])
@pytest.mark.parametrize("tokens", [1, 3, 8])  # one chunk not full, one full, three of which the last is not
def test_values_and_gradients_are_the_plain_ones(
    small_blocks: None, tokens: int, form: LogitOptions, entropy_gradient: bool
) -> None:
    assert_alike(Case.drawn(tokens), form, entropy_gradient=entropy_gradient)


@pytest.mark.parametrize("vocabulary", [1, 2, 15, 16, 17, 32])
def test_a_vocabulary_may_end_anywhere_in_a_block(small_blocks: None, vocabulary: int) -> None:
    assert_alike(Case.drawn(3, vocabulary), GEMMA, entropy_gradient=True)


def test_an_entropy_without_gradient_has_none() -> None:
    logprob_T, entropy_T = Case.drawn(2).fused(PLAIN, entropy_gradient=False)
    assert logprob_T.requires_grad and not entropy_T.requires_grad


@pytest.mark.parametrize("used", [0, 1])
def test_a_loss_may_use_one_of_the_two(used: int) -> None:
    case = Case.drawn(3)
    exact = case.in_float64()
    case.fused(PLAIN, entropy_gradient=True)[used].sum().backward()
    exact.plain(PLAIN, entropy_gradient=True)[used].sum().backward()
    assert case.weight_VH.grad is not None and exact.weight_VH.grad is not None
    torch.testing.assert_close(case.weight_VH.grad.double(), exact.weight_VH.grad, rtol=1e-4, atol=1e-5)


def test_no_tokens_give_no_numbers_and_no_gradient() -> None:
    case = Case.drawn(0)
    logprob_T, entropy_T = case.fused(PLAIN, entropy_gradient=True)
    assert logprob_T.shape == entropy_T.shape == (0,)
    (logprob_T.sum() + entropy_T.sum()).backward()
    assert case.hidden_TH.grad is not None and case.hidden_TH.grad.shape == (0, 5)
    assert case.weight_VH.grad is not None and not case.weight_VH.grad.any()


@pytest.mark.parametrize("frozen", ["hidden_TH", "weight_VH"])
def test_what_is_frozen_gets_no_gradient_and_the_other_the_same(small_blocks: None, frozen: str) -> None:
    case, whole = Case.drawn(5), Case.drawn(5)
    getattr(case, frozen).requires_grad_(False)
    loss(*case.fused(GEMMA, True)).backward()
    loss(*whole.fused(GEMMA, True)).backward()
    trained = {"hidden_TH": "weight_VH", "weight_VH": "hidden_TH"}[frozen]
    assert getattr(case, frozen).grad is None
    assert torch.equal(getattr(case, trained).grad, getattr(whole, trained).grad)


def test_logits_far_from_zero_lose_no_entropy() -> None:
    # around 1000 float32 steps by 0.00006: counted from 0, the log-prob of -0.0009 would be off by a fifteenth
    weight_VH = torch.tensor([[1000.0 + 7.0], [1000.0]], device=DEVICE)
    hidden_TH, target_T = torch.ones(1, 1, device=DEVICE), torch.tensor([0], device=DEVICE)
    logprob_T, entropy_T = fused_logprobs(hidden_TH, weight_VH, target_T, PLAIN, entropy_gradient=False)
    rest = math.log1p(math.exp(-7.0))
    assert logprob_T.tolist() == pytest.approx([-rest], rel=1e-4)
    assert entropy_T.tolist() == pytest.approx([rest + 7.0 * math.exp(-7.0) / (1 + math.exp(-7.0))], rel=1e-4)


def test_a_nan_is_not_hidden_and_a_target_outside_the_vocabulary_is_one(small_blocks: None) -> None:
    case = Case.drawn(4)
    hidden_TH = case.hidden_TH.detach().clone()
    hidden_TH[1] = torch.nan
    target_T = case.target_T.clone()
    target_T[2], target_T[3] = 37, -1
    logprob_T, entropy_T = fused_logprobs(hidden_TH, case.weight_VH, target_T, PLAIN, entropy_gradient=False)
    assert logprob_T.isnan().tolist() == [False, True, True, True]
    assert entropy_T.isnan().tolist() == [False, True, False, False]


def test_bfloat16_is_rounded_only_between_the_products(small_blocks: None) -> None:
    """The values are as good as float32's. A gradient is rounded twice to 8 bits, in the logits and as a sum, each time
    by at most 1 part in 256; where terms of a sum cancel, it is that part of the largest sum."""
    case = Case.drawn(8, dtype=torch.bfloat16)
    exact = case.in_float64()
    for one, other in zip(case.fused(GEMMA, True), exact.plain(GEMMA, True), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5)
    assert_alike(case, GEMMA, entropy_gradient=True, rtol=2 / 256, atol=2 / 256)


def test_a_float32_weight_gets_a_float32_gradient_of_bfloat16_arithmetic(small_blocks: None) -> None:
    drawn = Case.drawn(8)
    hidden_TH = drawn.hidden_TH.detach().bfloat16()
    case = Case(hidden_TH, drawn.weight_VH, drawn.target_T)
    loss(*case.fused(PLAIN, True)).backward()
    rounded = Case(hidden_TH, case.weight_VH.detach().bfloat16().requires_grad_(), case.target_T)
    loss(*rounded.fused(PLAIN, True)).backward()
    assert case.weight_VH.grad is not None and case.weight_VH.grad.dtype == torch.float32
    assert rounded.weight_VH.grad is not None
    assert torch.equal(case.weight_VH.grad.bfloat16(), rounded.weight_VH.grad)
    assert not torch.equal(case.weight_VH.grad.bfloat16().float(), case.weight_VH.grad)


def test_logits_in_float32_have_the_gradients_of_a_plain_product() -> None:
    case = Case.drawn(4)
    exact_H, exact_V = (tensor.detach().clone().requires_grad_() for tensor in (case.hidden_TH, case.weight_VH))
    for hidden_TH, weight_VH, logits in (
        (case.hidden_TH, case.weight_VH, linear_float32),
        (exact_H, exact_V, lambda h, w: h @ w.T),
    ):
        logits(hidden_TH, weight_VH).square().sum().backward()
    torch.testing.assert_close(case.hidden_TH.grad, exact_H.grad)
    torch.testing.assert_close(case.weight_VH.grad, exact_V.grad)
    coarse = linear_float32(case.hidden_TH.detach().bfloat16(), case.weight_VH.detach().bfloat16())
    assert coarse.dtype == torch.float32
    nothing = linear_float32(case.hidden_TH.detach()[:0], case.weight_VH)
    nothing.sum().backward()
    assert nothing.shape == (0, 37)  # how the size of the vocabulary is asked for


@pytest.mark.parametrize(("frozen", "given"), [("weight", [(6, 5)]), ("hidden", [(37, 5)])])
def test_logits_in_float32_of_what_is_frozen_cost_no_product(
    monkeypatch: pytest.MonkeyPatch, frozen: str, given: list[tuple[int, int]]
) -> None:
    case, shapes = Case.drawn(6), []
    (case.weight_VH if frozen == "weight" else case.hidden_TH).requires_grad_(False)
    logits = linear_float32(case.hidden_TH, case.weight_VH)

    def spy(a: Tensor, b: Tensor, **named: Any) -> Tensor:
        shapes.append((a.shape[0], b.shape[1]))
        return matmul_float32(a, b, **named)

    monkeypatch.setattr(head, "matmul_float32", spy)
    logits.sum().backward()
    assert shapes == given


def test_a_product_in_float32_adds_to_what_is_there() -> None:
    a = torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16, device=DEVICE)
    b = torch.tensor([[256.0], [0.5]], dtype=torch.bfloat16, device=DEVICE)
    out = matmul_float32(a, b)
    assert out.dtype == torch.float32 and out.tolist() == [[257.0]]  # bfloat16 would have to say 256 or 258
    matmul_float32(a, b, out=out, add=True)
    assert out.tolist() == [[514.0]]


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        (0, 0),
        (100, 100),  # all at once
        (3456, 3456),  # the most that 2^29 numbers of 151,936 allow, as a multiple of 128
        (3457, 1792),  # two halves, not one chunk and a row
        (13_000, 3328),  # four
    ],
)
def test_chunks_are_even_and_of_whole_tiles(tokens: int, rows: int) -> None:
    assert rows_per_chunk(tokens, 151_936) == rows


def test_a_vocabulary_larger_than_the_limit_goes_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 10)
    assert rows_per_chunk(7, 37) == 1
