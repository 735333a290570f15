"""Prompts with variables: `{prompt}`, `{response}`, `{ground_truth}`."""

import json
import re
from collections.abc import Mapping
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.judge.settings import KEY
from rloom.types import Message, Sample

VARIABLES = ("prompt", "response", "ground_truth")
# {name} is a variable and {{name}} is the text {name}. Other braces, as of JSON or \boxed{42}, are text.
FIELD = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")
TAG = re.compile(r"<(/?)([A-Za-z][\w.-]*)((?:\s[^<>]*)?)>")  # slash, name, attributes


class MissingValue(Exception):
    """A row has no value for a variable of the prompt."""


def check_template(template: str, name: str, *, needs_response: bool) -> None:
    unknown = [variable for variable in variables_of(template) if variable not in VARIABLES]
    if unknown:
        raise RewardError(
            f"{name}: there is no variable {{{unknown[0]}}}; use {', '.join(f'{{{known}}}' for known in VARIABLES)}, "
            f"or write {{{{{unknown[0]}}}}} for the text {{{unknown[0]}}}"
        )
    if needs_response and "response" not in variables_of(template):
        raise RewardError(f"{name}: the judge would not see the answer; add {{response}} to the prompt")


def variables_of(template: str) -> list[str]:
    return [match.group(2) for match in FIELD.finditer(template) if match.group(2)]


def enclosing_tags(template: str) -> set[str]:
    """The names of the tags, such as `<solution>` and `</solution>`, between which a variable stands."""
    variables = [match.start() for match in FIELD.finditer(template) if match.group(2)]
    opened: dict[str, int] = {}  # name -> where it was opened first
    names: set[str] = set()
    for tag in TAG.finditer(template):
        slash, name, _ = tag.groups()
        if not slash:
            opened.setdefault(name, tag.end())
            continue
        begin = opened.pop(name, tag.end())
        if any(begin <= variable < tag.start() for variable in variables):
            names.add(name)
    return names


def with_marks(template: str, names: set[str], mark: str) -> str:
    """`<solution>` becomes `<solution-mark>`."""

    def marked(tag: re.Match[str]) -> str:
        slash, name, attributes = tag.groups()
        return f"<{slash}{name}-{mark}{attributes}>" if name in names else tag.group()

    return TAG.sub(marked, template)


def fill(template: str, values: Mapping[str, str | None]) -> str:
    """Braces within the values are text: the template is read once."""

    def replaced(match: re.Match[str]) -> str:
        literal, variable = match.groups()
        if literal:
            return f"{{{literal}}}"
        value = values[variable]
        if value is None:
            raise MissingValue(
                f"the prompt of the judge has {{{variable}}} and the row has none; add it to the data, or remove it "
                f"from {KEY}.scoring_prompt"
            )
        return value

    return FIELD.sub(replaced, template)


def with_line_breaks(text: str) -> str:
    r"""A prompt of one line, as typed in a shell, may have `\n` for a line break, and `\\n` for these characters."""
    if "\n" in text:
        return text
    return re.sub(r"\\(\\n|n)", lambda match: "\n" if match.group(1) == "n" else r"\n", text)


def values_of(sample: Sample, response: str) -> dict[str, str | None]:
    return {
        "prompt": prompt_of(sample),
        "response": response,
        "ground_truth": as_text(sample.ground_truth),
    }


def prompt_of(sample: Sample) -> str:
    return conversation(sample.messages) if sample.messages else sample.prompt


def as_text(value: Any) -> str | None:
    if value is None or value == "":
        return None
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def conversation(messages: tuple[Message, ...]) -> str:
    """The words of a single message, or of several with their roles; without the tokens of a chat template."""
    contents = [content_of(message) for message in messages]
    if len(messages) == 1:
        return contents[0]
    return "\n\n".join(f"{message['role']}: {text}" for message, text in zip(messages, contents, strict=True))


def content_of(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, list):  # parts; a judge gets those with text
        return "\n".join(str(part["text"]) for part in content if isinstance(part, dict) and "text" in part)
    return str(content or "")
