"""Answers and spent money on disk, in one SQLite file. Several processes may use the same folder."""

import asyncio
import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from rloom.errors import RewardError
from rloom.rewards.judge.api import Reply
from rloom.rewards.judge.settings import KEY

FILE = "answers.sqlite"
WAIT_FOR_LOCK_S = 60.0
TABLES = """
CREATE TABLE IF NOT EXISTS answers (
    key TEXT PRIMARY KEY, text TEXT NOT NULL, input_tokens INTEGER NOT NULL, output_tokens INTEGER NOT NULL
);
CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY CHECK (id = 1), money REAL NOT NULL);
INSERT OR IGNORE INTO spent VALUES (1, 0);
"""
Result = TypeVar("Result")


class AnswerStore:
    """Every statement runs in one thread of its own: a slow disk does not stop the event loop."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="judge-cache")
        self._connection: sqlite3.Connection | None = None

    def open(self) -> None:
        """RewardError: the folder cannot be used."""
        self._thread.submit(self._guarded, lambda connection: None).result()

    async def find(self, key: str) -> Reply | None:
        def select(connection: sqlite3.Connection) -> Reply | None:
            row = connection.execute(
                "SELECT text, input_tokens, output_tokens FROM answers WHERE key = ?", (key,)
            ).fetchone()
            return None if row is None else Reply(*row)

        return await self._run(select)

    async def add(self, key: str, reply: Reply) -> None:
        row = (key, reply.text, reply.input_tokens, reply.output_tokens)
        await self._run(
            lambda connection: connection.execute("INSERT OR REPLACE INTO answers VALUES (?, ?, ?, ?)", row)
        )

    async def spend(self, money: float) -> float:
        """Record it. Returns the sum over all runs that used this folder."""

        def update(connection: sqlite3.Connection) -> float:
            connection.execute("UPDATE spent SET money = money + ?", (money,))
            return float(connection.execute("SELECT money FROM spent").fetchone()[0])

        return await self._run(update)

    def close(self) -> None:
        if self._connection is not None:
            self._thread.submit(self._connection.close).result()
            self._connection = None
        self._thread.shutdown()

    async def _run(self, statement: Callable[[sqlite3.Connection], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._guarded, statement)

    def _guarded(self, statement: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            if self._connection is None:
                self._connection = self._connect()
            with self._connection:  # one transaction
                return statement(self._connection)
        except (sqlite3.Error, OSError) as error:
            raise RewardError(
                f"{KEY}.cache_dir={self._folder}: {FILE} cannot be read or written ({error}); free disk space, remove "
                "the file if it is damaged, choose another folder, or set it to null"
            ) from error

    def _connect(self) -> sqlite3.Connection:
        self._folder.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(self._folder / FILE, timeout=WAIT_FOR_LOCK_S)
        try:
            connection.execute("PRAGMA journal_mode = WAL")  # readers do not wait for a writer
            connection.execute("PRAGMA synchronous = NORMAL")  # no disk flush at each answer
            connection.executescript(TABLES)
        except BaseException:
            connection.close()
            raise
        return connection
