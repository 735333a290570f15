"""The environment variables that the providers' own SDKs read for the address of their API. Imports no SDK."""

from collections.abc import Mapping
from urllib.parse import urlsplit

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
