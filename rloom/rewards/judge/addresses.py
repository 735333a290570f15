"""The environment variables that the providers' own SDKs read for the address of their API. Imports no SDK."""

from collections.abc import Mapping

ADDRESS_VARIABLES = {  # provider -> variables, the first that is set
    "dashscope": ("DASHSCOPE_BASE_URL", "DASHSCOPE_HTTP_BASE_URL"),
    "openai": ("OPENAI_BASE_URL",),
    "gemini": ("GOOGLE_GEMINI_BASE_URL",),
    "claude": ("ANTHROPIC_BASE_URL",),
}


def address_in(environment: Mapping[str, str], provider: str) -> str | None:
    return next((environment[name] for name in ADDRESS_VARIABLES[provider] if environment.get(name)), None)
