"""Chat templates that behave as those of known families, and a tokenizer for them."""

import re
from functools import cache

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

CHATML = """{%- if tools %}{{- '<|im_start|>system\\nTools: ' + tools | tojson + '<|im_end|>\\n' }}{% endif -%}
{%- for m in messages -%}{%- set role = 'user' if m.role == 'tool' else m.role -%}
{{- '<|im_start|>' + role + '\\n' + m.content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# drops the reasoning of answers before the last question, as Qwen3 does
DROPS_REASONING = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}{%- set content = m.content -%}
{%- if m.role == 'assistant' and loop.index0 < ns.last and '</think>' in content -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}
{{- '<|im_start|>' + m.role + '\\n' + content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"""
# always reasons: the template writes the opening tag, as DeepSeek R1 does
OPENS_REASONING = CHATML.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n<think>\\n'")
# strips every message, as Llama 3 does; the beginning of the text is in the first message only
HEADERS = """{{- '<|begin_of_text|>' -}}{%- for m in messages -%}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' -}}
{{- m.content | trim + '<|eot_id|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""
# roles are words, not special tokens; an answer ends with the end of the sequence, as Mistral's first models have it
BRACKETS = """{{- '<s>' -}}{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- ' ' + m.content | trim + '</s>' -}}
{%- else -%}{{- '[INST] ' + m.content + ' [/INST]' -}}{%- endif -%}{%- endfor -%}"""
# another name for the assistant, as Gemma has it
TURNS = """{{- '<bos>' -}}{%- for m in messages -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim -}}
{{- '<end_of_turn>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""

TEMPLATES = {  # name -> (template, text of the stop token)
    "chatml": (CHATML, "<|im_end|>"),
    "drops reasoning": (DROPS_REASONING, "<|im_end|>"),
    "opens reasoning": (OPENS_REASONING, "<|im_end|>"),
    "headers": (HEADERS, "<|eot_id|>"),
    "brackets": (BRACKETS, "</s>"),
    "turns": (TURNS, "<end_of_turn>"),
}
SPECIAL = re.compile(r"<\|\w+\|>|</?s>|<bos>|<(?:start|end)_of_turn>")
WORDS = ["user assistant system tool the number is higher lower right guess 0 1 2 3 4 5 6 7 8 9 think [INST] [/INST]"]


@cache
def tokenizer_for(name: str) -> PreTrainedTokenizerFast:
    """Byte-level BPE, with the special tokens of the template."""
    template, _ = TEMPLATES[name]
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=sorted(set(SPECIAL.findall(template))),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    made.train_from_iterator(WORDS * 10, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, chat_template=template)


def encode(text: str, name: str) -> list[int]:
    return tokenizer_for(name)(text, add_special_tokens=False)["input_ids"]
