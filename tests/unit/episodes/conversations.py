"""Chat templates that behave as those of known families, and tokenizers for them."""

import json
import re
from functools import cache
from typing import NamedTuple

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from rloom.episodes.template import TurnTemplate

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
# opens the reasoning, and writes an empty one around a last answer that has none, as Qwen3.5 does
FILLS_REASONING = """{%- set ns = namespace(last=0) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set ns.last = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}{%- set content, reasoning = m.content, '' -%}
{%- if m.role == 'assistant' and '</think>' in content -%}
{%- set reasoning = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
{%- set content = content.split('</think>')[-1].lstrip('\\n') -%}{%- endif -%}
{{- '<|im_start|>' + ('user' if m.role == 'tool' else m.role) + '\\n' -}}
{%- if m.role == 'assistant' and loop.index0 > ns.last -%}
{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' -}}{%- endif -%}
{{- content + '<|im_end|>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n<think>\\n' -}}{%- endif -%}"""
# strips every message, as Llama 3 does; the beginning of the text is in the first message only
HEADERS = """{{- '<|begin_of_text|>' -}}{%- for m in messages -%}
{{- '<|start_header_id|>' + ('ipython' if m.role == 'tool' else m.role) + '<|end_header_id|>\\n\\n' -}}
{{- (m.content | tojson if m.role == 'tool' else m.content | trim) + '<|eot_id|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}"""
# roles are words, not special tokens; an answer ends with the end of the sequence, as Mistral's first models have it
BRACKETS = """{{- '<s>' -}}{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- ' ' + m.content | trim + '</s>' -}}
{%- else -%}{{- '[INST] ' + m.content + ' [/INST]' -}}{%- endif -%}{%- endfor -%}"""
# roles alternate, calls are apart from the text, a result names its call's id, as Mistral's later models have it
CALLS_APART = """{{- '<s>' -}}{%- set ns = namespace(index=0) -%}{%- for m in messages -%}
{%- if m.role == 'user' or (m.role == 'assistant' and not m.tool_calls) -%}
{%- if (m.role == 'user') != (ns.index % 2 == 0) -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{%- set ns.index = ns.index + 1 -%}{%- endif -%}
{%- if m.role == 'tool' -%}
{%- if m.tool_call_id | length != 9 -%}{{- raise_exception('ids have 9 letters') -}}{%- endif -%}
{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' -}}
{%- elif m.role == 'assistant' and m.tool_calls -%}
{{- '[TOOL_CALLS] [' -}}{%- for c in m.tool_calls -%}{{- c.function | tojson -}}{%- endfor -%}{{- ']</s>' -}}
{%- elif m.role == 'assistant' -%}{{- ' ' + m.content | trim + '</s>' -}}
{%- else -%}{{- '[INST] ' + m.content + '[/INST]' -}}{%- endif -%}{%- endfor -%}"""
# another name for the assistant, and no results of tools, as Gemma has it
TURNS = """{{- '<bos>' -}}{%- for m in messages -%}
{%- if m.role == 'tool' -%}{{- raise_exception('roles must alternate') -}}{%- endif -%}
{{- '<start_of_turn>' + ('model' if m.role == 'assistant' else 'user') + '\\n' + m.content | trim -}}
{{- '<end_of_turn>\\n' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' -}}{%- endif -%}"""
# an answer ends where the next role begins; one without reasoning gets an empty one, as GLM 4.5 has it
NEXT_ROLE = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<|assistant|>' -}}
{%- if '</think>' not in m.content -%}{{- '\\n<think></think>\\n' -}}{%- endif -%}{{- m.content.strip() -}}
{%- else -%}{{- ('<|observation|>' if m.role == 'tool' else '<|user|>') + '\\n' + m.content -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
# a mark before the end of an answer, which the model writes, as Command R7B has it
MARKED = """{%- for m in messages -%}
{%- if m.role == 'assistant' -%}{{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' + m.content + '<|END_RESPONSE|>' -}}
{%- else -%}{{- '<|USER_TOKEN|>' + m.content -}}{%- endif -%}{{- '<|END_OF_TURN_TOKEN|>' -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|CHATBOT_TOKEN|><|START_RESPONSE|>' -}}{%- endif -%}"""
# reasoning, calls and the final text in channels, as gpt-oss has it
CHANNELS = """{%- set ns = namespace(tool=none) -%}{%- for m in messages -%}
{%- if m.role == 'assistant' -%}
{%- if '<|channel|>' in (m.content or '') -%}{{- raise_exception('pass channels in their fields') -}}{%- endif -%}
{%- if m.tool_calls -%}{%- set call = m.tool_calls[0].function -%}{%- set ns.tool = call.name -%}
{%- if m.thinking -%}{{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' -}}{%- endif -%}
{{- '<|start|>assistant<|channel|>commentary to=functions.' + call.name + ' json<|message|>' -}}
{{- call.arguments | tojson + '<|call|>' -}}
{%- else -%}{{- '<|start|>assistant<|channel|>final<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- elif m.role == 'tool' -%}
{%- if ns.tool is none -%}{{- raise_exception('no call before') -}}{%- endif -%}
{{- '<|start|>functions.' + ns.tool + ' to=assistant<|channel|>commentary<|message|>' -}}
{{- m.content | tojson + '<|end|>' -}}
{%- else -%}{{- '<|start|>user<|message|>' + m.content + '<|end|>' -}}{%- endif -%}
{%- endfor -%}{%- if add_generation_prompt -%}{{- '<|start|>assistant' -}}{%- endif -%}"""

TEMPLATES = {  # name -> (template, text of the stop token)
    "chatml": (CHATML, "<|im_end|>"),
    "drops reasoning": (DROPS_REASONING, "<|im_end|>"),
    "opens reasoning": (OPENS_REASONING, "<|im_end|>"),
    "fills reasoning": (FILLS_REASONING, "<|im_end|>"),
    "headers": (HEADERS, "<|eot_id|>"),
    "brackets": (BRACKETS, "</s>"),
    "calls apart": (CALLS_APART, "</s>"),
    "turns": (TURNS, "<end_of_turn>"),
    "next role": (NEXT_ROLE, "<|user|>"),
    "marked": (MARKED, "<|END_OF_TURN_TOKEN|>"),
    "channels": (CHANNELS, "<|return|>"),
}
SPECIAL = re.compile(
    r"<\|\w+\|>|<\|\w+>|<\w+\|>|<｜[\w▁]+｜>|</?s>|<bos>|<eos>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|<end_of_utterance>"
    r"|\[/?TOOL_\w+\]"
)
WORDS = ["user assistant system tool the number is higher lower right guess 0 1 2 3 4 5 6 7 8 9 think [INST] [/INST]"]


def byte_level(special: list[str]) -> Tokenizer:
    """As Qwen, Llama 3 and gpt-oss have it."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    train(made, special, alphabet)
    return made


def sentencepiece(special: list[str]) -> Tokenizer:
    """As Llama 2 and the first Mistral have it: a space before every text, and bytes of characters that are unknown."""
    made = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    train(made, ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *special], [])
    state = json.loads(made.to_str())
    bytes_of = {f"<0x{byte:02X}>" for byte in range(256)}
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] not in bytes_of]
    return Tokenizer.from_str(json.dumps(state))


def train(made: Tokenizer, special: list[str], alphabet: list[str]) -> None:
    trainer = trainers.BpeTrainer(
        vocab_size=330 + len(special), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(WORDS * 10, trainer)


def make_tokenizer(template: str, kind=byte_level, more=()) -> PreTrainedTokenizerFast:
    special = sorted({*SPECIAL.findall(template), "<bos>", "<eos>", *more})
    return PreTrainedTokenizerFast(
        tokenizer_object=kind(special), chat_template=template, bos_token="<bos>", eos_token="<eos>"
    )


@cache
def tokenizer_for(name: str, kind=byte_level) -> PreTrainedTokenizerFast:
    template, stop = TEMPLATES[name]
    return make_tokenizer(template, kind, [stop])


def encode(text: str, name: str, kind=byte_level) -> list[int]:
    return tokenizer_for(name, kind)(text, add_special_tokens=False)["input_ids"]


class Recorded(NamedTuple):
    """A conversation as an episode records it."""

    tokens: list[int]
    sampled: list[tuple[int, list[int]]]  # where the answers are, and their tokens
    rendered: str  # the whole conversation, as the template writes it now


def record(tokenizer, question, turns, tools=()) -> Recorded | None:
    """`turns`: (answer, stop, messages that follow). None: the template rewrites the past."""

    def encode_text(text):
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    template = TurnTemplate(tokenizer)
    added = template.start(question, tools)
    tokens, sampled = list(added.tokens), []
    for answer, stop, messages in turns:
        own = [*sampled_tokens(tokenizer, answer, added.conversation.text), *(encode_text(stop) if stop else [])]
        sampled.append((len(tokens), own))
        tokens += own
        added = template.add(template.answered(added.conversation, answer, stop), messages, stop)
        if added is None:
            return None
        tokens += added.tokens
    return Recorded(tokens, sampled, added.conversation.text)


def sampled_tokens(tokenizer, text: str, before: str) -> list[int]:
    """Tokens that a model might sample for this text: those of the whole text, if the answer is apart in them."""
    first, whole, alone = tokenizer([before, before + text, text], add_special_tokens=False)["input_ids"]
    return whole[len(first) :] if whole[: len(first)] == first else alone
