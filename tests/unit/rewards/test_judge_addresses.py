"""The address of a judge: its key, then the variable of the provider's SDK, then the provider's own."""

import os
from importlib import import_module

import pytest

from rloom.config.reward_sections import ApiJudge
from rloom.errors import RewardError
from rloom.rewards.judge.judge import JudgeReward
from rloom.rewards.judge.settings import ADDRESS_VARIABLES
from tests.judge_server import serving
from tests.judging import ENVIRONMENT, TYPES, quick_backoff, values_of, worth

VARIABLES = [(provider, name) for provider, names in ADDRESS_VARIABLES.items() for name in names]


def sdk_address(provider: str) -> str:
    """Imported here: every process of `make test` imports this file, and the four take seconds."""
    if provider == "openai":
        return str(import_module("openai").OpenAI(api_key="k").base_url)
    if provider == "claude":
        return str(import_module("anthropic").Anthropic(api_key="k").base_url)
    if provider == "gemini":
        client = import_module("google.genai").Client(api_key="k", vertexai=False)
        return str(client._api_client._http_options.base_url)
    return str(import_module("dashscope").AsyncClient(api_key="k", protocol="native").config.base_url)


def judge(provider: str, base_url: str | None = None, **variables: str) -> JudgeReward:
    settings = ApiJudge(type=provider, base_url=base_url, cache_dir=None)
    return JudgeReward(settings, environment=ENVIRONMENT | variables, backoff=quick_backoff())


@pytest.mark.parametrize(("provider", "variable"), VARIABLES)
def test_the_sdk_of_the_provider_reads_the_same_variable(
    provider: str, variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _, name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv(variable, "http://127.0.0.1:9/there")
    assert sdk_address(provider).rstrip("/") == "http://127.0.0.1:9/there"
    assert judge(provider, **{variable: os.environ[variable]}).base_url == "http://127.0.0.1:9/there"


@pytest.mark.parametrize("provider", TYPES)
def test_a_server_named_by_the_variable_scores_the_answers(provider: str) -> None:
    with serving() as server:
        variable = ADDRESS_VARIABLES[provider][0]
        assert values_of(judge(provider, **{variable: server.base_url(provider)}), [(worth(10), worth(1))]) == [
            [1.0, 0.0]
        ]


def test_the_key_overrides_the_variable() -> None:
    both = judge("openai", "http://127.0.0.1:1/v1", OPENAI_BASE_URL="http://127.0.0.1:2/v1")
    assert both.base_url == "http://127.0.0.1:1/v1"
    assert judge("openai").base_url == "https://api.openai.com/v1"


def test_a_local_server_of_the_variable_needs_no_key() -> None:
    local = ApiJudge(type="openai", cache_dir=None)
    JudgeReward(local, environment={"OPENAI_BASE_URL": "http://127.0.0.1:1/v1"}).check()
    with pytest.raises(RewardError, match="needs a key"):
        JudgeReward(local, environment={}).check()


def test_a_variable_with_a_password_is_refused_without_its_value() -> None:
    with pytest.raises(RewardError, match="OPENAI_BASE_URL contains credentials") as refused:
        judge("openai", OPENAI_BASE_URL="http://user:secret@host/v1").check()
    assert "secret" not in str(refused.value)
    with pytest.raises(RewardError, match="ANTHROPIC_BASE_URL is not an address"):
        judge("claude", ANTHROPIC_BASE_URL="localhost:8000").check()
