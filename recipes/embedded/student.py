"""The sloppy student whose exercise book the embedded model learns from.

The student works column by column and knows every single-digit fact, but is unreliable about carries:

    15 + 27    5+7=12          52 - 27    12-7=5
               1+2+1=4                    5-2-1=2
               答案：42                    答案：25

Forgetting the carry drops the `+1` (or `-1`) of the second line, and the answer follows from the slip.
"""

from dataclasses import dataclass
from random import Random

from rloom.data.prepare.arithmetic import Language, Problem, Question

MARKERS: dict[Language, str] = {"zh": "答案：", "en": "Answer: "}


@dataclass(frozen=True)
class Habits:
    """How often the student errs, each a probability."""

    forget_carry: float = 0.70  # when the units column carries or borrows
    needless_carry: float = 0.25  # when it does not
    miscopy: float = 0.05  # the last digit of the answer is off by one
    unfinished: float = 0.04  # no answer line, or one without a number


CAREFUL = Habits(forget_carry=0.0, needless_carry=0.0, miscopy=0.0, unfinished=0.0)


def answer(question: Question, habits: Habits, random: Random) -> str:
    problem, marker = question.problem, MARKERS[question.phrasing.language]
    flips = random.random() < (habits.forget_carry if problem.hard else habits.needless_carry)
    working, units, tens = _columns(problem, applies_carry=problem.hard != flips)
    if random.random() < habits.unfinished:
        return random.choice([working, f"{working}\n{marker.rstrip()}"])
    if random.random() < habits.miscopy:
        units = (units + random.choice([-1, 1])) % 10
    return f"{working}\n{marker}{_written(tens, units)}"


def _columns(problem: Problem, *, applies_carry: bool) -> tuple[str, int, int]:
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


def _written(tens: int, units: int) -> str:
    """A needless borrow can leave -1 in the tens column; the student simply writes the digits down."""
    return str(units) if tens == 0 else f"{tens}{units}"
