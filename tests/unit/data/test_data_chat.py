import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rloom.data import chat
from rloom.data.chat import as_messages, render_chat, set_variables, stop_token_ids, tokenize
from rloom.errors import DataError

WORDS = ["<unk>", "<s>", "</s>", "System:", "User:", "Assistant:", "be", "terse", "hello", "[user]", "[assistant]"]
UNK, BOS, EOS, SYSTEM, USER, ASSISTANT, BE, TERSE, HELLO, USER_TAG, ASSISTANT_TAG = range(len(WORDS))
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %} [{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} [assistant]{% endif %}"
)
HELLO_MESSAGES = ({"role": "user", "content": "hello"},)


def tokenizer(*, bos: bool = True, template: str | None = None) -> Any:
    """One token a word, and `<s>` in front whenever special tokens are asked for."""
    fast = FastTokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    fast.pre_tokenizer = WhitespaceSplit()
    if bos:
        fast.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    specials = {"bos_token": "<s>"} if bos else {}
    made = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="</s>", **specials)
    made.chat_template = template
    return made


def test_a_template_is_rendered_up_to_where_the_assistant_begins() -> None:
    text = render_chat(HELLO_MESSAGES, tokenizer(template=TEMPLATE))
    assert text == "<s> [user] hello [assistant]"


def test_text_of_a_template_gets_no_second_beginning_of_sequence() -> None:
    made = tokenizer(template=TEMPLATE)
    assert made("hello")["input_ids"] == [BOS, HELLO]  # what adding special tokens would do
    assert tokenize([render_chat(HELLO_MESSAGES, made)], made) == [(BOS, USER_TAG, HELLO, ASSISTANT_TAG)]


def test_without_a_template_turns_are_written_plainly() -> None:
    messages = ({"role": "system", "content": "be terse"}, *HELLO_MESSAGES)
    made = tokenizer(bos=False)
    text = render_chat(messages, made)
    assert text == "System: be terse\n\nUser: hello\n\nAssistant:"
    assert tokenize([text], made) == [(SYSTEM, BE, TERSE, USER, HELLO, ASSISTANT)]


def test_the_plain_format_begins_with_the_tokenizers_own_beginning_of_sequence() -> None:
    made = tokenizer(bos=True)
    text = render_chat(HELLO_MESSAGES, made)
    assert text == "<s>User: hello\n\nAssistant:"
    assert tokenize([text], made) == [(BOS, USER, HELLO, ASSISTANT)]


def test_the_plain_format_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    chat._warn_of_plain_format.cache_clear()
    made = tokenizer()
    with caplog.at_level(logging.WARNING, logger="rloom.data.chat"):
        for _ in range(3):
            render_chat(HELLO_MESSAGES, made)
    assert len(caplog.records) == 1
    assert "custom_chat_template" in caplog.text


def with_template(made: Any, custom: str | None, variables: Mapping[str, Any] = MappingProxyType({})) -> Any:
    made.chat_template = made.chat_template if custom is None else custom
    set_variables(made, variables)
    return made


def test_a_custom_template_comes_before_the_tokenizers_own() -> None:
    custom = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert render_chat(HELLO_MESSAGES, with_template(tokenizer(template=TEMPLATE), custom)) == "<hello>"
    assert render_chat(HELLO_MESSAGES, with_template(tokenizer(), custom)) == "<hello>"
    assert with_template(tokenizer(template=TEMPLATE), None).chat_template == TEMPLATE


THINKING = """
*{% macro end() %}{{ mark }}{% endmacro %}
{% if mark is not defined and not false %}{{ eos_token }}{% endif %}
{% if enable_thinking is defined and enable_thinking is false %}
[no]{% endif %}
{% for m in messages %}{{ m.content }}{{ end() }}{% endfor %}"""


@pytest.mark.parametrize(
    ("variables", "text"),
    [
        ({}, "\n*</s>hello"),
        ({"enable_thinking": False}, "\n*</s>[no]hello"),
        ({"enable_thinking": True, "mark": "'\n\"é"}, "\n*hello'\n\"é"),
        ({"eos_token": "%}\\"}, "\n*%}\\hello"),  # in place of the tokenizer's
        ({"no-name": 1, "true": False, "not": 1}, "\n*</s>hello"),
    ],
)
def test_variables_of_a_template_are_those_of_a_call(variables: dict[str, Any], text: str) -> None:
    """Transformers renders the same text if each call gets the variables."""
    made = tokenizer(template=THINKING)
    of_a_call = made.apply_chat_template(list(HELLO_MESSAGES), tokenize=False, **variables)
    assert render_chat(HELLO_MESSAGES, with_template(made, None, variables)) == of_a_call == text


def test_a_variable_that_a_call_gives_is_stronger() -> None:
    made = with_template(tokenizer(template=THINKING), None, {"enable_thinking": False})
    assert render_chat(HELLO_MESSAGES, made, variables={"enable_thinking": True}) == "\n*</s>hello"


def test_each_of_several_templates_gets_the_variables() -> None:
    made = tokenizer()
    made.chat_template = {"default": "{{ n }}", "tool_use": "{{\nm + tools | length }}"}
    with_template(made, None, {"n": [1, 2.5, None], "m": 4})
    assert render_chat(HELLO_MESSAGES, made) == "[1, 2.5, None]"
    assert render_chat(HELLO_MESSAGES, made, variables={"tools": [{"type": "function"}]}) == "5"
    with_template(made, "{{ n.a }}", {"n": {"a": True}})
    assert render_chat(HELLO_MESSAGES, made) == "True"


def test_a_variable_without_effect_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="rloom.data.chat"):
        with_template(tokenizer(template=THINKING), None, {"enable_thinking": True, "enable": True})
    assert [record.getMessage() for record in caplog.records] == [
        "Note: data.apply_chat_template_kwargs.enable has no effect: the chat template does not read it"
    ]
    with pytest.raises(DataError, match=r"data\.apply_chat_template_kwargs=\{'x': 1\}: .* has no chat template"):
        with_template(tokenizer(), None, {"x": 1})
    for name in ("messages", "tools", "chat_template", "max_length"):
        with pytest.raises(DataError, match=rf"kwargs\.{name}: an argument .* not a variable of a template; remove"):
            with_template(tokenizer(template=THINKING), None, {name: 1})


def test_what_a_template_refuses_is_a_fault_of_the_data() -> None:
    picky = tokenizer(template="{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r"refuses the messages \(no system role\)"):
        render_chat(HELLO_MESSAGES, picky)
    with pytest.raises(DataError, match="custom_chat_template"):
        render_chat(HELLO_MESSAGES, with_template(picky, "{% for %}"))


def test_a_plain_string_is_one_user_message() -> None:
    assert as_messages("计算 15 + 27") == ({"role": "user", "content": "计算 15 + 27"},)


def test_parts_of_text_are_joined() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert as_messages([{"role": "user", "content": parts}]) == ({"role": "user", "content": "a b"},)


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        (" ", "an empty string"),
        (7, "the prompt is int"),
        ([], "an empty list of messages"),
        (["hello"], "message 0 of the prompt is str"),
        (
            [{"role": "user", "content": "a"}, {"content": "b"}],
            "message 1 of the prompt has no role; its keys are 'content'",
        ),
        ([{"role": "user"}], "message 0 of the prompt has no content"),
        ([{"role": 1, "content": "a"}], "a role of type int"),
        ([{"role": "user", "content": 5}], "a content of type int"),
        ([{"role": "user", "content": [{"type": "image", "image": "x"}]}], "a part that is not text"),
    ],
)
def test_a_malformed_prompt_says_what_is_wrong(prompt: Any, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        as_messages(prompt)
    assert reason in str(caught.value)


def test_stop_tokens_are_those_of_tokenizer_and_generation_config() -> None:
    made = tokenizer()
    assert stop_token_ids(made, None) == (EOS,)
    assert stop_token_ids(made, 9) == (EOS, 9)
    assert stop_token_ids(made, [9, EOS, 7]) == (EOS, 9, 7)
    made.eos_token = None
    assert stop_token_ids(made, [9]) == (9,)
    assert stop_token_ids(made, None) == ()


def test_a_stop_token_of_number_zero_counts() -> None:
    made = tokenizer()
    made.eos_token = "<unk>"
    assert stop_token_ids(made, 0) == (UNK,)
