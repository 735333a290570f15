"""Products with one input, computed as one: the same numbers from the same parameters, and fewer products."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional

from rloom.models import joined
from rloom.models.attention import OpaqueAttention, PackedAttention, active
from rloom.models.decoder import Decoder
from rloom.models.joined import JoinedProducts
from rloom.models.network import PolicyNetwork
from tests.families import tiny_model
from tests.helpers import copied_policy

TOKENS, LENGTHS = torch.arange(5, 17), torch.tensor([7, 5])


@pytest.fixture
def network(model_folder: Callable[[str], Path]) -> PolicyNetwork:
    return copied_policy(model_folder("qwen2"))  # biases in its attention


def decoded(decoder: Decoder) -> Tensor:
    attend = PackedAttention(LENGTHS, torch.device("cpu"))
    with torch.no_grad(), active(attend), decoder.joined_products():
        return decoder.packed_hidden(TOKENS, OpaqueAttention(), attend.position_T)


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The outputs of each product."""
    sizes, linear = list[int](), functional.linear

    def counted(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        sizes.append(len(weight))
        return linear(hidden, weight, bias)

    monkeypatch.setattr(functional, "linear", counted)
    return sizes


def test_a_layer_takes_four_products_in_place_of_seven(network: PolicyNetwork, products: list[int]) -> None:
    """4 heads of 8, 2 of keys and of values, 48 in the middle: 32 + 16 + 16 and 48 + 48."""
    decoder = network.decoder
    with torch.no_grad():
        apart = decoder.hidden(TOKENS, LENGTHS)
    assert products == 2 * [32, 16, 16, 32, 48, 48, 32]
    decoder.join_products()
    products.clear()
    together = decoded(decoder)
    assert products == 2 * [64, 32, 96, 32]
    torch.testing.assert_close(together, apart, rtol=1e-5, atol=1e-6)


def test_outside_of_the_context_nothing_changes(network: PolicyNetwork) -> None:
    """Passes with gradients, and scoring: bit for bit, and the same names."""
    other = copy.deepcopy(network)
    network.decoder.join_products()
    decoded(network.decoder)
    for one in (network, other):
        one.decoder.hidden(TOKENS, LENGTHS).square().sum().backward()
    parameters, others = (dict(one.decoder.body.named_parameters()) for one in (network, other))
    assert parameters.keys() == others.keys()
    for name, parameter in parameters.items():
        assert torch.equal(parameter, others[name]) and parameter.grad is not None, name
        assert torch.equal(parameter.grad, torch.as_tensor(others[name].grad)), name


def test_updates_and_moves_of_the_weights_reach_the_products(network: PolicyNetwork) -> None:
    decoder = network.decoder
    decoder.join_products()
    addresses = [parameter.data_ptr() for parameter in network.module.parameters()]
    with torch.no_grad():
        for parameter in network.module.parameters():
            parameter.mul_(0.5)  # in place, as an optimizer does
        expected = decoder.hidden(TOKENS, LENGTHS)
    decoder.join_products()
    assert [parameter.data_ptr() for parameter in network.module.parameters()] == addresses  # graphs hold them
    torch.testing.assert_close(decoded(decoder), expected, rtol=1e-5, atol=1e-6)
    for parameter in network.module.parameters():
        parameter.data = parameter.data.clone()  # as offloading does
    with pytest.raises(AssertionError):
        decoded(decoder)
    decoder.join_products()
    torch.testing.assert_close(decoded(decoder), expected, rtol=1e-5, atol=1e-6)


def test_compiled_layers_share_one_graph(network: PolicyNetwork) -> None:
    decoder = network.decoder
    with torch.no_grad():
        expected = decoder.hidden(TOKENS, LENGTHS)
    decoder.join_products()
    for layer in decoder.layers:
        layer.compile(backend="aot_eager", dynamic=True, fullgraph=True)
    counters.clear()
    torch.testing.assert_close(decoded(decoder), expected, rtol=1e-5, atol=1e-6)
    assert counters["stats"]["unique_graphs"] == 1
    assert decoder.joined is not None and all(group.input is None for group in decoder.joined.groups)


class Cross(nn.Module):
    """Keys and values of another input, asked for in another order."""

    def __init__(self) -> None:
        super().__init__()
        for name, size in (("q_proj", 8), ("k_proj", 4), ("v_proj", 12)):
            setattr(self, name, nn.Linear(16, size, bias=False))

    def forward(self, hidden: Tensor, other: Tensor) -> Tensor:
        return torch.cat([self.v_proj(other), self.q_proj(hidden), self.k_proj(other)], -1)


def test_modules_with_different_inputs_get_their_own() -> None:
    module, inputs = Cross(), (torch.randn(3, 16), torch.randn(3, 16))
    with torch.no_grad():
        expected = module(*inputs)
        model = JoinedProducts(module)
        model.lay_out()
        with model.active():
            for _ in range(2):
                torch.testing.assert_close(module(*inputs), expected)


def groups_of(model: nn.Module) -> int:
    return len(JoinedProducts(model).groups)


def test_what_one_product_cannot_compute_is_left_alone() -> None:
    adapted = get_peft_model(tiny_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "up_proj"]))
    assert groups_of(adapted) == 0
    tied = nn.ModuleList([Cross(), Cross(), Cross()])
    tied[1].k_proj.weight = tied[0].k_proj.weight  # cannot be beside both
    mixed, odd = Cross(), Cross()
    mixed.v_proj.double()
    odd.k_proj = nn.Linear(3, 4, bias=False)
    assert groups_of(tied) == 1 and groups_of(mixed) == 0 and groups_of(odd) == 0
    unaligned = nn.Module()
    unaligned.gate_proj, unaligned.up_proj = nn.Linear(3, 3), nn.Linear(3, 3)  # compiled code copies such a weight
    assert groups_of(unaligned) == 0


def test_every_family_is_joined_or_has_no_such_modules() -> None:
    """The names of today's transformers: two groups for each of two layers."""
    for family in ("llama", "qwen2", "qwen3", "gemma2", "mistral", "olmo2"):
        assert groups_of(tiny_model(family)) == 4, family
    assert groups_of(tiny_model("gpt2")) == 0  # one product by itself
    assert joined.NAMES[0] == ("q_proj", "k_proj", "v_proj")
