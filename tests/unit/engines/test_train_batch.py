"""A loss judged part by part, with its gradient formed at once, is the loss of the whole pass and has its gradients.

Without a CUDA device plain torch is in the kernels' place, and they run in Triton's interpreter where `kernels` is
given: test_head.py compares each with torch.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective, ValueObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import TokenOutputs, TrainBatch
from rloom.engines.base import Placement
from rloom.engines.micro_batches import CachedTrainBatch
from rloom.models import head, network
from rloom.models.head import LogitOptions, even_ends, fused_logprobs, fused_loss, sample_ranges
from rloom.models.load import Lora
from rloom.packing import MicroBatching
from tests.engine_subjects import ENGINES
from tests.head_in_torch import replace_kernels
from tests.helpers import CPU, VOCABULARY, Weights, a_batch, assert_same, policy, train_batch
from tests.ranks import RankProcesses

pytestmark = pytest.mark.usefixtures("fast_kernels")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PLACEMENT = Placement(DEVICE)
GEMMA = LogitOptions(temperature=0.7, scale=1.5, softcap=4.0)
VANILLA = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.0, None, "low_var_kl")
OBJECTIVES = {
    "vanilla": VANILLA,
    "entropy and k3": replace(VANILLA, entropy_coefficient=0.3, kl_coefficient=0.1),
    "gspo": replace(VANILLA, loss_mode="gspo", aggregation="seq-mean-token-mean"),
    "geo_mean": replace(VANILLA, loss_mode="geo_mean", aggregation="seq-mean-token-mean"),
}


@dataclass(frozen=True)
class Learned:
    metrics: dict[str, float]
    gradients: Weights


@pytest.fixture
def fast_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kernels" in request.fixturenames or DEVICE.type == "cuda":
        return
    pytest.importorskip("triton")
    replace_kernels(monkeypatch)


@pytest.fixture
def kernels(interpreted_kernels: None) -> None:
    """The kernels themselves."""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> Callable[[int | None], None]:
    """From now on the kernels run, with the logits of so many tokens at once; None: they do not."""

    def set_limit(tokens: int | None) -> None:
        monkeypatch.setattr(network, "kernels_run_on", lambda device: tokens is not None)
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", (tokens or 0) * VOCABULARY)

    return set_limit


@pytest.fixture
def judged_parts(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many chunks each call had."""
    seen: list[int] = []

    def spy(*arguments: Any, **named: Any) -> Tensor:
        seen.append(len(arguments[4]))
        return fused_loss(*arguments, **named)

    monkeypatch.setattr(network, "fused_loss", spy)
    return seen


def learn(
    folder: Path,
    objective: Any,
    batch: TrainBatch,
    *,
    engine: str = "local",
    placement: Placement = PLACEMENT,
    **kind: Any,
) -> Learned:
    torch.manual_seed(0)  # an adapter starts from chance
    subject = ENGINES[engine]
    built = subject.build(folder, placement=placement, **kind)
    built.forward_backward(batch, objective, Counts.of(batch, 16))
    gradients = subject.gradients(built)
    return Learned(built.optim_step(0.0).metrics, gradients)


def assert_learned(found: Learned, expected: Learned) -> None:
    assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
    assert_same(found.gradients, expected.gradients)


@pytest.mark.parametrize(
    ("name", "tokens", "parts"),
    [
        ("vanilla", 57, 1),
        ("vanilla", 56, 2),
        ("vanilla", 12, 8),  # each sample alone
        ("entropy and k3", 25, 3),
        ("gspo", 25, 3),
        ("geo_mean", 25, 3),
        ("geo_mean", 12, 8),
    ],
)
def test_parts_teach_what_the_whole_pass_teaches(
    model_folder: Callable[[str], Path],
    at_once: Callable[[int | None], None],
    judged_parts: list[int],
    name: str,
    tokens: int,
    parts: int,
) -> None:
    folder = model_folder("qwen2")
    at_once(None)
    expected = learn(folder, OBJECTIVES[name], train_batch())
    assert judged_parts == []
    at_once(tokens)
    found = learn(folder, OBJECTIVES[name], train_batch())
    assert judged_parts == [parts]
    assert len(found.gradients) == 27  # every parameter
    assert_learned(found, expected)


@pytest.mark.parametrize("name", ["vanilla", "gspo"])
@pytest.mark.parametrize("family", ["qwen3", "gemma2"])  # tied embeddings, capped logits
def test_tied_weights_caps_and_several_passes_keep_the_gradient(
    model_folder: Callable[[str], Path], at_once: Callable[[int | None], None], family: str, name: str
) -> None:
    """Exactly on-policy: the gap to the rollout engine's probabilities is measured in parts too."""
    folder, passes = model_folder(family), {"micro": MicroBatching(tokens=50)}
    at_once(None)
    expected = learn(folder, OBJECTIVES[name], a_batch())
    assert "rollout_corr/kl" in expected.metrics
    at_once(14)
    assert_learned(learn(folder, OBJECTIVES[name], a_batch(), **passes), expected)


@pytest.mark.parametrize("name", ["vanilla", "entropy and k3"])
def test_the_kernels_teach_from_parts_what_the_whole_pass_teaches(
    kernels: None, model_folder: Callable[[str], Path], at_once: Callable[[int | None], None], name: str
) -> None:
    """Of capped logits."""
    at_once(None)
    expected = learn(model_folder("gemma2"), OBJECTIVES[name], train_batch())
    at_once(25)
    assert_learned(learn(model_folder("gemma2"), OBJECTIVES[name], train_batch()), expected)


@pytest.mark.parametrize("silent", [[0, 7], [0, 1, 2, 3, 4, 5, 6], list(range(8))])
def test_samples_that_wrote_nothing_go_with_their_neighbours(
    model_folder: Callable[[str], Path], at_once: Callable[[int | None], None], silent: list[int]
) -> None:
    batch = train_batch()
    quiet_T = torch.isin(batch.sample_T, torch.tensor(silent))
    batch = replace(batch, mask_T=batch.mask_T & ~quiet_T)
    at_once(None)
    expected = learn(model_folder("qwen2"), OBJECTIVES["geo_mean"], batch)
    at_once(13)
    assert_learned(learn(model_folder("qwen2"), OBJECTIVES["geo_mean"], batch), expected)


@pytest.mark.parametrize("entropy", [0.0, 0.3])
def test_a_frozen_head_is_read_and_gets_no_gradient(
    model_folder: Callable[[str], Path],
    at_once: Callable[[int | None], None],
    products: list[str],
    entropy: float,
) -> None:
    objective, kind = replace(VANILLA, entropy_coefficient=entropy), {"lora": Lora(rank=4), "checkpointing": True}
    at_once(None)
    expected = learn(model_folder("qwen2"), objective, train_batch(), **kind)
    products.clear()
    at_once(25)
    assert_learned(learn(model_folder("qwen2"), objective, train_batch(), **kind), expected)
    assert products == ["logits", "hidden"] * 3


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What each matrix product of the head gave. The tiny models have 32 hidden numbers."""
    seen: list[str] = []
    product = head.matmul_float32

    def spy(a: Tensor, b: Tensor, **named: Any) -> Tensor:
        out = product(a, b, **named)
        seen.append("weight" if len(out) == VOCABULARY else "logits" if out.shape[1] == VOCABULARY else "hidden")
        return out

    monkeypatch.setattr(head, "matmul_float32", spy)
    return seen


def test_logits_are_computed_once_a_part(
    model_folder: Callable[[str], Path], at_once: Callable[[int | None], None], products: list[str]
) -> None:
    at_once(25)
    learn(model_folder("qwen2"), VANILLA, train_batch())
    assert products == ["logits", "hidden", "weight"] * 3


@pytest.mark.parametrize("case", ["a sample too long", "a KL over the vocabulary", "a head with a bias", "not chunked"])
def test_what_parts_cannot_do_is_done_as_before(
    model_folder: Callable[[str], Path],
    at_once: Callable[[int | None], None],
    judged_parts: list[int],
    case: str,
) -> None:
    """The objective is asked once, of all samples; the longest answer has 12 tokens."""
    batch, model = train_batch().to(DEVICE), policy(model_folder("qwen2"), chunked=case != "not chunked")
    here = train_batch()
    if case == "a head with a bias":
        model.decoder.base.lm_head.bias = torch.nn.Parameter(torch.ones(VOCABULARY))
    model.module.to(DEVICE)
    at_once(11 if case == "a sample too long" else 57)
    asked: list[tuple[TokenOutputs, int]] = []

    def judge(outputs: TokenOutputs, rows: slice, tokens: slice) -> Tensor:
        asked.append((outputs, len(batch.view(rows, tokens))))
        return outputs.output_T.sum()

    reference = model if case == "a KL over the vocabulary" else None
    loss = model.loss(here, batch, judge, reference=reference)
    ((outputs, samples),) = asked
    assert samples == 8 and judged_parts == []
    expected = model.token_outputs(here, batch, reference=reference)
    assert torch.equal(outputs.output_T, expected.output_T) and torch.equal(loss, expected.output_T.sum())
    assert (outputs.kl_T is not None) == (reference is not None)


def test_a_critic_is_judged_at_once(
    model_folder: Callable[[str], Path], at_once: Callable[[int | None], None], judged_parts: list[int]
) -> None:
    objective = ValueObjective(0.5, "token-mean")
    at_once(None)
    expected = learn(model_folder("qwen2"), objective, train_batch(), critic=True)
    at_once(57)
    found = learn(model_folder("qwen2"), objective, train_batch(), critic=True)
    assert found.metrics == expected.metrics and judged_parts == []


@pytest.mark.parametrize(("dtype", "kind"), [(torch.float32, {}), (torch.bfloat16, {"lora": Lora(rank=4)})])
def test_one_rank_learns_from_parts_what_one_process_does(
    one_rank: None,
    model_folder: Callable[[str], Path],
    at_once: Callable[[int | None], None],
    judged_parts: list[int],
    dtype: torch.dtype,
    kind: dict[str, Any],
) -> None:
    if DEVICE.type == "cuda":
        pytest.skip("the kernels are compiled, and this process group is one of CPUs")
    at_once(14)
    placement, micro = Placement(torch.device("cpu"), dtype), MicroBatching(tokens=50)
    found, expected = (
        learn(
            model_folder("qwen3"),
            OBJECTIVES["entropy and k3"],
            train_batch(),
            engine=engine,
            placement=placement,
            micro=micro,
            **kind,
        )
        for engine in ("sharded", "local")
    )
    assert judged_parts == [3, 3] * 2
    assert_learned(found, expected)


def teach_rank(rank: int, ranks: int, folder: Path, tokens: int) -> tuple[Learned, list[int]]:
    """Its share of the batch in parts, and how many each pass had; the second rank's last pass is an idle one."""
    seen: list[int] = []

    def spy(*arguments: Any, **named: Any) -> Tensor:
        seen.append(len(arguments[4]))
        return fused_loss(*arguments, **named)

    rows = [0, 1, 2, 3, 4, 5] if rank == 0 else [6, 7]
    with pytest.MonkeyPatch.context() as patch:
        replace_kernels(patch)
        patch.setattr(network, "kernels_run_on", lambda device: True)
        patch.setattr(network, "fused_loss", spy)
        patch.setattr(head, "LOGITS_AT_ONCE", tokens * VOCABULARY)
        batch, subject = train_batch(), ENGINES["sharded"]
        engine = subject.build(folder, micro=MicroBatching(tokens=40))
        engine.forward_backward(batch.select(rows), OBJECTIVES["entropy and k3"], Counts.of(batch, 16))
        gradients = subject.gradients(engine)
        return Learned(engine.optim_step(0.0).metrics, gradients), seen


def test_two_ranks_learn_from_parts_what_one_process_learns(
    rank_processes: RankProcesses,
    model_folder: Callable[[str], Path],
    at_once: Callable[[int | None], None],
) -> None:
    at_once(None)
    expected = learn(model_folder("qwen3"), OBJECTIVES["entropy and k3"], train_batch(), placement=CPU)
    (first, parts), (second, other_parts) = rank_processes.run(2, teach_rank, model_folder("qwen3"), 14)
    assert (parts, other_parts) == ([3, 2], [1, 1])
    total = {name: first.metrics[name] + second.metrics[name] for name in expected.metrics}
    assert_learned(Learned(total, first.gradients), expected)


def test_two_chunks_by_hand(kernels: None) -> None:
    # z = ln(5, 3, 2): probabilities 0.5, 0.3, 0.2 at both tokens; the first writes 1, the second 0
    weight_VH = torch.tensor([[math.log(5)], [math.log(3)], [math.log(2)]], device=DEVICE, requires_grad=True)
    hidden_TH = torch.ones(2, 1, device=DEVICE, requires_grad=True)
    asked: list[int] = []

    def judge(index: int, logprob_R: Tensor, entropy_R: Tensor) -> Tensor:
        asked.append(index)
        return (-2 * logprob_R + entropy_R if index else logprob_R).sum()

    loss = fused_loss(
        hidden_TH,
        weight_VH,
        torch.tensor([1, 0], device=DEVICE),
        LogitOptions(),
        [slice(0, 1), slice(1, 2)],
        judge,
        entropy_gradient=True,
    )
    assert asked == [0, 1]
    assert loss.item() == pytest.approx(math.log(0.3) - 2 * math.log(0.5) + 1.029653)
    (loss * 10).backward()
    assert asked == [0, 1]
    # [-0.5, 0.7, -0.2] - 2 [0.5, -0.3, -0.2] - p (ln p + entropy)
    assert weight_VH.grad is not None and hidden_TH.grad is not None
    assert weight_VH.grad.flatten().tolist() == pytest.approx([-16.68253, 13.52296, 3.15957], abs=1e-4)
    # 0.7 ln 3 - 0.5 ln 5 - 0.2 ln 2, and by the second token's [-1.168253, 0.652296, 0.515957]
    assert hidden_TH.grad.flatten().tolist() == pytest.approx([-1.74320, -8.05977], abs=1e-4)


def drawn(tokens: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(tokens)
    hidden_TH, weight_VH = (torch.randn(n, 5, generator=draw).to(DEVICE, dtype) for n in (tokens, 37))
    target_T = torch.randint(37, (tokens,), generator=draw).to(DEVICE)
    return hidden_TH.requires_grad_(), weight_VH.requires_grad_(), target_T


@pytest.mark.parametrize("entropy_gradient", [True, False])
@pytest.mark.parametrize("cuts", [[0, 7], [0, 1, 7], [0, 3, 4, 7]])
def test_in_bfloat16_the_gradients_are_rounded_as_those_of_two_steps(
    kernels: None, cuts: list[int], entropy_gradient: bool
) -> None:
    """Bit for bit in the hidden states; in the weight up to the order in which chunks are summed in float32."""
    weigh_T = torch.arange(1.0, 8.0, device=DEVICE)
    chunks = [slice(first, last) for first, last in pairwise(cuts)]

    def judge(index: int, logprob_R: Tensor, entropy_R: Tensor) -> Tensor:
        weight_R = weigh_T[chunks[index]]
        return (weight_R * logprob_R.exp()).sum() + (entropy_R / weight_R).sum()

    hidden_TH, weight_VH, target_T = drawn(7, torch.bfloat16)
    loss = fused_loss(hidden_TH, weight_VH, target_T, GEMMA, chunks, judge, entropy_gradient=entropy_gradient)
    loss.backward()
    other_TH, other_VH, _ = drawn(7, torch.bfloat16)
    logprob_T, entropy_T = fused_logprobs(other_TH, other_VH, target_T, GEMMA, entropy_gradient=entropy_gradient)
    expected = (weigh_T * logprob_T.exp()).sum() + (entropy_T / weigh_T).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    assert hidden_TH.grad is not None and weight_VH.grad is not None and other_VH.grad is not None
    assert hidden_TH.grad.dtype == weight_VH.grad.dtype == torch.bfloat16
    assert torch.equal(hidden_TH.grad, other_TH.grad)
    torch.testing.assert_close(weight_VH.grad, other_VH.grad, rtol=1 / 128, atol=1e-6)


@pytest.mark.parametrize(
    ("counts", "most", "ends"),
    [
        ([5], 5, [1]),
        ([512] * 43, 3533, [5, 10, 16, 21, 27, 32, 38, 43]),  # eight parts of 5 or 6 samples, not seven of 6 and a rest
        ([1, 1, 1, 9, 1, 1, 1], 10, [3, 4, 7]),
        ([9, 9, 9], 10, [1, 2, 3]),
        ([0, 0, 4, 0, 4, 0], 4, [4, 6]),
        ([2, 2, 2, 2], 8, [4]),
        ([1, 5, 5, 1, 5], 6, [2, 4, 5]),
    ],
)
def test_parts_are_few_and_even(counts: list[int], most: int, ends: list[int]) -> None:
    assert even_ends(counts, most) == ends


def test_parts_are_whole_samples_in_order(at_once: Callable[[int | None], None]) -> None:
    """Answers of 6, 9, 4, 10, 3, 12, 8 and 5 tokens: a third would be 19."""
    batch = a_batch()
    at_once(25)
    parts = sample_ranges(batch.mask_T.nonzero().squeeze(1), batch.length_N, VOCABULARY)
    assert [part.rows for part in parts] == [slice(0, 3), slice(3, 6), slice(6, 8)]
    assert [part.tokens for part in parts] == [slice(0, 27), slice(27, 67), slice(67, 88)]
    assert [part.answers for part in parts] == [slice(0, 19), slice(19, 44), slice(44, 57)]


def test_who_wrote_what_is_worked_out_once_a_part() -> None:
    batch = replace(train_batch(), keep_T=torch.arange(88) != 70)
    whole = CachedTrainBatch(**vars(batch))
    assert whole.loss_mask_T is whole.loss_mask_T and torch.equal(whole.loss_mask_T, batch.loss_mask_T)
    part = whole.view(slice(6, 8), slice(67, 88))
    assert part.sample_T is part.sample_T and part.sample_T.tolist() == [0] * 12 + [1] * 9
    assert part.loss_mask_T.tolist() == batch.loss_mask_T[67:].tolist()
