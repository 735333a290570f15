r"""MATH and its kin: the last `\boxed` answer, equal to the truth as text or as mathematics."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from rloom.rewards.rules.boxed import last_boxed

LIBRARY_LIMIT_S = 4  # for one parse or one comparison; whole seconds, the library counts in alarms
LONGEST_ANSWER = 1000  # characters; what a model rambles into a box is not worth seconds of parsing

_TEXT = re.compile(r"\\(?:text|textbf|textit|mathrm|mbox)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[,;:! ]|~|\\(?:left|right|displaystyle)(?![a-zA-Z])|\$")
_WORD = re.compile(r"[^\W\d_]{4,}")


def load_library() -> None:
    """Import math-verify (and SymPy with it): half a second or more, once a process."""
    import math_verify  # noqa: F401


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: Any,
    extra_info: Mapping[str, Any] | None = None,
) -> dict[str, float | str | None]:
    truth = _truth(data_source, ground_truth)
    answer = last_boxed(solution_str)
    score = float(answer is not None and same_answer(answer, truth))
    return {"score": score, "acc": score, "pred": answer}


def same_answer(answer: str, truth: str) -> bool:
    answer, truth = _tidy(answer), _tidy(truth)
    if _as_text(answer) == _as_text(truth):
        return True
    # Symbols commute: to the library `east` is the product of its letters, and so is `seat`.
    if not answer or len(answer) > LONGEST_ANSWER or _WORD.fullmatch(_as_text(truth)):
        return False
    return _equal_as_mathematics(answer, truth)


def _equal_as_mathematics(answer: str, truth: str) -> bool:
    from math_verify import verify
    from math_verify.errors import TimeoutException

    try:
        wanted, given = list(_parsed(truth)), list(_parsed(answer))
        return bool(verify(wanted, given, timeout_seconds=LIBRARY_LIMIT_S, raise_on_error=True))
    except TimeoutException as error:  # undecided: that is no proof of a wrong answer
        raise TimeoutError(f"comparing {answer[:80]!r} with {truth[:80]!r} took over {LIBRARY_LIMIT_S} s") from error
    except Exception:  # the library's way of meeting two things that cannot be compared, such as a set and a matrix
        return False


@lru_cache(maxsize=4096)
def _parsed(latex: str) -> tuple[Any, ...]:
    from math_verify import parse

    return tuple(parse(rf"\boxed{{{latex}}}", parsing_timeout=LIBRARY_LIMIT_S, raise_on_error=True))


def _truth(data_source: str, ground_truth: Any) -> str:
    text = "" if ground_truth is None else str(ground_truth).strip()
    if r"\boxed" in text:
        text = last_boxed(text) or ""
    if not text:
        raise ValueError(f"ground_truth={ground_truth!r} of a {data_source} row holds no answer")
    return text


def _tidy(latex: str) -> str:
    r"""Without the marks that change no meaning: dollars, a final stop, a per cent sign (`10\%` is asked as `10`)."""
    return re.sub(r"(?:\\?%|[.。\s])+$", "", latex.replace(r"\$", "").strip().strip("$").strip())


def _as_text(latex: str) -> str:
    unwrapped = _TEXT.sub(r"\1", latex)
    compact = "".join(_SPACING.sub("", unwrapped).split()).casefold()
    return re.sub(r"\\[dt]frac", r"\\frac", compact)
