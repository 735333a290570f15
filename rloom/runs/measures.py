"""What a validation measures on a data source: the accuracy, or a mean score. Imports no torch.

Accuracy: the reward said of each answer whether it is right, as the value `acc`; every built-in rule does. Any other
number is a score. The names of the metrics are verl's and have `acc` in both cases, so the `validation` event of a run
records the measure of each source, and every reader takes it from `measures_of`.
"""

from collections.abc import Iterable, Mapping, Sequence

from rloom.types import Score

ACCURACY, SCORE = "accuracy", "score"
LABELS = {ACCURACY: "acc", SCORE: "score"}  # in lines of the terminal
TITLES = {ACCURACY: "Held-out accuracy on", SCORE: "Held-out score on"}
SAME = 1e-9  # mean and share of the same 0/1 scores: the order of their sums may differ


def measured(scores: Iterable[tuple[str, Score]]) -> dict[str, str]:
    """By data source. `scores`: with the data source of each; failed ones do not count."""
    found: dict[str, str] = {}
    for source, score in scores:
        if score.ok:
            found[source] = ACCURACY if "acc" in score.parts and found.get(source, ACCURACY) == ACCURACY else SCORE
    return found


def measures_of(validations: Sequence[Mapping[str, float]], recorded: Mapping[str, str]) -> dict[str, str]:
    """By data source. `validations`: their metrics. `recorded`: of the last `validation` event; a source without a
    record was written by an older version, and has an accuracy if all of its scores were 0 or 1."""
    sources = dict.fromkeys(source for metrics in validations for source in validation_accuracies(metrics))
    return {
        source: recorded.get(source)
        or (ACCURACY if all(_was_zero_or_one(source, each) for each in validations) else SCORE)
        for source in sources
    }


def validation_accuracies(metrics: Mapping[str, float]) -> dict[str, float]:
    """{'val-core/openai/gsm8k/acc/mean@1': 0.4} -> {'openai/gsm8k': 0.4}. Mean scores where there is no accuracy."""
    return {
        name.removeprefix("val-core/").rpartition("/acc/mean@")[0]: value
        for name, value in metrics.items()
        if name.startswith("val-core/") and "/acc/mean@" in name
    }


def _was_zero_or_one(source: str, metrics: Mapping[str, float]) -> bool:
    """The mean of 0/1 scores is the share of the scores above 0.5."""
    value = validation_accuracies(metrics).get(source)
    mean, share = (metrics.get(f"val-aux/{source}/acc/{name}@1") for name in ("best", "pass"))
    if mean is None or share is None:
        return value is None or 0 <= value <= 1
    return abs(mean - share) < SAME


def shown(value: float, measure: str) -> str:
    """An accuracy as a percentage, a score as it is: 42.2 %, -0.422. An `acc` beyond 0 to 1 is no share."""
    if measure == ACCURACY and 0 <= value <= 1:
        return f"{100 * value:.1f} %"
    return short_number(value)


def short_number(value: float) -> str:
    """Three significant digits: 0.0213, 17.2; or a whole number: 12,345."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
