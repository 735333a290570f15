"""Answers and money on disk."""

import asyncio
import multiprocessing
from pathlib import Path

from rloom.rewards.judge.api import Reply
from rloom.rewards.judge.store import AnswerStore


def write(folder: str, first: int) -> None:
    async def run() -> None:
        store = AnswerStore(Path(folder))
        for number in range(first, first + 100):
            await store.spend(0.5)
            await store.add(str(number), Reply(f"text {number}", number, 1))
        store.close()

    asyncio.run(run())


def test_two_processes_write_at_once_and_nothing_is_lost(tmp_path: Path) -> None:
    start = multiprocessing.get_context("spawn").Process
    processes = [start(target=write, args=(str(tmp_path), first)) for first in (0, 50)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]

    async def read() -> tuple[list[Reply | None], float]:
        store = AnswerStore(tmp_path)
        try:
            return [await store.find(str(number)) for number in (0, 77, 149, 150)], await store.spend(0)
        finally:
            store.close()

    assert asyncio.run(read()) == ([*(Reply(f"text {n}", n, 1) for n in (0, 77, 149)), None], 100.0)


def test_closing_twice_or_without_use_does_nothing(tmp_path: Path) -> None:
    store = AnswerStore(tmp_path)
    store.close()
    store.close()
    assert list(tmp_path.iterdir()) == []
