import logging
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from rloom.data import chat
from rloom.data.chat import as_messages, render_chat, stop_token_ids, tokenize
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


def test_a_custom_template_comes_before_the_tokenizers_own() -> None:
    custom = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    assert render_chat(HELLO_MESSAGES, tokenizer(template=TEMPLATE), custom) == "<hello>"
    assert render_chat(HELLO_MESSAGES, tokenizer(), custom) == "<hello>"


def test_what_a_template_refuses_is_a_fault_of_the_data() -> None:
    picky = tokenizer(template="{{ raise_exception('no system role') }}")
    with pytest.raises(DataError, match=r"refuses the messages \(no system role\)"):
        render_chat(HELLO_MESSAGES, picky)
    with pytest.raises(DataError, match="custom_chat_template"):
        render_chat(HELLO_MESSAGES, picky, "{% for %}")


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
