"""Tiny reward models, made on the spot: random ones, and one whose score can be worked out by hand."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DebertaV2Config,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from rloom.models.source import EMBEDDED_FOLDER
from rloom.types import Sample
from tests.helpers import SHAPE, tiny_model

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
WORDS = (*SPECIAL, "user", "assistant", "system", *(f"w{number}" for number in range(7, SHAPE["vocab_size"])))
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'tool' %}"
    "{{ raise_exception('no tools') }}{% endif %} {{ message['role'] }} {{ message['content'] }} {{ eos_token }}"
    "{% endfor %}{% if add_generation_prompt %} assistant{% endif %}"
)


def word_tokenizer(*, chat: bool) -> PreTrainedTokenizerFast:
    """Adds special tokens by itself: <s> question </s> answer </s>."""
    inner = Tokenizer(WordLevel({word: token for token, word in enumerate(WORDS)}, unk_token="<unk>"))
    inner.pre_tokenizer = WhitespaceSplit()
    inner.post_processor = TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A </s> $B:1 </s>:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    names = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=inner, **names, model_input_names=["input_ids", "token_type_ids", "attention_mask"]
    )
    tokenizer.chat_template = TEMPLATE if chat else None
    return tokenizer


def llama_config(labels: int = 1, **changes: Any) -> LlamaConfig:
    return LlamaConfig(**{**SHAPE, **changes}, num_labels=labels)


def deberta_config(labels: int = 1) -> DebertaV2Config:
    """The parts of DeBERTa v3: relative positions in buckets, projections shared with the content."""
    return DebertaV2Config(
        vocab_size=SHAPE["vocab_size"],
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        relative_attention=True,
        position_buckets=8,
        norm_rel_ebd="layer_norm",
        share_att_key=True,
        pos_att_type=["p2c", "c2p"],
        position_biased_input=False,
        type_vocab_size=2,
        pooler_hidden_size=32,
        initializer_range=0.3,
        pad_token_id=0,
        num_labels=labels,
    )


def random_classifier(config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def save_classifier(folder: Path, config: PreTrainedConfig, *, chat: bool = True) -> PreTrainedModel:
    model = random_classifier(config)
    model.save_pretrained(folder)
    word_tokenizer(chat=chat).save_pretrained(folder)
    return model


def words(count: int, first: int = 7) -> str:
    """So many words, none of them twice in a row."""
    return " ".join(f"w{first + (5 * number) % (SHAPE['vocab_size'] - first)}" for number in range(count))


def sample(question: str, answer: str, *earlier: dict[str, str]) -> Sample:
    return Sample(
        data_source="any",
        prompt=question,
        response=answer,
        messages=(*earlier, {"role": "user", "content": question}),
        prompt_tokens=tuple(range(len(question.split()))),
        response_tokens=tuple(range(len(answer.split()))),
    )


def samples(lengths: Sequence[tuple[int, int]] = ((3, 9), (5, 2), (1, 14), (8, 8), (2, 1))) -> list[Sample]:
    """(words of the question, of the answer)"""
    return [sample(words(question, 7 + row), words(answer, 9 + row)) for row, (question, answer) in enumerate(lengths)]


def save_share_counter(folder: Path, text: str) -> Path:
    """A reward model whose score rises with the share of the tokens of `text` in the answer.

    One layer whose attention weights are all equal: it averages the embeddings, which are (1, 0, ...) for these tokens
    and (0, 1, 0, ...) for others. With a share f the last norm and the head give √8 · f / √(f² + (1 - f)²).
    """
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER / "model")
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    liked = tokenizer(text, add_special_tokens=False)["input_ids"]
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=512,
        pad_token_id=0,
        num_labels=1,
    )
    model = AutoModelForSequenceClassification.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
        embedding, layer = model.model.embed_tokens.weight, model.model.layers[0]
        embedding[:, 1], embedding[liked, 0], embedding[liked, 1] = 1.0, 1.0, 0.0
        layer.self_attn.v_proj.weight.copy_(torch.eye(8))
        layer.self_attn.o_proj.weight.copy_(1e4 * torch.eye(8))  # the average outweighs the last token's own embedding
        for norm in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm):
            norm.weight.fill_(1.0)
        model.score.weight[0, 0] = 1.0
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_random_policy(folder: Path) -> Path:
    """With the embedded model's tokenizer; its answers are random."""
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER / "model")
    shape = {**SHAPE, "vocab_size": len(tokenizer), "initializer_range": 0.02, "bos_token_id": None}
    tiny_model(Qwen2Config(**shape)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
