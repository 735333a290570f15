"""The calculator, the Python tool, SQL and search: what they return, what players reach, and hostile calls."""

import resource
import sqlite3
import time
from collections.abc import Mapping
from contextlib import suppress
from random import Random
from typing import Any

import pytest

from rloom.environments import calculator, search, sql
from rloom.environments.calculator import Calculator, evaluate
from rloom.environments.python import NOTHING, PythonTool
from rloom.environments.search import Bm25, Search
from rloom.environments.sql import Sql, SqlTable
from rloom.episodes.tool_calls import parse_tool_calls
from rloom.rewards.routing import rule_for


@pytest.mark.parametrize(
    ("expression", "shown"),
    [("12*34", "408"), ("2*(3+4)-1", "13"), ("7/2", "3.5"), ("1/3", "0.3333333333"), ("-2**2", "-4"), ("9//2%3", "1")],
)
def test_the_calculator_computes(expression: str, shown: str) -> None:
    assert Calculator().calculate(expression) == shown


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('touch /tmp/x')",
        "(lambda: 1)()",
        "9**9**9",
        "2**100000",
        "10**64*10**64",
        "(" * 150 + "1" + ")" * 40,
        "1" * 5000,
        "-" * 150 + "1",
        "[1]*9",
        "'a'*9",
        "True+1",
        "1/0",
        "(-8)**0.5",
        "1e308*10",
        "x+1",
        "",
        "12*34; 1",
    ],
)
def test_the_calculator_computes_nothing_else(expression: str) -> None:
    with pytest.raises(ValueError):
        evaluate(expression)


def score(row: Mapping[str, Any], answer: str) -> float:
    rule = rule_for(row["data_source"])
    assert rule is not None
    found = rule.compute_score(row["data_source"], answer, row["reward_model"]["ground_truth"], row["extra_info"])
    return float(found["score"] or 0.0)


def test_a_player_with_the_calculator_solves_every_product_and_a_guess_solves_few() -> None:
    train, test = calculator.rows()
    assert (len(train), len(test)) == (4096, 256)
    assert not {row["prompt"][0]["content"] for row in train} & {row["prompt"][0]["content"] for row in test}
    random, tool = Random(0), Calculator()
    played = [
        score(row, f"Answer: {tool.calculate(row['prompt'][0]['content'].removeprefix('What is ').rstrip('?'))}")
        for row in test
    ]
    guessed = [score(row, f"Answer: {random.randint(144, 9801)}") for row in test]
    assert sum(played) == len(test) and sum(guessed) <= 3


def test_the_demonstrations_call_the_tool_in_45_percent_and_with_the_right_operation_in_a_third_of_them() -> None:
    train, _ = calculator.rows()
    called = [row["messages"] for row in train if len(row["messages"]) == 4]
    right = [row for row in train if row["messages"][-1]["content"] == f"Answer: {row['reward_model']['ground_truth']}"]
    assert 0.42 < len(called) / len(train) < 0.48 and 0.12 < len(right) / len(train) < 0.18
    for question, call, result, answer in called:
        [parsed] = parse_tool_calls(call["content"])
        expression = parsed.arguments["expression"]
        asked = question["content"].removeprefix("What is ").rstrip("?")
        assert expression.replace("+", "*").replace("-", "*") == asked
        assert result == {"role": "tool", "content": Calculator().calculate(expression)}
        assert answer["content"] == f"Answer: {result['content']}"


def test_the_python_tool_returns_what_a_program_prints() -> None:
    tool = PythonTool()
    assert tool.python("print(sum(range(5)))") == "10"
    assert tool.python("x = 6\nx * 7") == "42"  # as a notebook shows it
    assert tool.python("x = 1") == NOTHING
    assert "ZeroDivisionError" in tool.python("print('before')\n1/0")
    assert "before" in tool.python("print('before')\n1/0")
    assert "SyntaxError" in tool.python("def f(:")


@pytest.mark.parametrize(
    "code",
    [
        "import os\nwhile True: os.fork()",
        "while True: pass",
        "x = 'a' * 10**12",
        "while True: print('x' * 10**6)",
        "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    ],
    ids=["forks", "loops", "memory", "prints", "kills"],
)
def test_the_python_tool_ends_hostile_programs_and_works_after_them(code: str) -> None:
    tool, began = PythonTool(timeout_s=3.0, memory_mb=512), time.monotonic()
    assert "Error" in tool.python(code)
    assert time.monotonic() - began < 60
    assert tool.python("print(1)") == "1"


TABLE = SqlTable("books", "genre", ("pages", "price"), ((1, "Ada", "novel", 10, 100), (2, "Bo", "poetry", 30, 200)))


def asked(reference: str) -> Sql:
    environment = Sql()
    environment.reset(extra_info={"database": 0}, reward_model={"ground_truth": reference})
    environment._database = sql.open_database(TABLE)
    return environment


def test_the_last_query_is_the_answer() -> None:
    environment = asked("SELECT COUNT(*) FROM books")
    assert environment.get_reward() == 0.0  # nothing was asked
    assert environment.query("SELECT name, pages FROM books") == "name | pages\nAda | 10\nBo | 30\n(2 rows)"
    assert environment.get_reward() == 0.0
    environment.query("SELECT 2.0 AS anything")
    assert environment.get_reward() == 1.0
    with pytest.raises(sqlite3.OperationalError, match="no such column"):
        environment.query("SELECT colour FROM books")
    assert environment.get_reward() == 0.0  # the last query failed


def test_rows_are_compared_in_order_only_if_the_question_asks_for_one() -> None:
    ordered, free = asked("SELECT name FROM books ORDER BY pages DESC"), asked("SELECT name FROM books")
    for environment, reward in ((ordered, 0.0), (free, 1.0)):
        environment.query("SELECT name FROM books ORDER BY pages")
        assert environment.get_reward() == reward


@pytest.mark.parametrize(
    "statement",
    [
        "DROP TABLE books",
        "DELETE FROM books",
        "INSERT INTO books VALUES (3, 'Cy', 'novel', 1, 1)",
        "UPDATE books SET pages = 0",
        "CREATE TABLE other (id)",
        "ATTACH '/tmp/rloom_attached.db' AS other",
        "VACUUM INTO '/tmp/rloom_vacuum.db'",
        "PRAGMA writable_schema = 1",
        "BEGIN",
        "SELECT load_extension('/tmp/x.so')",
        "SELECT 1; DROP TABLE books",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT COUNT(*) FROM n",
        "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT i FROM n",
        "SELECT zeroblob(1000000000)",
        "SELECT printf('%.*c', 1000000000, 'x')",
        "",
    ],
)
def test_hostile_statements_change_nothing_and_end_in_time(statement: str) -> None:
    environment, began = asked("SELECT name FROM books"), time.monotonic()
    with suppress(sqlite3.Error, sqlite3.Warning, ValueError):
        assert len(environment.query(statement)) < 1000
    assert time.monotonic() - began < 20
    assert environment.get_reward() == 0.0
    environment.query("SELECT name FROM books")
    assert environment.get_reward() == 1.0
    environment.close()


COUNT = "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n)"


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("SELECT printf('%.*c', 1000000000, 'x')", "not authorized to use function: printf"),
        ("SELECT format('%1000000000d', 1)", "not authorized to use function: format"),
        ("SELECT length(randomblob(1000000000))", "string or blob too big"),
        ("SELECT replace(hex(zeroblob(4000)), '0', hex(zeroblob(4000)))", "string or blob too big"),
        (f"{COUNT} SELECT group_concat(hex(zeroblob(4000))) FROM n", "the query took longer than 2 s"),
        (f"{COUNT} SELECT hex(randomblob(4000)) FROM n", "the rows of the query have more than 1,000,000 characters"),
        (f"{COUNT} SELECT {', '.join(['1'] * 101)} FROM n", "too many columns in result set"),
        (
            f"{COUNT} SELECT i FROM n ORDER BY hex(randomblob(4000)), i",
            "needs more than 64 MiB|took longer",
        ),
        (f"SELECT {' + '.join(['instr(hex(zeroblob(4999)), hex(zeroblob(2500)) || 1)'] * 90)}", ""),
    ],
)
def test_a_query_ends_within_its_limits_of_time_and_memory(statement: str, reason: str) -> None:
    environment, began = asked("SELECT name FROM books"), time.monotonic()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if reason:
        with pytest.raises((sqlite3.Error, ValueError), match=reason):
            environment.query(statement)
    else:
        with suppress(ValueError):  # a busy machine takes longer than 2 s
            environment.query(statement)
    assert time.monotonic() - began < 30
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    environment.close()


def test_the_references_solve_every_question_and_a_guess_solves_few() -> None:
    train, test = sql.rows()
    assert (len(train), len(test)) == (4096, 256)
    assert not {row["extra_info"]["database"] for row in train} & {row["extra_info"]["database"] for row in test}
    solved = guessed = 0.0
    for row in test:
        environment = Sql()
        environment.reset(**row)
        environment.query(row["reward_model"]["ground_truth"])
        solved += environment.get_reward()
        environment.query("SELECT 3")
        guessed += environment.get_reward()
        environment.close()
    assert solved == len(test) and guessed / len(test) < 0.15


def test_bm25_is_the_published_formula() -> None:
    index = Bm25(["red cat", "a blue dog barks"])
    # idf = log(1 + (2 - 1 + 0.5) / (1 + 0.5)) = log 2; tf part = 2.2 / (1 + 1.2 * (0.25 + 0.75 * 2 / 3))
    assert index.score("cat", 0) == pytest.approx(0.6931471805599453 * 2.2 / 1.9)
    assert index.best("the DOG and the cat", 2) == [0, 1]
    assert index.best("dog", 3) == [1] and index.best("bird", 3) == []


def test_a_player_who_searches_answers_one_and_two_hops_and_a_guess_few() -> None:
    train, test = search.rows()
    assert (len(train), len(test)) == (2048, 256)
    people, towns = search.world(search.SEED)
    by_name, town_of = {town.name: town for town in towns}, {person.name: person for person in people}
    tool, random, right, guessed = Search(), Random(0), 0.0, 0.0
    for row in test:
        question = row["prompt"][0]["content"].partition("\n")[0]
        name = next(name for name in town_of if f" {name} " in question.replace("?", " "))
        seen = tool.search(name).splitlines()[0]
        assert seen.startswith(f"{name} is a ")
        town = seen.rpartition(" ")[2].rstrip(".")
        if row["extra_info"]["hops"] == 2:
            seen = tool.search(f"{town} founded flag").splitlines()[0]
            assert seen.startswith(f"{town} is a town that was founded in {by_name[town].founded}.")
        person = town_of[name]
        answers = {text: answer for text, answer, _ in search.questions(person, by_name[town])}
        assert answers[question] in seen
        right += score(row, f"I searched.\nAnswer: {answers[question]}.")
        guessed += score(row, f"Answer: {random.choice(search.JOBS + search.COLOURS + search.ANIMALS)}")
    assert right == len(test) and guessed / len(test) < 0.1


def test_people_of_the_test_questions_are_in_no_training_question() -> None:
    names = [
        {name for row in part for name in row["prompt"][0]["content"].partition("\n")[0].rstrip("?").split()}
        for part in search.rows()
    ]
    people = {person.name for person in search.world(search.SEED)[0]}
    assert not names[0] & names[1] & people and names[1] & people
