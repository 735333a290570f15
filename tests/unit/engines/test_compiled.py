"""Compiled layers: all of them share one version, whatever the lengths, and compute what the plain ones compute."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.utils import counters

from rloom.algos.aggregate import Counts
from rloom.algos.objectives import PolicyObjective
from rloom.algos.policy_losses import LossSettings
from rloom.engines.distributed import rank_mesh
from rloom.engines.fsdp import FSDPEngine
from rloom.models.attention import OpaqueAttention, PackedAttention, active
from rloom.models.network import PolicyNetwork
from rloom.packing import MicroBatching
from rloom.rollout.base import Request, Sampling
from rloom.rollout.native.engine import NativeRollout
from tests.helpers import ADAMW, CPU, FAMILIES, a_batch, engine_of, policy, save_model

REINFORCE = PolicyObjective("vanilla", LossSettings(), "token-mean", 0.0, None, "kl")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*"),  # torch's own, as its compiler is imported
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),  # the compiler looks whether an input has one
]


Networks = tuple[PolicyNetwork, PolicyNetwork, Callable[[], int]]


def five_layers(folder: Path, backend: str) -> Networks:
    """A plain one, a compiled one of the same five layers, and how many versions of a layer were made."""
    config = FAMILIES["qwen2"]()
    config.num_hidden_layers, config.layer_types = 5, ["full_attention"] * 5
    save_model(folder, config)
    plain, compiled = policy(folder), policy(folder, shares_prompts=True)
    torch._dynamo.reset()
    counters.clear()
    for layer in compiled.decoder.layers:
        layer.compile = partial(torch.nn.Module.compile, layer, backend=backend)
    compiled.compile()
    return plain, compiled, lambda: counters["stats"]["unique_graphs"]


@pytest.fixture
def networks(tmp_path: Path) -> Networks:
    return five_layers(tmp_path, "aot_eager")  # as inductor, less the making of machine code


@pytest.fixture(scope="module")
def divided_networks(tmp_path_factory: pytest.TempPathFactory) -> Networks:
    """Divided into forward and backward as inductor does. Two tests share them, since compiling takes longest."""
    return five_layers(tmp_path_factory.mktemp("model"), "aot_eager_decomp_partition")


def test_five_layers_compile_once_with_shared_prompts_and_once_without_and_never_where_they_are_put_aside(
    divided_networks: Networks,
) -> None:
    plain, compiled, versions = divided_networks
    batch = a_batch()
    with torch.no_grad(), compiled.decoder.uncompiled_layers():
        compiled.token_outputs(batch, batch)
    assert versions() == 0
    for samples in (8, 6, 5, 3):  # prompts are shared by the 5th and 6th, and by the 7th and 8th
        batch = a_batch(samples).select(range(samples))
        found, expected = (network.token_outputs(batch, batch) for network in (compiled, plain))
        found.output_T.sum().backward()
        torch.testing.assert_close(found.output_T, expected.output_T)
    assert versions() == 2


def test_a_layer_keeps_gate_and_up_and_not_what_is_made_of_them(divided_networks: Networks) -> None:
    """As wide as the feed-forward part: gate and up. As wide as a hidden state: attention's output, before and after
    its product. The inputs of other products (both norms, gate times up) are made anew."""
    _, network, _ = divided_networks
    batch, kept = a_batch(), list[torch.Size]()

    def keep(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            kept.append(tensor.shape)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        network.decoder.hidden(batch.tokens_T, batch.length_N)
    tokens, layers = len(batch.tokens_T), len(network.decoder.layers)
    assert [kept.count(torch.Size([tokens, width])) for width in (48, 32)] == [2 * layers, 2 * layers]


@pytest.mark.long
@pytest.mark.usefixtures("one_rank")
def test_a_sharded_layer_is_compiled_once_like_a_whole_one(
    networks: Networks,
) -> None:
    """To the compiler a module that FSDP manages is full of numbers that vary: several versions, all slow."""
    plain, compiled, versions = networks
    whole = MicroBatching(samples=8)
    sharded = FSDPEngine(compiled, CPU, rank_mesh(CPU.device), scoring=whole, training=whole, optimizer=ADAMW)
    for samples in (8, 6):
        batch = a_batch(samples).select(range(samples))
        sharded.forward_backward(batch, REINFORCE, Counts.of(batch, 16))
    assert versions() == 1
    torch.testing.assert_close(sharded.score(a_batch()), engine_of(plain).score(a_batch()))


def test_attention_behind_the_operator_is_compiled_once_and_sees_every_layer_in_order(
    networks: Networks,
) -> None:
    plain, compiled, versions = networks
    opaque = OpaqueAttention()
    with torch.no_grad():
        for tokens in (9, 12):
            token_T, packed = torch.arange(3, 3 + tokens), PackedAttention(torch.tensor([tokens]), CPU.device)
            calls: list[int] = []

            def attend(query, key, value, form, packed=packed, calls=calls):
                calls.append(len(calls))
                return packed(query, key, value, form)

            with active(attend):
                found = compiled.decoder.packed_hidden(token_T, opaque, packed.position_T)
            torch.testing.assert_close(found, plain.decoder.packed_hidden(token_T, packed))
            assert calls == [0, 1, 2, 3, 4]
    assert versions() == 1


def test_a_layer_that_cannot_be_compiled_sends_the_pass_back_to_its_start(
    model_folder: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Attention counts its layers: the second try must not take the first layer for the next one."""
    network = policy(model_folder("llama"))
    rollout = NativeRollout(
        network, owner=engine_of(network), max_sequences=4, max_prefill_tokens=40, memory_share=0.5, free_cache=True
    )
    requests = [Request((3, 4, 5), Sampling(5), 0), Request((7, 8), Sampling(5), 1)]
    expected = {index: one.tokens_L.tolist() for index, one in rollout.generate(requests)}

    def refuse(*_: object, **__: object) -> None:
        raise TorchDynamoException("a construct it does not know\nand more about it")

    network.decoder.layers[1]._compiled_call_impl = refuse
    assert {index: one.tokens_L.tolist() for index, one in rollout.generate(requests)} == expected
    assert "cannot compile the layers of LlamaForCausalLM (TorchDynamoException: a construct it" in caplog.text
    assert "use_torch_compile=False" in caplog.text
