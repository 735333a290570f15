"""When two LaTeX answers are one: what must be told apart, what must not, and MATH's own answers."""

import json
import re
from fractions import Fraction
from pathlib import Path

import pytest

from rloom.data.prepare.math import answer_of
from rloom.rewards.rules.latex import exact_number, normalised, with_braces
from rloom.rewards.rules.math import same_answer

MATH = Path(__file__).parents[3].parent / "shared" / "data" / "math"

# answer, truth
SAME = [
    # an argument without braces is the next token
    (r"\frac\pi 3", r"\frac{\pi}{3}"),
    (r"\frac12", r"\frac{1}{2}"),
    (r"\frac{\sqrt 3}2", r"\frac{\sqrt{3}}{2}"),
    (r"\frac\sqrt3 2", r"\frac{\sqrt{3}}{2}"),
    (r"\sqrt[3]2", r"\sqrt[3]{2}"),
    (r"\binom52", "10"),
    (r"\log_2 8", "3"),
    # numbers
    (r"\$1{,}000", "1000"),
    (r"1\,000", "1000"),
    ("3 1/2", r"3\frac12"),
    (r"0.\overline{6}", r"\frac23"),
    ("0.333333", r"\frac13"),
    ("1.41421356", r"\sqrt2"),
    (r"2\times10^{-5}", "0.00002"),
    (r"\frac{1}{\sqrt2}", r"\frac{\sqrt2}{2}"),
    (r"3\cdot 2^{100}", r"6\cdot2^{99}"),
    (r"(1+i)^2", "2i"),
    # bases: the question names the base, an answer may leave it out
    ("52_7", "52_{7}"),
    ("(52)_7", "52_7"),
    ("52", "52_7"),
    ("-37", "-37_8"),
    ("52_{10}", "52"),
    # units, degrees, words
    ("5 cm", r"5\text{ cm}"),
    (r"15\mbox{ cm}^2", "15"),
    ("12 apples", "12"),
    (r"\text{east}", "East"),
    (r"\text{Yes}", "yes"),
    ("(C)", r"\text{C}"),
    # equations
    ("x=5", "5"),
    ("5", "x=5"),
    ("AB = 5", "5"),
    (r"\angle ABC = 30^\circ", "30"),
    (r"\cos\theta=\frac35", "0.6"),
    ("17+3=20", "20"),
    ("y=2x+1", "2x-y+1=0"),
    ("4x+2z-10=0", "2x+z=5"),
    # lists, sets, tuples, intervals
    (r"6, 8\text{, and }10", "6,8,10"),
    (r"\{1,2,3\}", "3,2,1"),
    ("1,2", "(1,2)"),
    ("100,200", "100, 200"),
    (r"1\pm\sqrt2", r"1+\sqrt{2},1-\sqrt{2}"),
    ("y=5,x=3", "x=3,y=5"),
    (r"x \in [-2,7]", "[-2,7]"),
    (r"(5,\infty) \cup (0,5)", r"(0,5)\cup(5,\infty)"),
    (r"x\le 3", r"(-\infty,3]"),
    (r"(-\infty,3]", r"x\le 3"),
    (r"x \geq 3", r"3\le x"),
    (r"\begin{bmatrix} 0.5 & 2 \\ 3 & 4 \end{bmatrix}", r"\begin{pmatrix}\frac12&2\\3&4\end{pmatrix}"),
    # expressions
    (r"(x+1)(x-1)", "x^2-1"),
    (r"\sin^2x", r"1-\cos^2 x"),
    (r"\frac{1}{7}x+\frac{2}{7}", r"\dfrac{x+2}{7}"),
]

DIFFERENT = [
    # a fragment of what cannot be parsed
    (r"\frac\pi 3", "3"),
    ("3", r"\frac\pi 3"),
    (r"\foo{3}", "3"),
    ("the answer is 3", "3"),
    # numbers
    (".000067", ".0000672"),
    ("0.3333", "1/3"),
    ("1000000", "1000000.5"),
    (r"\frac{1}{1000000}", r"\frac{1}{1000001}"),
    (r"2^{-60}", "3^{-40}"),
    ("15", "7 8"),
    ("100", "100,000"),
    ("52_7", "52_8"),
    ("-37_8", "37_8"),
    ("52_7", "52"),
    ("37", "52_7"),
    # letters are not units, and their case matters
    ("2t", "2"),
    ("2", "2s"),
    ("R^2", "r^2"),
    (r"\Delta", r"\delta"),
    ("f'(x)", "f(x)"),
    ("x_1", "x_2"),
    ("seat", r"\text{east}"),
    (r"\text{odd}", r"\text{even}"),
    # equations
    ("0", "x + y + z = 0"),
    ("x + y + z = 0", "0"),
    ("2x+z=3", "3"),
    ("9=1", "1"),
    ("1=2", "3=4"),
    ("x=5", "y=5"),
    ("y=2x+1", "y=2x-1"),
    # lists, sets, tuples, intervals
    ("(1,2)", r"\{1,2\}"),
    ("2,1", "(1,2)"),
    ("1,1,2", "1,2,2"),
    ("1,2", "1,2,3"),
    ("[1,2]", "(1,2)"),
    (r"1+\sqrt2", r"1\pm\sqrt2"),
    (r"x\le 3", "x<3"),
    (r"\frac13", "10:30"),
    (r"\begin{pmatrix} 0 \\ 0 \\ 0 \end{pmatrix}", r"\begin{pmatrix} 4 \\ 0 \end{pmatrix}"),
    (r"\begin{pmatrix}1&2\end{pmatrix}", r"\begin{pmatrix}1\\2\end{pmatrix}"),
    (r"\sqrt{x^2}", "x"),
]


@pytest.mark.parametrize(("answer", "truth"), SAME)
def test_two_spellings_of_one_answer_are_equal(answer, truth):
    assert same_answer(answer, truth)


@pytest.mark.parametrize(("answer", "truth"), DIFFERENT)
def test_different_answers_are_told_apart(answer, truth):
    assert not same_answer(answer, truth)


def test_arguments_get_the_braces_that_tex_reads_into_them():
    assert with_braces(r"\frac\pi 3") == r"\frac{\pi}{3}"
    assert with_braces(r"\frac 123") == r"\frac{1}{2}3"
    assert with_braces(r"\frac9{19}+\sqrt3x") == r"\frac{9}{19}+\sqrt{3}x"
    assert with_braces(r"\frac{\frac12}3") == r"\frac{\frac{1}{2}}{3}"
    assert with_braces(r"\frac{1") == r"\frac{1"


def test_numbers_are_read_exactly_and_know_whether_they_are_decimals():
    assert exact_number("-1,234.50") == (Fraction("-1234.5"), True)
    assert exact_number(r"-2\frac{1}{3}") == (Fraction(-7, 3), False)
    assert exact_number(r"0.1\overline{6}") == (Fraction(1, 6), False)
    assert [exact_number(text) for text in ("1,23", "-", ".", "1/0", "5x", "7 8")] == [None] * 6


def test_what_changes_no_meaning_is_taken_away():
    assert normalised(r"$\left( \dfrac12,\; 90^\circ \right)$.") == r"( \frac{1}{2}, 90 )"
    assert normalised(r"32,\!348\text{ square inches}") == "32,348"
    assert normalised(r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}") == r"\begin{pmatrix} 1 \\ 2 \end{pmatrix}"


def integer(form):
    return lambda answer: form.format(int(answer)) if re.fullmatch(r"-?\d+", answer) else None


VARIANTS = {
    "dfrac": lambda answer: answer.replace(r"\frac", r"\dfrac"),
    "no left and right": lambda answer: re.sub(r"\\(left|right)(?![a-z])", "", answer),
    "dollars": "${}$".format,
    "full stop": "{}.".format,
    "thousands": integer("{:,}"),
    "decimal": integer("{}.0"),
    "unit": integer(r"{}\text{{ cm}}^2"),
    "plain unit": integer("{} square units"),
    "degrees": integer(r"{}^\circ"),
    "per cent": integer(r"{}\%"),
    "equation": integer("x = {}"),
    "slash": lambda answer: re.sub(r"^(-?)\\d?frac\{(\d+)\}\{(\d+)\}$", r"\1\2/\3", answer),
    "bare fraction": lambda answer: re.sub(r"\\frac\{(\d)\}\{(\d)\}", r"\\frac\1\2", answer),
    "bare root": lambda answer: re.sub(r"\\sqrt\{(\d)\}", r"\\sqrt\1", answer),
    "bmatrix": lambda answer: answer.replace("pmatrix", "bmatrix"),
}


@pytest.mark.skipif(not MATH.is_dir(), reason="the shared data sets are not here")
def test_every_real_math_answer_equals_its_own_spellings():
    rows = json.loads((MATH / "train.json").read_text())
    rows += [json.loads(line) for line in (MATH / "test500.jsonl").read_text().splitlines()]
    truths = {truth for row in rows if (truth := answer_of(row))}
    assert len(truths) == 3040
    tried = [("itself", truth, truth) for truth in truths]
    for name, make in VARIANTS.items():
        tried += [(name, made, truth) for truth in truths if (made := make(truth)) and made != truth]
    assert [(name, made) for name, made, truth in tried if not same_answer(made, truth)] == []
