"""Reward servers: the protocol, batches, failures of one answer, of one server and of all."""

import gzip
import json
import logging
import os
import random
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from rloom.errors import RewardError
from rloom.net import failover, http
from rloom.rewards.remote import InvalidReply, read_reply
from rloom.types import Sample
from tests.reward_servers import Reply, answers, dead_url, lengths, scoring, serving

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def short_back_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failover, "FIRST_BACK_OFF_S", 0.02)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_a_request_has_openrlhfs_fields_and_ours() -> None:
    with serving(lengths) as server, scoring(server.url) as reward:
        [score] = reward.scores([Sample("s", "问 {p}\n", '答\t"x"', {"n": [1]}, {"index": 7})])
        [request] = server.requests
    assert score.value == 5.0
    assert request == {
        "query": ['问 {p}\n答\t"x"'],
        "prompts": ["问 {p}\n"],
        "labels": [{"n": [1]}],
        "responses": ['答\t"x"'],
        "data_sources": ["s"],
        "ground_truths": [{"n": [1]}],
        "extra_infos": [{"index": 7}],
    }


def test_a_row_without_a_ground_truth_has_openrlhfs_empty_label() -> None:
    with serving(lengths) as server, scoring(server.url) as reward:
        reward.scores([Sample("s", "q", "a")])
        assert (server.requests[0]["labels"], server.requests[0]["ground_truths"]) == ([""], [None])


def test_openrlhfs_server_works_unchanged() -> None:
    """openrlhf/cli/serve_rm.py reads `query` and returns its rewards under three names."""

    def serve_rm(request: dict[str, Any]) -> dict[str, Any]:
        rewards = [len(query) / 2 for query in request["query"]]
        return {"rewards": rewards, "scores": rewards, "extra_logs": {"dummy_scores": rewards}}

    with serving(serve_rm) as server, scoring(server.url) as reward:
        scores = reward.scores(answers("abc", "a"))  # after the 9 characters of the prompt
    assert [score.value for score in scores] == [6.0, 5.0]
    assert [score.parts for score in scores] == [{"dummy_scores": 6.0, "acc": 6.0}, {"dummy_scores": 5.0, "acc": 5.0}]


def test_a_server_for_one_answer_may_return_numbers_without_lists() -> None:
    with (
        serving(lambda request: {"rewards": -0.5, "scores": 1, "extra_logs": {"tests": 3}}) as server,
        scoring(server.url, batch_size=1) as reward,
    ):
        [score] = reward.scores(answers("a"))
    assert (score.value, score.accuracy, score.parts["tests"]) == (-0.5, 1.0, 3.0)


def test_answers_that_wait_together_share_requests_of_batch_size() -> None:
    with serving(lengths) as server, scoring(server.url, batch_size=4) as reward:
        scores = reward.scores(answers(*("x" * i for i in range(10))))
        assert sorted(len(request["query"]) for request in server.requests) == [2, 4, 4]
        assert reward.reward.metrics()["requests"] == 3
    assert [score.value for score in scores] == [float(i) for i in range(10)]


@pytest.mark.parametrize("batch_size", [1, 3, 100])
def test_scores_do_not_depend_on_the_batches(batch_size: int) -> None:
    with serving(lengths) as server, scoring(server.url, batch_size=batch_size) as reward:
        scores = reward.scores(answers(*("x" * (i * 7 % 11) for i in range(20))))
    assert [score.value for score in scores] == [float(i * 7 % 11) for i in range(20)]


def test_an_entry_without_a_number_fails_its_answer_alone() -> None:
    rewards = b'[1, null, {"error": "no   tests"}, "0.5", NaN, Infinity, true, 1' + b"0" * 400 + b", [1], 1e300, 1e30]"
    with serving(lambda request: Reply(b'{"rewards": ' + rewards + b"}")) as server, scoring(server.url) as reward:
        scores = reward.scores(answers(*"abcdefghijk"))
        name = f"the reward server {server.url}"
    assert [score.value for score in scores] == [1.0, None, None, None, None, None, 1.0, None, None, None, 1e30]
    assert scores[9].reason == f"{name} returned 1e+300; the reward is 1e+300, which is beyond 1e+30"
    assert scores[1].reason == f"{name} returned null as a reward, which is not a finite number"
    assert scores[2].reason == f"{name} reported an error: no tests"
    assert scores[3].reason == f'{name} returned "0.5" as a reward, which is not a finite number'
    assert scores[4].reason == f"{name} returned NaN as a reward, which is not a finite number"


def test_further_values_that_are_no_numbers_are_left_out() -> None:
    body = {"rewards": [1, 2], "scores": [None, 0.5], "extra_logs": {"a": [float("nan"), 3], "b": "text", "c": 4}}
    scores = read_reply(json.dumps(body).encode(), 2)
    assert [score.parts for score in scores] == [{"c": 4.0}, {"a": 3.0, "c": 4.0, "acc": 0.5}]


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"", "returned a body that is not JSON"),
        (b"<html>busy</html>", "returned a body that is not JSON"),
        (b'{"rewards": [1, 2', "returned a body that is not JSON"),
        (b"\xff\xfe", "returned a body that is not JSON"),
        (b"[" * 100_000, "returned a body that is not JSON"),
        (b"[1, 2]", "returned no 'rewards': [1, 2]"),
        (b'{"reward": [1, 2]}', "returned no 'rewards': {\"reward\": [1, 2]}"),
        (b'{"error": "no model"}', 'returned no \'rewards\': {"error": "no model"}'),
        (b'{"rewards": [1]}', "returned 1 'rewards' for 2 answers"),
        (b'{"rewards": [1, 2, 3]}', "returned 3 'rewards' for 2 answers"),
        (b'{"rewards": 1}', "returned 1 as 'rewards' of 2 answers"),
        (b'{"rewards": [1, 2], "scores": [1]}', "returned 1 'scores' for 2 answers"),
        (b'{"rewards": [1, 2], "extra_logs": [1]}', "returned 'extra_logs' that are not an object: [1]"),
        (b'{"rewards": [1, 2], "extra_logs": {"x": [1]}}', "returned 1 'extra_logs.x' for 2 answers"),
    ],
)
def test_a_malformed_body_is_named(body: bytes, reason: str) -> None:
    with pytest.raises(InvalidReply, match=f"^{re.escape(reason)}"):
        read_reply(body, 2)


@pytest.mark.parametrize(
    ("reply", "reason"),
    [
        (Reply(b'{"rewards": [1]}', length=400), r"ended the connection without an answer \(RemoteProtocolError"),
        (Reply(b"{"), r"returned a body that is not JSON"),
        (Reply(b'{"rewards": [1, 2]}'), r"returned 2 'rewards' for 1 answers"),
        (Reply(b"overloaded", status=503), r"answered with HTTP status 503: overloaded"),
        (Reply(b"", status=429, headers={"Retry-After": "0"}), r"answered with HTTP status 429: an empty body"),
        (Reply(b"Internal Server Error", status=500), r"answered with HTTP status 500: Internal Server Error"),
        (Reply(b"", status=404), r"answered with HTTP status 404"),
    ],
)
def test_a_failed_request_is_repeated_and_then_is_a_failed_score(reply: Reply, reason: str) -> None:
    with serving(lambda request: reply) as server, scoring(server.url, max_retries=2) as reward:
        [score] = reward.scores(answers("a"))
        assert len(server.requests) == 3
        assert reward.reward.metrics() == {"requests": 3.0, "retries": 2.0}
    assert score.value is None and score.reason is not None
    assert re.match(f"the reward server {server.url} {reason}", score.reason)
    assert score.reason.endswith("(the last of 3 attempts)")


@pytest.mark.parametrize("header", ["²", "-5", "nan", "inf", "1e400", "soon", "Wed, 21 Oct 2015 07:28:00 GMT", "٣"])
def test_an_odd_retry_after_does_not_end_the_run(header: str) -> None:
    faults = iter([Reply(b"", status=429, headers={"Retry-After": header.encode().decode("latin-1")})])
    with serving(lambda request: next(faults, {"rewards": [0.25]})) as server, scoring(server.url) as reward:
        assert [score.value for score in reward.scores(answers("a"))] == [0.25]


def test_texts_of_a_server_can_be_printed_and_written() -> None:
    reply = b'{"rewards": [{"error": "\\ud800 \\u001b[2J"}, 1], "extra_logs": {"a\\ud800": 2, "b": 1e300}}'
    with serving(lambda request: Reply(reply)) as server, scoring(server.url) as reward:
        failed, good = reward.scores(answers("a", "b"))
    assert failed.reason == f"the reward server {server.url} reported an error: \ufffd \ufffd[2J"
    assert good.parts == {"a\ufffd": 2.0}


def test_a_body_without_end_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "LONGEST_BODY", 1 << 20)
    long = Reply(gzip.compress(b" " * (2 << 20)), headers={"Content-Encoding": "gzip"})
    bad = Reply(b"not gzip", headers={"Content-Encoding": "gzip"})
    replies = iter([long, Reply(b"x" * (2 << 20), status=404), bad])
    with serving(lambda _: next(replies, {"rewards": [1]})) as server, scoring(server.url, max_retries=0) as reward:
        *over, bad_gzip, good = (reward.scores(answers("a"))[0] for _ in range(4))
    assert {score.reason for score in over} == {f"the reward server {server.url} returned a body of more than 1 MiB"}
    assert "DecodingError" in str(bad_gzip.reason) and good.value == 1.0


def test_an_error_that_was_not_foreseen_fails_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise KeyError("unforeseen")

    with serving(lengths) as server, scoring(server.url, max_retries=0) as reward:
        for place in ("rewards.remote.scores_in", "net.http.limited_body"):
            with monkeypatch.context() as patched:
                patched.setattr(f"rloom.{place}", fails)
                [bad] = reward.scores(answers("a"))
            assert "KeyError: 'unforeseen'" in str(bad.reason) and reward.scores(answers("a"))[0].value == 1.0


def test_a_request_that_succeeds_at_last_has_its_score_and_its_retries_are_counted() -> None:
    faults = iter([Reply(b"", status=500), Reply(b'{"rewards": [', length=100), Reply(b"[")])
    with (
        serving(lambda request: next(faults, {"rewards": [0.25]})) as server,
        scoring(server.url, max_retries=3) as reward,
    ):
        [score] = reward.scores(answers("a"))
        metrics = reward.reward.metrics()
        assert reward.reward.metrics() == {"requests": 0.0, "retries": 0.0}  # since the last call
    assert score.value == 0.25
    assert (metrics["requests"], metrics["retries"]) == (4, 3)
    assert 0 < metrics["latency_mean_s"] == metrics["latency_max_s"]


def test_one_answer_that_the_server_refuses_does_not_fail_the_others() -> None:
    def refuses_bad(request: dict[str, Any]) -> Any:
        return Reply(b"bad text", status=422) if "bad" in request["responses"] else lengths(request)

    with serving(refuses_bad) as server, scoring(server.url) as reward:
        scores = reward.scores(answers("a", "bb", "bad", "dddd", "eeeee"))
        assert sorted(len(request["query"]) for request in server.requests) == [1, 2, 2, 3, 5]  # halves, none repeated
    assert [score.value for score in scores] == [1.0, 2.0, None, 4.0, 5.0]
    assert scores[2].reason == f"the reward server {server.url} answered with HTTP status 422: bad text"


def test_one_answer_on_which_the_server_fails_does_not_fail_the_others() -> None:
    def fails_on_bad(request: dict[str, Any]) -> Any:
        return Reply(b"", status=500) if "bad" in request["responses"] else lengths(request)

    with serving(fails_on_bad) as server, scoring(server.url, max_retries=1) as reward:
        scores = reward.scores(answers("a", "bb", "ccc", "bad"))
    assert [score.value for score in scores] == [1.0, 2.0, 3.0, None]


def test_a_dead_server_is_survived_and_named_once(caplog: pytest.LogCaptureFixture) -> None:
    dead = dead_url()
    with serving(lengths) as server, scoring(dead, server.url, batch_size=1) as reward:
        scores = [score for _ in range(5) for score in reward.scores(answers(*("x" * i for i in range(8))))]
    assert [score.value for score in scores] == [float(i) for _ in range(5) for i in range(8)]
    named = [record.getMessage() for record in caplog.records if dead in record.getMessage()]
    assert len(named) == 1
    assert named[0].startswith(f"The reward server {dead} cannot be reached (")
    assert named[0].endswith("its requests go to 1 other server.")


def test_a_hanging_server_is_survived() -> None:
    ended = threading.Event()

    def hangs(request: dict[str, Any]) -> Any:
        ended.wait(60)
        return lengths(request)

    with serving(hangs) as hanging, serving(lengths) as server:
        with scoring(hanging.url, server.url, batch_size=1, concurrency=2, timeout_s=3.0) as reward:
            scores = reward.scores(answers(*("x" * i for i in range(20))))
            tried = len(hanging.requests)
        ended.set()
    assert [score.value for score in scores] == [float(i) for i in range(20)]
    assert 1 <= tried < 10


def test_a_server_that_sends_a_byte_now_and_then_meets_the_time_limit() -> None:
    """A limit on each read would never end this request."""
    slow = Reply(b" " * 100_000, pause_s=0.05)
    with serving(lambda request: slow) as server, scoring(server.url, max_retries=0, timeout_s=0.5) as reward:
        [score] = reward.scores(answers("a"))
    assert score.reason == f"the reward server {server.url} did not answer in reward_model.remote.timeout_s=0.5 s"


def test_all_servers_dead_are_failed_scores_with_every_reason() -> None:
    one, two = dead_url(1), dead_url(2)
    with scoring(one, two, batch_size=1, timeout_s=3.0, max_retries=1) as reward:
        scores = reward.scores(answers(*"abcdefghijklmnopqrst"))
    assert all(score.value is None for score in scores)
    reasons = {str(score.reason) for score in scores}
    assert all("cannot be reached" in reason and (one in reason or two in reason) for reason in reasons)
    assert any(
        reason.startswith("no reward server answers: ") and one in reason and two in reason for reason in reasons
    )


def test_a_server_that_comes_back_is_used_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    faults = iter([Reply(b"", status=503)] * 5)

    with (
        serving(lambda request: next(faults, None) or lengths(request)) as server,
        scoring(server.url, max_retries=50) as reward,
    ):
        scores = reward.scores(answers("a", "bb"))
    assert [score.value for score in scores] == [1.0, 2.0]
    messages = [record.getMessage() for record in caplog.records if server.url in record.getMessage()]
    ours = [message for message in messages if message.startswith("The reward server")]
    assert [message.split(". ")[0] for message in ours] == [
        f"The reward server {server.url} answered with HTTP status 503: an empty body",
        f"The reward server {server.url} answers again.",
    ]


def test_the_server_with_the_fewest_answers_in_flight_gets_the_next_request() -> None:
    ended = threading.Event()

    def slow(request: dict[str, Any]) -> Any:
        ended.wait(60)
        return lengths(request)

    def fast(request: dict[str, Any]) -> Any:
        if len(quick.requests) == 11:
            ended.set()
        return lengths(request)

    with serving(slow) as other, serving(fast) as quick:
        with scoring(other.url, quick.url, batch_size=1, concurrency=1) as reward:
            scores = reward.scores(answers(*("x" * i for i in range(12))))
        assert (len(other.requests), len(quick.requests)) == (1, 11)
    assert [score.value for score in scores] == [float(i) for i in range(12)]


def test_concurrency_requests_are_at_a_server_at_the_same_time_and_no_more() -> None:
    three, lock, now, most = threading.Barrier(3, timeout=60), threading.Lock(), 0, 0

    def counting(request: dict[str, Any]) -> Any:
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        three.wait()  # never ends with fewer requests
        with lock:
            now -= 1
        return lengths(request)

    with serving(counting) as server, scoring(server.url, batch_size=1, concurrency=3) as reward:
        reward.scores(answers(*"abcdefghijkl"))
    assert most == 3


def test_a_row_that_json_cannot_hold_fails_alone() -> None:
    rows = [
        Sample("s", "q", "a", b"bytes"),
        Sample("s", "q", "bb", "1"),
        Sample("s", "q", "c", "1", {"x": float("nan")}),
    ]
    with serving(lengths) as server, scoring(server.url) as reward:
        scores = reward.scores(rows)
        assert server.requests[0]["responses"] == ["bb"]
    assert [score.value for score in scores] == [None, 2.0, None]
    assert scores[0].reason == (
        "this row cannot be sent to a reward server as JSON: Object of type bytes is not JSON serializable"
    )


def test_the_token_is_sent_and_is_in_no_reason_and_no_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("REWARD_TOKEN", "sekret-123\n")
    with serving(lambda request: Reply(b"", status=401)) as server:
        with scoring(server.url, token_env="REWARD_TOKEN", max_retries=1) as reward:
            [score] = reward.scores(answers("a"))
        assert server.headers[0]["Authorization"] == "Bearer sekret-123"
    assert "sekret" not in str(score) + caplog.text + repr(vars(reward.reward).keys())
    for value, reason in (("", "is not set"), ("ключ-123", "holds characters that no header may")):
        monkeypatch.setenv("REWARD_TOKEN", value)
        with pytest.raises(RewardError, match=f"token_env=REWARD_TOKEN: .*{reason}") as caught:
            scoring(server.url, token_env="REWARD_TOKEN").__enter__()
        assert "123" not in str(caught.value)


def test_the_check_before_a_run_needs_one_server_that_answers_http(caplog: pytest.LogCaptureFixture) -> None:
    dead = dead_url()
    refusal = rf"reward_model\.remote\.urls: no reward server answers: {dead} cannot be reached"
    with scoring(dead) as reward, pytest.raises(RewardError, match=refusal):
        reward.reward.check()
    with serving(lengths) as server, scoring(dead, server.url) as reward:
        reward.reward.check()  # the server has no GET; its error is an answer too
        assert server.requests == []
    assert f"Reward servers that do not answer yet: {dead} cannot be reached" in caplog.text


@pytest.fixture(scope="module")
def example_server() -> Any:
    command = [sys.executable, str(ROOT / "examples" / "reward_server" / "server.py"), "--port", "0"]
    environment = {**os.environ, "EXAMPLE_TOKEN": "open-sesame"}
    process = subprocess.Popen(
        [*command, "--token_env", "EXAMPLE_TOKEN"], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1]
    process.terminate()
    process.wait(30)
    process.stdout.close()


def test_the_example_server_scores_by_the_rules(example_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EXAMPLE_TOKEN", "open-sesame")
    rows = [
        Sample("openai/gsm8k", "6 * 7?", "It is\n#### 42", "42"),
        Sample("openai/gsm8k", "6 * 7?", "#### 43", "42"),
        Sample("math_dapo", "1/2?", "Answer: 0.5", "\\frac12"),
        Sample("math_dapo", "1/2?", "Answer: 2", "\\frac12"),
        Sample("no/rule", "?", "1", "1"),
    ]
    with scoring(example_server, token_env="EXAMPLE_TOKEN") as reward:
        reward.reward.check()
        scores = reward.scores(rows)
    assert [score.value for score in scores] == [1.0, 0.0, 1.0, -1.0, None]
    assert [score.accuracy for score in scores] == [1.0, 0.0, 1.0, 0.0, None]
    assert f"the reward server {example_server} reported an error: no reward rule for data_source='no/rule'" in str(
        scores[4].reason
    )


def test_the_example_server_takes_openrlhfs_request_and_refuses_others(example_server: str) -> None:
    headers = {"Authorization": "Bearer open-sesame"}
    request = {"query": ["15 + 27? 答案：42", "15 + 27? 41"], "prompts": ["15 + 27? "] * 2, "labels": ["42", "42"]}
    reply = httpx.post(example_server, json=request, headers=headers, timeout=60)
    assert reply.json()["rewards"] == [1.0, 0.0] and reply.json()["scores"] == [1.0, 0.0]
    assert httpx.post(example_server, json=request, timeout=60).status_code == 401
    assert httpx.post(example_server, json=[1], headers=headers, timeout=60).status_code == 400
    assert httpx.post(example_server, json={"query": ["a"]}, headers=headers, timeout=60).status_code == 400
    assert httpx.post(f"{example_server}x", json=request, headers=headers, timeout=60).status_code == 404


def test_the_curl_example_of_the_document_is_answered_as_printed(example_server: str) -> None:
    page = (ROOT / "docs" / "reward_models.md").read_text(encoding="utf-8")
    [request] = re.findall(r"-d '(\{.*?\})'", page, re.S)
    [printed] = re.findall(r"```json\n(.*?)```", page, re.S)
    headers = {"Authorization": "Bearer open-sesame"}
    assert httpx.post(example_server, content=request, headers=headers, timeout=60).json() == json.loads(printed)


def test_a_server_that_often_fails_scores_every_answer_or_fails_it_with_a_reason() -> None:
    """30 % of the responses are 429 or 500, 10 % malformed or cut off: no zero is invented, no score is another's."""
    kinds = random.Random(3)
    lock = threading.Lock()

    def often_fails(request: dict[str, Any]) -> Any:
        with lock:
            draw = kinds.random()
        if draw < 0.15:
            return Reply(b"", status=429, headers={"Retry-After": "0"})
        if draw < 0.3:
            return Reply(b"", status=500)
        if draw < 0.35:
            return Reply(b'{"rewards": [0, 0')
        return Reply(b'{"rewards": [0', length=500) if draw < 0.4 else lengths(request)

    texts = ["x" * (1 + i * 7 % 101) for i in range(2000)]
    with serving(often_fails) as server, scoring(server.url, concurrency=16, batch_size=8, max_retries=4) as reward:
        scores = reward.scores(answers(*texts))
        metrics = reward.reward.metrics()
    assert all(score.value == len(text) for text, score in zip(texts, scores, strict=True) if score.ok)
    assert sum(score.ok for score in scores) > 1900
    assert all(str(score.reason).endswith("(the last of 5 attempts)") for score in scores if not score.ok)
    assert metrics["retries"] > 50
