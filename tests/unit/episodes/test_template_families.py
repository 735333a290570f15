"""The chat templates of model families, as TRL ships them: which keep the past, and which rewrite it.

Read from the package `trl` if it is installed, else from the folder RLOOM_CHAT_TEMPLATES; skipped otherwise. The
behaviours that were found here are those of the templates in conversations.py.
"""

import os
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest

from rloom.errors import DataError
from tests.unit.episodes.conversations import byte_level, make_tokenizer, record, sentencepiece


def folder() -> Path | None:
    if path := os.environ.get("RLOOM_CHAT_TEMPLATES"):
        return Path(path)
    spec = find_spec("trl")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "chat_templates"


FOLDER = folder()
pytestmark = pytest.mark.skipif(FOLDER is None, reason="needs TRL's chat templates")

SYSTEM = {"role": "system", "content": "Be brief."}
QUESTION = {"role": "user", "content": "guess"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "one"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
HARMONY = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>7"
HARMONY_CALL = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
HARMONY_CALL += ' to=functions.add<|channel|>commentary json<|message|>{"a": 1}'
EQUAL, KEEPS, REWRITES, REFUSES = "equal", "keeps", "rewrites", "refuses"
# (stop token; an answer; a call and its stop token; what the template does to the past of a conversation of answers, of
# answers with reasoning, of calls with reasoning). equal: the tokens are those of the whole conversation
IM_END, THOUGHT = "<|im_end|>", "<think>\nhm\n</think>\n\n"
FAMILIES = {
    "qwen2_5": (IM_END, "7", THOUGHT, CALL, IM_END, EQUAL, EQUAL, EQUAL),
    "qwen2_5_vl": (IM_END, "7", THOUGHT, CALL, IM_END, EQUAL, EQUAL, EQUAL),
    "qwen3": (IM_END, "7", THOUGHT, CALL, IM_END, EQUAL, REWRITES, EQUAL),
    "qwen3_instruct_2507": (IM_END, "7", THOUGHT, CALL, IM_END, EQUAL, EQUAL, EQUAL),
    "qwen3_vl": (IM_END, "7", THOUGHT, CALL, IM_END, EQUAL, EQUAL, EQUAL),
    "qwen3_5_think": (IM_END, "7", THOUGHT[8:], CALL, IM_END, EQUAL, REWRITES, EQUAL),
    "qwen3_5_nothink": (IM_END, "7", "", CALL, IM_END, REWRITES, REWRITES, EQUAL),
    "qwen3_6": (IM_END, "7", THOUGHT[8:], CALL, IM_END, EQUAL, REWRITES, EQUAL),
    "llama3": ("<|eot_id|>", "7", THOUGHT, LLAMA_CALL, "<|eot_id|>", EQUAL, EQUAL, EQUAL),
    "llama3_1": ("<|eot_id|>", "7", THOUGHT, LLAMA_CALL, "<|eot_id|>", EQUAL, EQUAL, EQUAL),
    "llama3_2": ("<|eot_id|>", "7", THOUGHT, LLAMA_CALL, "<|eot_id|>", EQUAL, EQUAL, EQUAL),
    "gemma": ("<end_of_turn>", "7", THOUGHT, CALL, "<end_of_turn>", EQUAL, EQUAL, REFUSES),
    "gemma3": ("<end_of_turn>", "7", THOUGHT, CALL, "<end_of_turn>", EQUAL, EQUAL, REFUSES),
    "glm4moe": (
        "<|user|>",
        "\n<think></think>\n7",
        "\n<think>hm</think>\n",
        "x",
        "<|observation|>",
        EQUAL,
        REWRITES,
        EQUAL,
    ),
    "gptoss": ("<|end|>", "<|channel|>final<|message|>7", HARMONY[:-1], "", "<|call|>", EQUAL, REWRITES, EQUAL),
    "deepseekv3": (
        "<｜end▁of▁sentence｜>",
        "7",
        "hm\n</think>\n\n",
        "8",
        "<｜end▁of▁sentence｜>",
        EQUAL,
        REWRITES,
        REWRITES,
    ),
    "phi3": ("<|end|>", "7", THOUGHT, CALL, "<|end|>", EQUAL, EQUAL, REFUSES),
    "phi3_5": ("<|end|>", "7", THOUGHT, CALL, "<|end|>", EQUAL, EQUAL, REFUSES),
    "lfm2": (IM_END, "7", THOUGHT, CALL, IM_END, EQUAL, EQUAL, EQUAL),
    "lfm2_2_5": (IM_END, "7", THOUGHT, CALL, IM_END, EQUAL, REWRITES, EQUAL),
    "nemotron_3_nano": (IM_END, "7", THOUGHT[8:], CALL, IM_END, EQUAL, REWRITES, EQUAL),
    "nemotron_3_super": (IM_END, "7", THOUGHT[8:], CALL, IM_END, EQUAL, REWRITES, EQUAL),
    "nemotron_3_ultra": (IM_END, "7", THOUGHT[8:], CALL, IM_END, EQUAL, REWRITES, EQUAL),
    "cohere": ("<|END_OF_TURN_TOKEN|>", "7", THOUGHT, CALL, "<|END_OF_TURN_TOKEN|>", EQUAL, EQUAL, REFUSES),
    "cohere2": (
        "<|END_OF_TURN_TOKEN|>",
        "7<|END_RESPONSE|>",
        THOUGHT,
        CALL,
        "<|END_OF_TURN_TOKEN|>",
        EQUAL,
        EQUAL,
        REFUSES,
    ),
}


@cache
def tokenizer_of(family, kind=byte_level):
    assert FOLDER is not None
    stop, *_, call_stop = FAMILIES[family][:5]
    return make_tokenizer((FOLDER / f"{family}.jinja").read_text(), kind, [stop, call_stop])


def outcome(family, turns, tools=(), kind=byte_level, system=False):
    tokenizer = tokenizer_of(family, kind)
    try:
        found = record(tokenizer, [SYSTEM, QUESTION] if system else [QUESTION], turns, tools)
    except DataError:
        return REFUSES
    if found is None:
        return REWRITES
    for start, sampled in found.sampled:
        assert found.tokens[start : start + len(sampled)] == sampled
    whole = tokenizer(found.rendered, add_special_tokens=False)["input_ids"]
    return EQUAL if found.tokens == whole else KEEPS


def user(text):
    return {"role": "user", "content": text}


@pytest.mark.parametrize("family", FAMILIES)
def test_what_the_template_does_to_the_past(family):
    stop, answer, reasoning, call, call_stop, plain, thought, called = FAMILIES[family]
    result = {"role": "tool", "name": "add", "content": 'a "result", 日本'}
    assert outcome(family, [(answer, stop, [user("higher")]), (answer, stop, [user("é")])]) == plain
    if family != "gemma":  # which has no system messages
        assert outcome(family, [(answer, stop, [user("higher")])], system=True) == plain
    with_reasoning = reasoning + ("7" if family in ("gptoss", "cohere2", "glm4moe") else answer)
    with_reasoning += "<|END_RESPONSE|>" if family == "cohere2" else ""
    assert outcome(family, [(with_reasoning, stop, [user("higher")])]) == thought
    asked = HARMONY_CALL if family == "gptoss" else reasoning + call
    turns = [(asked, call_stop, [result]), (asked, call_stop, [result] if family == "gptoss" else [result, result])]
    assert outcome(family, turns, [ADD]) == called


@pytest.mark.parametrize("family", FAMILIES)
def test_odd_answers_are_kept_or_begin_a_branch(family):
    """Empty answers, white space, texts of special tokens, another stop token, none, and halves of characters."""
    stop, answer = FAMILIES[family][:2]
    for kind in (byte_level, sentencepiece):
        for odd in ("", " ", "\n\n", f" {answer}\n\n", f"{answer} {stop} x", "</think>", "<think>", "日本🙂\ufffd"):
            for end in (stop, "<eos>", ""):
                turns = [(odd, end, [user("higher")]), (answer, stop, [user("lower")])]
                assert outcome(family, turns, kind=kind) in (EQUAL, KEEPS, REWRITES)
