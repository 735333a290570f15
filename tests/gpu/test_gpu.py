"""What only a GPU can show: both engines agree there, bfloat16 stays close, and offloaded weights come and go."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.batch import Batch, TokenOutputs
from rloom.config.load import load_config
from rloom.engines.base import Placement
from rloom.engines.distributed import join, leave, rank_mesh
from rloom.engines.fsdp import FSDPEngine
from rloom.engines.local import LocalEngine
from rloom.launch.models import pick_device
from rloom.models import head
from rloom.models.load import Lora
from rloom.models.network import PolicyNetwork
from rloom.packing import MicroBatching
from rloom.rollout.base import Begun, Completion, Request, Rollout, Sampling
from rloom.rollout.hf import HfRollout
from rloom.rollout.native.engine import NativeRollout
from tests.helpers import ADAMW, SHAPE, VOCABULARY, a_batch, engine_of, policy, save_model
from tests.requests import ask, sampled, trajectories

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),  # torch's compiler imports what torch deprecates
    pytest.mark.filterwarnings("ignore::UserWarning:torch.*"),
]

CUDA = torch.device("cuda")
WHOLE = MicroBatching(tokens=10_000)
GREEDY = Sampling(max_new_tokens=12, temperature=0.0)
LUCKY = Sampling(max_new_tokens=12)
REQUESTS = [ask(range(3 + row, 5 + 2 * row), seed=row) for row in range(12)]
REINFORCE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.01, None, "kl")


def native(
    network: PolicyNetwork, owner: LocalEngine, *, share: float = 0.5, free_cache: bool = True, eager: bool = False
) -> NativeRollout:
    return NativeRollout(
        network,
        owner=owner,
        max_sequences=8,
        max_prefill_tokens=40,
        memory_share=share,
        free_cache=free_cache,
        eager=eager,
    )


def stepping(network: PolicyNetwork, owner: LocalEngine) -> NativeRollout:
    return native(network, owner, eager=True)


def hf(network: PolicyNetwork, owner: LocalEngine) -> HfRollout:
    attention = "eager" if network.softcap else "sdpa"  # sdpa leaves out a softcap
    return HfRollout(network, owner=owner, pad_id=0, max_sequences=8, generate_kwargs={}, attention=attention)


def write(rollout: Rollout, sampling: Sampling, requests: Sequence[Request] = REQUESTS) -> list[Completion]:
    found = sorted(rollout.generate(sampled(requests, sampling)), key=lambda pair: pair[0])
    return [completion for _, completion in found]


@pytest.mark.parametrize("build", [native, stepping])
def test_native_writes_greedily_what_hugging_face_writes(
    family_folder: Path, build: Callable[[PolicyNetwork, LocalEngine], NativeRollout]
) -> None:
    network = policy(family_folder)
    owner = engine_of(network, Placement(CUDA))
    expected = [completion.tokens_L.tolist() for completion in write(hf(network, owner), GREEDY)]
    rollout = build(network, owner)
    assert [completion.tokens_L.tolist() for completion in write(rollout, GREEDY)] == expected
    assert rollout.decoder is not None
    assert sorted(rollout.decoder.graphs.graphs) == ([8] if build is native else [])


def test_graphs_outlive_the_memory_behind_the_cache_and_are_made_anew_for_weights_that_moved(
    model_folder: Callable[[str], Path],
) -> None:
    network = policy(model_folder("qwen2"))
    owner = engine_of(network, Placement(CUDA, torch.bfloat16))
    rollout = native(network, owner)
    before = [completion.tokens_L.tolist() for completion in write(rollout, LUCKY)]
    first = rollout.decoder
    assert first is not None and first.cache.bytes > 0
    rollout.sleep()
    assert first.cache.bytes == 0
    rollout.wake()
    assert [completion.tokens_L.tolist() for completion in write(rollout, LUCKY)] == before
    assert rollout.decoder is first
    for parameter in network.module.parameters():
        parameter.data = parameter.data.clone()
    assert [completion.tokens_L.tolist() for completion in write(rollout, LUCKY)] == before
    assert rollout.decoder is not first


def test_updates_reach_the_captured_graphs(model_folder: Callable[[str], Path]) -> None:
    """After a step the graphs write with the new weights, as an engine made after the step does."""
    network = policy(model_folder("llama"))
    owner = engine_of(network, Placement(CUDA, torch.bfloat16))
    rollout, batch = native(network, owner), a_batch()
    before = write(rollout, GREEDY)
    owner.forward_backward(batch, REINFORCE, Counts.of(batch, 16))
    assert owner.optim_step(0.05).applied
    after = [completion.tokens_L.tolist() for completion in write(rollout, GREEDY)]
    assert after == [completion.tokens_L.tolist() for completion in write(native(network, owner), GREEDY)]
    assert after != [completion.tokens_L.tolist() for completion in before]


@pytest.mark.parametrize(
    "sampling",
    [LUCKY, Sampling(12, temperature=0.7, top_k=5), Sampling(12, top_p=0.6), Sampling(12, top_k=20, top_p=0.9)],
)
def test_the_device_draws_what_the_host_draws(model_folder: Callable[[str], Path], sampling: Sampling) -> None:
    folder = model_folder("qwen3")
    network, there = policy(folder), policy(folder)
    on_host = NativeRollout(
        network,
        owner=engine_of(network),
        max_sequences=8,
        max_prefill_tokens=40,
        memory_share=0.5,
        free_cache=True,
    )
    expected = write(on_host, sampling)
    found = write(native(there, engine_of(there, Placement(CUDA))), sampling)
    assert [one.tokens_L.tolist() for one in found] == [one.tokens_L.tolist() for one in expected]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.logprobs_L, other.logprobs_L, rtol=0, atol=1e-4)


def test_a_step_that_cannot_be_captured_runs_from_python_and_says_so(
    model_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    network = policy(model_folder("qwen2"))
    owner = engine_of(network, Placement(CUDA))
    expected = [completion.tokens_L.tolist() for completion in write(native(network, owner), GREEDY)]
    logits = network.logits

    def looks_at_a_number(hidden_TH: torch.Tensor) -> torch.Tensor:
        assert float(hidden_TH.sum()) != 1.25  # waits for the device: no graph can hold that
        return logits(hidden_TH)

    network.logits = looks_at_a_number  # type: ignore[method-assign]
    rollout = native(network, owner)
    found = [completion.tokens_L.tolist() for completion in write(rollout, GREEDY)]
    assert found == expected
    assert "could not capture this model's decode step" in caplog.text and "enforce_eager=True" in caplog.text
    assert rollout.decoder is not None and not rollout.decoder.graphs.graphs


def test_lora_checkpointing_and_compiled_layers_go_together(model_folder: Callable[[str], Path]) -> None:
    folder, batch = model_folder("qwen2"), a_batch()
    engines = []
    for compiled in (False, True):
        torch.manual_seed(0)
        network = policy(folder, lora=Lora(rank=4))
        network.decoder.enable_checkpointing()
        engines.append(
            LocalEngine(network, Placement(CUDA), scoring=WHOLE, training=WHOLE, optimizer=ADAMW, compiled=compiled)
        )
    for engine in engines:
        for _ in range(2):
            engine.forward_backward(batch, REINFORCE, Counts.of(batch, 16))
            assert engine.optim_step(0.01).applied
    plain, compiled_one = engines
    for one, other in zip(plain.trainable.values(), compiled_one.trainable.values(), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-4)
    greedy = [write(build(e.network, e), GREEDY) for e in engines for build in (native, hf)]
    assert len({tuple(tuple(one.tokens_L.tolist()) for one in each) for each in greedy}) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_layers_train_and_write_as_the_others(family_folder: Path, dtype: torch.dtype) -> None:
    plain, compiled = (
        LocalEngine(
            policy(family_folder),
            Placement(CUDA, dtype),
            scoring=WHOLE,
            training=WHOLE,
            optimizer=ADAMW,
            compiled=compile_layers,
        )
        for compile_layers in (False, True)
    )
    batch = a_batch()
    apart = (compiled.score(batch) - plain.score(batch)).abs()
    # the compiler rounds to bfloat16 less often; with random weights every token is an unlikely one
    assert float(apart.max()) < 1e-4 if dtype == torch.float32 else float(apart.mean()) < 0.05
    for engine in (plain, compiled):
        engine.forward_backward(batch, replace(REINFORCE, records_tokens=True), Counts.of(batch, 16))
        recorded = engine.tally.read_outputs()
        assert recorded is not None
        difference = (recorded.output_T - engine.score(batch))[batch.mask_T].abs()
        assert float(difference.max()) < (1e-3 if dtype == torch.float32 else 0.2)
    one, other = (torch.cat([g.flatten().float() for g in gradients(engine).values()]) for engine in (plain, compiled))
    assert float((other - one).norm() / one.norm()) < (1e-3 if dtype == torch.float32 else 0.1)
    if dtype == torch.float32:
        found, expected = (write(native(e.network, e), GREEDY) for e in (compiled, plain))
        assert [one.tokens_L.tolist() for one in found] == [one.tokens_L.tolist() for one in expected]


def test_a_compiled_layer_keeps_what_the_plan_says(tmp_path: Path) -> None:
    """Its input and what attention adds to it, queries and attention's output, keys and values, gate and up."""
    hidden, query, key_value, intermediate = 256, 256, 128, 1024
    length_N, tokens_T = torch.full((20,), 1000), torch.randint(3, VOCABULARY, (20_000,), device=CUDA)
    kept: dict[int, float] = {}  # bfloat16 numbers a token, by depth; what is kept outside of layers is the same
    saved: dict[int, Counter[str]] = {}
    for layers in (2, 6):
        shape = {"hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers}
        config = Qwen2Config(**{**SHAPE, **shape, "max_position_embeddings": 1024})
        network = policy(save_model(tmp_path / str(layers), config))
        LocalEngine(
            network, Placement(CUDA, torch.bfloat16), scoring=WHOLE, training=WHOLE, optimizer=ADAMW, compiled=True
        )
        network.decoder.hidden(tokens_T, length_N)  # the first time it is compiled
        gc.collect()  # an engine and its model refer to each other: the last one's memory must not be freed below
        before = requested_bytes()
        found = network.decoder.hidden(tokens_T, length_N)
        kept[layers] = (requested_bytes() - before) / (2 * len(tokens_T))
        del found
        with listed_saves(network) as saved[layers]:
            network.decoder.hidden(tokens_T, length_N)
    expected = 2 * (hidden + query + key_value + intermediate)
    a_layer = (kept[6] - kept[2]) / 4
    assert a_layer == pytest.approx(expected, rel=0.02), f"{a_layer} a layer of {kept}; saved {saved[6] - saved[2]}"


def requested_bytes() -> int:
    """What is allocated now, without what the allocator adds: up to 1 MiB to each block, 2 % of this test's largest."""
    torch.cuda.synchronize()
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


@contextmanager
def listed_saves(network: PolicyNetwork) -> Iterator[Counter[str]]:
    """The type and shape of each tensor that is kept for the backward pass, parameters left out."""
    found: Counter[str] = Counter()
    known = {parameter.untyped_storage().data_ptr() for parameter in network.module.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in known:
            known.add(place)
            found[f"{tensor.dtype}{list(tensor.shape)}"] += 1
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def gradients(engine: LocalEngine) -> dict[str, torch.Tensor]:
    found = {name: engine.accumulated.get(name, p.grad) for name, p in engine.trainable.items()}
    return {name: gradient.clone() for name, gradient in found.items() if gradient is not None}


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])  # tied embeddings in the second
def test_in_bfloat16_a_loss_judged_in_parts_has_the_gradients_of_two_steps(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    """With the logits of 25 tokens at once the pass has several parts; with those of 11 the longest answer has no
    place in one, and all log-probs are known before the loss is."""
    batch, found, asked = a_batch(), [], []

    class Counted(PolicyObjective):
        def __call__(self, *arguments: Any) -> Any:
            asked[-1] += 1
            return super().__call__(*arguments)

    for tokens in (25, 11):
        monkeypatch.setattr(head, "LOGITS_AT_ONCE", tokens * VOCABULARY)
        asked.append(0)
        engine = engine_of(policy(model_folder(family)), Placement(CUDA, torch.bfloat16))
        engine.forward_backward(batch, Counted(**vars(REINFORCE)), Counts.of(batch, 16))
        own = gradients(engine)
        found.append((engine.optim_step(0.0).metrics, own))
    assert asked == [3, 1]
    (metrics, in_parts), (expected, in_two_steps) = found
    assert metrics == pytest.approx(expected, rel=1e-4, abs=1e-6)
    for name, gradient in in_two_steps.items():
        gap = (in_parts[name] - gradient).norm() / gradient.norm().clamp(min=1e-3)
        assert float(gap) < 0.02, name


def test_judging_in_parts_never_waits_for_the_device(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    network, batch = policy(model_folder("qwen2")), a_batch()
    network.module.to(CUDA, torch.bfloat16)
    there, counts = batch.to(CUDA), Counts.of(batch, 16)
    hidden_TH = torch.randn(len(batch.tokens_T), 32, device=CUDA, dtype=torch.bfloat16, requires_grad=True)
    monkeypatch.setattr(network.decoder, "hidden", lambda tokens_T, length_N, routing: hidden_TH)
    monkeypatch.setattr(head, "LOGITS_AT_ONCE", 25 * VOCABULARY)

    def judge(outputs: TokenOutputs, rows: slice, tokens: slice) -> torch.Tensor:
        return REINFORCE(outputs, there.view(rows, tokens), counts)[0]

    for mode in ("default", "error"):  # the first time the kernels are compiled
        torch.cuda.set_sync_debug_mode(mode)
        try:
            network.loss(batch, there, judge, entropy_gradient=True).backward()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert hidden_TH.grad is not None and hidden_TH.grad.isfinite().all()


def test_a_gradient_is_gathered_without_waiting_for_the_device(model_folder: Callable[[str], Path]) -> None:
    engine, batch = engine_of(policy(model_folder("qwen2")), Placement(CUDA, torch.bfloat16)), a_batch()
    for mode in ("default", "error"):  # the first time the kernels are compiled
        torch.cuda.set_sync_debug_mode(mode)
        try:
            engine.forward_backward(batch, replace(REINFORCE, records_tokens=True), Counts.of(batch, 16))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert engine.optim_step(0.01).metrics["actor/entropy"] > 0


def test_packed_samples_attend_by_varlen_as_in_rows(model_folder: Callable[[str], Path]) -> None:
    folder, batch = model_folder("qwen2"), a_batch()
    placement = Placement(CUDA, torch.bfloat16)
    packed, rows = (engine_of(policy(folder, packed=packed), placement).score(batch) for packed in (True, False))
    assert float((packed - rows).abs().mean()) < 0.02


@pytest.mark.parametrize("build", [native, stepping])
def test_an_interrupted_answer_goes_on_as_if_it_had_not_been(
    model_folder: Callable[[str], Path], build: Callable[[PolicyNetwork, LocalEngine], NativeRollout]
) -> None:
    """In float32. Eight of twelve requests have begun."""
    network = policy(model_folder("qwen2"))
    rollout = build(network, engine_of(network, Placement(CUDA)))
    requests = sampled(REQUESTS, Sampling(max_new_tokens=24, ignore_eos=True))
    whole = rollout.generate_all(requests)
    numbers = [rollout.submit(request) for request in requests]
    finished: list[Completion] = []
    while not finished and not any(len(rollout.tokens_so_far(number)) > 3 for number in numbers):
        finished += rollout.poll()
    parts = rollout.interrupt_all(numbers)
    lengths = [len(part.tokens_L) for part in parts]
    assert max(lengths) > 3 and min(lengths) == 0
    going_on = [
        replace(request, begun=Begun(tuple(part.tokens_L.tolist()), tuple(part.logprobs_L.tolist())))
        if len(part.tokens_L)
        else request
        for request, part in zip(requests, parts, strict=True)
    ]
    for one, expected in zip(rollout.generate_all(going_on), whole, strict=True):
        assert one.tokens_L.tolist() == expected.tokens_L.tolist()
        torch.testing.assert_close(one.logprobs_L, expected.logprobs_L, rtol=0, atol=1e-4)


@pytest.mark.parametrize("build", [native, hf])
def test_in_bfloat16_sampled_logprobs_stay_near_the_trainers(
    family_folder: Path, build: Callable[[PolicyNetwork, LocalEngine], Rollout]
) -> None:
    network = policy(family_folder)
    owner = engine_of(network, Placement(CUDA, torch.bfloat16))
    completions = write(build(network, owner), LUCKY)
    batch = Batch.pack(trajectories(REQUESTS, completions))
    difference_T = (owner.score(batch) - batch.rollout_logprobs_T)[batch.mask_T].abs()
    assert float(difference_T.mean()) < 0.02


def test_the_only_rank_of_a_sharded_engine_learns_what_the_plain_one_learns(
    model_folder: Callable[[str], Path],
) -> None:
    """By NCCL, on the device that a run picks for itself."""
    device, folder, batch = pick_device(load_config([])), model_folder("qwen2"), a_batch()
    plain = engine_of(policy(folder), Placement(device))
    join(0, 1, address="127.0.0.1:0", device=device)
    try:
        sharded = FSDPEngine(
            policy(folder),
            Placement(device),
            rank_mesh(device),
            scoring=WHOLE,
            training=WHOLE,
            optimizer=ADAMW,
        )
        for engine in (plain, sharded):
            engine.forward_backward(batch, REINFORCE, Counts.of(batch, 16))
        found, expected = sharded.optim_step(0.01), plain.optim_step(0.01)
        assert found.metrics == pytest.approx(expected.metrics, rel=1e-4, abs=1e-6)
        assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)
    finally:
        leave()


def test_offloaded_weights_and_moments_visit_the_gpu_and_learn_the_same(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("qwen2")
    staying = engine_of(policy(folder), Placement(CUDA))
    visiting = engine_of(policy(folder), Placement(CUDA, offload_parameters=True, offload_optimizer=True))
    batch = a_batch()
    for _ in range(2):  # the second step meets moments that went to the host and came back
        for engine in (staying, visiting):
            engine.forward_backward(batch, REINFORCE, Counts.of(batch, 16))
            assert engine.optim_step(0.01).applied
    moments = [tensor for state in visiting.optimizer.state.values() for tensor in state.values()]
    assert {tensor.device.type for tensor in (*visiting.module.parameters(), *moments)} == {"cpu"}
    assert {parameter.device.type for parameter in staying.module.parameters()} == {"cuda"}
    for one, other in zip(staying.trainable.values(), visiting.trainable.values(), strict=True):
        # a hundredth of what one step moves a weight: sums on a GPU are not made in the same order twice
        torch.testing.assert_close(one.detach().cpu(), other.detach(), rtol=0, atol=1e-4)


def test_offloaded_weights_are_brought_in_to_generate(model_folder: Callable[[str], Path]) -> None:
    network = policy(model_folder("llama"))
    owner = engine_of(network, Placement(CUDA, offload_parameters=True))
    found = [completion.tokens_L.tolist() for completion in write(native(network, owner), GREEDY)]
    assert {parameter.device.type for parameter in network.module.parameters()} == {"cpu"}
    staying = policy(model_folder("llama"))
    expected = write(native(staying, engine_of(staying, Placement(CUDA))), GREEDY)
    assert found == [completion.tokens_L.tolist() for completion in expected]
