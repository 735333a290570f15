"""The keys `reward_model.api.*`, as this package reads them, and the variables for the address of an API. It imports
no configuration; the section fits this."""

from collections.abc import Mapping
from typing import Protocol
from urllib.parse import urlsplit

KEY = "reward_model.api"  # for messages


class JudgeSettings(Protocol):
    @property
    def type(self) -> str: ...

    @property
    def model(self) -> str | None: ...

    @property
    def base_url(self) -> str | None: ...

    @property
    def api_key_env(self) -> str | None: ...

    @property
    def preset(self) -> str | None: ...

    @property
    def language(self) -> str: ...

    @property
    def system_prompt(self) -> str | None: ...

    @property
    def scoring_prompt(self) -> str | None: ...

    @property
    def mode(self) -> str: ...

    @property
    def min_score(self) -> float: ...

    @property
    def max_score(self) -> float: ...

    @property
    def temperature(self) -> float | None: ...

    @property
    def max_tokens(self) -> int: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def requests_per_minute(self) -> int | None: ...

    @property
    def tokens_per_minute(self) -> int | None: ...

    @property
    def timeout_s(self) -> float: ...

    @property
    def max_retries(self) -> int: ...

    @property
    def cache_dir(self) -> str | None: ...

    @property
    def input_price(self) -> float | None: ...

    @property
    def output_price(self) -> float | None: ...

    @property
    def budget(self) -> float | None: ...


ADDRESS_VARIABLES = {  # provider -> variables, the first that is set
    "dashscope": ("DASHSCOPE_BASE_URL", "DASHSCOPE_HTTP_BASE_URL"),
    "openai": ("OPENAI_BASE_URL",),
    "gemini": ("GOOGLE_GEMINI_BASE_URL",),
    "claude": ("ANTHROPIC_BASE_URL",),
}


def address_in(environment: Mapping[str, str], provider: str) -> str | None:
    return next((environment[name] for name in set_variables(environment, provider)), None)


def set_variables(environment: Mapping[str, str], provider: str) -> list[str]:
    return [name for name in ADDRESS_VARIABLES[provider] if environment.get(name)]


def variable_fault(environment: Mapping[str, str], provider: str) -> str | None:
    """Messages contain the address, so it must not contain a password. The value is not repeated in the sentence."""
    for name in set_variables(environment, provider)[:1]:
        parts = urlsplit(environment[name])
        if parts.username is not None or parts.password is not None or parts.query:
            return f"{name} contains credentials or a query; put the key into the variable of the API key"
        if parts.scheme not in ("http", "https") or not parts.netloc:
            return f"{name} is not an address; use one such as http://127.0.0.1:8000/v1, or unset it"
    return None
