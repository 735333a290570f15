"""Every causal family of transformers: right, or refused."""

import logging
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2_5_VLConfig

from rloom.config.load import load_config
from rloom.errors import ConfigError, ModelError
from rloom.families import training as family_checks
from rloom.families.family import Family, family_of
from rloom.families.training import check_training, own_logits, small_model, two_samples
from rloom.models.attention import call_attend
from rloom.models.limits import check_context
from rloom.models.load import fix_rotary_scaling, load_causal_lm, read_config
from rloom.models.network import PolicyNetwork, logit_scale
from rloom.models.source import ModelSource
from rloom.plan.make import make_plan
from tests.families import CAUSAL_FAMILIES, NOT_TRIED, listed_families, row, tiny_config, tiny_model
from tests.helpers import tiny_tokenizer

COMMON = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mistral",
    "mixtral",
    "gemma",
    "gemma2",
    "gemma3_text",
    "phi3",
    "glm4",
)


@pytest.mark.filterwarnings("ignore")  # transformers' own, of old families
@pytest.mark.parametrize(
    "family", [name if name in COMMON else pytest.param(name, marks=pytest.mark.long) for name in CAUSAL_FAMILIES]
)
def test_the_table_of_families_says_what_is_computed(family: str) -> None:
    assert row(family) == listed_families()[family]


def test_the_table_has_a_line_for_every_family() -> None:
    assert sorted(listed_families()) == sorted([*CAUSAL_FAMILIES, *NOT_TRIED])


def saved(folder: Path, family: str, **changes: Any) -> ModelSource:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tiny_model(family, **changes).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return ModelSource(str(folder), longest=32)


def test_layers_that_carry_a_state_get_a_row_for_each_sample_and_the_run_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = saved(tmp_path, "qwen3_next")
    with caplog.at_level(logging.INFO, "rloom"):
        layout = family_of(source).layout(packed=True)
    assert not layout.packed
    assert "qwen3_next" in caplog.text and "as with use_remove_padding=False" in caplog.text
    model = load_causal_lm(source, attention=layout.attention)
    assert isinstance(model, PreTrainedModel)
    samples = two_samples(model)
    expected = torch.cat(own_logits(model, samples))
    model.set_attn_implementation(layout.attention)
    network = PolicyNetwork(model, packed=layout.packed)
    hidden = network.decoder.hidden(torch.cat(samples), torch.tensor([len(tokens) for tokens in samples]))
    torch.testing.assert_close(network.logits(hidden), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", ["mamba", "bloom", "qwen3_next", "gpt_oss", "deepseek_v3", "llama4_text"])
def test_gradients_are_those_of_the_models_own_forward(family: str) -> None:
    """Of a sum that weighs every logit differently."""
    model = tiny_model(family)
    found, samples = check_training(model), two_samples(model)
    own = [model(input_ids=tokens[None], use_cache=False).logits[0] for tokens in samples]
    weight = torch.randn(torch.cat(own).shape, generator=torch.Generator().manual_seed(1))
    (torch.cat(own) * weight).sum().backward()
    expected = {
        name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None
    }
    model.zero_grad()
    model.set_attn_implementation("rloom" if found.packed is None else found.attention)
    network = PolicyNetwork(model, packed=found.packed is None)
    network.decoder.train()
    hidden = network.decoder.hidden(torch.cat(samples), torch.tensor([len(tokens) for tokens in samples]))
    (network.logits(hidden) * weight).sum().backward()
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    for name, parameter in model.named_parameters():
        if name in expected:
            assert parameter.grad is not None and (parameter.grad - expected[name]).abs().max() < 1e-4 * largest, name


def test_a_family_that_native_does_not_compute_is_refused_with_the_engine_that_does(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"rollout.name=native: .*\(lfm2\) correctly .* use .*rollout.name=hf"):
        family_of(saved(tmp_path, "lfm2")).check_native()


def test_a_family_that_nothing_here_computes_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"\(roberta\): rloom does not compute this family correctly. Packed samples: "
    ):
        family_of(saved(tmp_path, "roberta")).layout(packed=True)


def test_a_model_of_images_is_refused_as_one(tmp_path: Path) -> None:
    Qwen2_5_VLConfig().save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"\(qwen2_5_vl\): .* text alone; models of images are not supported"):
        family_of(ModelSource(str(tmp_path))).layout(packed=True)


def test_prompts_are_not_padded_for_a_family_whose_answers_would_change(tmp_path: Path) -> None:
    assert not family_of(saved(tmp_path / "rwkv", "rwkv")).hf_generation().pads_prompts
    assert family_of(saved(tmp_path / "mamba", "mamba")).hf_generation().pads_prompts


def test_an_argument_that_attention_does_not_know_is_an_error() -> None:
    query = torch.zeros(1, 2, 3, 4)
    with pytest.raises(ModelError, match="Linear passes position_bias to its attention"):
        call_attend(
            torch.nn.Linear(1, 1), query, query, query, None, attend=lambda *_: query, scaling=1.0, position_bias=query
        )
    with pytest.raises(ModelError, match="passes attention_mask"):
        call_attend(torch.nn.Linear(1, 1), query, query, query, query, attend=lambda *_: query, scaling=1.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("family", ["starcoder2", "seed_oss", "biogpt", "phimoe"])
def test_training_computes_the_published_model_in_evaluation(tmp_path: Path, family: str, checkpointing: bool) -> None:
    """These have dropout, or noise on a router. Phi-3.5-MoE's router reads the noise in evaluation, too."""
    config = tiny_config(family)
    for name, value in vars(config).items():
        if ("drop" in name or "jitter" in name) and isinstance(value, float):
            setattr(config, name, 0.3)
    family_checks.random_model(config, trust_remote_code=False).save_pretrained(tmp_path)
    published = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    samples = two_samples(published)
    expected = torch.cat([published(tokens[None]).logits[0] for tokens in samples])
    network = PolicyNetwork(load_causal_lm(ModelSource(str(tmp_path)), attention="eager"), packed=False)
    if checkpointing:
        network.decoder.enable_checkpointing()
    network.decoder.train()
    hidden = network.decoder.hidden(torch.cat(samples), torch.tensor([len(tokens) for tokens in samples]))
    torch.testing.assert_close(network.logits(hidden), expected, rtol=1e-4, atol=1e-4)
    network.logits(hidden).sum().backward()  # recomputes the layers in evaluation mode, too, or torch would notice
    assert all(layer.training == checkpointing for layer in network.decoder.layers)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "families",
    [(*COMMON, "phimoe", "gpt2"), pytest.param(CAUSAL_FAMILIES, marks=pytest.mark.long)],
    ids=["common", "all"],
)
def test_a_configuration_is_read_as_it_was_published(tmp_path: Path, families: Sequence[str]) -> None:
    """The check at the start of a run compares with the model of this configuration."""
    for family in families:
        CONFIG_MAPPING[family]().save_pretrained(tmp_path)
        assert read_config(ModelSource(str(tmp_path))).to_dict() == AutoConfig.from_pretrained(tmp_path).to_dict()


LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.0, 1.0, 1.0],
    "long_factor": [4.0, 6.0, 8.0, 9.0],
    "original_max_position_embeddings": 10,
    "factor": 6.4,
}


def phi3(longest: int) -> PreTrainedModel:
    model = tiny_model("phi3", rope_parameters=dict(LONGROPE), original_max_position_embeddings=10, sliding_window=None)
    model.set_attn_implementation("rloom")
    fix_rotary_scaling(model, longest)
    return model


def logits_of(model: PreTrainedModel, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
    network = PolicyNetwork(model, packed=True)
    lengths = [len(one) for one in tokens]
    hidden = network.decoder.hidden(torch.cat(tokens), torch.tensor(lengths))
    return list(network.logits(hidden).detach().split(lengths))


@pytest.mark.parametrize("longest", [10, 32])
def test_longrope_goes_by_the_runs_longest_sample_and_not_by_the_samples_of_a_pass(longest: int) -> None:
    model = phi3(longest)
    long, short = two_samples(model)  # 12 and 7 tokens, on both sides of the original 10
    alone, together = logits_of(model, [short])[0], logits_of(model, [long, short])[1]
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)
    # the factors are felt: another longest sample, other logits
    other = logits_of(phi3(42 - longest), [short])[0]
    assert (other - alone).abs().max() > 0.05


def test_a_context_longer_than_the_model_was_made_for_is_refused_with_the_way_out(tmp_path: Path) -> None:
    check_context(64, 64, "actor_rollout_ref.model.path=m")
    too_long = r"= 65 tokens, the model supports 64 .*override_config.max_position_embeddings=65"
    with pytest.raises(ModelError, match=too_long):
        check_context(64, 65, "actor_rollout_ref.model.path=m")
    source = saved(tmp_path, "llama")
    with pytest.raises(ModelError, match=too_long):
        family_of(replace(source, longest=65))
    lengths = ["data.max_prompt_length=32", "data.max_response_length=33"]
    with pytest.raises(ModelError, match=too_long):
        make_plan(load_config([f"actor_rollout_ref.model.path={tmp_path}", *lengths]))


@pytest.mark.parametrize(
    ("family", "entries", "scale"),
    [
        ("granite", {"logits_scaling": 4.0}, 0.25),
        ("hyperclovax", {"logits_scaling": 4.0}, 4.0),
        ("cohere", {"logit_scale": 0.5}, 0.5),
        ("llama", {}, 1.0),
    ],
)
def test_logits_are_scaled_as_the_family_does(family: str, entries: dict[str, float], scale: float) -> None:
    assert logit_scale(tiny_config(family, **entries)) == scale
    assert check_training(tiny_model(family, **entries)).packed is None


def test_a_twin_has_a_layer_of_each_kind_and_short_windows_where_samples_reach_past_them() -> None:
    config = CONFIG_MAPPING["gemma3_text"](hidden_size=64, head_dim=16, sliding_window=512)
    twin = small_model(config, longest=1024)
    assert twin.config.layer_types == ["sliding_attention", "full_attention"]
    assert (twin.config.sliding_window, small_model(config, longest=512).config.sliding_window) == (4, 512)
    assert sum(parameter.numel() for parameter in twin.parameters()) < 100_000


def test_a_twin_of_a_model_finds_what_a_tiny_model_finds() -> None:
    for family, right in {"gpt_oss": True, "qwen3_next": False, "zamba2": False}.items():
        config = CONFIG_MAPPING[family](hidden_size=128)
        assert (check_training(small_model(config, longest=1024)).packed is None) == right, family


@pytest.mark.filterwarnings("ignore")
def test_a_family_that_counts_the_tokens_of_a_row_is_not_packed() -> None:
    """Llama 4 raises the temperature of attention after 8,192 tokens of a row, whichever sample they belong to."""
    found = check_training(small_model(CONFIG_MAPPING["llama4_text"](hidden_size=1024), longest=1024))
    assert found.packed is not None and found.padded is None


def test_what_twins_find_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = saved(tmp_path, "llama")
    first = family_of(source)
    monkeypatch.setattr(Family, "__init__", lambda *_: pytest.fail("tried again"))
    assert family_of(source) is first


def test_ulysses_refuses_a_family_that_is_right_in_rows_only() -> None:
    from rloom.engines.ulysses import check_heads

    network = PolicyNetwork(tiny_model("qwen3_next"), packed=False)
    with pytest.raises(ConfigError, match="ulysses_sequence_parallel_size=2: it splits packed samples"):
        check_heads(network, 2, 2, "actor_rollout_ref.actor.ulysses_sequence_parallel_size")
