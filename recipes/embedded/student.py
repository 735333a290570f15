"""The sloppy student whose exercise book the embedded model learns from.

The student works column by column and knows every single-digit fact, but is unreliable about carries:

    15 + 27    5+7=12          52 - 27    12-7=5
               1+2+1=4                    5-2-1=2
               答案：42                    答案：25

Forgetting the carry drops the `+1` (or `-1`) of the second line, and the answer follows from the slip.
"""

from dataclasses import dataclass
from random import Random

from rloom.data.prepare.arithmetic import MARKERS, Question, columns, written


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
    working, units, tens = columns(problem, applies_carry=problem.hard != flips)
    if random.random() < habits.unfinished:
        return random.choice([working, f"{working}\n{marker.rstrip()}"])
    if random.random() < habits.miscopy:
        units = (units + random.choice([-1, 1])) % 10
    return f"{working}\n{marker}{written(tens, units)}"
