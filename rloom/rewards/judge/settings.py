"""What a judge is given: the keys `reward_model.api.*`, the providers, and the variables of the environment with a
provider's address and key. It imports no configuration; the section fits `JudgeSettings`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol
from urllib.parse import quote, urlsplit

KEY = "reward_model.api"  # for messages


class JudgeSettings(Protocol):
    @property
    def type(self) -> str: ...

    @property
    def language(self) -> str: ...

    @property
    def mode(self) -> str: ...

    model: str | None
    base_url: str | None
    api_key_env: str | None
    preset: str | None
    system_prompt: str | None
    scoring_prompt: str | None
    min_score: float
    max_score: float
    temperature: float | None
    max_tokens: int
    concurrency: int
    requests_per_minute: int | None
    tokens_per_minute: int | None
    timeout_s: float
    max_retries: int
    cache_dir: str | None
    input_price: float | None
    output_price: float | None
    budget: float | None


@dataclass(frozen=True)
class Provider:
    model: str  # by default
    base_url: str  # by default
    address_variables: tuple[str, ...]  # the first that is set
    key_variables: tuple[str, ...]  # the first that is set
    header_variables: Mapping[str, str] = field(default_factory=dict)  # variable -> header that gets its value
    needs_key_at_other_addresses: bool = True
    native: tuple[str, ...] = ()  # ends of addresses whose API is the provider's own
    compatible: str = ""  # what replaces them: the path of the OpenAI-compatible API on the same host
    has_chat_completions: bool = True  # False: Anthropic's messages
    has_schemas: bool = True  # False: JSON mode; the prompt has the form
    has_closed_schemas: bool = True  # takes `additionalProperties`
    ends_with_quota: bool = False  # HTTP 429 with insufficient_quota does not end by waiting

    def called(self, base_url: str) -> str:
        """The address that is called for this one. Users know and set the provider's native addresses."""
        if self.compatible and not base_url.endswith(self.compatible):
            for end in self.native:
                if base_url.endswith(end):
                    return base_url.removesuffix(end) + self.compatible
        return base_url


PROVIDERS = {
    "dashscope": Provider(
        "qwen-plus",
        "https://dashscope.aliyuncs.com/api/v1",
        ("DASHSCOPE_BASE_URL", "DASHSCOPE_HTTP_BASE_URL"),
        ("DASHSCOPE_API_KEY",),
        {"DASHSCOPE_WORKSPACE": "X-DashScope-WorkSpace"},
        native=("/api/v1",),
        compatible="/compatible-mode/v1",
        has_schemas=False,  # few of its models have them
    ),
    "openai": Provider(
        "gpt-4o-mini",
        "https://api.openai.com/v1",
        ("OPENAI_BASE_URL",),
        ("OPENAI_API_KEY",),
        {"OPENAI_ORG_ID": "OpenAI-Organization", "OPENAI_PROJECT_ID": "OpenAI-Project"},
        needs_key_at_other_addresses=False,
        ends_with_quota=True,  # DashScope has the same code for a rate of tokens
    ),
    "gemini": Provider(
        "gemini-1.5-flash",
        "https://generativelanguage.googleapis.com",
        ("GOOGLE_GEMINI_BASE_URL",),
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        native=("/v1beta", "/v1", ""),
        compatible="/v1beta/openai",
        has_closed_schemas=False,
    ),
    "claude": Provider(
        "claude-3-haiku-20240307",
        "https://api.anthropic.com",
        ("ANTHROPIC_BASE_URL",),
        ("ANTHROPIC_API_KEY", "CLAUDE_API_KEY"),
        has_chat_completions=False,
    ),
}


def address_in(environment: Mapping[str, str], provider: str) -> str | None:
    return next((environment[name] for name in set_variables(environment, provider)), None)


def set_variables(environment: Mapping[str, str], provider: str) -> list[str]:
    return [name for name in PROVIDERS[provider].address_variables if environment.get(name)]


def variable_fault(environment: Mapping[str, str], provider: str) -> str | None:
    """Messages contain the address, so it must not contain a password. The value is not repeated in the sentence."""
    for name in set_variables(environment, provider)[:1]:
        parts = urlsplit(environment[name])
        if parts.username is not None or parts.password is not None or parts.query:
            return f"{name} contains credentials or a query; put the key into the variable of the API key"
        if parts.scheme not in ("http", "https") or not parts.netloc:
            return f"{name} is not an address; use one such as http://127.0.0.1:8000/v1, or unset it"
    return None


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
