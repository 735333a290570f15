"""Our packed, chunked log-probs beside what transformers' own models say, family by family."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from rloom.config.load import load_config
from rloom.engines.base import Placement
from rloom.errors import ModelError
from rloom.launch.engines import model_work
from rloom.launch.models import pick_device, placement
from rloom.models import head
from rloom.models.checkpoint_format import save_description, save_pretrained
from rloom.models.load import Lora, load_causal_lm, load_tokenizer
from rloom.models.network import PolicyNetwork, ValueNetwork
from rloom.models.source import ModelSource
from tests.helpers import (
    FAMILIES,
    MIXTURES,
    WINDOW,
    a_batch,
    eager_model,
    policy,
    recorded_syncs,
    samples_of,
    save_model,
    tiny_model,
)

ModelFolder = Callable[[str], Path]


@torch.no_grad()
def by_transformers(model: PreTrainedModel, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-prob and entropy of each written token of `a_batch`, one sample at a time from the model's own logits."""
    logprobs_T, entropy_T = [], []
    for tokens, mask in samples_of(a_batch()):
        distribution = (model(tokens[None]).logits[0] / temperature).log_softmax(-1)
        chosen = distribution[:-1].gather(1, tokens[1:, None]).squeeze(1)
        entropy = -(distribution.exp() * distribution).sum(-1)[:-1]
        logprobs_T += [torch.zeros(1), chosen * mask[1:]]
        entropy_T += [torch.zeros(1), entropy * mask[1:]]
    return torch.cat(logprobs_T), torch.cat(entropy_T)


def by_us(network: PolicyNetwork | ValueNetwork, entropy_gradient: bool = False) -> tuple[Tensor, Tensor | None]:
    batch = a_batch()
    found = network.token_outputs(batch, batch, entropy_gradient=entropy_gradient)
    return found.output_T, found.entropy_T


def gradients(network: PolicyNetwork) -> dict[str, Tensor]:
    """Of a sum that weighs every log-prob and every entropy differently."""
    network.module.zero_grad()
    logprobs_T, entropy_T = by_us(network, entropy_gradient=True)
    assert entropy_T is not None
    weight_T = torch.linspace(-1, 1, len(logprobs_T))
    (weight_T * logprobs_T + weight_T.flip(0) * entropy_T).sum().backward()
    return {name: p.grad.clone() for name, p in network.module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_and_entropy_are_those_of_the_models_own_logits(
    family_folder: Path, packed: bool, temperature: float
) -> None:
    expected_logprobs_T, expected_entropy_T = by_transformers(eager_model(family_folder), temperature)
    logprobs_T, entropy_T = by_us(policy(family_folder, packed=packed, temperature=temperature))
    torch.testing.assert_close(logprobs_T.detach(), expected_logprobs_T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy_T, expected_entropy_T, atol=1e-5, rtol=1e-5)


def test_padded_gradients_are_the_packed_ones(family_folder: Path) -> None:
    packed, padded = gradients(policy(family_folder)), gradients(policy(family_folder, packed=False))
    assert packed.keys() == padded.keys() == dict(eager_model(family_folder).named_parameters()).keys()
    for name, gradient in packed.items():
        torch.testing.assert_close(padded[name], gradient, atol=1e-4, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("family", "change"),
    [
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"sliding_window": 64}),
        ("gemma3", {"sliding_window": 64}),
        ("mistral", {"sliding_window": None}),
    ],
)
def test_softcaps_and_windows_are_felt_in_these_tiny_models(
    family: str, change: dict[str, Any], model_folder: ModelFolder
) -> None:
    """Otherwise the tests above would prove nothing about them."""
    config = FAMILIES[family]()
    config.update(change)
    changed_T, _ = by_transformers(tiny_model(config))
    logprobs_T, _ = by_transformers(eager_model(model_folder(family)))
    assert (changed_T - logprobs_T).abs().max() > 0.05


def test_a_token_sees_itself_and_the_window_before_it() -> None:
    # one layer, window 4: the last token's prediction depends on the last 4 tokens and on no other
    assert WINDOW == 4
    config = FAMILIES["mistral"]()
    config.num_hidden_layers = 1
    network = PolicyNetwork(tiny_model(config), packed=True)
    network.decoder.base.set_attn_implementation("rloom")
    tokens_T, length_N = torch.tensor([10, 11, 12, 13, 14, 15, 16]), torch.tensor([7])
    before = network.decoder.hidden(tokens_T, length_N)[-1]
    for place in range(7):
        changed_T = tokens_T.clone()
        changed_T[place] = 40
        same = torch.allclose(network.decoder.hidden(changed_T, length_N)[-1], before, atol=1e-6)
        assert same == (place < 3), place


def test_cutting_the_logits_into_chunks_changes_nothing(family_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    network = policy(family_folder)
    logprobs_T, entropy_T = by_us(network)
    whole = gradients(network)
    seen: list[int] = []
    logits = network.logits
    monkeypatch.setattr(head, "CHUNK_LOGITS", 7 * 64)  # 57 written tokens, 7 at a time
    monkeypatch.setattr(network, "logits", lambda hidden: seen.append(len(hidden)) or logits(hidden))
    chunked_T, chunked_entropy_T = by_us(network)
    assert seen == [0, 7, 7, 7, 7, 7, 7, 7, 7, 1]
    torch.testing.assert_close(chunked_T, logprobs_T, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(chunked_entropy_T, entropy_T, atol=1e-5, rtol=1e-5)
    for name, gradient in gradients(network).items():
        torch.testing.assert_close(gradient, whole[name], atol=1e-5, rtol=1e-5, msg=name)


def test_without_fused_kernels_all_logits_are_made_at_once(
    model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = policy(model_folder("llama"), chunked=False)
    seen: list[int] = []
    logits = network.logits
    monkeypatch.setattr(head, "CHUNK_LOGITS", 64)
    monkeypatch.setattr(network, "logits", lambda hidden: seen.append(len(hidden)) or logits(hidden))
    by_us(network)
    assert seen == [0, 57]


def test_logprob_and_entropy_of_a_distribution_worked_by_hand() -> None:
    logits_TV = torch.tensor([[0.5, 0.25, 0.25]]).log()
    [logprob], [entropy] = head.logprob_and_entropy(logits_TV + 7, torch.tensor([1]), False)
    assert float(logprob) == pytest.approx(math.log(0.25))
    assert float(entropy) == pytest.approx(1.5 * math.log(2))


def test_without_an_entropy_bonus_the_entropy_carries_no_gradient(model_folder: ModelFolder) -> None:
    network = policy(model_folder("qwen2"))
    assert by_us(network, entropy_gradient=False)[1].requires_grad is False
    assert by_us(network, entropy_gradient=True)[1].requires_grad is True


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_a_critic_starts_at_zero_and_then_reads_the_state_before_each_token(family_folder: Path, packed: bool) -> None:
    network = ValueNetwork(load_causal_lm(ModelSource(str(family_folder))), packed=packed)
    assert torch.count_nonzero(by_us(network)[0]) == 0
    weight = torch.randn(32, generator=torch.Generator().manual_seed(5))
    head = dict(network.module.named_parameters())["lm_head.weight"]
    with torch.no_grad():
        head.copy_(weight[None])
        values_T, entropy = by_us(network)
        reference, expected = eager_model(family_folder), []
        for tokens, mask in samples_of(a_batch()):
            hidden_LH = reference.get_decoder()(tokens[None]).last_hidden_state[0]
            expected += [torch.zeros(1), (hidden_LH @ weight)[:-1] * mask[1:]]
    assert entropy is None
    torch.testing.assert_close(values_T, torch.cat(expected), atol=1e-4, rtol=1e-5)


def test_a_critics_head_learns_apart_from_the_tied_embedding(model_folder: ModelFolder) -> None:
    source = ModelSource(str(model_folder("qwen3")))
    network = ValueNetwork(load_causal_lm(source), packed=True)
    by_us(network)[0].sum().backward()
    shapes = {name: tuple(p.shape) for name, p in network.module.named_parameters() if p.grad is not None}
    assert shapes["lm_head.weight"] == (1, 32)
    assert shapes["model.embed_tokens.weight"] == (64, 32)


@pytest.mark.parametrize("empty", [False, True])
def test_dropout_is_off_in_training_and_stays_in_the_configuration(tmp_path: Path, empty: bool) -> None:
    config = FAMILIES["qwen2"]()
    config.attention_dropout = 0.5
    model = load_causal_lm(ModelSource(str(save_model(tmp_path, config))), lora=Lora(rank=2), empty=empty)
    assert not any(module.training for module in model.modules())
    network = PolicyNetwork(model, packed=True)
    network.decoder.train()
    assert not any(module.training for module in model.modules())
    assert network.decoder.base.config.attention_dropout == 0.5  # an export has what was published


@pytest.mark.parametrize("save", [save_description, save_pretrained])
def test_the_files_of_a_model_are_synced_by_who_writes_them(
    model_folder: ModelFolder, tmp_path: Path, save: Callable[..., None]
) -> None:
    network, tokenizer = policy(model_folder("qwen2")), load_tokenizer(ModelSource(str(model_folder("qwen2"))))
    with recorded_syncs(tmp_path) as synced:
        save(network, tokenizer, tmp_path)
    saved = {file.name: file.stat().st_size for file in tmp_path.iterdir()}
    assert {"config.json", "tokenizer.json"} < saved.keys() and synced == {**saved, ".": 0}


def test_overrides_reach_the_model(model_folder: ModelFolder) -> None:
    source = ModelSource(str(model_folder("mistral")), overrides={"sliding_window": 7})
    assert load_causal_lm(source).config.sliding_window == 7


def test_a_gpu_is_named_with_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.cuda.set_device, which every rank calls, takes no other."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    config = load_config(["actor_rollout_ref.model.path=a/model"])
    assert pick_device(config) == torch.device("cuda", 0)
    assert placement(config, config.actor_rollout_ref.actor.fsdp_config) == Placement(
        torch.device("cuda", 0), torch.bfloat16
    )


@pytest.mark.parametrize("adapter", [None, "drawn", "saved"])
def test_an_empty_model_is_the_model_without_its_numbers(
    family_folder: Path, tmp_path: Path, adapter: str | None
) -> None:
    """The same parameters in the same order, of which the same learn, tied ones counted once; buffers have theirs."""
    lora = None if adapter is None else Lora(rank=4)
    source = ModelSource(str(family_folder))
    if adapter == "saved":
        load_causal_lm(source, lora=lora).save_pretrained(tmp_path)
        lora = Lora(rank=0, adapter_path=str(tmp_path))
    full, empty = load_causal_lm(source, lora=lora), load_causal_lm(source, lora=lora, empty=True)
    expected, found = (
        [(name, p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()] for model in (full, empty)
    )
    assert found == expected
    assert all(parameter.is_meta for parameter in empty.parameters())
    for (name, one), (other_name, other) in zip(full.named_buffers(), empty.named_buffers(), strict=True):
        assert name == other_name and torch.equal(one, other)


def broken(folder: Path, name: str) -> str:
    """The path of a folder that is no model, for the reason its name says."""
    folder.mkdir()
    if name == "missing":
        return str(folder / "nowhere")
    if name != "empty":
        save_model(folder, FAMILIES["llama"]())
    if name == "no weights":
        (folder / "model.safetensors").unlink()
    if name == "cut weights":
        weights = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
    if name == "garbage config":
        (folder / "config.json").write_text("{ this is not json")
    if name == "unknown architecture":
        (folder / "config.json").write_text('{"model_type": "abacus"}')
    return str(folder)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("missing", "there is no such folder"),
        ("empty", "the folder has no config.json"),
        ("no weights", r"has no weights \(\*\.safetensors\); it holds config.json"),
        ("cut weights", "could not be loaded"),
        ("garbage config", "could not be loaded"),
        ("unknown architecture", "could not be loaded: .*abacus"),
    ],
)
@pytest.mark.parametrize("key", ["actor_rollout_ref.model.path", "critic.model.path"])
def test_a_folder_that_is_no_model_is_named_with_its_key(tmp_path: Path, fault: str, says: str, key: str) -> None:
    path = broken(tmp_path / "model", fault)
    with pytest.raises(ModelError, match=says) as caught:
        load_causal_lm(ModelSource(path, key=key))
    assert str(caught.value).startswith(f"{key}={path}: ")


def test_a_folder_without_a_tokenizer_is_named_with_its_key(tmp_path: Path) -> None:
    tiny_model(FAMILIES["llama"]()).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"actor_rollout_ref\.model\.path=.*: no tokenizer could be loaded"):
        load_tokenizer(ModelSource(str(tmp_path)))


def test_a_missing_adapter_is_a_model_error(model_folder: ModelFolder, tmp_path: Path) -> None:
    lora = Lora(rank=0, adapter_path=str(tmp_path / "nowhere"))
    with pytest.raises(ModelError, match=r"actor_rollout_ref\.model\.lora_adapter_path=.*nowhere"):
        load_causal_lm(ModelSource(str(model_folder("llama"))), lora=lora)


def test_modules_that_the_model_does_not_have_are_a_model_error(model_folder: ModelFolder) -> None:
    lora = Lora(rank=4, target_modules=["query_projection"])
    with pytest.raises(ModelError, match=r"actor_rollout_ref\.model\.target_modules=\['query_projection'\]: "):
        load_causal_lm(ModelSource(str(model_folder("llama"))), lora=lora)


@pytest.mark.parametrize("at_once", [head.CHUNK_LOGITS, 64 * 3], ids=["at once", "in chunks"])
def test_the_kl_over_the_vocabulary_is_that_of_the_two_models_logits(
    model_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    """Value and gradient beside transformers' own logits; with LoRA the reference is the model itself, adapter off."""
    monkeypatch.setattr(head, "CHUNK_LOGITS", at_once)
    folder, batch = model_folder("qwen2"), a_batch()
    network = policy(folder, lora=Lora(rank=2))
    torch.manual_seed(0)
    for name, parameter in network.module.named_parameters():
        if "lora_B" in name:  # they start at 0, where policy and reference agree
            torch.nn.init.normal_(parameter, std=0.1)
    found = network.token_outputs(batch, batch, reference=network)
    assert found.kl_T is not None
    base, expected = eager_model(folder), []
    for tokens, mask in samples_of(batch):
        mine = network.logits(network.decoder.hidden(tokens, torch.tensor([len(tokens)])))[:-1].log_softmax(-1)
        theirs = base(tokens[None]).logits[0, :-1].log_softmax(-1).detach()
        expected += [torch.zeros(1), (mine.exp() * (mine - theirs)).sum(-1) * mask[1:]]
    torch.testing.assert_close(found.kl_T, torch.cat(expected), atol=1e-5, rtol=1e-4)
    assert float(found.kl_T.detach().max()) > 0.001
    ours = torch.autograd.grad(found.kl_T.sum(), adapter_of(network))
    wanted = torch.autograd.grad(torch.cat(expected).sum(), adapter_of(network))
    torch.testing.assert_close(ours, wanted, atol=1e-4, rtol=1e-3)


def adapter_of(network: PolicyNetwork) -> list[Tensor]:
    return [parameter for parameter in network.module.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("family", [*FAMILIES, *MIXTURES])
def test_the_work_of_a_token_is_what_torch_counts(family: str) -> None:
    """Of experts, the chosen ones alone. Transformers' attention computes all 12 × 12 scores, masked ones too."""
    model = tiny_model({**FAMILIES, **MIXTURES}[family]())
    model.set_experts_implementation("eager")  # torch does not count grouped matrix products
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.arange(1, 13)[None])
    work = model_work(PolicyNetwork(model, packed=False))
    assert work is not None
    expected = 2 * work.active * 12 + 2 * sum(work.attention.values()) * 12 * 12
    # some versions of torch also count the rotary embedding's product of 12 positions and a few frequencies
    assert expected <= counted.get_total_flops() <= 1.001 * expected


def test_the_work_of_an_adapter_and_of_a_critic(model_folder: ModelFolder) -> None:
    whole, adapted = (model_work(policy(model_folder("llama"), lora=lora)) for lora in (None, Lora(2, 4, "all-linear")))
    critic = model_work(ValueNetwork(eager_model(model_folder("llama")), packed=False))
    assert whole is not None and adapted is not None and critic is not None
    # of a layer: q and o 32 × 32, k and v 32 × 16, the MLP 3 × 32 × 48; the head 32 × 64
    assert whole.active == whole.trained == 2 * (2 * 1024 + 2 * 512 + 3 * 1536) + 2048 == 17408
    # rank 2: inputs and outputs of each matrix
    assert adapted.trained == 2 * 2 * (2 * 64 + 2 * 48 + 3 * 80) == 1856 and adapted.active == 17408 + 1856
    assert critic.active == 17408 - 2048 + 32


def with_dtype(folder: Path, name: str, dtype: torch.dtype) -> None:
    """One tensor of the folder's file in another dtype."""
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name].to(dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_weights_are_read_in_the_dtype_of_the_file_and_buffers_in_float32(tmp_path: Path, dtype: torch.dtype) -> None:
    """gemma's factor of the embedding, the root of 32, is computed: 5.65625 in bfloat16."""
    source = ModelSource(str(save_model(tmp_path, FAMILIES["gemma"](), dtype=dtype)))
    model = load_causal_lm(source)
    assert {parameter.dtype for parameter in model.parameters()} == {dtype}
    buffers = dict(model.named_buffers())
    assert {buffer.dtype for buffer in buffers.values()} == {torch.float32}
    whole = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    for name, buffer in whole.named_buffers():
        assert torch.equal(buffers[name], buffer)
    for one, other in zip(model.parameters(), whole.parameters(), strict=True):
        assert torch.equal(one.float(), other)


def test_float32_holds_what_a_file_of_several_dtypes_has_and_what_an_adapter_is_drawn_in(tmp_path: Path) -> None:
    source = ModelSource(str(save_model(tmp_path, FAMILIES["qwen2"](), dtype=torch.bfloat16)))
    assert {p.dtype for p in load_causal_lm(source, lora=Lora(rank=2)).parameters()} == {torch.float32}
    with_dtype(tmp_path, "model.norm.weight", torch.float32)
    assert {p.dtype for p in load_causal_lm(source).parameters()} == {torch.float32}


def test_an_empty_model_has_the_stop_tokens_of_the_published_one(tmp_path: Path) -> None:
    """generation_config.json may name more than config.json does."""
    folder = save_model(tmp_path, FAMILIES["qwen2"]())
    GenerationConfig(eos_token_id=[3, 5]).save_pretrained(folder)
    for empty in (False, True):
        assert load_causal_lm(ModelSource(str(folder)), empty=empty).generation_config.eos_token_id == [3, 5]
