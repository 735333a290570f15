"""From chat messages to the text and the tokens of a prompt.

A tokenizer without a chat template (a base model) gets a plain format instead:

    System: You are terse.

    User: What is 2 + 3?

    Assistant:

with the tokenizer's beginning-of-sequence token in front, if it has one. Templates write that token themselves, so
rendered text is tokenized without adding special tokens.
"""

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from inspect import signature
from typing import Any, Protocol

from jinja2 import TemplateError

from rloom.errors import DataError
from rloom.types import Message

log = logging.getLogger(__name__)

TEMPLATE_KEY, VARIABLES_KEY = "actor_rollout_ref.model.custom_chat_template", "data.apply_chat_template_kwargs"
NO_NAMES = ("true", "false", "none", "True", "False", "None", "not")  # Jinja reads them as constants and an operator


class Tokenizer(Protocol):
    """The part of a Hugging Face tokenizer that rloom uses."""

    name_or_path: str
    chat_template: Any
    bos_token: str | None
    eos_token: str | None
    eos_token_id: int | None
    special_tokens_map: Mapping[str, Any]  # a chat template may use any of them

    def __call__(self, text: list[str], *, add_special_tokens: bool, verbose: bool) -> Mapping[str, Any]: ...

    def get_vocab(self) -> Mapping[str, int]: ...

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        **variables: Any,
    ) -> Any: ...


def as_messages(prompt: Any, what: str = "the prompt") -> tuple[Message, ...]:
    """Check a prompt of a data file. A plain string is one user message."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise DataError(f"{what} is an empty string")
        return ({"role": "user", "content": prompt},)
    if not isinstance(prompt, list | tuple):
        raise DataError(f"{what} is {type(prompt).__name__}; it must be a string or a list of chat messages")
    if not prompt:
        raise DataError(f"{what} is an empty list of messages")
    return tuple(_as_message(place, message) for place, message in enumerate(prompt))


def as_prompt(prompt: Any) -> tuple[Message, ...]:
    """Check the messages before an answer: the last one is not the assistant's, and has a content."""
    messages = as_messages(prompt)
    if messages[-1]["role"] == "assistant":
        raise DataError("the last message of the prompt is the assistant's, which the policy has to write; remove it")
    if not messages[-1]["content"].strip():
        raise DataError(f"message {len(messages) - 1} of the prompt, the last one, has an empty content")
    return messages


def set_variables(tokenizer: Tokenizer, variables: Mapping[str, Any], template_key: str = TEMPLATE_KEY) -> None:
    """Make these variables defaults of the tokenizer's chat template.

    They are a part of the template, so that all who render with this tokenizer have them, such as an agent in another
    process. A call that gives one itself is stronger.
    """
    template = tokenizer.chat_template
    if variables and template is None:
        raise DataError(
            f"{VARIABLES_KEY}={dict(variables)}: the tokenizer {tokenizer.name_or_path} has no chat template that "
            f"could read them; remove the key, or set {template_key}"
        )
    whole = "\n".join(template.values()) if isinstance(template, Mapping) else template
    defaults = list[str]()
    for name, value in variables.items():
        if name == "messages" or name in signature(tokenizer.apply_chat_template).parameters:
            raise DataError(
                f"{VARIABLES_KEY}.{name}: an argument of transformers' apply_chat_template that rloom gives itself, "
                f"not a variable of a template; remove the key, or set {template_key} for another template"
            )
        if not name.isidentifier() or name in NO_NAMES or not re.search(rf"\b{name}\b", whole):
            log.warning(f"Note: {VARIABLES_KEY}.{name} has no effect: the chat template does not read it")
        elif name in tokenizer.special_tokens_map:  # transformers gives these in every call
            defaults.append(f"{{%- set {name} = {value!r} %}}\n")
        else:
            defaults.append(f"{{%- set {name} = {name} | default({value!r}) %}}\n")
    if defaults:
        tokenizer.chat_template = _begun_with("".join(defaults), template)


def _begun_with(start: str, template: Any) -> Any:
    """A template of several, by name, begins so in each."""
    if isinstance(template, Mapping):
        return {name: _begun_with(start, one) for name, one in template.items()}
    return f"{start}{template}"


def render_chat(
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    *,
    answered: bool = False,
    variables: Mapping[str, Any] | None = None,
    template_key: str = TEMPLATE_KEY,
) -> str:
    """The text up to the start of the assistant's answer. `answered`: up to the end of the last message instead.

    `variables`: further ones of the template, such as its tools.
    """
    if tokenizer.chat_template is None:
        _warn_of_plain_format(tokenizer.name_or_path, template_key)
        return (tokenizer.bos_token or "") + _plain_format(messages, answered)
    try:
        text: str = tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            add_generation_prompt=not answered,
            tokenize=False,
            **(variables or {}),
        )
    except (TemplateError, TypeError, ValueError) as error:
        # templates are part of the model, and raise errors to refuse messages
        raise DataError(
            f"the chat template refuses the messages ({error}); change the messages, or set {template_key}"
        ) from error
    return text


def tokenize(texts: Sequence[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Tokens of rendered texts, which already contain their special tokens."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, verbose=False)
    return [tuple(ids) for ids in encoded["input_ids"]]


def stop_token_ids(tokenizer: Tokenizer, generation_config_eos: int | list[int] | None) -> tuple[int, ...]:
    """Tokens that end an answer: of the tokenizer, then of the model's generation config, which for many chat models
    is the only place of the end-of-turn token."""
    configured = [generation_config_eos] if isinstance(generation_config_eos, int) else generation_config_eos or []
    candidates = [tokenizer.eos_token_id, *configured]
    return tuple(dict.fromkeys(token for token in candidates if token is not None))


def _as_message(place: int, message: Any) -> Message:
    if not isinstance(message, Mapping):
        raise DataError(f"message {place} of the prompt is {type(message).__name__}; it must have a role and a content")
    for key in ("role", "content"):
        if message.get(key) is None:
            raise DataError(f"message {place} of the prompt has no {key}; its keys are {', '.join(map(repr, message))}")
    if not isinstance(message["role"], str):
        raise DataError(f"message {place} of the prompt has a role of type {type(message['role']).__name__}, not text")
    return {**message, "content": _as_text(place, message["content"])}


def _as_text(place: int, content: Any) -> str:
    """A content is text, or a list of text parts: [{"type": "text", "text": "..."}]."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"message {place} of the prompt has a content of type {type(content).__name__}, not text")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            raise DataError(f"message {place} of the prompt has a part that is not text; only text is supported")
    return "".join(part["text"] for part in content)


def _plain_format(messages: Sequence[Message], answered: bool) -> str:
    turns = [f"{message['role'].capitalize()}: {message['content']}" for message in messages]
    return "\n\n".join(turns if answered else [*turns, "Assistant:"])


@cache  # once per tokenizer, not once per row
def _warn_of_plain_format(name: str, template_key: str) -> None:
    log.warning(
        "the tokenizer %s has no chat template: prompts are formatted as 'User: ...', 'Assistant:'. "
        "Set %s to use another format",
        name or "of the model",
        template_key,
    )
