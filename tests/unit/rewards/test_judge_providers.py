"""The SDKs of the four providers against a local server that speaks their protocols."""

import json
import re
from typing import Any

import pytest

from rloom.rewards.judge.prompts import SCORE_SCHEMA
from rloom.types import Score
from tests.judge_server import Body, JudgeServer, Received, faults_in_turn, serving
from tests.judging import TYPES, judge_for, scores_of, values_of, worth

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


def test_gemini_gets_a_response_schema() -> None:
    server, body = sent("gemini")
    assert server.received[0].path == "/v1/models/gemini-1.5-flash:generateContent"
    assert body["systemInstruction"]["parts"] == [{"text": SYSTEM}]
    assert body["contents"] == [{"role": "user", "parts": [{"text": USER}]}]
    settings = body["generationConfig"]
    schema = settings.pop("responseSchema")
    assert settings == {"temperature": 0.25, "maxOutputTokens": 99, "responseMimeType": "application/json"}
    assert schema["properties"] == {"reason": {"type": "STRING"}, "score": {"type": "NUMBER"}}
    assert schema["required"] == ["reason", "score"]


def test_dashscope_gets_the_native_protocol_in_json_mode() -> None:
    server, body = sent("dashscope")
    assert server.received[0].path == "/api/v1/services/aigc/text-generation/generation"
    assert body == {
        "model": "qwen-plus",
        "input": {"messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": USER}]},
        "parameters": {
            "result_format": "message",
            "temperature": 0.25,
            "max_tokens": 99,
            "response_format": {"type": "json_object"},
        },
    }


@pytest.mark.parametrize("type", TYPES)
def test_model_and_temperature_are_settings(type: str) -> None:
    server, body = sent(type, model="my-judge.2", temperature=None)
    assert "my-judge.2" in server.received[0].path + str(body.get("model"))
    assert "temperature" not in {**body, **body.get("parameters", {}), **body.get("generationConfig", {})}


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


def test_a_429_because_the_money_is_spent_is_not_repeated() -> None:
    class Empty(JudgeServer):
        def result(self, request: Received, fault: str) -> tuple[int, Body]:
            return 429, {"error": {"message": "You exceeded your current quota", "code": "insufficient_quota"}}

    with serving(Empty) as server:
        [[score]] = scores_of(judge_for(server), [(worth(4),)])
    assert "exceeded your current quota" in str(score.reason) and len(server.received) == 1


NO_CHOICES = ("{}", '{"choices": []}', '{"candidates": null, "content": null, "output": {}}')
REFUSALS: dict[str, Body] = {
    "openai": {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "refusal": "No."}}]},
    "claude": {"type": "message", "content": [], "stop_reason": "refusal", "usage": {}},
    "gemini": {"promptFeedback": {"blockReason": "SAFETY"}},
}
CUT_OFF: dict[str, Body] = {
    "openai": {"choices": [{"index": 0, "finish_reason": "length", "message": {"role": "assistant", "content": "7"}}]},
    "claude": {"type": "message", "content": [{"type": "text", "text": "7"}], "stop_reason": "max_tokens", "usage": {}},
    "gemini": {"candidates": [{"content": {"parts": [{"text": "7"}]}, "finishReason": "MAX_TOKENS"}]},
    "dashscope": {"output": {"choices": [{"finish_reason": "length", "message": {"role": "a", "content": "7"}}]}},
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
