"""The address of a judge: its key, then the variable that the provider's SDK reads, then the provider's own."""

import pytest

from rloom.config.reward_sections import ApiJudge
from rloom.errors import RewardError
from rloom.rewards.judge.judge import JudgeReward
from rloom.rewards.judge.settings import PROVIDERS
from tests.judge_server import serving
from tests.judging import ENVIRONMENT, TYPES, quick_backoff, values_of, worth

VARIABLES = [(provider, name) for provider, kind in PROVIDERS.items() for name in kind.address_variables]


def judge(provider: str, base_url: str | None = None, **variables: str) -> JudgeReward:
    settings = ApiJudge(type=provider, base_url=base_url, cache_dir=None)
    return JudgeReward(settings, environment=ENVIRONMENT | variables, backoff=quick_backoff())


@pytest.mark.parametrize(("provider", "variable"), VARIABLES)
def test_the_variables_are_those_of_the_providers_sdks(provider: str, variable: str) -> None:
    assert variable in (
        *("DASHSCOPE_BASE_URL", "DASHSCOPE_HTTP_BASE_URL", "OPENAI_BASE_URL"),
        *("GOOGLE_GEMINI_BASE_URL", "ANTHROPIC_BASE_URL"),
    )
    assert judge(provider, **{variable: "http://127.0.0.1:9/there"}).base_url == "http://127.0.0.1:9/there"


@pytest.mark.parametrize(
    ("provider", "given", "called"),
    [
        ("dashscope", None, "https://dashscope.aliyuncs.com/compatible-mode/v1"),
        (
            "dashscope",
            "https://w.ap-southeast-1.maas.aliyuncs.com/api/v1/",
            "https://w.ap-southeast-1.maas.aliyuncs.com/compatible-mode/v1",
        ),
        (
            "dashscope",
            "https://dashscope-intl.aliyuncs.com/compatible-mode/v1",
            "https://dashscope-intl.aliyuncs.com/compatible-mode/v1",
        ),
        ("dashscope", "http://gateway/v1", "http://gateway/v1"),
        ("gemini", None, "https://generativelanguage.googleapis.com/v1beta/openai"),
        ("gemini", "http://proxy/google", "http://proxy/google/v1beta/openai"),
        ("gemini", "http://proxy/v1beta", "http://proxy/v1beta/openai"),
        ("gemini", "http://proxy/v1beta/openai/", "http://proxy/v1beta/openai"),
        ("openai", None, "https://api.openai.com/v1"),
        ("openai", "http://proxy/api/v1", "http://proxy/api/v1"),
        ("claude", None, "https://api.anthropic.com"),
    ],
)
def test_a_native_address_stands_for_the_compatible_api_beside_it(
    provider: str, given: str | None, called: str
) -> None:
    assert judge(provider, given).called_url == called


@pytest.mark.parametrize("provider", TYPES)
def test_a_server_named_by_the_variable_scores_the_answers(provider: str) -> None:
    with serving() as server:
        variable = PROVIDERS[provider].address_variables[0]
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
