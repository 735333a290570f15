"""The rules, case by case: what is read from an answer, and whether it is right."""

import json
import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from itertools import pairwise
from pathlib import Path

import pytest

from rloom.rewards.rules import answer_line, format, gsm8k, limited, math, math_reasoning
from rloom.rewards.rules.boxed import last_boxed
from rloom.rewards.rules.numbers import canonical, close, numbers_in, parse_number

# a time limit that is reached in a callback of the garbage collector is ignored there and raised again at the next tick
pytestmark = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
SHARED = Path(__file__).parents[3].parent / "shared" / "data"

GSM8K_STRICT = [
    # solution, ground truth, the answer as read, score
    ("9 * 2 = 18\n#### 18", "18", "18", 1.0),
    ("#### 18.00", "18", "18", 1.0),
    ("#### 18.", "18", "18", 1.0),
    ("#### $1,234", "1234", "1234", 1.0),
    ("#### 1234", "1,234", "1234", 1.0),
    ("####-5", "-5", "-5", 1.0),
    ("#### −5", "-5", "-5", 1.0),
    ("#### -$5", "-5", "-5", 1.0),
    ("#### **70** dollars", 70, "70", 1.0),
    ("#### 0.5", ".5", "0.5", 1.0),
    ("#### 3\nNo, wait.\n#### 4", "4", "4", 1.0),
    ("#### 3\nNo, wait.\n#### 4", "3", "4", 0.0),
    ("#### 1,234, as asked", "1234", "1234", 1.0),
    ("#### 1,234,567, as asked", "1234567", "1234567", 1.0),
    ("#### 18 ####", "18", "18", 1.0),
    ("#### 18 ####\nThat is all.", "18", "18", 1.0),
    ("#### 17 #### 18", "18", "18", 1.0),
    (r"#### \boxed{1{,}234}", "1234", "1234", 1.0),
    (r"#### $\boxed{\$18}$", "18", "18", 1.0),
    (r"#### \(1,\!234\)", "1234", "1234", 1.0),
    ("#### __-18__", "-18", "-18", 1.0),
    ("#### 1,234, as asked", "1", "1234", 0.0),
    ("#### 1,2", "12", None, 0.0),
    ("#### +18", "18", "18", 1.0),
    ("#### 1.8e1", "18", "18", 1.0),
    ("#### 1 234", "1234", "1234", 1.0),
    ("#### 5 million dollars", "5,000,000", "5000000", 1.0),
    ("#### 5 million", "5", "5000000", 0.0),
    ("#### 5 hundred thousand", "500000", "500000", 1.0),
    ("#### 3百万元", "3000000", "3000000", 1.0),
    ("#### 1.2亿", "1.2", "120000000", 0.0),
    ("#### 18 + 2 = 20", "20", None, 0.0),
    ("#### " + "9" * 4000 + "e999", "18", None, 0.0),
    ("#### 18 ####", "1", "18", 0.0),
    ("#### 19", "18", "19", 0.0),
    ("#### 180", "18", "180", 0.0),
    ("#### 2500001", "2500000", "2500001", 0.0),
    ("The answer is 18", "18", None, 0.0),
    ("#### eighteen", "18", None, 0.0),
    ("#### 18\n####", "18", None, 0.0),
    ("", "18", None, 0.0),
    ("#### " + "9" * 6000, "18", None, 0.0),
    ("#### Step 18", "18", None, 0.0),
]

GSM8K_FLEXIBLE = [
    ("#### 18 + 2 = 20", "20", "20", 1.0),
    ("It is 5 million.", "5", "5000000", 0.0),
    ("It is 5 million.", "5000000", "5000000", 1.0),
    ("about 6.02 × 10^23", "23", "602" + "0" * 21, 0.0),
    ("She makes 9 * 2 = $18.", "18", "18", 1.0),
    ("First 3, then 1,000 in total.", "1000", "1000", 1.0),
    ("It is 1,000, as asked", "1000", "1000", 1.0),
    ("10-3", "3", "3", 1.0),
    ("It fell to -3", "-3", "-3", 1.0),
    ("#### 18 and then 5 more", "18", "5", 0.0),
    ("no number at all", "18", None, 0.0),
]

MATH = [
    (r"so \boxed{5}", "5", "5", 1.0),
    (r"\boxed{4}, no: \boxed{5}.", "5", "5", 1.0),
    (r"\boxed{5}, no: \boxed{4}.", "5", "4", 0.0),
    (r"\boxed{\frac{3}{4}}", "3/4", r"\frac{3}{4}", 1.0),
    (r"\boxed{\dfrac34}", r"$\frac{3}{4}$", r"\dfrac34", 1.0),
    (r"\boxed{0.75}", r"\frac{3}{4}", "0.75", 1.0),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", r"\sqrt{12}", 1.0),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", "(x+1)^2", 1.0),
    (r"\boxed{x=5}", "5", "x=5", 1.0),
    (r"\boxed{90^\circ}", "90", r"90^\circ", 1.0),
    (r"\boxed{\$1{,}000}", "1000", r"\$1{,}000", 1.0),
    (r"\boxed{10\%}", "10", r"10\%", 1.0),
    (r"\boxed{\text{east}}", "east", r"\text{east}", 1.0),
    (r"\boxed{C}", r"\text{(C)}", "C", 1.0),
    (r"\boxed{2, 1}", "1,2", "2, 1", 1.0),
    (r"\boxed 7.", "7", "7", 1.0),
    (r"\boxed{5}", r"work, work, \boxed{5}", "5", 1.0),
    (r"\boxed{-3}", "−3", "-3", 1.0),
    (r"\boxed{\left( 3, \frac{\pi}{2} \right)}", r"(3,\frac{\pi}{2})", r"\left( 3, \frac{\pi}{2} \right)", 1.0),
    (r"\boxed{seat}", r"\text{east}", "seat", 0.0),
    (r"\boxed{(2,1)}", "(1,2)", "(2,1)", 0.0),
    (r"\boxed{[0,1]}", "[0,1)", "[0,1]", 0.0),
    (r"\boxed{3.14159}", r"\pi", "3.14159", 0.0),
    (r"\boxed{0.33}", "1/3", "0.33", 0.0),
    (r"\boxed{}", "5", "", 0.0),
    (r"\boxed{\frac{1}", "5", None, 0.0),
    ("the answer is 5", "5", None, 0.0),
    (r"\boxed{\frac{}{}}", "5", r"\frac{}{}", 0.0),
]

MATH_REASONING = [
    ("15 + 27 = 42，答案：42", "42", "42", 1.0),
    ("答案: 42。", "42", "42", 1.0),
    ("所以答案是42", 42, "42", 1.0),
    ("答案是：**42**", "42", "42", 1.0),
    ("答案：42 元", "42", "42", 1.0),
    ("答案是 15 + 27 = 42", "42", "42", 1.0),
    ("Answer: 42.0", "42", "42", 1.0),
    ("ANSWER: 42.", "42", "42", 1.0),
    ("**Answer:** $42$", "42", "42", 1.0),
    ("Answer:\n\n42\nbecause 15 + 27", "42", "42", 1.0),
    ("the answer is 1,000", "1000", "1000", 1.0),
    ("the answer is 1000", "1,000", "1000", 1.0),
    ("The answer is 42 apples.", "42", "42", 1.0),
    ("#### 42", 42.0, "42", 1.0),
    (r"thus \boxed{42}.", "42", "42", 1.0),
    (r"Answer: \boxed{\frac{3}{4}}", "0.75", "0.75", 1.0),
    (r"Answer: 3/4", r"\frac{3}{4}", "0.75", 1.0),
    ("Answer: 1/3", "0.333333", "1/3", 1.0),
    ("Answer: -7", "−7", "-7", 1.0),
    ("答案：−7", "-7", "-7", 1.0),
    ("答案：４２", "42", "42", 1.0),
    ("Answer: 41. Let me check. Answer: 42", "42", "42", 1.0),
    ("15 加 27 等于 42", "42", "42", 1.0),
    ("Answer: Paris.", "paris", "Paris", 1.0),
    ("答案：“偶数”。", "偶数", "偶数", 1.0),
    ("Answer: x = 3, y = 4", "x=3,y=4", "x = 3, y = 4", 1.0),
    ("Answer: 42. Let me check. Answer: 41", "42", "41", 0.0),
    ("15 + 27 = 42, or is it 43", "42", "43", 0.0),
    ("Answer: 7", "-7", "7", 0.0),
    ("Answer: 1", "1,000", "1", 0.0),
    ("Answer: 42 or 43", "42", "42 or 43", 0.0),
    ("Answer: 42 + 1", "42", "42 + 1", 0.0),
    ("Answer: 42 million", "42", "42000000", 0.0),
    ("答案：小明有 42 个", "42", "42", 1.0),
    ("Answer: 3/0", "3", "3/0", 0.0),
    ("Answer: 10000001", "10000000", "10000001", 0.0),
    ("42\nAnswer:", "42", None, 0.0),
    ("Answer: London", "Paris", "London", 0.0),
    (r"\boxed{4", "4", None, 0.0),
    ("我不知道", "42", None, 0.0),
]


# solution, ground truth, the answer as read, whether it is right
ANSWER_LINES = [
    ("so 17 * 2 = 34.\nAnswer: 34", "34", "34", True),
    ("Answer: $34$", "34", "$34$", True),
    (r"Answer: $\boxed{34}$", "34", "34", True),
    ("**Answer:** 34", "34", "34", True),
    ("**Answer**: 34.", "34", "34.", True),
    ("The final answer: x = 34", "34", "x = 34", True),
    (r"Answer: \frac12", "0.5", r"\frac12", True),
    ("Answer: 3\nNo, wait.\nAnswer: 34", "34", "34", True),
    (r"thus \boxed{34}.", "34", "34", True),  # no such line
    (r"\boxed{34}" + "\nAnswer: 35", "34", "35", False),
    ("Answer: 34\nNo, wait.\nAnswer: 3", "34", "3", False),
    ("Answer: 340", "34", "340", False),
    ("It is 34", "34", None, False),
    ("Answer:", "34", None, False),
    ("", "34", None, False),
]


@pytest.mark.parametrize(("solution", "truth", "read", "right"), ANSWER_LINES)
def test_dapo_data_is_scored_by_its_last_answer_line(solution, truth, read, right):
    expected = {"score": 1.0, "acc": 1.0, "pred": read} if right else {"score": -1.0, "acc": 0.0, "pred": read}
    assert answer_line.compute_score("math_dapo", solution, truth) == expected


@pytest.mark.parametrize(("solution", "truth", "read", "score"), GSM8K_STRICT)
def test_gsm8k_strict_reads_the_number_after_the_last_hashes(solution, truth, read, score):
    assert gsm8k.compute_score("openai/gsm8k", solution, truth) == {"score": score, "acc": score, "pred": read}


@pytest.mark.parametrize(("solution", "truth", "read", "score"), GSM8K_FLEXIBLE)
def test_gsm8k_flexible_reads_the_last_number(solution, truth, read, score):
    result = gsm8k.compute_score("openai/gsm8k", solution, truth, method="flexible")
    assert result == {"score": score, "acc": score, "pred": read}


@pytest.mark.parametrize(("solution", "truth", "read", "score"), MATH)
def test_math_compares_the_last_boxed_answer(solution, truth, read, score):
    assert math.compute_score("lighteval/MATH", solution, truth) == {"score": score, "acc": score, "pred": read}


@pytest.mark.parametrize(("solution", "truth", "read", "score"), MATH_REASONING)
def test_math_reasoning_reads_what_the_last_marker_introduces(solution, truth, read, score):
    result = math_reasoning.compute_score("math_reasoning", solution, truth)
    assert result == {"score": score, "acc": score, "pred": read}


@pytest.mark.parametrize(
    ("rule", "truth"), [(gsm8k, "eighteen"), (gsm8k, None), (math, ""), (math, r"\boxed{}"), (math_reasoning, " ")]
)
def test_a_ground_truth_that_cannot_be_read_is_an_error_and_not_a_zero(rule, truth):
    with pytest.raises(ValueError, match="of a some/source row"):
        rule.compute_score("some/source", r"#### 18 \boxed{18}", truth)


def test_an_unknown_gsm8k_method_names_the_known_ones():
    with pytest.raises(ValueError, match="method='loose': use one of strict, flexible"):
        gsm8k.compute_score("openai/gsm8k", "#### 1", "1", method="loose")


# Answers that would take hours, or raise in a parser. Each is compared with ground truths of several kinds.
HOSTILE = {
    "tower": "9^{9^{9^9}}",
    "logarithm of a tower": r"\log_2(9^{9^{9^9}})",
    "factorial of a factorial": "((9!)!)!",
    "binomial": r"\binom{1000000000}{500000000}",
    "many towers": ",".join(["9^{9^{9^9}}"] * 60),
    "braces": "{" * 490 + "5" + "}" * 490,
    "fractions": r"\frac{1}{1+" * 90 + "1" + "}" * 90,
    "integer": "9" * 990,
    "degree": "x^{10^{100}}",
    "polynomial": "(x+y+z+w)^{99999}",
    "product": r"\prod_{k=1}^{10^{12}} k",
    "inequality": "x<9^{9^{9^9}}",
    "exponent": "1e999",
    "superscript": "²",
    "surrogate": "\ud800",
    "two hundred thousand braces": "{" * 100_000 + "}" * 100_000,
}


@pytest.mark.parametrize("name", HOSTILE)
def test_whatever_an_answer_does_its_score_is_a_number(name, monkeypatch):
    monkeypatch.setattr(limited, "LIMIT_S", 0.1)
    for truth in ("5", "x+y=2"):
        scored = math.compute_score("math", rf"\boxed{{{HOSTILE[name]}}}", truth)
        assert (scored["score"], scored["acc"]) == (0.0, 0.0)
    assert answer_line.compute_score("aime", f"Answer: {HOSTILE[name]}", "5")["score"] == -1.0


def test_an_answer_that_takes_too_long_says_so(monkeypatch):
    monkeypatch.setattr(limited, "LIMIT_S", 0.1)
    scored = math.compute_score("math", r"\boxed{9^{9^{9^9}}}", "5")
    assert scored["detail"] == "the answer was not compared: evaluating it took over 0.1 s"
    deep = math.compute_score("math", rf"\boxed{{{'(' * 1500}5{')' * 1500}}}", "5")
    assert deep["detail"] == "the answer was not compared: it has 3001 characters, more than 1000"


def test_a_ground_truth_that_takes_too_long_fails_the_row(monkeypatch):
    monkeypatch.setattr(limited, "LIMIT_S", 0.1)
    for answer in ("5", "7^{7^{7^{7^7}}}"):
        with pytest.raises(limited.GroundTruthError, match=r"ground_truth='9\^\{9\^\{9\^9\}\}' cannot be used"):
            math.compute_score("math", rf"\boxed{{{answer}}}", "9^{9^{9^9}}")


def test_long_texts_are_scored_in_linear_time():
    texts = ["#### 1" + ",123" * 9_000 + "4", "#### 18" + "*a" * 30_000, r"\frac{" + " " * 30_000, "####" * 30_000]
    texts += ["#### 18" + "<a" * 30_000, "-" * 99_000, r"\boxed{" * 9_000, "answer:" * 9_000]
    for text in texts:
        found = [rule.compute_score("s", text, "19") for rule in (gsm8k, math_reasoning, math)]
        found.append(gsm8k.compute_score("s", text, "19", method="flexible"))
        assert [(one["score"], one.get("detail")) for one in found] == [(0.0, None)] * 4


def test_a_comparison_in_another_thread_needs_no_signals():
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(math.same_answer, r"\sqrt{12}", r"2\sqrt3").result()
        assert pool.submit(math.same_answer, "x > 4", r"(4,\infty)").result()


def test_an_answer_that_a_format_takes_too_long_for_does_not_match(monkeypatch):
    monkeypatch.setattr(limited, "LIMIT_S", 0.1)
    scored = format.compute_score("s", "a" * 40 + "!", None, pattern="(a+)+b")
    assert scored == {"score": 0.0, "detail": "the answer was not matched: evaluating it took over 0.1 s"}
    assert format.compute_score("s", " aab ", None, pattern="(a+)+b")["score"] == 1.0
    with pytest.raises(re.error):
        format.compute_score("s", "a", None, pattern="(")


def test_braces_inside_boxed_are_counted_and_escaped_ones_are_not():
    assert last_boxed(r"\boxed{\left\{ \frac{1}{2}, 3 \right\}} done") == r"\left\{ \frac{1}{2}, 3 \right\}"
    assert last_boxed(r"\boxed{a\}b} c}") == r"a\}b"
    assert last_boxed("nothing") is None


def test_numbers_are_exact_and_spelled_one_way():
    assert numbers_in("5-3, 1,234.50, 2–4, .5, 6 / 8") == [
        5,
        3,
        Fraction("1234.5"),
        2,
        4,
        Fraction(1, 2),
        Fraction(3, 4),
    ]
    assert [canonical(Fraction(text)) for text in ("42.0", "-3/4", "1/3")] == ["42", "-0.75", "1/3"]
    assert parse_number("42 apples") is None
    assert canonical(Fraction("9" * 400 + ".5")) == "1" + "9" * 400 + "/2"
    assert close(Fraction("0.333333"), Fraction(1, 3)) and not close(Fraction("0.3333"), Fraction(1, 3))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
@pytest.mark.parametrize("method", ["strict", "flexible"])
def test_every_gsm8k_reference_solution_scores_one(method):
    rows = [json.loads(line)["answer"] for line in (SHARED / "gsm8k" / "test.jsonl").read_text().splitlines()]
    results = [gsm8k.compute_score("openai/gsm8k", row, row.rsplit("####", 1)[1], method=method) for row in rows]
    assert [row for row, result in zip(rows, results, strict=True) if result["score"] != 1.0] == []
    assert len(rows) == 1319


# How models end a GSM8K answer: {} is the number as GSM8K writes it, {:,} with commas between thousands.
GSM8K_FORMS = [
    "#### {}",
    "#### {:,}",
    "####{}",
    "#### {}.",
    "#### {:,}, as asked",
    "#### {:,}. That is the total for 3 days.",
    "#### {:,} apples",
    "#### ${:,}",
    "#### ${:,}.00",
    "#### \\${:,}",
    "#### {}%",
    "#### {}\\%",
    "#### {:,} ####",
    "#### **{:,}**",
    "**#### {:,}**",
    "#### ${:,}$",
    "#### \\boxed{{{:,}}}",
    "#### $\\boxed{{{}}}$",
    "#### \\boxed{{\\${:,}}}",
    "#### \\({:,}\\)",
    "The answer is: #### {}",
    "####: {:,}",
    "#### ({})",
    "#### ≈ {:,}",
    "####\u00a0{}",
    "#### {}\nLet me know if you need 2 more examples.",
]
GSM8K_SEPARATORS = ["{,}", ",\\!", "\\,", "\u202f", "\u2009", "\u00a0"]  # between thousands
GSM8K_FLEXIBLE_FORMS = [
    "The answer is {}.",
    "She makes ${:,} every day.",
    "So $\\boxed{{\\${:,}}}$.",
    "**Answer: {:,}**",
    "It is {}.00.",
    "5 * 3 = {} dollars",
    "x={}",
    "答案是{}元。",
]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
def test_every_real_gsm8k_answer_is_read_in_every_form():
    files = [SHARED / "gsm8k" / name for name in ("train.jsonl", "test.jsonl")]
    solutions = [json.loads(line)["answer"] for file in files for line in file.read_text().splitlines()]
    answers = Counter(int(solution.rsplit("####", 1)[1].replace(",", "")) for solution in solutions)
    assert answers.total() == 8792
    misread = [(text, answer) for answer in answers for text in _strict_forms(answer) if not _is_read(text, answer)]
    misread += [
        (form, answer)
        for answer in answers
        for form in GSM8K_FLEXIBLE_FORMS
        if not _is_read(form.format(answer), answer, method="flexible")
    ]
    assert misread == []


def _strict_forms(answer: int) -> list[str]:
    thousands = [f"#### {answer:,}".replace(",", separator) for separator in GSM8K_SEPARATORS]
    minus = [f"#### {answer:,}".replace("-", sign) for sign in "−–－﹣"]
    return [form.format(answer) for form in GSM8K_FORMS] + thousands + minus


def _is_read(solution: str, answer: int, method: str = "strict") -> bool:
    scores = [gsm8k.compute_score("s", solution, truth, method=method)["score"] for truth in (answer, answer + 1)]
    return scores == [1.0, 0.0]


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
def test_the_math_train_answers_score_one_in_a_boxed_sentence():
    rows = json.loads((SHARED / "math" / "train.json").read_text())
    answers = Counter(row["answer"] for row in rows)
    scores: Counter[float | None] = Counter()
    for answer, count in answers.items():
        try:
            score = math.compute_score("math", rf"So the final answer is $\boxed{{{answer}}}$.", answer)["score"]
        except ValueError:  # rows without an answer
            score = None
        scores[score] += count
    assert scores == {1.0: 7470, None: 4}


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
def test_every_math_500_reference_solution_scores_one():
    rows = _math_500()
    results = [math.compute_score("HuggingFaceH4/MATH-500", row["solution"], row["answer"]) for row in rows]
    assert [row["answer"] for row, result in zip(rows, results, strict=True) if result["score"] != 1.0] == []


@pytest.mark.skipif(not SHARED.is_dir(), reason="the shared data sets are not here")
def test_neighbouring_answers_of_math_500_are_told_apart():
    answers = [row["answer"] for row in _math_500()][:200]
    neighbours = [(left, right) for left, right in pairwise(answers) if left != right]
    assert len(neighbours) == 198
    assert [pair for pair in neighbours if math.same_answer(*pair)] == [("5", "x=5")]


def _math_500() -> list[dict[str, str]]:
    rows = [json.loads(line) for line in (SHARED / "math" / "test500.jsonl").read_text().splitlines()]
    assert len(rows) == 500
    return rows
