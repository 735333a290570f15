"""What fails in a worker: the same report from processes of this machine and from Ray."""

import logging
import os
import signal
import socket
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rloom.errors import WorkerError
from rloom.runtime import failures, remote
from tests.e2e.peers import HANGS, KILLED, Peer
from tests.e2e.runs import terminate_all
from tests.worker_backends import Backend, ray_address, started, started_processes  # noqa: F401

pytestmark = pytest.mark.slow
HANGS_S = 240


def test_a_worker_that_cannot_begin_is_an_error_and_no_loss(started: Backend) -> None:  # noqa: F811
    """To begin again would end the same."""
    with started(int, [("no number",)]) as workers, pytest.raises(WorkerError) as caught:
        remote.RemoteGroup(workers, None).each("stats", [()])
    assert str(caught.value).startswith("worker 0 could not begin: ValueError: ")
    assert not caught.value.lost


def test_a_port_listens_before_it_is_published_so_that_no_other_process_takes_it(started: Backend) -> None:  # noqa: F811
    with started(Peer, [()] * 2) as workers:
        addresses = [remote.RemoteGroup(workers[:1], None).call("address")[0] for _ in range(2)]
        for address in addresses:
            with socket.socket() as other, pytest.raises(OSError, match="in use"):
                other.bind(("", int(address.rsplit(":")[-1])))
        group = remote.RemoteGroup(workers, "actor")
        # 0 + 1 and 1 + 1; the 5 of rank 0
        assert group.each("meet", [(rank, *addresses) for rank in range(2)]) == [([1.0, 2.0], [5.0])] * 2


def test_the_cause_is_reported_first_and_a_worker_that_hangs_is_not_waited_for(
    started: Backend,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The error of a lost peer arrives first, its cause a second later; a third worker is in a collective for ever."""
    monkeypatch.setattr(failures, "RAISED_WAIT_S", 2.0)
    with started(Peer, [()] * 3, tmp_path) as workers:
        group = remote.RemoteGroup(workers, "actor")
        assert group.each("act", [(0, None)] * 3) == ["done"] * 3
        assert (
            len(terminate_all(*children())) >= 1 + 2 * 3
        )  # what starts them, and three workers with the `tee` of each
        time.sleep(0.5)
        assert group.each("act", [(0, None)] * 3) == ["done"] * 3
        assert group.each("end_a_child", [()] * 3) == [-signal.SIGTERM] * 3, "a worker's own children do end"
        with pytest.raises(WorkerError) as caught:
            group.each("act", [(0, "Connection closed by peer"), (1, "the disk is gone"), (HANGS_S, None)])
        error = caught.value
        assert str(error).startswith("worker 1 failed: Strange: the disk is gone\nTraceback")
        assert f"Its last lines ({tmp_path / '1.log'})" in str(error) and "actor.act" in str(error)
        assert error.__notes__ == [
            "Another failure, possibly a consequence: worker 0 failed: Strange: Connection closed by peer"
        ]
        assert (error.worker, error.lost) == ("worker 1", False)
        pair = remote.RemoteGroup(workers[:2], "actor")
        left: list[list[Any]] = [[[None, None], [None]], [[], [None]]]  # of each share
        found = list(pair.stream("act_stream", lambda share: left[share].pop(0) if left[share] else None))
        assert [items for share, items in found if share == 0] == [["done", "done"], ["done"]]
        assert [items for share, items in found if share == 1] == [[], ["done"]]
        with pytest.raises(WorkerError, match="worker 0 failed: Strange: no such token"):
            list(pair.stream("act_stream", lambda share: [None, "no such token"] if share == 0 else None))


def test_a_stored_result_is_read_by_the_driver_and_by_another_worker(started: Backend) -> None:  # noqa: F811
    with started(Peer, [()] * 2) as workers:
        group = remote.RemoteGroup(workers, "actor")
        found = group.start("numbers", [(1000,), (2000,)], stored=True).wait()
        assert [stored.get()[-1].item() for stored in found] == [999, 1999]
        assert group.each("total", [(found[1],), (found[0],)]) == [1999 * 1000, 999 * 500]  # of the other worker


def test_a_worker_gives_a_stored_result_back_when_the_driver_has_opened_it() -> None:
    with started_processes(Peer, [()]) as workers:
        group = remote.RemoteGroup(workers, "actor")
        stored = group.start("numbers", [(1000,)], stored=True).wait()
        assert group.call("memory_files") == [0] and stored[0].get()[-1].item() == 999


def test_a_worker_that_hangs_in_a_stream_counts_as_dead_after_the_limit(
    started: Backend,  # noqa: F811
    tmp_path: Path,
) -> None:
    with started(Peer, [()], tmp_path) as workers:
        assert remote.RemoteGroup(workers, "actor").each("act", [(0, None)]) == ["done"]
        group = remote.RemoteGroup(workers, "actor", limit_s=5.0)
        with pytest.raises(WorkerError, match=r"^worker 0 counts as dead: .*progress_timeout_s=5 s") as caught:
            list(group.stream("act_stream", lambda share: [HANGS]))
    error = caught.value
    assert (error.worker, error.lost) == ("worker 0", True) and "actor.act_stream" in str(error)


def children() -> list[int]:
    """Of this process: Ray's head, or the process that workers are forked from."""
    listed = subprocess.run(
        ["ps", "-ww", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True, check=True
    )
    marks = (" start --head ", "rloom.runtime.fork_server serve")
    return [int(line.split()[0]) for line in listed.stdout.splitlines() if any(mark in line for mark in marks)]


def test_a_death_is_reported_before_an_error_that_arrived_earlier(
    started: Backend,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(failures, "RAISED_WAIT_S", 60.0)  # ends with the death
    with started(Peer, [()] * 2, tmp_path) as workers:
        group = remote.RemoteGroup(workers, "actor")
        assert group.each("act", [(0, None)] * 2) == ["done"] * 2
        with pytest.raises(WorkerError, match=r"^worker 1 died\. .*exit") as caught:
            group.each("act", [(0, "no such token"), (0.5, KILLED)])
        assert caught.value.lost and "actor.act" in str(caught.value)
        assert caught.value.__notes__ == [
            "Another failure, possibly a consequence: worker 0 failed: Strange: no such token"
        ]
        with pytest.raises(WorkerError, match="worker 1 died"):  # called again
            group.each("act", [(0, None)] * 2)


def test_large_answers_and_large_calls_pass_each_other(started: Backend) -> None:  # noqa: F811
    """Neither side waits until the other has read what it sent: a worker has its next items before it answers."""
    with started(Peer, [()]) as workers:
        text, left = "a" * 5_000_000, 6

        def next_items(share: int) -> list[str] | None:
            nonlocal left
            left -= 1
            return [text] if left >= 0 else None

        found = list(remote.RemoteGroup(workers, "actor").stream("echo_stream", next_items))
    assert found == [(0, [text])] * 6


class SlowWorkers:
    """Workers with a clock of their own: an answer of worker 0 takes 10 s, one of worker 1 takes 250 s."""

    def __init__(self) -> None:
        self.now = 0.0
        self.ready_at: dict[remote.Answer, float] = {}

    def worker(self, name: str, seconds: float) -> Any:
        def submit(method: str, *arguments: Any) -> remote.Answer:
            answer = remote.Answer()
            answer.set_result(None)
            self.ready_at[answer] = self.now + (seconds if method == "send" else 0.0)
            return answer

        return SimpleNamespace(name=name, submit=submit)

    def arrived(self, answers: Any, timeout_s: float) -> list[remote.Answer]:
        first = min(answers, key=self.ready_at.__getitem__)
        self.now = min(max(self.ready_at[first], self.now), self.now + max(timeout_s, 0.0))
        return [first] if self.ready_at[first] <= self.now else []


def test_a_worker_of_a_stream_that_does_not_answer_is_named_although_others_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowWorkers()
    monkeypatch.setattr(remote, "arrived", slow.arrived)
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: slow.now))
    monkeypatch.setattr(remote, "SENDS_AHEAD", 1)
    caplog.set_level(logging.INFO, logger=remote.__name__)
    left = [30, 1]  # items of each share: worker 0 is busy for 300 s, worker 1 for 250 s

    def next_items(share: int) -> list[int] | None:
        left[share] -= 1
        return [0] if left[share] >= 0 else None

    group = remote.RemoteGroup([slow.worker("worker 0", 10.0), slow.worker("worker 1", 250.0)], "rollout")
    assert len(list(group.stream("generate_stream", next_items))) == 31
    assert [record.message for record in caplog.records] == [
        f"Waiting for worker 1 ({seconds} s)" for seconds in (60, 120, 240)
    ]


def test_a_stream_serves_all_workers_that_have_answered_before_it_waits_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are there as soon as items are sent, as on a driver that is late."""
    slow, waits = SlowWorkers(), 0

    def arrived(answers: Any, timeout_s: float) -> list[remote.Answer]:
        nonlocal waits
        waits += 1
        return [answer for answer in answers if answer.done()]

    monkeypatch.setattr(remote, "arrived", arrived)
    left = [3] * 4

    def next_items(share: int) -> list[int] | None:
        left[share] -= 1
        return [0] if left[share] >= 0 else None

    group = remote.RemoteGroup([slow.worker(f"worker {number}", 0.0) for number in range(4)], "rollout")
    assert [share for share, _ in group.stream("generate_stream", next_items)] == [0, 1, 2, 3] * 3
    assert waits == 3 + 2  # to open the streams and to close them


def test_a_worker_that_hangs_counts_as_dead_although_others_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    now, hangs = 0.0, remote.Answer()
    monkeypatch.setattr(remote, "time", SimpleNamespace(monotonic=lambda: now))
    first, second = (SimpleNamespace(name=name, log_file=None) for name in ("worker 0", "worker 1"))
    waiting = remote.Waiting(limit_s=100.0)
    for now in (0.0, 50.0, 99.0, 100.0):
        answer = remote.Answer()
        answer.set_result(now)
        if now < 100:
            assert waiting.ready({hangs: second, answer: first}) == [answer]
    with pytest.raises(WorkerError, match=r"^worker 1 counts as dead"):
        waiting.ready({hangs: second, answer: first})
    hangs.set_result(None)  # in the meantime: the caller was late, not the worker
    waiting.since["worker 1"] = 0.0, 1000.0
    assert waiting.ready({hangs: second}) == [hangs]
