"""Groups go to worker processes in batches: as many as are cheap, none lost, none twice, none kept."""

import asyncio
import contextlib
import gc
import threading
import time
from pathlib import Path

import pytest

from rloom.net.loop import EventLoop
from rloom.rewards.pool import RulePool
from rloom.rewards.score_queue import BackgroundScorer
from rloom.rewards.worker_process import WorkerProcess
from rloom.types import Sample, Score
from tests.waiting import wait_until

COUNTING = """
import gc, os, time
from rloom.types import Sample

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    with open(__file__ + ".log", "a") as log:
        log.write(solution_str + "\\n")
    if solution_str == "hang":
        time.sleep(600)
    if solution_str == "die":
        os._exit(3)
    if solution_str == "slow":
        time.sleep(0.1)
    if solution_str == "slow die":
        time.sleep(0.3)
        os._exit(3)
    if solution_str == "wait for quick":
        until_s = time.monotonic() + 60
        while "quick" not in open(__file__ + ".log").read().splitlines():
            if time.monotonic() > until_s:
                raise TimeoutError("no other worker scored it")
            time.sleep(0.01)
    if solution_str == "pop":
        extra_info["tests"].pop()
        return float(len(extra_info["tests"]))
    return 1.0

def live_samples(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str != "count":
        return 1.0
    gc.collect()
    return sum(type(thing) is Sample for thing in gc.get_objects())
"""


def score(pool: RulePool, *responses: str) -> list[Score]:
    return [one for [one] in asyncio.run(pool.score([(Sample("own", "p", text),) for text in responses]))]


@pytest.fixture
def counting(tmp_path) -> Path:
    (tmp_path / "counting.py").write_text(COUNTING)
    return tmp_path / "counting.py"


@pytest.fixture
def requests_sent(monkeypatch) -> list[bytes]:
    sent: list[bytes] = []
    send = WorkerProcess.send

    def recorded(process: WorkerProcess, request: bytes) -> None:
        sent.append(request)
        send(process, request)

    monkeypatch.setattr(WorkerProcess, "send", recorded)
    return sent


@pytest.fixture
def large_batches(monkeypatch) -> None:
    """Whatever a call takes."""
    monkeypatch.setattr("rloom.rewards.pool.BATCH_S", 1e6)


@pytest.mark.parametrize(("bad", "reason"), [("hang", "timed out after"), ("die", "ended with exit code 3")])
def test_cheap_calls_are_sent_in_batches_and_a_failure_in_one_fails_alone(
    counting, requests_sent, monkeypatch, bad, reason
):
    """The calls that a worker had not begun when it was killed are made by the next one, and none is made twice."""
    monkeypatch.setattr("rloom.rewards.pool.BATCH_S", 1.0)  # on a busy machine a round trip of one call is no cheap one
    texts = [bad if index == 100 else f"answer {index}" for index in range(200)]
    with contextlib.closing(RulePool(num_workers=1, timeout_s=4, path=str(counting))) as pool:
        scores = score(pool, *texts)
        assert [pool.metrics(), pool.metrics()] == [{"workers_replaced": 1.0}, {"workers_replaced": 0.0}]
    assert [index for index, one in enumerate(scores) if not one.ok] == [100]
    assert reason in (scores[100].reason or "")
    assert sorted(Path(f"{counting}.log").read_text().splitlines()) == sorted(texts)
    assert len(requests_sent) < 100


def test_slow_calls_are_sent_one_by_one(counting, requests_sent):
    with contextlib.closing(RulePool(num_workers=2, timeout_s=60, path=str(counting))) as pool:
        assert score(pool, *["slow"] * 8) == [Score(1)] * 8
    assert len(requests_sent) == 8


def test_an_idle_worker_scores_what_arrives_while_another_is_busy(counting):
    async def one_after_the_other(pool: RulePool) -> list[list[Score]]:
        first = asyncio.create_task(pool.score([(Sample("s", "p", "wait for quick"),)]))
        while not Path(f"{counting}.log").exists():
            await asyncio.sleep(0.01)
        return [*await pool.score([(Sample("s", "p", "quick"),)]), *await first]

    with contextlib.closing(RulePool(num_workers=2, timeout_s=90, path=str(counting))) as pool:
        assert asyncio.run(one_after_the_other(pool)) == [[Score(1)], [Score(1)]]


def test_an_idle_worker_scores_what_a_replaced_one_had_not_begun(counting, large_batches):
    with contextlib.closing(RulePool(num_workers=2, timeout_s=90, path=str(counting))) as pool:
        score(pool, "a", "b")  # from now on a worker takes half of what waits
        scores = score(pool, "slow die", "wait for quick", "quick", "c", "d", "e")
    assert [one.value for one in scores] == [None, 1, 1, 1, 1, 1]


def test_the_groups_of_a_batch_share_no_objects(counting, large_batches, requests_sent):
    """A function may change its arguments."""
    row = {"tests": [*range(40)]}
    with contextlib.closing(RulePool(num_workers=1, timeout_s=90, path=str(counting))) as pool:
        score(pool, "a")
        scores = asyncio.run(pool.score([(Sample("s", "p", "pop", "", row),)] * 20))
    assert scores == [[Score(39)]] * 20
    assert len(requests_sent) == 2


class Unreadable:
    def __reduce__(self) -> tuple[type[int], tuple[str]]:
        return int, ("no number",)


def test_a_row_that_a_worker_cannot_read_fails_alone(counting, large_batches, requests_sent):
    good, bad = Sample("s", "p", "a"), Sample("s", "p", "b", Unreadable())
    with contextlib.closing(RulePool(num_workers=1, timeout_s=90, path=str(counting))) as pool:
        score(pool, "a")
        scores = asyncio.run(pool.score([(good,), (good, bad), (good,)]))
        assert pool.metrics() == {"workers_replaced": 0.0}
    reason = (
        "this row cannot be read by a reward worker: ValueError: invalid literal for int() with base 10: 'no number'"
    )
    assert scores == [[Score(1)], [Score.failed(reason)] * 2, [Score(1)]]
    assert len(requests_sent) == 2


def test_a_reply_that_arrived_while_the_event_loop_was_blocked_is_a_score(counting):
    async def block() -> None:
        time.sleep(3)

    with contextlib.closing(EventLoop("shared")) as loop:
        pool = RulePool(num_workers=1, timeout_s=2, path=str(counting))
        with contextlib.closing(BackgroundScorer(pool, loop)) as scorer:
            assert scorer.submit([(Sample("s", "p", "a"),)]).result() == [[Score(1)]]
            scores = scorer.submit([(Sample("s", "p", "slow"),)])
            wait_until(lambda: "slow" in Path(f"{counting}.log").read_text())  # sent
            loop.run(block())
            assert scores.result() == [[Score(1)]]


def test_what_waits_when_the_pool_is_closed_fails_with_that_reason(counting):
    pool = RulePool(num_workers=2, timeout_s=90, path=str(counting))

    async def close_meanwhile() -> list[list[Score]]:
        groups = [(Sample("s", "p", "hang"),)] * 100
        scoring = asyncio.create_task(pool.score(groups))
        while not Path(f"{counting}.log").exists():
            await asyncio.sleep(0.01)
        await asyncio.to_thread(pool.close)
        return await scoring

    scores = asyncio.run(asyncio.wait_for(close_meanwhile(), 60))
    assert [one.reason for [one] in scores] == ["the reward was closed before this sample was scored"] * 100


def live() -> int:
    """Samples and scores in memory."""
    gc.collect()
    return sum(type(thing) in (Sample, Score) for thing in gc.get_objects())


def test_2_000_samples_leave_nothing_in_memory(counting):
    before = live()
    pool = RulePool(num_workers=2, timeout_s=60, path=str(counting), name="live_samples")
    with contextlib.closing(BackgroundScorer(pool)) as scorer:
        futures = [scorer.submit([(Sample("s", "p", f"{index} " + "x" * 500),)]) for index in range(2_000)]
        assert sum(one.value or 0 for future in futures for [one] in future.result()) == 2_000
        del futures
        wait_until(lambda: live() <= before)  # the thread of the last answer may not have ended its turn
        in_worker = [scorer.submit([(Sample("s", "p", "count"),)]).result()[0][0].value for _ in range(4)]
    assert in_worker == [1.0] * 4  # the sample that counts


def test_an_event_loop_closes_beside_a_thread_that_does_not_end() -> None:
    release = threading.Event()
    loop = EventLoop("closing")
    loop.start(asyncio.to_thread(release.wait, 60))
    began = time.monotonic()
    try:
        loop.cancel_all()
        loop.close()
        assert time.monotonic() - began < 20
    finally:
        release.set()
