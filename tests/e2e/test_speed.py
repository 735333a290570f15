"""The speed gate: rloom's generation beside generate() of transformers, and its update beside a plain torch loop.

Both sides run in this process on one thread, in turn, and the median of the ratios of neighbouring rounds is compared,
in processor time: what else the machine does hardly changes it. The bound lies between the recorded ratio and one that
is 1.5 times as low.
"""

import importlib
import platform
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from rloom.engines.base import Placement
from rloom.engines.local import LocalEngine
from rloom.packing import MicroBatching
from rloom.rollout.base import Request, Sampling
from rloom.rollout.native.engine import NativeRollout

ROUNDS = 9
SAMPLES, PROMPT_TOKENS, NEW_TOKENS = 32, 16, 32
# processor time of the other side over that of rloom: docs/measurements/step.md#the-speed-gate-cpu2-loaded
RECORDED = {"x86_64": {"rollout": 1.38, "update": 0.95}}
ALLOWED = 1.25  # times as slow as recorded

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(platform.machine() not in RECORDED, reason="no ratio was recorded on this architecture"),
]


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A module of benchmarks/, on the CPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return importlib.import_module


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other would make the ratio depend on the load."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def check(name: str, ours: Callable[[], object], other: Callable[[], object]) -> None:
    found = [seconds(other) / seconds(ours) for _ in range(ROUNDS + 1)][1:]  # the first round warms up
    recorded = RECORDED[platform.machine()][name]
    print(f"{name}: {median(found):.3f} of {' '.join(f'{one:.2f}' for one in found)}, recorded {recorded}")
    assert median(found) > recorded / ALLOWED, f"{name}: {median(found):.2f} times as fast, recorded {recorded}"


def small_shape(shapes: Any) -> Any:
    return shapes.Shape("qwen2", 128, 384, 3, 4, 2, 2048, tied=True, context=2048)


def test_generation_is_as_much_faster_than_transformers_as_recorded(load: Callable[[str], Any]) -> None:
    shapes = load("shapes")
    shape, cpu, dtype = small_shape(shapes), torch.device("cpu"), torch.float32
    network = shapes.random_network(shape, cpu, dtype)
    owner = LocalEngine(network, Placement(cpu, dtype), scoring=MicroBatching(tokens=16384), compiled=False)
    native = NativeRollout(
        network,
        owner=owner,
        max_sequences=SAMPLES,
        max_prefill_tokens=4096,
        memory_share=0.5,
        free_cache=False,
        eager=True,
    )
    peer = load("hf_peer").HfGenerate(shape, cpu, dtype)
    prompts = shapes.random_prompts(shape, SAMPLES // 8, PROMPT_TOKENS, seed=0)
    sampling = Sampling(NEW_TOKENS, ignore_eos=True)
    requests = [Request(tokens, sampling, row) for row, tokens in enumerate(prompts * 8)]
    native.wake()
    check("rollout", lambda: list(native.generate(requests)), lambda: list(peer.generate(requests)))


def test_an_update_is_as_fast_beside_a_plain_loop_as_recorded(
    load: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, training = load("shapes"), load("training")
    monkeypatch.setitem(shapes.SHAPES, "small", small_shape(shapes))
    given = Namespace(
        shape="small",
        samples=SAMPLES,
        prompt_tokens=PROMPT_TOKENS,
        new_tokens=NEW_TOKENS,
        tokens_per_pass=SAMPLES // 2 * (PROMPT_TOKENS + NEW_TOKENS),
        checkpointing=False,
        eager=True,
    )
    batch = training.random_batch(shapes.SHAPES["small"], SAMPLES, PROMPT_TOKENS, NEW_TOKENS)
    ours = training.Ours(training.make_engine(given), given, batch)
    check("update", ours.update, training.HuggingFace(given, batch).update)
