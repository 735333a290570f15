"""The registry of reward rules: data source -> rule."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rloom.errors import RewardError
from rloom.rewards.base import Setup
from rloom.rewards.rules import answer_line, code, gsm8k, math, math_reasoning
from rloom.rewards.rules.code_problems import problem_of
from rloom.rewards.rules.expressions import load_library
from rloom.rewards.rules.limited import HARD_LIMIT_S
from rloom.types import SampleGroup, Score

OTHER_REWARDS = (
    "your own function (custom_reward_function.path=my_rewards.py custom_reward_function.name=compute_score), a reward "
    "model (reward_model.enable=True reward_model.path=MODEL) or an API judge (reward_model.api.enable=True)"
)


def _no_library() -> None:
    """For rules that import nothing on first use."""


def _as_given(data_source: str, ground_truth: Any) -> Any:
    """For rules that parse the ground truth together with the answer."""
    return ground_truth


@dataclass(frozen=True)
class Rule:
    compute_score: Callable[..., dict[str, float | str | None]]
    options: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # reward_kwargs it reads, and their values
    prepare: Callable[[], None] = _no_library  # slow imports, outside the time limit of a request
    true_answer: Callable[[str, Any], Any] = _as_given  # (data source, ground truth) parsed; ValueError if it cannot be
    wrong: float = 0.0  # the score of a wrong answer
    sandboxed: bool = False  # runs generated code: it gets the keyword `sandbox` and has a time limit of its own

    @property
    def is_fast(self) -> bool:
        """It compares numbers: it imports no library and runs no code."""
        return not self.sandboxed and self.prepare is _no_library


GSM8K = Rule(gsm8k.compute_score, options={"method": gsm8k.METHODS}, true_answer=gsm8k.true_answer)
MATH = Rule(math.compute_score, prepare=load_library, true_answer=math.true_answer)
MATH_REASONING = Rule(math_reasoning.compute_score, true_answer=math_reasoning.true_answer)
ANSWER_LINE = Rule(
    answer_line.compute_score, prepare=load_library, true_answer=math.true_answer, wrong=answer_line.WRONG
)
CODE = Rule(code.compute_score, true_answer=problem_of, sandboxed=True)

EXACT = {
    "openai/gsm8k": GSM8K,
    "lighteval/MATH": MATH,
    "DigitalLearningGmbH/MATH-lighteval": MATH,
    "HuggingFaceH4/MATH-500": MATH,
    "openai/openai_humaneval": CODE,
    "google-research-datasets/mbpp": CODE,
    "rloom/calculator": MATH_REASONING,
    "rloom/search": MATH_REASONING,
}
# Tried in this order, ignoring case: the longer names before math.
PREFIXES = {
    "math_reasoning": MATH_REASONING,
    "math_dapo": ANSWER_LINE,
    "math": MATH,
    "aime": ANSWER_LINE,
    "humaneval": CODE,
    "mbpp": CODE,
    "codecontests": CODE,
    "codeforces": CODE,
    "apps": CODE,
    "taco": CODE,
}


def rule_for(data_source: str) -> Rule | None:
    if data_source in EXACT:
        return EXACT[data_source]
    name = data_source.casefold()
    return next((rule for prefix, rule in PREFIXES.items() if name.startswith(prefix)), None)


def registered() -> list[str]:
    return [*EXACT, *(f"{prefix}*" for prefix in PREFIXES)]


def options_for(rule: Rule, reward_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The part of `reward_kwargs` that this rule reads: the data sources of a run share one setting."""
    return {name: value for name, value in reward_kwargs.items() if name in rule.options}


def keywords_for(rule: Rule, setup: Setup) -> dict[str, Any]:
    """The keyword arguments of this rule, next to those of every rule."""
    options = options_for(rule, setup.reward_kwargs)
    return options | {"sandbox": setup.sandbox} if rule.sandboxed else options


def call_limit_s(setup: Setup, group: SampleGroup) -> float:
    """The time limit of scoring `group`: reward_model.timeout_s for a user's function. A rule ends before it reaches
    this limit, so that only a fault of the machine reaches it."""
    if setup.path is not None:
        return setup.timeout_s
    limits_s = (_rule_limit_s(setup, sample.data_source) for sample in group)
    return max(setup.timeout_s, sum(limits_s))


def _rule_limit_s(setup: Setup, data_source: str) -> float:
    if runs_code(data_source) and setup.sandbox is not None:
        return code.call_limit_s(setup.sandbox)
    return 5 * HARD_LIMIT_S  # wall-clock time: other processes compete for the CPU


def wrong_score(data_source: str, reason: str) -> Score:
    """For an answer that ended its worker."""
    rule = rule_for(data_source)
    return Score(0.0 if rule is None else rule.wrong, parts={"acc": 0.0}, detail=reason)


def runs_code(data_source: str) -> bool:
    rule = rule_for(data_source)
    return rule is not None and rule.sandboxed


def check_sources(sources: Mapping[str, Sequence[int]], reward_kwargs: Mapping[str, Any] | None = None) -> None:
    """Check that every data source has a rule and that a rule reads every option. `sources`: data source -> rows."""
    unknown = {source: rows for source, rows in sources.items() if rule_for(source) is None}
    if unknown:
        named = "; ".join(f"{source!r} ({_rows(rows)})" for source, rows in unknown.items())
        raise RewardError(
            f"no reward rule for data_source {named}. Registered: {', '.join(registered())}. "
            f"Correct the data_source of these rows, or use another reward: {OTHER_REWARDS}"
        )
    rules = [rule for rule in map(rule_for, sources) if rule is not None]
    for name, value in (reward_kwargs or {}).items():
        _check_option(name, value, rules, sources)


def _check_option(name: str, value: Any, rules: Sequence[Rule], sources: Mapping[str, Sequence[int]]) -> None:
    allowed = next((rule.options[name] for rule in rules if name in rule.options), None)
    if allowed is None:
        readable = sorted({option for rule in rules for option in rule.options}) or ["none"]
        raise RewardError(
            f"reward_kwargs.{name}={value!r}: no rule for {', '.join(sources)} reads it; "
            f"options they read: {', '.join(readable)}"
        )
    if value not in allowed:
        raise RewardError(f"reward_kwargs.{name}={value!r}: use one of {', '.join(allowed)}")


def _rows(rows: Sequence[int], shown: int = 3) -> str:
    examples = ", ".join(str(row) for row in rows[:shown])
    more = f" and {len(rows) - shown} more" if len(rows) > shown else ""
    return f"row{'s' if len(rows) > 1 else ''} {examples}{more}" if rows else "no rows given"
