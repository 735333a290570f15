"""The probe: engines whose weights cannot be read are found when they do not have the actor's."""

import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rloom.engines.local import LocalEngine
from rloom.errors import ModelError
from rloom.models.load import Lora
from rloom.rollout.base import Completion, Request, copy_weights
from rloom.rollout.native.engine import NativeRollout
from rloom.runtime.group import LocalGroup
from rloom.training.probe import METRIC, Probed, ProbeRequests, WeightProbe, compared
from rloom.training.roles import Scorer
from tests.fake_engines import Owner
from tests.helpers import engine_of, policy

SETTING = "actor_rollout_ref.rollout.name=vllm"
CACHE = {"max_sequences": 8, "max_prefill_tokens": 1000, "memory_share": 0.5, "free_cache": True}


class Bench:
    """An actor and a rollout engine on a copy of its model."""

    def __init__(self, folder: Path, lora: Lora | None = None, engines: int = 1) -> None:
        self.engine: LocalEngine = engine_of(policy(folder, lora=lora))
        network = policy(folder, lora=lora)
        copy_weights(self.engine.weights(), network.module)
        self.rollout = NativeRollout(network, owner=Owner(), **CACHE)
        self.asked: list[list[Request]] = []
        group = LocalGroup([self])
        self.probe = WeightProbe(group, ProbeRequests(40, 1.0, engines), SETTING, every=3)
        self.scorer = Scorer(LocalGroup([self.engine]))
        self.version = 0

    def generate_all(self, requests: list[Request]) -> list[Completion]:
        self.asked.append(requests)
        return self.rollout.generate_all(requests)

    def learn(self, rate: float) -> None:
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for parameter in self.engine.trainable.values():
                parameter.add_(rate * torch.randn(parameter.shape, generator=generator))

    def sync(self, change: Callable[[str, Tensor], Tensor] | None = lambda name, tensor: tensor) -> None:
        """`change`: of what is sent; None: nothing is sent."""
        self.version += 1

        def sent() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in self.engine.weights() if change is not None else ():
                yield name, change(name, tensor)

        self.rollout.load_weights(sent(), self.version)
        self.probe.weights_changed()

    def step(self) -> dict[str, float]:
        self.probe.ask()
        return self.probe.compare(self.scorer)


def test_a_healthy_engine_is_asked_after_every_third_sync(model_folder: Callable[[str], Path]) -> None:
    bench, found = Bench(model_folder("qwen2"), engines=3), []
    for _ in range(7):
        found.append(bench.step())
        bench.learn(0.05)
        bench.sync()
    assert [METRIC in metrics for metrics in found] == [True, False, False, True, False, False, True]
    assert max(metrics.get(METRIC, 0.0) for metrics in found) < 1e-4
    prompts = [[request.tokens for request in requests] for requests in bench.asked]
    assert prompts == [prompts[0]] * 3 and len(set(prompts[0])) == 3
    assert [len(tokens) for tokens in prompts[0]] == [8] * 3


@pytest.mark.parametrize("lora", [None, Lora(rank=4)], ids=["weights", "adapter"])
def test_an_engine_that_gets_nothing_is_found_while_it_still_agrees(
    lora: Lora | None, model_folder: Callable[[str], Path]
) -> None:
    """The actor's log-probs change little from one probe to the next, and in all by what two kernels may differ by."""
    bench = Bench(model_folder("qwen2"), lora)
    with pytest.raises(ModelError, match="does not use the LoRA adapter that it gets") as found:
        for _ in range(60):
            bench.step()
            bench.learn(0.002 if lora is None else 0.001)
            bench.sync(change=None)
    assert str(found.value).startswith(f"{SETTING}: from step 0 to step ") and bench.version > 2 * 3
    actor, engine = map(float, re.findall(r"by ([\d.e-]+\d|0)", str(found.value)))
    assert 0.1 <= actor < 0.3 and engine == 0


def test_weights_that_are_far_off_are_an_error_the_second_time(model_folder: Callable[[str], Path]) -> None:
    bench = Bench(model_folder("qwen2"))

    def scaled(name: str, tensor: Tensor) -> Tensor:
        return tensor * 4 if name.endswith("model.norm.weight") else tensor

    bench.step()
    for _ in range(3):
        bench.learn(0.05)
        bench.sync(scaled)
    assert bench.step()[METRIC] > 0.3
    bench.learn(0.05)
    bench.sync(scaled)  # the next probe is due after one sync
    with pytest.raises(ModelError, match=r"with the weights of step 4 the engine's log-probs .*name=native or hf"):
        bench.step()


def test_the_first_probe_allows_no_difference(model_folder: Callable[[str], Path]) -> None:
    bench = Bench(model_folder("qwen2"))
    bench.learn(0.5)
    with pytest.raises(ModelError, match="with the weights of step 0"):
        bench.step()


def test_an_answer_of_other_weights_than_the_actors_is_not_compared(model_folder: Callable[[str], Path]) -> None:
    bench = Bench(model_folder("qwen2"))
    bench.probe.ask()
    bench.learn(0.5)
    bench.sync()
    assert bench.probe.compare(bench.scorer) == {}  # the last validation, for example, was before the update
    assert bench.step()[METRIC] < 1e-4


def probed(tokens: list[int], engine: list[float], actor: list[float]) -> Probed:
    return Probed(1, torch.tensor(tokens), torch.tensor(engine), torch.tensor(actor))


def test_changes_are_those_of_the_tokens_that_both_answers_begin_with() -> None:
    first = probed([5, 6, 7, 8, 9], [-1.0, -2.0, -1.0, -1.0, -3.0], [-1.0, -2.0, -1.0, -1.0, -3.0])
    later = probed([5, 6, 7, 8, 4], [-1.5, -2.0, -1.0, -1.0, -9.0], [-2.0, -2.0, -2.0, -1.0, -9.0])
    assert later.changes_since(first) == pytest.approx((0.5, 0.125))
    assert probed([5, 6, 7, 1, 1], [0.0] * 5, [0.0] * 5).changes_since(first) is None
    assert math.isnan(probed([5], [math.nan], [0.0]).difference)


class Answers:
    """Completions with fixed log-probs."""

    def __init__(self, logprobs: list[float]) -> None:
        self.logprobs = logprobs

    def generate_all(self, requests: list[Request]) -> list[Completion]:
        return [
            Completion(n, torch.tensor([5, 6]), torch.tensor(self.logprobs), False, 0) for n in range(len(requests))
        ]


class Actor:
    def __init__(self, logprob: float) -> None:
        self.logprob, self.rows = logprob, 0

    def score(self, batch: Any) -> Tensor:
        self.rows += len(batch)
        return torch.full((len(batch.tokens_T),), self.logprob)


def test_every_engine_is_compared_and_every_worker_of_the_actor_scores() -> None:
    actors = [Actor(-1.0), Actor(-1.0), Actor(-1.0)]
    engines = LocalGroup([Answers([-1.0, -1.0]), Answers([-1.1, -1.3])])
    probe = WeightProbe(engines, ProbeRequests(40, 1.0), SETTING)
    probe.ask()
    assert probe.compare(Scorer(LocalGroup(actors))) == {METRIC: pytest.approx(0.2)}
    assert all(actor.rows >= 1 for actor in actors)
    engines.workers = [Answers([-1.0, -1.0]), Answers([math.nan, -1.0])]
    bad = WeightProbe(engines, ProbeRequests(40, 1.0), SETTING)
    bad.ask()
    with pytest.raises(ModelError, match="by nan on average"):
        bad.compare(Scorer(LocalGroup(actors)))


def test_short_runs_have_a_short_probe() -> None:
    [request] = ProbeRequests(2, 1.0).all()
    assert len(request.tokens) == 1 and request.sampling.max_new_tokens == 1
    trajectories = ProbeRequests(2, 1.0).trajectories(
        [Completion(0, torch.tensor([7]), torch.tensor([-2.0]), False, 3)]
    )
    [found] = compared(trajectories, torch.tensor([0.0, -1.5]))
    assert found.difference == 0.5 and found.version == 3
