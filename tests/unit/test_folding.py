"""Lines of a terminal are broken between words."""

import pytest

from rloom.terminal import columns, folded

OPENING = (
    "gae on embedded (cpu): 2048 prompts, 64 × 8 answers a step, 32 steps, no reference (algorithm.kl_metric=True)"
)
PATH = "/home/someone/projects/checkpoints/rloom_examples/embedded_gae_embedded_with_a_long_name"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("short", ["short"]),
        (OPENING, ["gae on embedded (cpu): 2048 prompts, 64 × 8 answers a step, 32 steps, no",
                   "    reference (algorithm.kl_metric=True)"]),
        (f"Model: {PATH}; x", ["Model:", f"    {PATH};", "    x"]),
        ("  - " + "word " * 20, ["  - " + " ".join(["word"] * 15), "      word word word word word"]),
        ("x" * 70 + " 97.3 % now", ["x" * 70 + " 97.3 %", "    now"]),
        ("x" * 74 + " 97.3 % now", ["x" * 74, "    97.3 % now"]),
        ("一" * 40 + "，二" + " abc", ["一" * 39, "    一，二 abc"]),
        ("a\n\nb", ["a", "", "b"]),
    ],
)  # fmt: skip
def test_a_line_of_80_columns(text: str, lines: list[str]) -> None:
    assert folded(text, 80).split("\n") == lines
    assert all(columns(line) <= 80 or " " not in line.strip() for line in lines)
