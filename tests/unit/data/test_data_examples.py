"""Rows of supervised fine-tuning: which tokens are the answer, and which rows are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Sequence as PreTokenizers
from tokenizers.pre_tokenizers import Split, WhitespaceSplit
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rloom.data.examples import ChatColumns, Example, load_examples, read_chats
from rloom.errors import DataError
from rloom.models.source import EMBEDDED_FOLDER

CHATML = (
    "{% for m in messages %}<|im_start|> {{ m.role }}\n {{ m.content }} <|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)
WITH_GENERATION = (
    "{% for m in messages %}<|im_start|> {{ m.role }}\n"
    "{% if m.role == 'assistant' %}{% generation %} {{ m.content }} <|im_end|>\n{% endgeneration %}"
    "{% else %} {{ m.content }} <|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|> assistant\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m.role == 'user' %}<s> [INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }} </s>{% endif %}{% endfor %}"
)
GEMMA = (
    "<s>{% for m in messages %}<start_of_turn> {{ 'model' if m.role == 'assistant' else m.role }}\n "
    "{{ m.content | trim }} <end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn> model\n{% endif %}"
)
PHI3 = (  # the end of the text only if no answer is to be generated, so that earlier turns end in another way
    "{% for m in messages %}<|{{ m.role }}|> {{ m.content }} <|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% else %}</s>{% endif %}"
)
NO_END = (
    "{% for m in messages %} [{{ m.role }}] {{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %} [assistant]{% endif %}"
)
MARKERS = """<s> </s> <|im_start|> <|im_end|> <start_of_turn> <end_of_turn> <|end|> <|user|> <|assistant|>"""
OTHERS = """[INST] [/INST] [user] [assistant] User: Assistant: user assistant model hello good day more bye <unk>"""
ONE_TURN = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
TWO_TURNS = [*ONE_TURN, {"role": "user", "content": "more"}, {"role": "assistant", "content": "bye"}]


class Words:
    """A tokenizer with one token for each word, so that a mask can be read."""

    def __init__(self, template: str | None) -> None:
        specials = MARKERS.split()
        words = [*specials, *OTHERS.split()]
        fast = FastTokenizer(WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
        fast.pre_tokenizer = PreTokenizers([WhitespaceSplit()])
        self.made: Any = PreTrainedTokenizerFast(
            tokenizer_object=fast,
            unk_token="<unk>",
            bos_token="<s>",
            eos_token="</s>",
            additional_special_tokens=specials,
        )
        self.made.chat_template = template

    def read(self, folder: Path, *rows: Any, **settings: Any) -> list[Example]:
        return read(folder, self.made, *rows, **settings)

    def answers(self, example: Example) -> str:
        """Tokens of answers in capitals."""
        words = self.made.convert_ids_to_tokens(example.tokens)
        return " ".join(word.upper() if learnt else word for word, learnt in zip(words, example.mask, strict=True))


def read(
    folder: Path, tokenizer: Any, *rows: Any, limit: int = 64, truncation: str = "error", **form: Any
) -> list[Example]:
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tokenizer.chat_template = form.pop("chat_template", tokenizer.chat_template)
    rows = read_chats(str(file), ChatColumns(**form), max_samples=-1, field="data.train_files")
    return load_examples(rows, tokenizer, max_length=limit, truncation=truncation)


@pytest.mark.parametrize(
    "template, text",
    [
        (
            CHATML,
            "<|im_start|> user hello <|im_end|> <|im_start|> assistant GOOD DAY <|IM_END|> "
            "<|im_start|> user more <|im_end|> <|im_start|> assistant BYE <|IM_END|>",
        ),
        (
            WITH_GENERATION,
            "<|im_start|> user hello <|im_end|> <|im_start|> assistant GOOD DAY <|IM_END|> "
            "<|im_start|> user more <|im_end|> <|im_start|> assistant BYE <|IM_END|>",
        ),
        (LLAMA2, "<s> [INST] hello [/INST] GOOD DAY </S> <s> [INST] more [/INST] BYE </S>"),
        (
            GEMMA,
            "<s> <start_of_turn> user hello <end_of_turn> <start_of_turn> model GOOD DAY <END_OF_TURN> "
            "<start_of_turn> user more <end_of_turn> <start_of_turn> model BYE <END_OF_TURN>",
        ),
        (NO_END, "[user] hello [assistant] GOOD DAY </S> [user] more [assistant] BYE </S>"),
        (None, "<s> User: hello Assistant: GOOD DAY </S> User: more Assistant: BYE </S>"),
    ],
    ids=["chatml", "generation tag", "llama2", "gemma", "no end of turn", "no template"],
)
def test_every_assistant_turn_is_learnt_with_the_token_that_ends_it(
    template: str | None, text: str, tmp_path: Path
) -> None:
    words = Words(template)
    [example] = words.read(tmp_path, {"messages": TWO_TURNS})
    assert words.answers(example) == text


def test_the_embedded_models_template_by_hand(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(EMBEDDED_FOLDER / "model")
    rows = [{"role": "user", "content": "1 + 2?"}, {"role": "assistant", "content": "3"}]
    [example] = read(tmp_path, tokenizer, {"messages": rows})
    prompt = "<|im_start|>user\n1 + 2?<|im_end|>\n<|im_start|>assistant\n"
    assert example.tokens == tuple(tokenizer(prompt + "3<|im_end|>\n").input_ids)
    learnt = [token for token, answer in zip(example.tokens, example.mask, strict=True) if answer]
    assert tokenizer.decode(learnt) == "3<|im_end|>"
    assert example.mask.index(True) == len(tokenizer(prompt).input_ids)


def test_a_template_that_renders_earlier_turns_in_another_way_is_refused_with_the_row(tmp_path: Path) -> None:
    words = Words(PHI3)
    [example] = words.read(tmp_path, {"messages": ONE_TURN})
    assert words.answers(example) == "<|user|> hello <|end|> <|assistant|> GOOD DAY <|END|> </S>"
    with pytest.raises(DataError, match=r"row 1 .*renders message 1 in another way when more messages follow"):
        words.read(tmp_path, {"messages": ONE_TURN}, {"messages": TWO_TURNS})


def test_a_token_across_the_border_of_an_answer_is_cut_as_in_generation(tmp_path: Path) -> None:
    fast = FastTokenizer(WordLevel({"a:": 0, "b": 1, ":b": 2, "a": 3, "</s>": 4, "<unk>": 5}, unk_token="<unk>"))
    fast.pre_tokenizer = Split(":b", "isolated")  # the whole text `a:b` is `a`, `:b`; the prompt alone is `a:`
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=fast, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ ':' if m.role == 'user' else '' }}{% endfor %}"
    row = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    [example] = read(tmp_path, tokenizer, {"messages": row})
    assert (example.tokens, example.mask) == ((0, 1, 4), (False, True, True))


@pytest.mark.parametrize(
    "row, form",
    [
        ({"prompt": "hello", "response": "good day"}, {}),
        ({"prompt": [{"role": "user", "content": "hello"}], "answer": "good day"}, {}),
        ({"question": "hello", "answer": "good day"}, {}),
        ({"prompt": "hello", "extra_info": {"question": "more", "answer": "good day"}}, {}),
        ({"prompt": "x", "answer": "y", "messages": ONE_TURN}, {}),
        ({"chat": ONE_TURN}, {"messages_key": "chat"}),
        ({"messages": TWO_TURNS, "prompt": "hello", "response": "good day"}, {"is_chat": False}),
        (
            {"prompt": "x", "extra_info": {"question": "hello", "answer": "good day"}},
            {"prompt_path": ("extra_info", "question"), "response_path": ("extra_info", "answer")},
        ),
    ],
)
def test_prompt_and_answer_are_found(row: dict[str, Any], form: dict[str, Any], tmp_path: Path) -> None:
    words = Words(LLAMA2)
    [example] = words.read(tmp_path, row, **form)
    assert words.answers(example) == "<s> [INST] hello [/INST] GOOD DAY </S>"


def test_truncation(tmp_path: Path) -> None:
    words, row = Words(LLAMA2), {"messages": TWO_TURNS}  # 13 tokens
    with pytest.raises(DataError, match=r"row 0 .*13 tokens, over data.max_length=12"):
        words.read(tmp_path, row, limit=12)
    [left] = words.read(tmp_path, row, limit=4, truncation="left")
    assert words.answers(left) == "more [/INST] BYE </S>"
    [right] = words.read(tmp_path, row, limit=6, truncation="right")
    assert words.answers(right) == "<s> [INST] hello [/INST] GOOD DAY"
    [first] = words.read(tmp_path, row, limit=2, truncation="left")
    assert first.mask == (False, True), "the first token has no context"
    with pytest.raises(DataError, match=r"row 0 .*leaves no token of an answer"):
        words.read(tmp_path, row, limit=3, truncation="right")


@pytest.mark.parametrize(
    "row, form, fault",
    [
        ({"messages": ONE_TURN[:1]}, {}, "has no assistant turn"),
        ({"messages": [ONE_TURN[0], {"role": "assistant", "content": " "}]}, {}, "the assistant's message 1 is empty"),
        ({"messages": [ONE_TURN[0], {"role": "assitant", "content": "x"}]}, {}, "message 1 has the role 'assitant'"),
        ({"messages": ONE_TURN[1:]}, {}, "begins with an assistant turn"),
        ({"messages": "hello"}, {}, "'messages' is str"),
        ({"prompt": "hello", "response": ""}, {}, "the assistant's message 1 is empty"),
        ({"prompt": "hello", "response": 3}, {}, "the response is int"),
        ({"prompt": "hello"}, {}, r"has no response \(looked for response, answer, extra_info.answer\)"),
        ({"text": "hello"}, {}, "has no prompt .*its columns are 'text'. Set data.prompt_key"),
        ({"prompt": ONE_TURN, "response": "x"}, {}, "the prompt ends with an assistant turn"),
        ({"prompt": "hello", "response": "x"}, {"response_path": ("a", "b")}, "nothing under 'a.b'.*data.response_key"),
        ({"prompt": "hello", "response": "x"}, {"is_chat": True}, "nothing under 'messages'.*data.messages_key"),
    ],
)
def test_a_wrong_row_is_named(row: dict[str, Any], form: dict[str, Any], fault: str, tmp_path: Path) -> None:
    good = {"messages": ONE_TURN, "prompt": "hello", "response": "day", "a": {"b": "day"}}
    with pytest.raises(DataError, match=rf"data\.train_files: .*rows\.jsonl, row 1 \(counting from 0\): .*{fault}"):
        Words(LLAMA2).read(tmp_path, good, row, **form)
