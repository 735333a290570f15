"""100 pairs of answers that are equal and over 100 that are not, by kind; compared in both orders."""

from pathlib import Path

import pytest
import yaml

from rloom.rewards.rules.math import same_answer

TABLES = yaml.safe_load((Path(__file__).parents[2] / "tables" / "answer_pairs.yaml").read_text(encoding="utf-8"))
EQUAL, UNEQUAL = (
    {kind: [(answer, truth) for answer, truth in pairs] for kind, pairs in TABLES[name].items()}
    for name in ("equal", "unequal")
)


@pytest.mark.parametrize("kind", EQUAL)
def test_equal_answers_are_equal_in_both_orders(kind: str) -> None:
    pairs = [pair for answer, truth in EQUAL[kind] for pair in ((answer, truth), (truth, answer))]
    assert [pair for pair in pairs if not same_answer(*pair)] == []


@pytest.mark.parametrize("kind", UNEQUAL)
def test_unequal_answers_are_unequal_in_both_orders(kind: str) -> None:
    pairs = [pair for answer, truth in UNEQUAL[kind] for pair in ((answer, truth), (truth, answer))]
    assert [pair for pair in pairs if same_answer(*pair)] == []


def test_the_tables_have_100_pairs_each() -> None:
    equal, unequal = ([pair for pairs in table.values() for pair in pairs] for table in (EQUAL, UNEQUAL))
    assert len(set(equal)) >= 100 and len(set(unequal)) >= 100
