"""The key of the API: found in the environment, never shown."""

import logging
import re
from collections.abc import Mapping, Sequence
from urllib.parse import quote

HIDDEN = "[key]"
# What providers and HTTP libraries write around a key. An error message may repeat a part of a key.
PATTERNS = (
    re.compile(
        r"(?i)((?:authorization|x-api-key|x-goog-api-key|api-key)['\"]?\s*[:=,]\s*(?:b?['\"])?(?:bearer\s+)?)[^\s'\",]+"
    ),
    re.compile(r"(?i)(bearer\s+)[^\s'\",]+"),
    re.compile(r"(?i)([?&](?:api_?key|key|token)=)[^\s&'\"]+"),
    re.compile(r"()\bsk-[\w*-]{4,}"),
    re.compile(r"()\bAIza[\w*-]{8,}"),
)
# They write addresses, headers or bodies of requests at the levels below.
LIBRARY_LOGGERS = ("openai", "anthropic", "google_genai", "dashscope", "httpx", "httpx2", "httpcore", "httpcore2")
SHORTEST_KEY = 6  # a placeholder such as "none" also occurs in ordinary text


class Secret:
    """A key that is not shown when it is printed, logged or formatted."""

    __slots__ = ("_value",)

    def __init__(self, value: str) -> None:
        self._value = value

    def reveal(self) -> str:
        return self._value

    def __repr__(self) -> str:
        return f"Secret({HIDDEN})"


def find_key(variables: Sequence[str], environment: Mapping[str, str]) -> Secret | None:
    """The value of the first of these variables that is set."""
    values = (environment.get(name, "").strip() for name in variables)
    found = next((value for value in values if value), None)
    return None if found is None else Secret(found)


def without_key(text: str, key: Secret | None) -> str:
    if key is not None and len(key.reveal()) >= SHORTEST_KEY:
        for form in (key.reveal(), quote(key.reveal(), safe="")):
            text = text.replace(form, HIDDEN)
    return text


def redact(text: str, key: Secret | None) -> str:
    """`text` without the key, and without anything that looks like one. Before it is shortened: a part is a key too."""
    text = without_key(text, key)
    for pattern in PATTERNS:
        text = pattern.sub(rf"\g<1>{HIDDEN}", text)
    return text


def silence_libraries() -> None:
    """Every failed call becomes a reason or a metric, so the logs of the SDKs are not needed for that."""
    for name in LIBRARY_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
