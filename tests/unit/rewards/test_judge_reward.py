"""The judge as a reward: cache, budget, limits, groups, keys, and its life in the background."""

import asyncio
import gc
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest

from rloom.config.reward_sections import ApiJudge
from rloom.errors import RewardError
from rloom.rewards.base import ScoringUnit
from rloom.rewards.judge.judge import JudgeReward
from rloom.rewards.judge.settings import Secret, redact
from rloom.rewards.score_queue import BackgroundScorer
from rloom.types import Sample, Score
from tests.judge_server import KEY, Body, JudgeServer, faults_in_turn, serving
from tests.judging import ENVIRONMENT, TYPES, judge_for, scores_of, values_of, worth
from tests.waiting import wait_until


def test_a_second_run_sends_nothing(tmp_path: Path) -> None:
    samples = tuple(worth(score) for score in range(1, 11))
    with serving() as server:
        first, second = (judge_for(server, cache_dir=str(tmp_path / "new" / "cache")) for _ in range(2))
        assert values_of(first, [samples]) == values_of(second, [samples])
        assert len(server.received) == 10
        assert (first.metrics()["cached"], second.metrics()["cached"]) == (0, 10)
        other = judge_for(server, cache_dir=str(tmp_path / "new" / "cache"), model="another")
        values_of(other, [samples])
        assert len(server.received) == 20


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"max_tokens": 7},
        {"system_prompt": "You are kind."},
        {"preset": "dialogue"},
        {"min_score": 0},
        {"mode": "groupwise"},
        {"type": "claude"},
    ],
)
def test_every_part_of_a_request_is_part_of_the_key_of_the_cache(tmp_path: Path, change: dict[str, Any]) -> None:
    with serving() as server:
        values_of(judge_for(server, cache_dir=str(tmp_path)), [(worth(7),)])
        values_of(judge_for(server, **{"cache_dir": str(tmp_path), **change}), [(worth(7),)])
        assert len(server.received) == 2


def test_failures_are_not_kept(tmp_path: Path) -> None:
    with serving(plan=faults_in_turn("malformed", "401", "500")) as server:
        for _ in range(3):
            [[score]] = scores_of(judge_for(server, cache_dir=str(tmp_path), max_retries=0), [(worth(7),)])
            assert score.value is None
        assert values_of(judge_for(server, cache_dir=str(tmp_path)), [(worth(7),)]) == [[6 / 9]]


def test_identical_requests_in_flight_are_sent_once() -> None:
    with serving(latency_s=0.05) as server:
        reward = judge_for(server)
        assert values_of(reward, [(worth(7), worth(7), worth(4)), (worth(7),)]) == [[6 / 9, 6 / 9, 3 / 9], [6 / 9]]
    assert len(server.received) == 2 and reward.metrics()["cached"] == 2


BUDGET = {"input_price": 5000.0, "output_price": 20_000.0, "budget": 5.0}  # 120 × 0.005 + 20 × 0.02 = 1 for a call


def test_a_spent_budget_stops_the_run_and_what_is_in_flight_is_kept(tmp_path: Path) -> None:
    samples = [(worth(1 + number % 10, prompt=f"Question {number}"),) for number in range(40)]
    with serving(latency_s=0.05) as server:
        reward = judge_for(server, cache_dir=str(tmp_path), concurrency=4, **BUDGET)
        message = r"reward_model.api.budget=5: spent 8; raise it to go on\. The answers so far are in .*cache_dir"
        with pytest.raises(RewardError, match=message):  # after 4 and 4 more
            scores_of(reward, samples)
        assert len(server.received) == 8 and reward.metrics()["cost"] == pytest.approx(8)
        # after a resume: nothing more is sent, answers of the cache still count
        again = judge_for(server, cache_dir=str(tmp_path), **BUDGET)
        assert values_of(again, samples[:8]) == [[(number % 10) / 9] for number in range(8)]
        with pytest.raises(RewardError, match="spent 8"):
            scores_of(judge_for(server, cache_dir=str(tmp_path), **BUDGET), samples)
        assert len(server.received) == 8
        raised = judge_for(server, cache_dir=str(tmp_path), **{**BUDGET, "budget": 100.0})
        assert len(values_of(raised, samples)) == 40 and len(server.received) == 40


def test_malformed_answers_cost_money_too(tmp_path: Path) -> None:
    with serving(plan=lambda number: "malformed") as server:
        reward = judge_for(server, cache_dir=str(tmp_path), **{**BUDGET, "budget": 3.0})
        with pytest.raises(RewardError, match="spent 3"):
            scores_of(reward, [(worth(7),)])
        assert len(server.received) == 3


def test_no_more_calls_at_once_than_allowed() -> None:
    together = asyncio.Barrier(5)

    class Waits(JudgeServer):
        async def answer(self, *given: Any) -> bool:
            async with asyncio.timeout(60):
                await together.wait()  # never ends with fewer calls
            return await super().answer(*given)

    with serving(Waits) as server:
        values_of(judge_for(server, concurrency=5), [tuple(worth(1, prompt=f"Question {n}") for n in range(40))])
        assert server.most_at_once == 5


class FakeClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    async def sleep(self, seconds: float) -> None:
        self.time_s += seconds


def test_calls_keep_to_the_requests_per_minute() -> None:
    clock = FakeClock()
    with serving() as server:
        settings = ApiJudge(
            type="openai", base_url=server.base_url("openai"), cache_dir=None, requests_per_minute=61, concurrency=1
        )
        reward = JudgeReward(settings, environment=ENVIRONMENT, clock=clock)
        values_of(reward, [tuple(worth(1, prompt=f"Question {number}") for number in range(31))])
    # a bucket of 61/60, refilled with (61 - 61/60)/60 a second
    assert clock.now() == pytest.approx((31 - 61 / 60) / ((61 - 61 / 60) / 60))


def test_retry_after_is_honoured_and_a_very_long_one_fails_the_sample() -> None:
    clock = FakeClock()

    def headers(seconds: str) -> list[float]:
        started = clock.now()
        with serving(plan=faults_in_turn("429"), retry_after=seconds) as server:
            settings = ApiJudge(type="openai", base_url=server.base_url("openai"), cache_dir=None)
            reward = JudgeReward(settings, environment=ENVIRONMENT, clock=clock)
            [[score]] = scores_of(reward, [(worth(7),)])
        return [clock.now() - started, len(server.received), float(score.ok)]

    waited, requests, ok = headers("20")
    assert 20 <= waited <= 20.5 and (requests, ok) == (2, 1)
    assert headers("4000") == [0, 1, 0]


def test_a_group_is_judged_in_one_call() -> None:
    with serving() as server:
        reward = judge_for(server, mode="groupwise")
        assert reward.unit is ScoringUnit.PROMPT and judge_for(server).unit is ScoringUnit.ANSWER
        found = values_of(reward, [(worth(10), worth(1), worth(5.5)), (worth(4),)])
    assert found == [[1.0, 0.0, 0.5], [3 / 9]]
    assert len(server.received) == 2


@pytest.mark.parametrize("type", TYPES)
def test_every_provider_judges_groups(type: str) -> None:
    with serving() as server:
        assert values_of(judge_for(server, type, mode="groupwise"), [(worth(10), worth(1))]) == [[1.0, 0.0]]


def test_a_group_whose_scores_are_incomplete_fails_as_a_whole() -> None:
    def say(body: Body, user: str) -> str:
        return json.dumps({"reason": "", "scores": [{"answer": 1, "score": 7}]})

    with serving(say=say) as server:
        [found] = scores_of(judge_for(server, mode="groupwise", max_retries=1), [(worth(10), worth(1))])
    reason = "openai judge: scores of answers [1] instead of 1 to 2 in "
    assert [score.value for score in found] == [None, None]
    assert all(str(score.reason).startswith(reason) for score in found)


def test_a_server_that_refuses_structured_output_is_used_without_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    samples = [(worth(score),) for score in (3, 7, 9)]
    keys = {"concurrency": 1, "cache_dir": str(tmp_path)}
    with serving(refuses_response_format=True, say=lambda body, user: f"评分：{user.split('[worth ')[1][0]}") as server:
        reward = judge_for(server, **keys)
        with caplog.at_level(logging.WARNING, logger="rloom"):
            assert values_of(reward, samples) == [[2 / 9], [6 / 9], [8 / 9]]
        assert ["response_format" in request.body for request in server.received] == [True, False, False, False]
        assert caplog.text.count("refuses structured output") == 1
        assert values_of(judge_for(server, **keys), samples) == [[2 / 9], [6 / 9], [8 / 9]]
        assert len(server.received) == 4


@pytest.mark.parametrize("mode", ["pointwise", "groupwise"])
def test_the_preset_and_the_form_are_in_the_language_of_the_prompt(mode: str) -> None:
    questions = ("计算 15 + 27 的结果", "What is 15 + 27?", "15と27の和は何ですか")
    words = {"zh": ("严格的数学阅卷人", "到 10 的分数"), "en": ("a strict examiner", "from 1 to 10")}
    expected = {"auto": ("zh", "en", "en"), "en": ("en",) * 3, "zh": ("zh",) * 3}
    for language, found in expected.items():
        with serving() as server:
            reward = judge_for(server, preset="math", language=language, mode=mode)
            for question, own in zip(questions, found, strict=True):
                group = (worth(7, prompt=question, ground_truth="42"),)
                assert values_of(reward, [group]) == [[6 / 9]]
                system, user = (message["content"] for message in server.received[-1].body["messages"])
                assert words[own][0] in system and words[own][1] in user and question in user
                other = "en" if own == "zh" else "zh"
                assert words[other][0] not in system and words[other][1] not in user


def test_the_form_is_in_the_language_of_the_users_own_prompt() -> None:
    with serving() as server:
        values_of(judge_for(server, scoring_prompt="请打分：{prompt} {response}"), [(worth(7, prompt="1 + 1?"),)])
        values_of(judge_for(server, scoring_prompt="Rate: {prompt} {response}"), [(worth(7, prompt="一加一？"),)])
        chinese, english = (request.body["messages"][-1]["content"] for request in server.received)
    assert chinese.endswith('请给出一个 1 到 10 的分数。只输出 JSON，格式为：{"reason": "一到两句理由", "score": 分数}')
    assert english.endswith('in this form: {"reason": "one or two sentences", "score": a number}')


def test_a_row_without_a_ground_truth_fails_alone() -> None:
    with serving() as server:
        reward = judge_for(server, preset="math")
        [[right, missing]] = scores_of(reward, [(worth(7, ground_truth="42"), worth(4))])
    assert right.value == 6 / 9 and "{ground_truth} and the row has none" in str(missing.reason)


def test_text_that_is_not_unicode_fails_alone() -> None:
    with serving() as server:
        [[good, bad]] = scores_of(judge_for(server, max_retries=0), [(worth(7), Sample("s", "p", "\ud800 [worth 3]"))])
    assert good.value == 6 / 9 and "UnicodeEncodeError" in str(bad.reason)


@pytest.mark.parametrize("type", TYPES)
def test_without_a_key_it_is_an_error_at_start(type: str) -> None:
    names = {"openai": "OPENAI_API_KEY", "claude": "ANTHROPIC_API_KEY or CLAUDE_API_KEY"}
    names |= {"gemini": "GEMINI_API_KEY or GOOGLE_API_KEY", "dashscope": "DASHSCOPE_API_KEY"}
    reward = JudgeReward(ApiJudge(type=type, cache_dir=None), environment={"OPENAI_API_KEY": " "})
    message = f"type={type} needs a key in the environment variable {names[type]}: export "
    with pytest.raises(RewardError, match=message):
        reward.check()
    last = names[type].split(" or ")[-1]
    JudgeReward(ApiJudge(type=type, cache_dir=None), environment={last: "k"}).check()


def test_a_local_server_needs_no_key_unless_one_is_named() -> None:
    local = {"type": "openai", "base_url": "http://127.0.0.1:1/v1", "cache_dir": None}
    JudgeReward(ApiJudge(**local), environment={}).check()
    with pytest.raises(RewardError, match="environment variable JUDGE_KEY"):
        JudgeReward(ApiJudge(**local, api_key_env="JUDGE_KEY"), environment={}).check()
    with serving() as server:
        assert values_of(judge_for(server, api_key_env="JUDGE_KEY"), [(worth(10),)]) == [[1.0]]


def test_a_key_that_no_header_can_carry_is_an_error_at_start() -> None:
    for wrong in ("“sk-1234567”", "sk-1234\n567"):
        reward = JudgeReward(ApiJudge(type="openai", cache_dir=None), environment={"OPENAI_API_KEY": wrong})
        with pytest.raises(RewardError, match="OPENAI_API_KEY has characters that no key has") as refused:
            reward.check()
        assert "1234" not in str(refused.value)


def test_a_cache_that_cannot_be_used_is_an_error_at_start(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "answers.sqlite").write_text("not a database" * 100)
    for name in ("file", "damaged"):
        reward = JudgeReward(ApiJudge(type="openai", cache_dir=str(tmp_path / name)), environment=ENVIRONMENT)
        with pytest.raises(RewardError, match=rf"cache_dir=.*{name}: answers.sqlite cannot be read or written"):
            reward.check()
        reward.close()


@pytest.mark.parametrize("type", TYPES)
def test_it_works_and_closes_in_the_background(type: str, tmp_path: Path) -> None:
    with serving() as server:
        scorer = BackgroundScorer(judge_for(server, type, cache_dir=str(tmp_path)))
        futures = [scorer.submit([(worth(score),)]) for score in range(1, 11)]
        assert [future.result(60)[0][0].value for future in futures] == [pytest.approx(n / 9) for n in range(10)]
        scorer.close()
    del scorer, futures
    gc.collect()  # an unclosed client is a warning, which is an error
    ended = {"reward-loop", "judge-cache"}
    wait_until(lambda: not ended & {thread.name.split("_")[0] for thread in threading.enumerate()})


@pytest.mark.parametrize("type", TYPES)
def test_it_closes_while_calls_hang(type: str) -> None:
    with serving(plan=lambda number: "hang") as server:
        scorer = BackgroundScorer(judge_for(server, type, concurrency=4))
        futures = [scorer.submit([(worth(score),)]) for score in range(1, 11)]
        wait_until(lambda: len(server.received) >= 4)
        assert len(server.received) == 4
        scorer.close()
    assert all(future.cancelled() for future in futures)
    del scorer, futures
    gc.collect()


def test_no_file_log_or_error_shows_the_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def say(body: Body, user: str) -> str:
        if "[worth 7]" in user:
            return json.dumps({"reason": f"your key is {KEY}", "score": 7})
        return f"{'x' * 100} your key is {KEY}, in the header Authorization: Bearer {KEY}"  # cut in the middle of it

    with serving(say=say) as server, caplog.at_level(logging.DEBUG):
        for type in TYPES:
            reward = judge_for(server, type, cache_dir=str(tmp_path), max_retries=1)
            [[good, bad]] = scores_of(reward, [(worth(7), worth(3))])
            assert good == Score(6 / 9, detail="7 of 1 to 10: your key is [key]")
            assert bad.value is None and KEY[:8] not in str(bad.reason) + repr(reward) + repr(vars(reward))
    assert KEY[:8] not in caplog.text
    assert not any(KEY[:8].encode() in file.read_bytes() for file in tmp_path.rglob("*") if file.is_file())


def test_an_error_that_repeats_the_key_does_not_show_it() -> None:
    with serving() as server:
        settings = ApiJudge(type="openai", base_url=server.base_url("openai"), cache_dir=None)
        reward = JudgeReward(settings, environment={"OPENAI_API_KEY": "sk-wrong-1234567890"})
        [[score]] = scores_of(reward, [(worth(7),)])
    assert score == Score.failed("openai judge: HTTP 401: Incorrect API key: Bearer [key]")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("POST https://x/v1?key=abcd1234&a=1", "POST https://x/v1?key=[key]&a=1"),
        ("{'x-api-key': 'abcd1234', 'a': 1}", "{'x-api-key': '[key]', 'a': 1}"),
        ("headers=[(b'Authorization', b'Bearer abcd')]", "headers=[(b'Authorization', b'Bearer [key]')]"),
        ("Incorrect API key provided: sk-ab****wxyz.", "Incorrect API key provided: [key]."),
        ("my secret%20value is in it", "my [key] is in it"),
        ("a task-based ask-me answer", "a task-based ask-me answer"),
    ],
)
def test_what_looks_like_a_key_is_not_shown(text: str, shown: str) -> None:
    assert redact(text, Secret("secret value")) == shown
    assert repr(Secret("abc")) == "Secret([key])"
