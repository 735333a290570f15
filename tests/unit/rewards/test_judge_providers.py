"""The four providers: a local server that speaks their protocols gets what they document."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from rloom.config.reward_sections import ApiJudge
from rloom.rewards.judge.api import ChatRequest, chat_body
from rloom.rewards.judge.judge import JudgeReward
from rloom.rewards.judge.prompts import SCORE_SCHEMA
from rloom.rewards.judge.settings import PROVIDERS
from rloom.types import Score
from tests.judge_server import KEY, Body, JudgeServer, Received, faults_in_turn, serving
from tests.judging import ENVIRONMENT, TYPES, judge_for, scores_of, values_of, worth

SYSTEM = "You are a teacher."
SCORING = "Question: {prompt}\nAnswer: {response}\nTruth: {ground_truth}"
USER = (
    "Question: What is 6 times 7?\nAnswer: It is 42. [worth 7]\nTruth: 42\n\nGive one score from 1 to 10. Answer with "
    'JSON only, in this form: {"reason": "one or two sentences", "score": a number}'
)


def sent(type: str, **keys: Any) -> tuple[JudgeServer, Body]:
    """The server, and the only request it got."""
    with serving() as server:
        own = {"system_prompt": SYSTEM, "scoring_prompt": SCORING, "max_tokens": 99, "temperature": 0.25, **keys}
        [[score]] = scores_of(judge_for(server, type, **own), [(worth(7, ground_truth="42"),)])
    assert score == Score(6 / 9, detail="7 of 1 to 10: as marked")
    [request] = server.received
    return server, request.body


@pytest.mark.parametrize("type", TYPES)
def test_scores_from_1_to_10_become_0_to_1(type: str) -> None:
    with serving() as server:
        found = values_of(judge_for(server, type), [(worth(1), worth(5.5)), (worth(10),)])
    assert found == [[0.0, 0.5], [1.0]]
    assert len(server.received) == 3


def test_openai_gets_messages_and_a_json_schema() -> None:
    server, body = sent("openai")
    assert server.received[0].path == "/v1/chat/completions"
    assert body == {
        "model": "gpt-4o-mini",
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}],
        "temperature": 0.25,
        "max_tokens": 99,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "verdict", "strict": True, "schema": SCORE_SCHEMA},
        },
    }


def test_claude_gets_a_tool_that_it_has_to_use() -> None:
    server, body = sent("claude")
    assert server.received[0].path == "/v1/messages"
    [tool] = body.pop("tools")
    assert tool["input_schema"] == SCORE_SCHEMA and body.pop("tool_choice") == {"type": "tool", "name": tool["name"]}
    assert body == {
        "model": "claude-3-haiku-20240307",
        "system": SYSTEM,
        "messages": [{"role": "user", "content": USER}],
        "temperature": 0.25,
        "max_tokens": 99,
    }


OPEN_SCHEMA = {
    "type": "object",
    "properties": {"reason": {"type": "string"}, "score": {"type": "number"}},
    "required": ["reason", "score"],
}
SCHEMA_OF_GEMINI = {"type": "json_schema", "json_schema": {"name": "verdict", "strict": True, "schema": OPEN_SCHEMA}}


@pytest.mark.parametrize(
    ("type", "path", "model", "form"),
    [
        ("gemini", "/v1beta/openai/chat/completions", "gemini-1.5-flash", SCHEMA_OF_GEMINI),
        ("dashscope", "/compatible-mode/v1/chat/completions", "qwen-plus", {"type": "json_object"}),
    ],
)
def test_gemini_and_dashscope_are_called_at_their_compatible_apis(type: str, path: str, model: str, form: Body) -> None:
    server, body = sent(type)
    assert server.received[0].path == path
    assert body == {
        "model": model,
        "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}],
        "temperature": 0.25,
        "max_tokens": 99,
        "response_format": form,
    }


def test_gemini_gets_no_closed_schema_at_any_depth() -> None:
    with serving() as server:
        values_of(judge_for(server, "gemini", mode="groupwise"), [(worth(10), worth(1))])
    assert "additionalProperties" not in json.dumps(server.received[0].body)


@pytest.mark.parametrize("type", TYPES)
def test_headers_are_those_that_the_provider_documents(type: str) -> None:
    variables = {"OPENAI_ORG_ID": "org-1", "OPENAI_PROJECT_ID": "proj-2", "DASHSCOPE_WORKSPACE": "ws-3"}
    with serving() as server:
        settings = ApiJudge(type=type, base_url=server.base_url(type), cache_dir=None)
        values_of(JudgeReward(settings, environment=ENVIRONMENT | variables), [(worth(7),)])
    headers = server.received[0].headers
    own = {
        "openai": {"openai-organization": "org-1", "openai-project": "proj-2"},
        "dashscope": {"x-dashscope-workspace": "ws-3"},
        "claude": {"x-api-key": KEY, "anthropic-version": "2023-06-01"},
        "gemini": {},
    }
    expected = own[type] | ({} if type == "claude" else {"authorization": f"Bearer {KEY}"})
    names = {name for headers_of in own.values() for name in headers_of} | {"authorization"}
    assert {name: value for name, value in headers.items() if name in names} == expected
    assert headers["content-type"] == "application/json"


def test_only_openais_own_api_gets_the_new_name_of_the_limit() -> None:
    request = ChatRequest("m", "s", "u", None, 99, None)
    kind = PROVIDERS["openai"]
    assert chat_body(request, kind, "https://api.openai.com/v1")["max_completion_tokens"] == 99
    assert chat_body(request, kind, "http://127.0.0.1:8000/v1")["max_tokens"] == 99


@pytest.mark.parametrize("type", TYPES)
def test_model_and_temperature_are_settings(type: str) -> None:
    _, body = sent(type, model="my-judge.2", temperature=None)
    assert body["model"] == "my-judge.2"
    assert "temperature" not in body


@pytest.mark.parametrize("type", TYPES)
def test_tokens_and_cost_are_counted(type: str) -> None:
    with serving() as server:
        reward = judge_for(server, type, input_price=2.0, output_price=10.0)
        scores_of(reward, [(worth(3), worth(4))])
    found = dict(reward.metrics())
    assert found.pop("latency_s") > 0
    # 2 × 120 tokens at 2 and 2 × 20 at 10 a million
    assert found.pop("cost") == pytest.approx(0.00048 + 0.0004)
    assert found == {
        "requests": 2,
        "cached": 0,
        "retries": 0,
        "failed": 0,
        "input_tokens": 240,
        "output_tokens": 40,
    }
    assert set(reward.metrics().values()) == {0}  # of the calls since the last `metrics`


def failures(type: str, *faults: str, **keys: Any) -> tuple[JudgeServer, list[str]]:
    """One sample after the other, each judged until it failed: their reasons."""
    with serving(plan=faults_in_turn(*faults)) as server:
        samples = tuple(worth(3, prompt=f"Question {number}") for number in range(len(faults)))
        reward = judge_for(server, type, concurrency=1, **keys)
        [found] = scores_of(reward, [samples])
    reasons = [score.reason for score in found if score.reason is not None]
    assert all(score.value == pytest.approx(2 / 9) for score in found[len(reasons) :])
    return server, [reason.removeprefix(f"{type} judge: ") for reason in reasons]


@pytest.mark.parametrize("type", TYPES)
def test_a_request_that_is_refused_is_not_repeated(type: str) -> None:
    # a 400 may be about structured output, so it is sent once more without
    server, reasons = failures(type, "400", "400", "401", "403", "404")
    assert [reason[:10] for reason in reasons] == ["HTTP 400: ", "HTTP 401: ", "HTTP 403: ", "HTTP 404: "]
    assert all("not now" in reason and "attempts" not in reason for reason in reasons)
    assert len(server.received) == 5 + 1


@pytest.mark.parametrize("type", TYPES)
def test_a_fault_that_passes_is_repeated(type: str) -> None:
    faults = [
        fault for name in ("408", "409", "429", "429 date", "500", "malformed", "cut") for fault in (name, name, "")
    ]
    with serving(plan=faults_in_turn(*faults)) as server:
        reward = judge_for(server, type, concurrency=1)
        found = values_of(reward, [tuple(worth(score) for score in range(1, 8))])
    assert found == [[pytest.approx(score / 9) for score in range(7)]]
    metrics = reward.metrics()
    assert (metrics["requests"], metrics["retries"], metrics["failed"]) == (21, 14, 0) and len(server.received) == 21


@pytest.mark.parametrize("type", TYPES)
def test_a_fault_that_stays_is_a_failure_with_its_reason(type: str) -> None:
    faults = [fault for fault in ("429", "500", "malformed", "cut") for _ in range(3)]
    _, reasons = failures(type, *faults, max_retries=2)
    assert all(reason.endswith(" (3 attempts)") for reason in reasons)
    patterns = ("HTTP 429: .*not now", "HTTP 500: .*not now", "in the answer|not valid JSON", "connection failed: ")
    assert len(reasons) == 4
    assert all(re.search(pattern, reason) for pattern, reason in zip(patterns, reasons, strict=True)), reasons


@pytest.mark.parametrize("type", TYPES)
def test_a_server_that_hangs_is_left_after_the_time_limit(type: str) -> None:
    _, reasons = failures(type, "hang", "hang", timeout_s=0.4, max_retries=1)
    assert reasons == ["no answer within reward_model.api.timeout_s=0.4 (2 attempts)"]


def test_dashscope_reports_errors_in_the_body_of_a_200_too() -> None:
    busy, wrong = (json.dumps({"code": code, "message": "no"}) for code in ("Throttling", "InvalidParameter"))
    _, reasons = failures("dashscope", busy, busy, wrong, wrong, max_retries=1)
    assert reasons == ["HTTP 429: Throttling: no (2 attempts)", "HTTP 400: InvalidParameter: no"]


class Empty(JudgeServer):
    def result(self, request: Received, fault: str) -> tuple[int, Body]:
        return 429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}


def test_a_429_because_the_money_is_spent_is_not_repeated() -> None:
    with serving(Empty) as server:
        [[score]] = scores_of(judge_for(server), [(worth(4),)])
    assert "exceeded your current quota" in str(score.reason) and len(server.received) == 1


def test_the_same_code_is_repeated_where_it_means_a_rate_of_tokens() -> None:
    with serving(Empty) as server:
        scores_of(judge_for(server, "dashscope", max_retries=1), [(worth(4),)])
    assert len(server.received) == 2


@dataclass
class Failing(JudgeServer):
    error: Any = None
    status: int = 403

    def result(self, request: Received, fault: str) -> tuple[int, Body | bytes]:
        return self.status, self.error


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        ({"error": {"message": "no access", "code": "x"}}, "no access"),  # OpenAI, DashScope
        ({"type": "error", "error": {"type": "permission_error", "message": "no access"}}, "no access"),  # Anthropic
        ([{"error": {"code": 403, "message": "no access", "status": "PERMISSION_DENIED"}}], "no access"),  # Gemini
        ({"error": "no access"}, '{"error": "no access"}'),  # llama.cpp
        (b"<html>no access</html>", "<html>no access</html>"),
        (b"", "an empty body"),
    ],
)
def test_the_message_of_an_error_is_found_in_the_forms_of_all_servers(error: Any, shown: str) -> None:
    with serving(Failing, error=error) as server:
        [[score]] = scores_of(judge_for(server), [(worth(4),)])
    assert score.reason == f"openai judge: HTTP 403: {shown}"


def test_a_proxy_without_the_compatible_api_is_told_by_the_address_that_was_called() -> None:
    with serving(Failing, error=b"no such page", status=404) as server:
        [[score]] = scores_of(judge_for(server, "gemini"), [(worth(4),)])
        [[other]] = scores_of(judge_for(server, "openai"), [(worth(4),)])
    called = f"{server.root}/v1beta/openai/chat/completions"
    assert score.reason == (f"gemini judge: HTTP 404: no such page (called: {called}, the OpenAI-compatible API)")
    assert other.reason == "openai judge: HTTP 404: no such page"


def test_a_redirect_is_followed() -> None:
    class Moved(JudgeServer):
        def result(self, request: Received, fault: str) -> tuple[int, Body | bytes]:
            if request.path.startswith("/old"):
                return 307, b""
            return super().result(request, fault)

        def retry_headers(self, fault: str) -> Mapping[str, str]:
            return {"Location": "/v1/chat/completions"}

    with serving(Moved) as server:
        [[refused]] = scores_of(judge_for(server, "claude", base_url=f"{server.root}/old"), [(worth(10),)])
        assert "HTTP 307" in str(refused.reason)  # its key could go to another host
        server.received.clear()
        assert values_of(judge_for(server, base_url=f"{server.root}/old"), [(worth(10),)]) == [[1.0]]
    assert [request.path for request in server.received] == ["/old/chat/completions", "/v1/chat/completions"]


NO_CHOICES = ("{}", '{"choices": []}', '{"candidates": null, "content": null, "output": {}}')
REFUSALS: dict[str, Body] = {
    "openai": {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "refusal": "No."}}]},
    "claude": {"type": "message", "content": [], "stop_reason": "refusal", "usage": {}},
    "gemini": {"choices": [{"index": 0, "finish_reason": "content_filter", "message": {"role": "assistant"}}]},
}
CUT_SHORT = {"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "7"}}
CUT_OFF: dict[str, Body] = {
    **{type: {"choices": [CUT_SHORT]} for type in TYPES},
    "claude": {"type": "message", "content": [{"type": "text", "text": "7"}], "stop_reason": "max_tokens", "usage": {}},
}


@pytest.mark.parametrize("type", TYPES)
def test_an_answer_without_a_verdict_fails_the_sample(type: str) -> None:
    _, reasons = failures(type, json.dumps(CUT_OFF[type]), *NO_CHOICES, max_tokens=5, max_retries=2)
    cut_off, unusable = reasons
    assert cut_off == "the answer was cut off at reward_model.api.max_tokens=5; raise it"
    assert unusable.endswith(" (3 attempts)")


@pytest.mark.parametrize("type", REFUSALS)
def test_a_model_that_refuses_to_judge_fails_the_sample(type: str) -> None:
    server, [reason] = failures(type, json.dumps(REFUSALS[type]))
    assert reason.startswith("the model refused: ") and len(server.received) == 1


def test_nothing_listens_at_the_address() -> None:
    with serving() as server:
        pass
    for type in TYPES:
        [[score]] = scores_of(judge_for(server, type, max_retries=1), [(worth(4),)])
        assert "connection failed" in str(score.reason) and "(2 attempts)" in str(score.reason)
