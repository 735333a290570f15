"""Prompts that several samples share are computed once, and every number is as if each sample had computed its own."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from rloom.batch import TrainBatch
from rloom.engines.local import LocalEngine
from rloom.engines.micro_batches import split_batch
from rloom.launch.models import critic_network, policy_network, reference_engine
from rloom.models.load import load_causal_lm
from rloom.models.network import ValueNetwork
from rloom.models.shared_prompts import SharedPrompts, repeat_prompts, shareable_prompts
from rloom.models.source import ModelSource
from rloom.packing import MicroBatching, RowPrompt, rows_together
from tests.helpers import CPU, FAMILIES, a_batch, configured, policy


def with_equal_prompts(batch: TrainBatch) -> TrainBatch:
    """Both answers of a group to the prompt of the first: of 3, 2, 5 and 4 tokens."""
    samples = [tokens.clone() for tokens in batch.tokens_T.split(batch.length_N.tolist())]
    for row, size in ((1, 3), (3, 2), (5, 5), (7, 4)):
        samples[row][:size] = samples[row - 1][:size]
    return replace(batch, tokens_T=torch.cat(samples))


def one_batch(samples: list[list[int]], prompts: list[int]) -> TrainBatch:
    """Only tokens, lengths and masks are read."""
    batch = a_batch().select(range(len(samples)))
    lengths = torch.tensor([len(sample) for sample in samples])
    mask = [torch.arange(len(sample)) >= prompt for sample, prompt in zip(samples, prompts, strict=True)]
    tokens_T = torch.tensor([token for sample in samples for token in sample])
    return replace(batch, tokens_T=tokens_T, mask_T=torch.cat(mask), length_N=lengths)


def test_three_samples_with_one_prompt_by_hand() -> None:
    #                     0  1  2  3    4  5  6    7  8  9    10 11 12 13
    batch = one_batch([[5, 6, 7, 7], [5, 6, 8], [5, 9, 8], [5, 6, 9, 9]], [2, 2, 2, 2])
    prompts = shareable_prompts(batch)
    assert prompts is not None
    shared = SharedPrompts.of(batch.length_N, prompts)
    assert shared.computed_N.tolist() == [4, 1, 3, 2]
    assert shared.computed_S.tolist() == [0, 1, 2, 3, 6, 7, 8, 9, 12, 13]
    assert shared.source_T.tolist() == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7, 0, 1, 8, 9]
    assert shared.repeated_P.tolist() == [0, 1]
    assert shared.repeats_PR.tolist() == [[4, 10], [5, 11]]


def test_a_prompt_that_fewer_samples_repeat_has_gaps() -> None:
    batch = one_batch([[5, 6, 7], [4, 8], [5, 6, 9], [4, 9], [5, 6, 5]], [2, 1, 2, 1, 2])
    shared = SharedPrompts.of(batch.length_N, shareable_prompts(batch) or [])
    assert shared.repeated_P.tolist() == [0, 1, 3]
    assert shared.repeats_PR.tolist() == [[5, 10], [6, 11], [8, -1]]


def test_prompts_are_compared_by_their_tokens_not_by_their_group() -> None:
    batch = one_batch([[5, 6, 7], [5, 7, 7]], [2, 2])
    assert shareable_prompts(batch) is None
    assert shareable_prompts(one_batch([[5, 6, 7], [5, 6, 6, 7]], [2, 3])) is None  # one continues the other


def test_a_sample_without_a_sampled_token_computes_its_last_one() -> None:
    batch = one_batch([[5, 6, 7], [5, 6, 7]], [3, 3])
    shared = SharedPrompts.of(batch.length_N, shareable_prompts(batch) or [])
    assert shared.computed_N.tolist() == [3, 1]


def test_short_prompts_of_long_answers_are_not_shared() -> None:
    # of 64 tokens, 2 are repeated, then 1
    assert shareable_prompts(one_batch([[5, 6, *[7] * 30], [5, 6, *[8] * 30]], [2, 2])) is not None
    assert shareable_prompts(one_batch([[5, *[7] * 31], [5, *[8] * 31]], [1, 1])) is None


def test_the_gradient_of_a_repeated_value_is_the_sum_over_its_copies() -> None:
    batch = one_batch([[5, 6, 7], [4, 8], [5, 6, 9], [4, 9], [5, 6, 5]], [2, 1, 2, 1, 2])
    shared = SharedPrompts.of(batch.length_N, shareable_prompts(batch) or [])
    # computed: 5 6 7, 4 8, 9, 9, 5; copies of 5 and 6: 3 each, of 4: 2
    value_SX = torch.arange(16.0).reshape(8, 2).requires_grad_()
    shared.repeated(value_SX).sum().backward()
    assert value_SX.grad is not None
    assert value_SX.grad[:, 0].tolist() == [3, 3, 1, 2, 1, 1, 1, 1]
    indices = (shared.computed_S, shared.source_T, shared.repeated_P, shared.repeats_PR)
    torch.library.opcheck(repeat_prompts, (torch.randn(8, 2, 3, requires_grad=True), *indices))


def test_copies_are_added_in_float32() -> None:
    # 256 + 8 × 1: in bfloat16, whose neighbours of 256 are 255 and 258, adding one at a time stays at 256
    samples, prompt = 9, RowPrompt(b"", 1)
    shared = SharedPrompts.of(torch.tensor([2] * samples), [prompt] * samples)
    value_SX = torch.zeros(10, 1, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.ones(18, 1, dtype=torch.bfloat16)
    weights[0] = 256
    (shared.repeated(value_SX) * weights).sum().backward()
    assert value_SX.grad is not None and value_SX.grad[0].item() == 264


def gradients(module: nn.Module) -> dict[str, Tensor]:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return found


@pytest.mark.parametrize("family", [*FAMILIES])
def test_outputs_and_gradients_are_those_of_samples_that_compute_their_own_prompts(
    family: str, model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = with_equal_prompts(a_batch())
    network = policy(model_folder(family), shares_prompts=True)
    if not network.decoder.packed:
        pytest.skip("samples of this family are not packed")
    weight_T = torch.randn(len(batch.tokens_T), generator=torch.Generator().manual_seed(3))
    (network.token_outputs(batch, batch).output_T * weight_T).sum().backward()
    assert network.decoder.shared_prompts(batch) is not None
    shared, found = gradients(network.module), network.token_outputs(batch, batch)
    monkeypatch.setattr(type(network.decoder), "prompts", lambda self, host_batch: None)
    expected = network.token_outputs(batch, batch)
    (expected.output_T * weight_T).sum().backward()
    torch.testing.assert_close(found.output_T, expected.output_T, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(found.entropy_T, expected.entropy_T, atol=2e-6, rtol=1e-5)
    own = gradients(network.module)
    assert shared.keys() == own.keys() and shared
    for name, gradient in own.items():
        torch.testing.assert_close(shared[name], gradient, atol=2e-5, rtol=1e-4, msg=name)


def test_values_too(model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    batch = with_equal_prompts(a_batch())
    network = ValueNetwork(load_causal_lm(ModelSource(str(model_folder("qwen2")))), packed=True, shares_prompts=True)
    nn.init.normal_(network.decoder.base.get_output_embeddings().weight)
    found = network.token_outputs(batch, batch).output_T
    monkeypatch.setattr(type(network.decoder), "prompts", lambda self, host_batch: None)
    torch.testing.assert_close(found, network.token_outputs(batch, batch).output_T)


def test_a_layer_computes_a_prompt_once(model_folder: Callable[[str], Path]) -> None:
    batch, network = with_equal_prompts(a_batch()), policy(model_folder("qwen2"), shares_prompts=True)
    seen: list[int] = []
    network.decoder.layers[0].register_forward_pre_hook(lambda layer, inputs: seen.append(inputs[0].shape[1]))
    network.token_outputs(batch, batch)
    assert seen == [3 + 2 + 5 + 4 + 6 + 9 + 4 + 13 + 3 + 12 + 8 + 5]


def test_the_reference_of_a_full_kl_shares_prompts_too(model_folder: Callable[[str], Path]) -> None:
    batch, network = with_equal_prompts(a_batch()), policy(model_folder("qwen2"), shares_prompts=True)
    outputs = network.token_outputs(batch, batch, reference=network.as_reference())
    assert outputs.kl_T is not None
    torch.testing.assert_close(outputs.kl_T, torch.zeros(len(batch.tokens_T)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("shared", [True, False])
def test_one_key_is_for_actor_reference_and_critic(shared: bool) -> None:
    lengths = ("data.max_prompt_length=64", "data.max_response_length=64")
    config = configured(f"actor_rollout_ref.actor.use_prefix_grouper={shared}", *lengths)
    reference = reference_engine(config)
    assert isinstance(reference, LocalEngine)
    networks = [policy_network(config), reference.network, critic_network(config)]
    assert [network.decoder.shares_prompts for network in networks] == [shared] * 3


def test_answers_to_one_prompt_go_into_one_micro_batch() -> None:
    # three samples of "a" have 18 tokens, two of "b" 10, and "c" has 5; the budget counts a prompt for each
    lengths = [6, 5, 7, 5, 5, 5]
    prompts = [RowPrompt(key, tokens) for key, tokens in zip("ababac", (4, 3, 4, 3, 4, 1), strict=True)]
    assert [(rows.numbers, rows.tokens) for rows in rows_together(lengths, prompts, 18)] == [
        ([0, 2, 4], 18),
        ([1, 3], 10),
        ([5], 5),
    ]
    assert MicroBatching(tokens=20).cut(lengths, prompts) == [[0, 2, 4], [1, 3, 5]]
    # 13 tokens of budget: the third sample of "a" begins another micro-batch
    assert [rows.numbers for rows in rows_together(lengths, prompts, 13)] == [[0, 2], [1, 3], [4], [5]]
    # 6 tokens: each is alone, also the one that is longer
    assert [rows.numbers for rows in rows_together(lengths, prompts, 6)] == [[0], [1], [2], [3], [4], [5]]
    assert MicroBatching(samples=4).cut(lengths, prompts) == [[0, 1, 2, 3], [4, 5]]


def test_a_batch_is_cut_into_whole_groups() -> None:
    batch = with_equal_prompts(a_batch())  # pairs of 21, 21, 25 and 21 tokens
    prompts = shareable_prompts(batch)
    micro_batches = split_batch(batch, MicroBatching(tokens=46), CPU.device, prompts)
    assert [micro_batches.tokens, micro_batches.samples] == [[46, 42], [4, 4]]
    assert [len(set(one.group_N.tolist())) for one, _ in micro_batches] == [2, 2]
