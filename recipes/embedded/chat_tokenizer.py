"""Qwen2's kind of tokenizer, with a few hundred entries of its own and a ChatML template.

All 256 bytes are in the vocabulary, so any text of any language can be encoded; it comes back in Unicode's composed
form (NFC), as with every Qwen2 tokenizer. Digits are split off before merging: a number is always its digits.
"""

import json
from collections.abc import Iterable

from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import Qwen2Tokenizer

END_OF_TEXT, START_OF_TURN, END_OF_TURN = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
LARGEST_VOCABULARY = 384  # the words of the data set run out of merges a little earlier
CONTEXT = 512

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}"
    "{{- '<|im_start|>assistant\\n' -}}"
    "{%- endif -%}"
)


def train(texts: Iterable[str]) -> Qwen2Tokenizer:
    # AutoTokenizer gives a qwen2 model this class whatever its folder says, so its way of splitting text is trained on
    rules = Qwen2Tokenizer().backend_tokenizer
    bpe = Tokenizer(models.BPE())
    bpe.normalizer, bpe.pre_tokenizer = rules.normalizer, rules.pre_tokenizer
    trainer = trainers.BpeTrainer(
        vocab_size=LARGEST_VOCABULARY,
        special_tokens=[END_OF_TEXT, START_OF_TURN, END_OF_TURN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    learned = json.loads(bpe.to_str())["model"]
    return Qwen2Tokenizer(
        vocab=learned["vocab"],
        merges=[tuple(merge) for merge in learned["merges"]],
        eos_token=END_OF_TURN,
        pad_token=END_OF_TEXT,
        additional_special_tokens=[START_OF_TURN],
        chat_template=CHAT_TEMPLATE,
        model_max_length=CONTEXT,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
