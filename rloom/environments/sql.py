"""Questions about SQLite databases with generated tables and rows, and a tool for queries.

A database is a function of its seed: a row of the data has the seed, not the tables. Queries can only read, and have
limits of time, of rows and of memory.
"""

import sqlite3
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

DATA_SOURCE = "rloom/sql"
TRAIN_ROWS, TEST_ROWS, SEED = 4096, 256, 0
QUERY_S, MAX_ROWS, SHOWN_ROWS = 2.0, 1000, 10
MAX_LENGTH, MAX_COLUMNS, MAX_RESULT = 10_000, 100, 1_000_000  # characters of a value or a query; of all values
HEAP_BYTES = 64 << 20  # of SQLite in this process
STEPS_BETWEEN_CHECKS = 50  # of SQLite's virtual machine; one can be a function that takes milliseconds
INSTRUCTION = (
    "The database is SQLite. Call the tool `query` to look at it. The last query that you run is your answer: its rows "
    "must be those that the question asks for. Then write a short answer without a call."
)
READING = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    getattr(sqlite3, "SQLITE_RECURSIVE", 33),
}
# the last two take seconds for a precision such as '%.*c', whatever the limit of lengths
FORBIDDEN_FUNCTIONS = {"load_extension", "readfile", "writefile", "fts3_tokenizer", "printf", "format"}

# table of things, their group, their numbers
SUBJECTS = (
    ("employees", "department", ("salary", "age"), ("sales", "research", "support", "finance")),
    ("books", "genre", ("pages", "price"), ("novel", "poetry", "history", "science")),
    ("cities", "country", ("population", "area"), ("Norway", "Chile", "Japan", "Kenya")),
    ("products", "category", ("price", "stock"), ("tools", "toys", "food", "garden")),
    ("players", "team", ("goals", "matches"), ("Reds", "Blues", "Greens", "Whites")),
    ("trains", "line", ("seats", "speed"), ("north", "south", "east", "west")),
)
NAMES = ("Ada", "Bo", "Cy", "Dee", "Eli", "Fay", "Gus", "Hal", "Ida", "Jo", "Kim", "Lou", "Mia", "Ned", "Oda", "Pam")


@dataclass(frozen=True)
class SqlTable:
    """One subject, its columns, and its rows: (id, name, group, number, number)."""

    name: str
    group: str
    numbers: tuple[str, str]
    rows: tuple[tuple[int, str, str, int, int], ...]

    @property
    def groups(self) -> list[str]:
        return sorted({row[2] for row in self.rows})


@dataclass(frozen=True)
class SqlQuestion:
    text: str
    sql: str  # the reference


class Sql:
    """Reward: 1 if the last query has the same rows as the reference, in any order unless the question asks for one."""

    def __init__(self) -> None:
        self._database = sqlite3.connect(":memory:")
        self._reference = ""
        self._found: list[tuple[Any, ...]] | None = None

    def reset(self, extra_info: dict[str, Any], reward_model: dict[str, Any], **row: Any) -> None:
        self._database = open_database(table_of(int(extra_info["database"])))
        self._reference = str(reward_model["ground_truth"])

    def query(self, sql: str) -> str:
        """Run one SELECT on the database and return its rows.

        Args:
            sql: The query, in SQLite's dialect.
        """
        self._found = None
        names, self._found = run_query(self._database, sql)
        return shown(names, self._found)

    def get_reward(self) -> float:
        _, expected = run_query(self._database, self._reference)
        ordered = " order by " in self._reference.casefold()
        return float(self._found is not None and same_rows(self._found, expected, ordered=ordered))

    def close(self) -> None:
        self._database.close()


def open_database(table: SqlTable) -> sqlite3.Connection:
    """In memory. After its rows are in it, it can only be read."""
    database = sqlite3.connect(":memory:", isolation_level=None)
    first, second = table.numbers
    database.execute(
        f"CREATE TABLE {table.name} (id INTEGER PRIMARY KEY, name TEXT, {table.group} TEXT, {first} INTEGER, "
        f"{second} INTEGER)"
    )
    database.executemany(f"INSERT INTO {table.name} VALUES (?, ?, ?, ?, ?)", table.rows)
    database.execute("PRAGMA temp_store = MEMORY")  # what is sorted counts, too, and fills no disk
    database.execute(f"PRAGMA hard_heap_limit = {HEAP_BYTES}")
    database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_LENGTH)
    database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, MAX_COLUMNS)
    database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, MAX_LENGTH)
    database.setlimit(sqlite3.SQLITE_LIMIT_ATTACHED, 0)
    database.set_authorizer(authorize)
    return database


def authorize(action: int, first: str | None, second: str | None, database: str | None, source: str | None) -> int:
    """SELECT and what it needs; no PRAGMA, ATTACH, or statement that writes."""
    if action == sqlite3.SQLITE_FUNCTION and (second or "").casefold() in FORBIDDEN_FUNCTIONS:
        return sqlite3.SQLITE_DENY
    return sqlite3.SQLITE_OK if action in READING else sqlite3.SQLITE_DENY


def run_query(database: sqlite3.Connection, sql: str) -> tuple[list[str], list[tuple[Any, ...]]]:
    """The names of the columns, and the rows. sqlite3.Error or ValueError with a reason that the policy reads."""
    until_s = time.monotonic() + QUERY_S
    database.set_progress_handler(lambda: int(time.monotonic() > until_s), STEPS_BETWEEN_CHECKS)
    found: list[tuple[Any, ...]] = []
    size = 0
    try:
        cursor = database.execute(sql)
        for row in cursor:
            found.append(row)
            size += sum(len(value) if isinstance(value, str | bytes) else 8 for value in row)
            if len(found) > MAX_ROWS:
                raise ValueError(f"the query has more than {MAX_ROWS} rows")
            if size > MAX_RESULT:
                raise ValueError(f"the rows of the query have more than {MAX_RESULT:,} characters")
    except MemoryError:
        raise ValueError(f"the query needs more than {HEAP_BYTES >> 20} MiB of memory") from None
    except sqlite3.OperationalError as error:
        if "interrupted" in str(error):
            raise ValueError(f"the query took longer than {QUERY_S:g} s") from None
        raise
    finally:
        database.set_progress_handler(None, 0)
    return [column[0] for column in cursor.description or ()], found


def shown(names: Sequence[str], found: Sequence[tuple[Any, ...]]) -> str:
    lines = [" | ".join(names), *(" | ".join(map(str, one)) for one in found[:SHOWN_ROWS])]
    return "\n".join([*lines, f"({len(found)} rows)"])


def same_rows(found: Sequence[tuple[Any, ...]], expected: Sequence[tuple[Any, ...]], *, ordered: bool) -> bool:
    """Names of columns do not count. Numbers are compared with six digits."""
    first, second = ([tuple(map(comparable, one)) for one in rows] for rows in (found, expected))
    return first == second if ordered else sorted(first) == sorted(second)


def comparable(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, int | float) else f"'{value}'"


def table_of(seed: int) -> SqlTable:
    random = Random(seed)
    name, group, numbers, groups = random.choice(SUBJECTS)
    count = random.randint(8, len(NAMES))
    people = random.sample(NAMES, count)
    made = [
        (index + 1, person, random.choice(groups), random.randint(10, 99), random.randint(100, 999))
        for index, person in enumerate(people)
    ]
    return SqlTable(name, group, numbers, tuple(made))


def question_of(table: SqlTable, random: Random) -> SqlQuestion:
    maker: Callable[[SqlTable, Random], SqlQuestion] = random.choice(QUESTIONS)
    return maker(table, random)


def count_question(table: SqlTable, random: Random) -> SqlQuestion:
    group = random.choice(table.groups)
    return SqlQuestion(
        f"How many {table.name} have the {table.group} {group}?",
        f"SELECT COUNT(*) FROM {table.name} WHERE {table.group} = '{group}'",
    )


def extreme_question(table: SqlTable, random: Random) -> SqlQuestion:
    number, (word, order) = random.choice(table.numbers), random.choice((("largest", "DESC"), ("smallest", "ASC")))
    return SqlQuestion(
        f"What is the name of the entry of {table.name} with the {word} {number}? If several have it, the one with the "
        "smallest id.",
        f"SELECT name FROM {table.name} ORDER BY {number} {order}, id LIMIT 1",
    )


def average_question(table: SqlTable, random: Random) -> SqlQuestion:
    number = random.choice(table.numbers)
    return SqlQuestion(
        f"What is the average {number} of {table.name} for each {table.group}? Return {table.group} and average.",
        f"SELECT {table.group}, AVG({number}) FROM {table.name} GROUP BY {table.group}",
    )


def above_question(table: SqlTable, random: Random) -> SqlQuestion:
    first, second = table.numbers
    limit = random.randint(30, 70)
    return SqlQuestion(
        f"List the names of all {table.name} with a {first} over {limit}, ordered by {second}, largest first, then by "
        "name.",
        f"SELECT name FROM {table.name} WHERE {first} > {limit} ORDER BY {second} DESC, name",
    )


def above_average_question(table: SqlTable, random: Random) -> SqlQuestion:
    number = random.choice(table.numbers)
    return SqlQuestion(
        f"How many {table.name} have a {number} over the average {number}?",
        f"SELECT COUNT(*) FROM {table.name} WHERE {number} > (SELECT AVG({number}) FROM {table.name})",
    )


QUESTIONS = (count_question, extreme_question, average_question, above_question, above_average_question)


def rows() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Training and test rows have different databases."""
    random = Random(SEED)
    made = [row(seed, random) for seed in range(TRAIN_ROWS + TEST_ROWS)]
    for split, index, one in [
        *(("train", index, one) for index, one in enumerate(made[:TRAIN_ROWS])),
        *(("test", index, one) for index, one in enumerate(made[TRAIN_ROWS:])),
    ]:
        one["extra_info"] |= {"split": split, "index": index}
    return made[:TRAIN_ROWS], made[TRAIN_ROWS:]


def row(seed: int, random: Random) -> dict[str, Any]:
    table = table_of(seed)
    question = question_of(table, random)
    columns = ", ".join(("id", "name", table.group, *table.numbers))
    return {
        "data_source": DATA_SOURCE,
        "prompt": [
            {"role": "user", "content": f"Table {table.name}({columns}). {question.text}\n\n{INSTRUCTION}"},
        ],
        "ability": "sql",
        "reward_model": {"style": "rule", "ground_truth": question.sql},
        "extra_info": {"database": seed},
    }
