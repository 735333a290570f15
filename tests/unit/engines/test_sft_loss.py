"""The loss of supervised fine-tuning: that of transformers, whatever the micro-batches."""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import Qwen2Config

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import SupervisedObjective
from rloom.data.examples import Example
from rloom.engines.local import LocalEngine
from rloom.packing import MicroBatching
from rloom.training.sft import pack, perplexity
from tests.engine_subjects import local_gradients
from tests.helpers import ADAMW, CPU, SHAPE, assert_near, eager_model, policy, save_model

IGNORED = -100  # the label that transformers leaves out


def examples() -> list[Example]:
    """Four rows of 9, 5, 12 and 7 tokens, 3 + 2 + 7 + 1 = 13 of them answers; the third row has two answers."""
    draws = torch.Generator().manual_seed(5)
    masks = ["000000111", "00011", "000111001111", "0000001"]
    return [
        Example(
            row,
            "",
            tuple(torch.randint(3, 20, (len(mask),), generator=draws).tolist()),
            tuple(letter == "1" for letter in mask),
        )
        for row, mask in enumerate(masks)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("sft") / "model", Qwen2Config(**SHAPE))


def computed(folder: Path, batching: MicroBatching, shares: list[list[int]]) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient of the rows, divided among engines as among workers."""
    batch, loss = pack(examples()), 0.0
    counts, gradients = Counts.of(batch, 16), dict[str, Tensor]()
    assert counts.tokens == 13
    for rows in shares:
        engine = LocalEngine(policy(folder), CPU, scoring=batching, training=batching, optimizer=ADAMW)
        engine.forward_backward(batch.select(rows), SupervisedObjective(), counts)
        for name, gradient in local_gradients(engine).items():
            gradients[name] = gradients.get(name, torch.zeros_like(gradient)) + gradient
        loss += engine.optim_step(0.0).metrics["train/loss"]
    return loss, gradients


def of_transformers(folder: Path) -> tuple[float, dict[str, Tensor]]:
    model, rows = eager_model(folder), examples()
    longest = max(len(row.tokens) for row in rows)
    tokens, labels = torch.zeros(len(rows), longest, dtype=torch.long), torch.full((len(rows), longest), IGNORED)
    for number, row in enumerate(rows):
        ids, mask_L = torch.tensor(row.tokens), torch.tensor(row.mask)
        tokens[number, : len(ids)] = ids
        labels[number, : len(ids)] = ids.where(mask_L, IGNORED)
    loss = model(input_ids=tokens, labels=labels).loss  # padding is on the right, where causal attention does not look
    loss.backward()
    return loss.item(), {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def test_loss_and_gradient_are_those_of_transformers(folder: Path) -> None:
    loss, gradients = computed(folder, MicroBatching(tokens=1000), [[0, 1, 2, 3]])
    expected, of_model = of_transformers(folder)
    assert loss == pytest.approx(expected, abs=1e-5)
    assert_near(gradients, of_model, 1e-5)


@pytest.mark.parametrize(
    "batching, shares",
    [
        (MicroBatching(samples=2), [[0, 1, 2, 3]]),
        (MicroBatching(samples=1), [[0, 1, 2, 3]]),
        (MicroBatching(tokens=16), [[0, 1, 2, 3]]),
        (MicroBatching(samples=1), [[2, 0], [1, 3]]),
        (MicroBatching(tokens=1000), [[0], [1], [2], [3]]),
    ],
    ids=["2 passes", "4 passes", "by tokens", "2 workers", "4 workers"],
)
def test_any_split_gives_the_same_loss_and_gradient(
    folder: Path, batching: MicroBatching, shares: list[list[int]]
) -> None:
    whole, gradient = computed(folder, MicroBatching(tokens=1000), [[0, 1, 2, 3]])
    loss, found = computed(folder, batching, shares)
    assert loss == pytest.approx(whole, abs=1e-6)
    assert_near(found, gradient, 1e-5)


def test_the_perplexity_of_a_huge_loss_is_finite() -> None:
    assert perplexity(0.0) == 1.0
    assert perplexity(1e6) == pytest.approx(1.0142320547350045e304)
