"""From data files to examples of supervised fine-tuning: tokens, and which of them are answers.

A row is a chat (`messages`), or a prompt and a response. The chat template is rendered up to the start and up to the
end of each assistant turn: the text between is the answer, with the token that ends the turn. Each rendering has to be
a prefix of the whole chat; otherwise the place of the answer is unknown, and the row is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rloom.data.chat import Tokenizer, as_messages, render_chat, tokenize
from rloom.data.files import Row
from rloom.data.prompts import ROWS_PER_CHUNK, TRUNCATIONS, PlacedRow, read_all_rows
from rloom.errors import DataError
from rloom.types import Message

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PROMPTS = (("prompt",), ("question",), ("extra_info", "question"))  # where prompt and answer may be, if no key is set
RESPONSES = (("response",), ("answer",), ("extra_info", "answer"))


@dataclass(frozen=True)
class Example:
    """Example: prompt [5, 6], answer [7, 8] -> tokens (5, 6, 7, 8), mask (False, False, True, True)."""

    index: int  # row in the data set
    text: str  # the rendered chat, not truncated
    tokens: tuple[int, ...]
    mask: tuple[bool, ...]  # True for the tokens of answers


@dataclass(frozen=True)
class ChatColumns:
    """Where a row has its chat."""

    messages_key: str = "messages"
    tools_key: str = "tools"
    is_chat: bool | None = None  # None: if the row has messages
    prompt_path: tuple[str, ...] | None = None  # column and keys below it; None: the first of PROMPTS
    response_path: tuple[str, ...] | None = None


@dataclass(frozen=True)
class ChatRow:
    """A row without fault."""

    placed: PlacedRow
    messages: tuple[Message, ...]  # the last of them the assistant's
    variables: Mapping[str, Any]  # of its chat template


def read_chats(
    files: str | Path | Sequence[str | Path], columns: ChatColumns, *, max_samples: int, field: str
) -> list[ChatRow]:
    """The rows of all files in order, checked. Needs no torch."""
    found = []
    for row in read_all_rows(files, field, max_samples):
        try:
            found.append(ChatRow(row, *chat_of(row.values, columns)))
        except DataError as error:
            raise DataError(f"{row.place}: {error}") from error
    return found


def load_examples(rows: Sequence[ChatRow], tokenizer: Tokenizer, *, max_length: int, truncation: str) -> list[Example]:
    found: list[Example] = []
    for start in range(0, len(rows), ROWS_PER_CHUNK):
        chunk = rows[start : start + ROWS_PER_CHUNK]
        found += [
            shortened(row.placed, one, max_length, truncation)
            for row, one in zip(chunk, build(chunk, tokenizer), strict=True)
        ]
    return found


def build(rows: Sequence[ChatRow], tokenizer: Tokenizer) -> list[Example]:
    pieces = [pieces_of(row, tokenizer) for row in rows]
    tokens = tokenize([text for of_row in pieces for text in texts_of(of_row)], tokenizer)
    examples = []
    for row, of_row in zip(rows, pieces, strict=True):
        count = 2 * len(of_row)
        own, tokens = tokens[:count], tokens[count:]
        examples.append(encoded(row.placed.index, of_row, own))
    return examples


# One row: its messages.


def chat_of(row: Row, columns: ChatColumns) -> tuple[tuple[Message, ...], Mapping[str, Any]]:
    """The messages of a row, the last of them the assistant's, and the variables of the chat template."""
    is_chat = columns.is_chat
    if is_chat if is_chat is not None else row.get(columns.messages_key) is not None:
        given = value_at(row, (columns.messages_key,), "data.messages_key")
        if not isinstance(given, list):
            raise DataError(f"{columns.messages_key!r} is {type(given).__name__}; it must be a list of chat messages")
        messages = as_messages([with_content(message) for message in given], "the chat")
        tools = row.get(columns.tools_key)
        return checked(messages), {"tools": tools} if tools else {}
    prompt = as_messages(first_value(row, columns.prompt_path, PROMPTS, "prompt"))
    response = first_value(row, columns.response_path, RESPONSES, "response")
    if not isinstance(response, str):
        raise DataError(f"the response is {type(response).__name__}; it must be text")
    if prompt[-1]["role"] == "assistant":
        raise DataError("the prompt ends with an assistant turn; put whole chats into data.messages_key")
    return checked((*prompt, {"role": "assistant", "content": response})), {}


def with_content(message: Any) -> Any:
    """A call of tools has no content in some files; templates expect one."""
    calls = isinstance(message, Mapping) and message.get("tool_calls") and message.get("content") is None
    return {**message, "content": ""} if calls else message


def checked(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    for place, message in enumerate(messages):
        if message["role"] not in ROLES:
            raise DataError(f"message {place} has the role {message['role']!r}; roles are {', '.join(ROLES)}")
        if message["role"] == "assistant" and not message["content"].strip() and not message.get("tool_calls"):
            raise DataError(f"the assistant's message {place} is empty; write an answer, or remove the row")
    if all(message["role"] != "assistant" for message in messages):
        raise DataError("it has no assistant turn, so there is nothing to learn; add the answer, or remove the row")
    if messages[0]["role"] == "assistant":
        raise DataError("it begins with an assistant turn; put the prompt before it")
    return messages


def first_value(row: Row, path: tuple[str, ...] | None, places: Sequence[tuple[str, ...]], what: str) -> Any:
    """The value at `path`, or at the first of the usual places that the row has."""
    if path is not None:
        return value_at(row, path, f"data.{what}_key")
    for place in places:
        value = lookup(row, place)
        if value is not None:
            return value
    tried = ", ".join(".".join(place) for place in places)
    raise DataError(f"has no {what} (looked for {tried}); its columns are {columns_of(row)}. Set data.{what}_key")


def value_at(row: Row, path: tuple[str, ...], setting: str) -> Any:
    value = lookup(row, path)
    if value is None:
        raise DataError(f"has nothing under {'.'.join(path)!r}; its columns are {columns_of(row)}. Set {setting}")
    return value


def lookup(row: Row, path: Sequence[str]) -> Any:
    value: Any = row
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def columns_of(row: Row) -> str:
    return ", ".join(map(repr, row))


# One row: its text in pieces.


@dataclass(frozen=True)
class ChatPiece:
    text: str
    is_answer: bool


def chat_pieces(row: ChatRow, tokenizer: Tokenizer) -> list[ChatPiece]:
    """The rendered chat, divided into prompts and answers in turn."""
    messages = row.messages

    def render(count: int, answered: bool) -> str:
        return render_chat(
            messages[:count],
            tokenizer,
            answered=answered,
            variables=row.variables,
            template_key="model.custom_chat_template",
        )

    whole, done, pieces = render(len(messages), True), 0, []
    for place in (place for place, message in enumerate(messages) if message["role"] == "assistant"):
        before, after = render(place, False), render(place + 1, True)
        if not (whole.startswith(after) and after.startswith(before) and len(before) >= done):
            raise DataError(
                f"the chat template renders message {place} in another way when more messages follow, so its answer "
                "has no fixed place; end the chat after this turn, or set model.custom_chat_template to a template "
                "that only appends"
            )
        # white space after the token that ends the turn belongs to the template: no model generates it
        answer = after[len(before) :].rstrip()
        content = messages[place]["content"].strip()
        # a template without such a token gets that of the tokenizer
        end = (tokenizer.eos_token or "") if content and answer.endswith(content) else ""
        pieces += [ChatPiece(whole[done : len(before)], False), ChatPiece(answer + end, True)]
        done = len(before) + len(answer)
    return [*pieces, ChatPiece(whole[done:], False)]


# One row: its tokens.


def texts_of(pieces: Sequence[ChatPiece]) -> list[str]:
    """To tokenize: the text up to the end of each piece, and each piece alone."""
    ends = ["".join(piece.text for piece in pieces[: count + 1]) for count in range(len(pieces))]
    return [*ends, *(piece.text for piece in pieces)]


def encoded(index: int, pieces: Sequence[ChatPiece], tokens: Sequence[tuple[int, ...]]) -> Example:
    """As the whole text is tokenized, unless a token there crosses the border of an answer: then piece by piece, as in
    generation, where the prompt is tokenized alone."""
    up_to, alone = tokens[: len(pieces)], tokens[len(pieces) :]
    whole = up_to[-1]
    if all(whole[: len(part)] == part for part in up_to):
        ends = [len(part) for part in up_to]
        parts = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    else:
        parts = list(alone)
    mask = [piece.is_answer for piece, part in zip(pieces, parts, strict=True) for _ in part]
    mask[0] = False  # the first token has no context
    text = "".join(piece.text for piece in pieces)
    return Example(index, text, tuple(token for part in parts for token in part), tuple(mask))


def shortened(row: PlacedRow, example: Example, limit: int, truncation: str) -> Example:
    tokens, mask = example.tokens, example.mask
    if len(tokens) > limit:
        if truncation == "error":
            raise DataError(
                f"{row.place}: it has {len(tokens)} tokens, over data.max_length={limit}. Raise data.max_length, or "
                "set data.truncation to left or right"
            )
        tokens = TRUNCATIONS[truncation](tokens, limit)
        kept = mask[-limit:] if truncation == "left" else mask[:limit]
        mask = (False, *kept[1:])
    if not any(mask):
        raise DataError(
            f"{row.place}: data.truncation={truncation} at data.max_length={limit} leaves no token of an answer; raise "
            "data.max_length, or remove the row"
        )
    return Example(example.index, example.text, tokens, mask)


def pieces_of(row: ChatRow, tokenizer: Tokenizer) -> list[ChatPiece]:
    try:
        return chat_pieces(row, tokenizer)
    except DataError as error:
        raise DataError(f"{row.placed.place}: {error}") from error
