"""A tiny random model of every causal family that the installed transformers knows, and what rloom makes of it.

`python -m tests.families` prints docs/models.md.
"""

import copy
import sys
import warnings
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from rloom.engines.ulysses import new_sequence_parallel_group
from rloom.families.family import OnCpu, check_hf, check_native
from rloom.families.training import check_split, check_training
from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.load import quiet_transformers
from rloom.models.network import PolicyNetwork
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.native.token_cache import MixedLayerShapes

# Not language models of tokens, or not by themselves: why no tiny one can be tried.
NOT_TRIED = {
    "blt": "reads bytes in patches",
    "gemma3n": "its picture tower needs the package timm; gemma3n_text is its text part",
    "gemma4_assistant": "drafts for another model",
    "gemma4_unified_assistant": "drafts for another model",
    "musicgen": "writes sound",
    "musicgen_melody": "writes sound",
}
CAUSAL_FAMILIES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() - NOT_TRIED.keys())
PAGE = Path(__file__).parents[1] / "docs" / "models.md"
WINDOW = 4  # shorter than both samples that are compared
MOST_PARAMETERS = 5_000_000

# Configuration entries, whatever family has them. Sizes that belong together fit: 4 heads of 8 make 32.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "pronunciation_vocab_size", "shape_vocab_size", "vocab_size_per_layer_input"), 64),
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "embed_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "d_ff", "ffn_hidden_size", "dim_ff"), 48),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dff", "mlp_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "encoder_layers"), 2),
    **dict.fromkeys(("num_decoder_layers", "num_encoder_layers", "num_blocks", "depth", "num_global_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "num_decoder_attention_heads", "num_encoder_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads",), 2),
    **dict.fromkeys(("head_dim", "hidden_size_per_layer_input", "global_head_dim", "attention_head_dim"), 8),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk", "num_selected_experts"), 2),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 16),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size", "q_lora_rank"), 16),
    **dict.fromkeys(("pronunciation_embed_dim", "shape_embed_dim", "encoder_hash_byte_group_vocab"), 16),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    **dict.fromkeys(("kv_lora_rank", "qk_nope_head_dim", "mamba_d_state", "ssm_state_size", "state_size"), 8),
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8),
    **dict.fromkeys(
        ("qk_rope_head_dim", "mamba_n_heads", "mamba_num_heads", "linear_num_value_heads", "rotary_dim"), 4
    ),
    **dict.fromkeys(("mamba_chunk_size", "chunk_size"), 4),
    **dict.fromkeys(("sliding_window", "attention_chunk_size"), WINDOW),
    **dict.fromkeys(("mamba_d_head", "mamba_head_dim"), 16),
    "mamba_d_ssm": 64,
    "v_head_dim": 6,  # DeepSeek: values smaller than keys
    "linear_num_key_heads": 2,
    "initializer_range": 0.3,
    "is_decoder": True,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# Entries of one family whose defaults do not fit the small sizes above.
SPECIAL: dict[str, dict[str, Any]] = {
    "codegen": {"rotary_dim": 4},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": None, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": None,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {"no_rope_layers": [1, 0], "floor_scale": 4, "attn_scale": 0.5},
    "mamba2": {"n_groups": 2, "num_heads": 4, "head_dim": 16},
    "nemotron_h": {"n_groups": 2},
    "reformer": {
        "attn_layers": ["local", "local"],
        "axial_pos_shape": [8, 8],
        "axial_pos_embds_dim": [16, 16],
        "local_attn_chunk_length": 4,
        "attention_head_size": 8,
    },
    "zamba": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "hybrid"] * 2,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "num_key_value_heads": 4,
        "mamba_dt_rank": 4,
    },
    "zamba2": {
        "layers_block_type": ["mamba", "hybrid"],
        "n_mamba_heads": 4,
        "mamba_headdim": 16,
        "num_key_value_heads": 4,
        "attention_head_dim": 16,
        "adapter_rank": 4,
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "qwen4_exp_text": {
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
        "hc_lowrank": 4,
        "ngram_vocab_size_base": 64,
        "ple_embed_dim": 32,
    },
    "xmod": {"default_language": "en_XX"},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "zaya": {"num_attention_heads": 4, "num_key_value_heads": 2, "num_experts_per_tok": 1, "router_hidden_size": 16},
}


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    return shrunk(CONFIG_MAPPING[family], SPECIAL.get(family, {}) | changes)


def shrunk(kind: type[PreTrainedConfig], changes: dict[str, Any]) -> PreTrainedConfig:
    standard = kind()
    known = {**standard.to_dict(), **getattr(kind, "attribute_map", {})}
    entries = {name: value for name, value in SMALL.items() if name in known}
    if "qk_rope_head_dim" in known:  # latent attention has as many key heads as query heads, and rotates a part of each
        entries |= {"num_key_value_heads": 4, "head_dim": 4}
    layers = known.get("layer_types")
    if isinstance(layers, list) and layers:
        kinds = list(dict.fromkeys(layers))
        entries["layer_types"] = kinds if len(kinds) > 1 else kinds * 2
        entries["num_hidden_layers"] = len(entries["layer_types"])
    for name, value in vars(standard).items():
        if isinstance(value, PreTrainedConfig):
            entries[name] = shrunk(type(value), SPECIAL.get(value.model_type, {}))
    return kind(**(entries | changes))


def tiny_model(family: str, **changes: Any) -> PreTrainedModel:
    """Every parameter is random, biases and norms too, so that none can be forgotten without a trace."""
    config = tiny_config(family, **changes)
    with torch.device("meta"):
        size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
    if size > MOST_PARAMETERS:
        raise ValueError(f"{family}: {size:,} parameters")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def row(family: str) -> str:
    """A line of the table in docs/models.md."""
    model = tiny_model(family)
    found = check_training(model)
    if found.padded is not None:
        return table_row(family, "", "", "", "", "refused")
    within = None if found.packed is None else with_wide_window(family)
    condition = "" if within is None else " within its window"
    packed = f"yes{condition}" if found.packed is None or within is not None else ""
    native = f"{native_way(within or model)}{condition}" if packed else ""
    hf = ""
    if check_hf(model, found.own_attention, pads_prompts=True) is None:
        hf = "yes"
    elif check_hf(model, found.own_attention, pads_prompts=False) is None:
        hf = "one length at a time"
    note = "" if native or hf else "no rollout engine is right: refused"
    return table_row(family, packed, f"yes ({found.attention})", native, hf, note)


def with_wide_window(family: str) -> PreTrainedModel | None:
    """A model whose window no sample reaches past, if that makes packed samples right."""
    config = tiny_config(family)
    text = config.get_text_config()
    windows = [name for name in ("sliding_window", "attention_chunk_size") if getattr(text, name, None) == WINDOW]
    if not windows or config is not text:
        return None
    model = tiny_model(family, **dict.fromkeys(windows, 64))
    return model if check_training(model).packed is None else None


def split_faults(rank: int, ranks: int, families: Mapping[str, str]) -> dict[str, str | None]:
    """What is wrong when two ranks share the tokens of packed samples. Of a family: what docs/models.md says of it."""
    group = new_sequence_parallel_group(ranks)
    found: dict[str, str | None] = {}
    with warnings.catch_warnings(), quiet_transformers(), redirect_stdout(sys.stderr):
        warnings.simplefilter("ignore")
        for family, packed in families.items():
            model = tiny_model(family) if packed == "yes" else with_wide_window(family)
            assert model is not None
            found[family] = check_split(model, group)
    return found


def native_way(model: PreTrainedModel) -> str:
    if check_native(model) is not None:
        return ""
    return "graphs" if has_one_cache_shape(model) else "step by step"


def has_one_cache_shape(model: PreTrainedModel) -> bool:
    model.set_attn_implementation(RLOOM_ATTENTION)
    engine = NativeRollout(
        PolicyNetwork(model, packed=True), owner=OnCpu(), max_sequences=1, max_prefill_tokens=1, memory_share=1.0,
        free_cache=True,
    )  # fmt: skip
    try:
        engine.token_shape()
    except MixedLayerShapes:
        return False
    return True


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cell or '–' for cell in cells)} |"


HEAD = f"""# Model families

Every causal family of transformers {transformers.__version__}, tried with a tiny random model: rloom's logits and
log-probs of two samples of different length beside the model's own forward, one sample at a time. `make docs` makes
this page; a test compares each line with what is computed. What is not right is refused when a run starts, before
weights are read, with the reason and what to use instead: a run tries its own model in the same way.

- **packed**: trained on samples laid end to end (`use_remove_padding=True`, the default). Where that is not right, each
  sample gets a row of its own, padded at the end, and the run says so. *Within its window*: as long as the run's
  longest sample (`data.max_prompt_length + data.max_response_length`) does not reach past the attention window.
  Each of these families is also compared on two ranks that split the tokens of samples
  (`ulysses_sequence_parallel_size=2`).
- **padded**: trained with a row for each sample, and the attention that is right: rloom's, or sdpa or eager of
  transformers.
- **native**: generated by rloom's own engine; on a GPU with CUDA graphs, or step by step where layers have unlike
  caches.
- **hf**: generated by generate() of transformers; for some families only prompts of one length together.

| family | packed | padded | native | hf | |
| --- | --- | --- | --- | --- | --- |
"""


def listed_families() -> dict[str, str]:
    """Family -> its line in docs/models.md."""
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
    return {line.split(" | ")[0].removeprefix("| "): line for line in lines}


def page() -> str:
    with redirect_stdout(sys.stderr):  # some families print
        rows = {family: row(family) for family in CAUSAL_FAMILIES}
    rows |= {family: table_row(family, "", "", "", "", f"not tried: {why}") for family, why in NOT_TRIED.items()}
    return HEAD + "\n".join(rows[family] for family in sorted(rows)) + "\n"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    print(page(), end="")
