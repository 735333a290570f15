"""The rollout's choices of experts in batches: packed, selected, and sent to the policy only."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from rloom.batch import Advantages, Batch, TrainBatch, Trajectory, Turn
from rloom.runtime.group import LocalGroup
from rloom.training.batch_store import BatchStore
from rloom.training.loop import OldLogprobs, Training
from rloom.training.roles import Scorer
from rloom.types import Prompt, Score


def trajectory(tokens: list[int], experts: list[int] | None) -> Trajectory:
    """One layer, one expert per token."""
    prompt = Prompt(index=0, messages=(), text="", tokens=(tokens[0],), data_source="arithmetic")
    experts_LMK = None if experts is None else torch.tensor(experts, dtype=torch.int16)[:, None, None]
    turn = Turn(1, len(tokens), version=0)
    return Trajectory(prompt, 0, torch.tensor(tokens), torch.zeros(len(tokens)), (turn,), True, Score(1.0), experts_LMK)


FIRST, SECOND, WITHOUT = trajectory([5, 6, 7], [3, 1, -1]), trajectory([8, 9], [2, -1]), trajectory([4, 4], None)


def experts_of(batch: Batch) -> list[int]:
    assert batch.experts_TMK is not None and batch.experts_TMK.dtype == torch.int16
    return batch.experts_TMK.flatten().tolist()


def test_experts_are_packed_selected_and_viewed_with_their_tokens() -> None:
    batch = Batch.pack([FIRST, SECOND])
    assert experts_of(batch) == [3, 1, -1, 2, -1]
    assert experts_of(batch.select([1, 0])) == [2, -1, 3, 1, -1]
    assert experts_of(batch.view(slice(1, 2), slice(3, 5)).to(torch.device("cpu"))) == [2, -1]
    zeros_T = torch.zeros(5)
    train_batch = TrainBatch.of(batch, Advantages(zeros_T, zeros_T))
    assert experts_of(train_batch.select([1])) == [2, -1]
    assert train_batch.without_experts().experts_TMK is None


def test_a_sample_without_experts_leaves_the_choice_to_the_trainer() -> None:
    assert experts_of(Batch.pack([WITHOUT, SECOND])) == [-1, -1, 2, -1]
    assert Batch.pack([WITHOUT, WITHOUT]).experts_TMK is None


class Model:
    def __init__(self) -> None:
        self.experts: list[Any] = []

    def score(self, batch: Batch) -> Tensor:
        self.experts.append(None if batch.experts_TMK is None else experts_of(batch))
        return torch.zeros(len(batch.tokens_T))


def test_only_the_policy_gets_the_experts() -> None:
    models = {name: Model() for name in ("policy", "reference", "critic")}
    scorers = {name: Scorer(LocalGroup([model])) for name, model in models.items()}
    roles = SimpleNamespace(
        policy=SimpleNamespace(scorer=scorers["policy"]),
        reference=scorers["reference"],
        critic=SimpleNamespace(scorer=scorers["critic"]),
    )
    loop: Any = SimpleNamespace(
        roles=roles, settings=SimpleNamespace(old_logprobs=OldLogprobs.TRAINER), stage=lambda name: nullcontext()
    )
    batch = Batch.pack([FIRST])
    Training.model_outputs(loop, batch, BatchStore(LocalGroup([models["policy"]]), batch.length_N, [[0]]))
    assert {name: model.experts for name, model in models.items()} == {
        "policy": [[3, 1, -1]],
        "reference": [None],
        "critic": [None],
    }
