"""The providers by name. A provider's SDK is imported when its client is made."""

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from rloom.errors import RewardError
from rloom.extras import install_command
from rloom.rewards.judge.providers.base import Endpoint, Provider
from rloom.rewards.judge.settings import KEY


@dataclass(frozen=True)
class ProviderKind:
    library: str  # the SDK, as imported
    model: str  # by default
    base_url: str
    key_variables: tuple[str, ...]  # the first that is set
    make: Callable[[Endpoint], Provider]
    needs_key_at_other_addresses: bool = True


def make_openai(endpoint: Endpoint) -> Provider:
    from rloom.rewards.judge.providers.openai import OpenAIProvider

    return OpenAIProvider(endpoint)


def make_claude(endpoint: Endpoint) -> Provider:
    from rloom.rewards.judge.providers.claude import ClaudeProvider

    return ClaudeProvider(endpoint)


def make_gemini(endpoint: Endpoint) -> Provider:
    from rloom.rewards.judge.providers.gemini import GeminiProvider

    return GeminiProvider(endpoint)


def make_dashscope(endpoint: Endpoint) -> Provider:
    from rloom.rewards.judge.providers.dashscope import DashScopeProvider

    return DashScopeProvider(endpoint)


PROVIDERS = {
    "dashscope": ProviderKind(
        "dashscope", "qwen-plus", "https://dashscope.aliyuncs.com/api/v1", ("DASHSCOPE_API_KEY",), make_dashscope
    ),
    "openai": ProviderKind(
        "openai",
        "gpt-4o-mini",
        "https://api.openai.com/v1",
        ("OPENAI_API_KEY",),
        make_openai,
        needs_key_at_other_addresses=False,
    ),
    "gemini": ProviderKind(
        "google.genai",
        "gemini-1.5-flash",
        "https://generativelanguage.googleapis.com",
        ("GEMINI_API_KEY", "GOOGLE_API_KEY"),
        make_gemini,
    ),
    "claude": ProviderKind(
        "anthropic",
        "claude-3-haiku-20240307",
        "https://api.anthropic.com",
        ("ANTHROPIC_API_KEY", "CLAUDE_API_KEY"),
        make_claude,
    ),
}


def check_library(name: str) -> None:
    library = PROVIDERS[name].library
    try:
        importlib.import_module(library)
    except ImportError as error:
        raise RewardError(
            f"{KEY}.type={name} needs the library {library}, which is not installed ({error}): "
            f"{install_command('judge')}"
        ) from error
