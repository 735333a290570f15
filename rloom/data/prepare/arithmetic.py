"""Sums and differences of two-digit numbers, asked in Chinese and in English: the embedded data set.

A problem is *hard* if its units column carries or borrows. The share of hard problems determines the accuracy of a
model that ignores carries, and so the initial accuracy of the embedded model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal

from rloom.errors import DataError

DATA_SOURCE = "math_reasoning"
HARD_SHARE = 0.625
SMALLEST, LARGEST = 10, 99
# As in recipes/embedded: with another seed, the test problems would include training problems of the embedded model.
TRAIN_ROWS, TEST_ROWS, SEED = 8192, 512, 0

Language = Literal["zh", "en"]
WORDS: dict[Language, dict[str, str]] = {"zh": {"+": "加", "-": "减"}, "en": {"+": "plus", "-": "minus"}}
MARKERS: dict[Language, str] = {"zh": "答案：", "en": "Answer: "}


@dataclass(frozen=True)
class Problem:
    a: int
    op: Literal["+", "-"]
    b: int

    @property
    def result(self) -> int:
        return self.a + self.b if self.op == "+" else self.a - self.b

    @property
    def hard(self) -> bool:
        """Whether the units column carries (or borrows)."""
        units_a, units_b = self.a % 10, self.b % 10
        return units_a + units_b > 9 if self.op == "+" else units_a < units_b


@dataclass(frozen=True)
class Phrasing:
    language: Language
    template: str

    def ask(self, problem: Problem) -> str:
        word = WORDS[self.language][problem.op]
        return self.template.format(a=problem.a, op=problem.op, b=problem.b, word=word)


PHRASINGS = (
    Phrasing("zh", "计算 {a} {op} {b} 的结果"),
    Phrasing("zh", "{a} {op} {b} 等于多少？"),
    Phrasing("zh", "请计算：{a} {op} {b}"),
    Phrasing("zh", "{a} {word} {b} 是多少？"),
    Phrasing("en", "What is {a} {op} {b}?"),
    Phrasing("en", "Compute {a} {op} {b}."),
    Phrasing("en", "Please calculate {a} {op} {b}"),
    Phrasing("en", "How much is {a} {word} {b}?"),
)


@dataclass(frozen=True)
class Question:
    problem: Problem
    phrasing: Phrasing

    @property
    def text(self) -> str:
        return self.phrasing.ask(self.problem)

    @property
    def answer(self) -> str:
        """Column by column, as the embedded model writes it, without its errors: `5+7=12`, `1+2+1=4`, `Answer: 42`."""
        working, units, tens = columns(self.problem, applies_carry=self.problem.hard)
        return f"{working}\n{MARKERS[self.phrasing.language]}{written(tens, units)}"


def columns(problem: Problem, *, applies_carry: bool) -> tuple[str, int, int]:
    """The working in two lines, the units digit and what stands before it."""
    (tens_a, units_a), (tens_b, units_b) = divmod(problem.a, 10), divmod(problem.b, 10)
    op, carry = problem.op, int(applies_carry)
    carried = f"{op}1" if applies_carry else ""
    if op == "+":
        units, tens = units_a + units_b, tens_a + tens_b + carry
    else:
        units_a += 10 * problem.hard
        units, tens = units_a - units_b, tens_a - tens_b - carry
    working = f"{units_a}{op}{units_b}={units}\n{tens_a}{op}{tens_b}{carried}={tens}"
    return working, units % 10, tens


def written(tens: int, units: int) -> str:
    """A needless borrow can leave -1 in the tens column; the digits are written one after the other."""
    return str(units) if tens == 0 else f"{tens}{units}"


def questions(*, train: int, test: int, seed: int) -> tuple[list[Question], list[Question]]:
    """Draw both splits. No problem is in both, and no question occurs twice within a split."""
    if train < 0 or test < 0:
        raise DataError(f"arithmetic: train={train}, test={test}: a number of rows cannot be negative")
    random = Random(seed)
    train_questions: list[Question] = []
    test_questions: list[Question] = []
    hard_train, hard_test = round(train * HARD_SHARE), round(test * HARD_SHARE)
    for hard, train_share, test_share in ((True, hard_train, hard_test), (False, train - hard_train, test - hard_test)):
        pool = [problem for problem in _all_problems() if problem.hard is hard]
        random.shuffle(pool)
        held_out, rest = pool[:test_share], pool[test_share:]
        _check_capacity(hard=hard, train=train_share, test=test_share, pool=len(pool))
        test_questions += _ask(held_out, test_share, random)
        train_questions += _ask(rest, train_share, random)
    random.shuffle(train_questions)
    random.shuffle(test_questions)
    return train_questions, test_questions


def splits(source: Path | None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The embedded data set."""
    if source is not None:
        raise DataError(f"--source {source}: arithmetic is generated, not read; leave --source out")
    return rows(train=TRAIN_ROWS, test=TEST_ROWS, seed=SEED)


def rows(*, train: int, test: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The data set as rows of the documented schema: `(train rows, test rows)`."""
    train_questions, test_questions = questions(train=train, test=test, seed=seed)
    return _as_rows(train_questions, "train"), _as_rows(test_questions, "test")


def _all_problems() -> list[Problem]:
    numbers = range(SMALLEST, LARGEST + 1)
    sums = [Problem(a, "+", b) for a in numbers for b in numbers]
    differences = [Problem(a, "-", b) for a in numbers for b in numbers if a >= b]
    return sums + differences


def _check_capacity(*, hard: bool, train: int, test: int, pool: int) -> None:
    most_train = (pool - test) * len(PHRASINGS)
    if test > pool or train > most_train:
        kind = "with a carry or borrow" if hard else "without carry or borrow"
        raise DataError(
            f"arithmetic: train={train} and test={test} rows {kind}: there are only {pool} such problems in "
            f"{len(PHRASINGS)} phrasings; use fewer rows"
        )


def _ask(problems: Sequence[Problem], count: int, random: Random) -> list[Question]:
    """`count` distinct questions: each further pass over the problems uses the next phrasing."""
    first_phrasing = [random.randrange(len(PHRASINGS)) for _ in problems]
    asked = []
    for i in range(count):
        round_trip, which = divmod(i, len(problems))
        phrasing = PHRASINGS[(first_phrasing[which] + round_trip) % len(PHRASINGS)]
        asked.append(Question(problems[which], phrasing))
    return asked


def _as_rows(split_questions: Sequence[Question], split: str) -> list[dict[str, Any]]:
    return [
        {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": question.text}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(question.problem.result)},
            "extra_info": {"split": split, "index": index, "answer": question.answer},
        }
        for index, question in enumerate(split_questions)
    ]
