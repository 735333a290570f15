"""The rule for code: which program an answer has, what its tests give, and the published solutions."""

import asyncio
import gzip
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rloom.config.reward_sections import SandboxSection
from rloom.rewards.pool import RulePool
from rloom.rewards.routing import rule_for
from rloom.rewards.rules.code import compute_score
from rloom.rewards.rules.code_answers import chosen_block, programs
from rloom.rewards.rules.code_problems import Asserts, problem_of
from rloom.rewards.sandbox.tests import same_text, same_value
from rloom.rewards.score_queue import BackgroundScorer
from rloom.rewards.user_function import FunctionCaller
from rloom.types import Sample, Score
from tests.code_mutants import with_another_operator, with_other_returns, without_bodies

SHARED_DATA = Path(__file__).parents[4] / "shared" / "data"
needs_shared_data = pytest.mark.skipif(not SHARED_DATA.is_dir(), reason="the published data sets are not here")

KEYS = SandboxSection().model_dump()
QUICK = KEYS | {"cpu_s": 1, "timeout_s": 60}  # on a busy machine, a second of processor time takes long
HUMANEVAL, MBPP = "openai/openai_humaneval", "mbpp"

ADD = {
    "entry_point": "add",
    "prompt": "import math\n\n\ndef helper(x):\n    return x\n\n\ndef add(a, b):\n    '''The sum.'''\n",
    "test": "def check(candidate):\n    assert candidate(1, 2) == 3\n"
    "    for n in range(3):\n        assert candidate(n, 0) == n\n"
    "    x = candidate(0, 0)\n    assert x == 0, 'zero'\n",
}
SQUARE = {"test_list": ["assert square(2) == 4", "assert square(3) == 9", "assert square(-1) == 1"]}
DOUBLE = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2\n", "4", "6\n"]}


def score(answer: str, truth: Any, *, source: str = MBPP, **keys: Any) -> dict[str, Any]:
    return compute_score(source, answer, json.dumps(truth), sandbox=QUICK | keys)


def fenced(code: str, label: str = "python") -> str:
    return f"Here it is:\n\n```{label}\n{code}\n```\nThat is all."


# which code


def test_the_last_python_block_that_defines_the_function_is_the_program() -> None:
    answer = fenced("def f(): return 1") + fenced("def f(): return 2") + fenced("print(f())")
    assert chosen_block(answer, ["f"]) == "def f(): return 2\n"
    assert chosen_block(answer, ["g"]) == "print(f())\n"
    assert chosen_block(answer, []) == "print(f())\n"


def test_blocks_of_other_languages_and_empty_blocks_do_not_count() -> None:
    answer = fenced("x = 1") + fenced("int x = 2;", "cpp") + fenced("ls", "bash") + fenced("", "python")
    assert chosen_block(answer, []) == "x = 1\n"
    assert chosen_block(fenced("ls", "bash"), []) is None


def test_blocks_without_a_language_count_if_none_is_marked_as_python() -> None:
    assert chosen_block(fenced("x = 1", "") + fenced("x = 2", ""), []) == "x = 2\n"
    assert chosen_block(fenced("x = 1", "py") + fenced("output", ""), []) == "x = 1\n"


def test_a_block_that_was_cut_off_and_one_in_a_list_are_read() -> None:
    assert chosen_block("```python\nx = 1\ny = 2", []) == "x = 1\ny = 2"
    assert chosen_block("1. First\n\n   ```python\n   if x:\n       y\n   ```\n", []) == "if x:\n    y\n"


def test_an_answer_of_half_a_million_characters_is_read_at_once() -> None:
    for line in ("a", " ", "```\n"):
        assert chosen_block("x\n```" + line * 500_000, []) is None


def test_code_in_the_thoughts_of_a_reasoning_model_does_not_count() -> None:
    assert programs("<think>```python\nx = 1\n```</think>No code.", problem_of("apps", DOUBLE)) == ("No code.",)


@pytest.mark.parametrize(
    "answer",
    [
        "    return a + b\n",  # continues the prompt
        "return a + b",  # a decoder removed the spaces
        "    return a + b\n\n\ndef test():\n    assert unfinished(",  # goes on after the function
        fenced("def add(a, b):\n    return helper(a) + b"),  # the helper is in the prompt
        fenced("    return a + b"),
        fenced("return a + b"),
        "def add(a, b):\n    return math.floor(a + b)",
        "The function:\ndef add(a, b):\n    return a + b",
    ],
)
def test_a_humaneval_answer_is_a_continuation_or_a_whole_function(answer: str) -> None:
    assert score(answer, ADD, source=HUMANEVAL)["detail"] == "3 of 3 tests passed"


# what the tests give


def test_each_statement_with_an_assert_in_check_is_a_test() -> None:
    result = score("    return a + b if a != 2 else 0", ADD, source=HUMANEVAL, partial_credit=True)
    assert result["detail"] == "2 of 3 tests passed; test 2: assertion failed"
    assert (result["acc"], result["out_of_time"]) == (0.0, 0.0)
    assert result["score"] == result["tests_passed"] == pytest.approx(2 / 3)


def test_partial_credit_is_the_share_of_tests_that_passed() -> None:
    answer = fenced("def square(x): return 2 * x if x > 2 else x * x")
    assert score(answer, SQUARE, partial_credit=True)["score"] == pytest.approx(2 / 3)
    assert score(answer, SQUARE)["score"] == 0.0


def test_without_partial_credit_the_first_test_that_fails_ends_the_program() -> None:
    """The second test would run into the time limit, and the step would wait for it."""
    answer = fenced("def square(x):\n    while x == 3: pass\n    return -1")
    wrong = score(answer, SQUARE)
    assert (wrong["detail"], wrong["out_of_time"]) == ("0 of 3 tests passed; test 1: assertion failed", 0.0)
    calls = {"fn_name": "square", "inputs": [[2], [3]], "outputs": [4, 9]}
    assert score(answer, calls, source="apps")["detail"] == "0 of 2 tests passed; test 1: returned -1, expected 4"


def test_an_endless_loop_fails_its_test_and_partial_credit_goes_on_after_it() -> None:
    answer = fenced("def square(x):\n    while x == 3: pass\n    return x * x")
    result = score(answer, SQUARE, partial_credit=True)
    assert result["detail"] == "2 of 3 tests passed; test 2: CPU time limit of 1 s"
    assert result["score"] == pytest.approx(2 / 3)
    assert score(answer, SQUARE)["detail"] == "1 of 3 tests passed; test 2: CPU time limit of 1 s"
    always = score(fenced("def square(x):\n    while True: pass"), SQUARE, partial_credit=True)
    limits = "test 1: CPU time limit of 1 s; test 2: CPU time limit of 0.25 s"
    assert always["detail"] == f"0 of 3 tests passed; {limits}"
    assert always["out_of_time"] == 1.0


def test_the_total_time_limit_ends_the_tests_of_an_answer() -> None:
    answer = fenced("import time\ntime.sleep(0.2)\nprint(2 * int(input()))")
    result = score(answer, DOUBLE, source="apps", partial_credit=True, total_timeout_s=0.1)
    assert result["detail"] == "1 of 3 tests passed; test 2: total time limit of 0.1 s"


def test_an_answer_without_code_and_one_that_does_not_compile_score_zero() -> None:
    assert score("", SQUARE) == {
        "score": 0.0,
        "acc": 0.0,
        "tests_passed": 0.0,
        "out_of_time": 0.0,
        "pred": None,
        "detail": "0 of 3 tests passed; no code in the answer",
    }
    detail = score(fenced("def square(x: return"), SQUARE)["detail"]
    assert detail.startswith("0 of 3 tests passed; test 1: SyntaxError: ")


@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(0)",
        "import sys; sys.exit(0)",
        "def square(x): raise SystemExit(0)",
        "import os\ndef square(x): os._exit(0)",
        'import os\nos.write(3, b\'{"case": 0, "error": null}\\n\' * 3)\ndef square(x): return None',
        "def square(x): raise KeyboardInterrupt",
        "__case__ = print\ndef square(x): return None",
        "def square(x): globals()['square'] = None",
        "import builtins\nbuiltins.AssertionError = ValueError\ndef square(x): return 5",
    ],
)
def test_a_program_that_ends_or_pretends_does_not_pass(code: str) -> None:
    result = score(fenced(code), SQUARE)
    assert result["score"] == result["tests_passed"] == 0.0
    assert "test 1: " in result["detail"]


def test_demonstrations_below_the_main_guard_are_not_run() -> None:
    code = "def square(x): return x * x\nif __name__ == '__main__':\n    raise SystemExit(square(input()))"
    assert score(fenced(code), SQUARE)["score"] == 1.0


def test_the_setup_of_an_mbpp_row_uses_the_names_of_the_program() -> None:
    truth = {"test_list": ["assert value(node) == 7"], "test_setup_code": "node = Node(7)"}
    code = "class Node:\n    def __init__(self, data): self.data = data\ndef value(node): return node.data"
    assert score(fenced(code), truth)["score"] == 1.0


def test_a_program_reads_stdin_once_for_each_test() -> None:
    result = score(fenced("if __name__ == '__main__':\n    print(2 * int(input()))"), DOUBLE, source="codecontests")
    assert (result["score"], result["detail"]) == (1.0, "3 of 3 tests passed")
    wrong = fenced("n = int(input())\nprint(2 * n if n != 2 else 5)")
    assert score(wrong, DOUBLE, source="apps")["detail"] == "1 of 3 tests passed; test 2: printed '5\\n', expected '4'"
    assert score(wrong, DOUBLE, source="apps", partial_credit=True)["score"] == pytest.approx(2 / 3)


def test_a_named_function_is_called_with_the_inputs() -> None:
    truth = {"fn_name": "pairs", "inputs": ["[1, 2]\n3", [[4], 5]], "outputs": ["[[1, 3], [2, 3]]", [[4, 5]]]}
    function = "def pairs(xs: List[int], y):\n    return [(x, y) for x in xs]"
    method = "class Solution:\n    def pairs(self, xs, y):\n        return list(product(xs, [y]))"
    for code in (function, method):  # without their imports, as such solutions are published
        assert score(fenced(code), truth, source="taco")["detail"] == "2 of 2 tests passed"
    wrong = score(fenced("def pairs(xs, y): return {1} if y == 5 else [[1, 3], [2, 3]]"), truth, source="taco")
    assert wrong["detail"] == "1 of 2 tests passed; test 2: TypeError: Object of type set is not JSON serializable"


@pytest.mark.parametrize(
    ("given", "wanted", "same"),
    [
        ("1 2\n3\n", "1 2 \n3", True),
        ("1  2", "1 2", True),
        ("0.333333", "0.33333333", True),
        ("1e-7", "0.0", True),
        ("0.33", "0.333333", False),
        ("1\n2", "1 2", False),
        ("10000001", "10000000", False),
        ("YES", "Yes", False),
        ("1", "1.0", True),
        ("", "0", False),
        ("1000000000.0", "1000000007", False),
        ("1000000007.0", "1000000007", True),
        ("1e9", "1000000007", False),
        ("5.0", "5", True),
        ("0011", "11", False),
        ("nan", "0.5", False),
        ("inf", "1e400", False),
        ("1_0", "10.0", False),
        ("１.０", "1.0", False),
    ],
)
def test_printed_text_is_compared_by_words_and_decimals_by_value(given: str, wanted: str, same: bool) -> None:
    assert same_text(given, wanted) is same


def test_returned_values_are_compared_with_their_types() -> None:
    assert same_value([1, 2], [[1, 2]], in_lists=True)  # APPS: in a list of its own
    assert not same_value([1, 2], [[1, 2]])
    assert same_value(0.1 + 0.2, 0.3)
    assert same_value({"a": [1.0]}, {"a": [1]})
    assert not same_value(1, True)
    assert not same_value([1, 2], [1])
    assert not same_value("1", 1)
    assert not same_value(1e9, 1_000_000_007)  # a tolerance only where the expected value is a decimal
    assert same_value(5.0, 5)
    assert not same_value(10**400, 0.5)


# ground truths


@pytest.mark.parametrize(
    ("truth", "fault"),
    [
        ("no JSON", "Expecting value"),
        ("[]", "it is not an object"),
        ({"answer": 1}, "it has the keys answer"),
        ({"test_list": []}, "its test_list is not a list with at least one element"),
        ({"test_list": ["assert ("]}, "was never closed"),
        ({"entry_point": "f", "test": "assert f()"}, "its test defines no function check"),
        ({"entry_point": "f", "test": "def check(c): pass"}, "has no assert"),
        ({"entry_point": "f(", "test": "def check(c): assert c"}, r"entry_point='f\(' is not a name"),
        ({"inputs": ["1"], "outputs": []}, "its outputs is not a list"),
        ({"inputs": ["1", "2"], "outputs": ["1"]}, "it has 2 inputs and 1 outputs"),
    ],
)
def test_a_ground_truth_that_cannot_be_used_names_its_fault(truth: Any, fault: str) -> None:
    with pytest.raises(ValueError, match=rf"the ground truth of a row of taco cannot be used: .*{fault}"):
        problem_of("taco", truth)


def test_the_functions_that_mbpp_tests_call_are_found() -> None:
    truth = {"test_list": ["assert sorted(f(1)) == list(range(3))", "import math\nassert math.isclose(g(2), 1)"]}
    problem = problem_of("mbpp", truth)
    assert isinstance(problem, Asserts)
    assert (problem.names, problem.count) == (("f", "g"), 2)


@pytest.mark.parametrize(
    "source",
    [
        HUMANEVAL,
        "mbpp",
        "google-research-datasets/mbpp",
        "codecontests",
        "apps",
        "codeforces",
        "taco",
        "mbpp/sanitized",
    ],
)
def test_code_sources_have_the_rule_for_code(source: str) -> None:
    rule = rule_for(source)
    assert rule is not None
    assert rule.sandboxed


# in the pool


@pytest.fixture
def pool() -> Iterator[RulePool]:
    # a time limit of a call that is shorter than a program's: code has a limit of its own
    made = RulePool(num_workers=1, timeout_s=0.5, sandbox=QUICK | {"partial_credit": True})
    yield made
    made.close()


def test_the_pool_returns_scores_with_details_and_failures_with_reasons(pool: RulePool) -> None:
    def sample(answer: str, truth: Any) -> Sample:
        return Sample("mbpp", "", answer, truth)

    good, slow = "def square(x): return x * x", "def square(x):\n    while x == 3: pass\n    return x * x"
    samples = [sample(fenced(good), SQUARE), sample(fenced(slow), json.dumps(SQUARE)), sample(good, "{}")]
    scores: list[list[Score]] = asyncio.run(pool.score([(one,) for one in samples]))
    (right,), (partly,), (broken,) = scores
    assert (right.value, right.detail, right.prediction) == (1.0, "3 of 3 tests passed", good + "\n")
    assert partly.value == pytest.approx(2 / 3)
    assert partly.parts == {"acc": 0.0, "tests_passed": pytest.approx(2 / 3), "out_of_time": 1.0}
    assert partly.detail == "2 of 3 tests passed; test 2: CPU time limit of 1 s"
    assert not broken.ok
    assert "the ground truth of a row of mbpp cannot be used" in (broken.reason or "")


def test_an_answer_does_not_wait_behind_a_program_that_does_not_end() -> None:
    keys = KEYS | {"cpu_s": 1000, "timeout_s": 1000.0}
    asleep = Sample("mbpp", "", fenced("import time\ndef square(x): time.sleep(1000)"), SQUARE)
    right = Sample("mbpp", "", fenced("def square(x): return x * x"), SQUARE)
    with closing(BackgroundScorer(RulePool(num_workers=1, timeout_s=10, sandbox=keys))) as queue:
        queue.submit([(right,)]).result()
        stuck = queue.submit([(asleep,)])
        assert [queue.submit([(right,)]).result()[0][0].value for _ in range(3)] == [1.0, 1.0, 1.0]
        assert not stuck.done()


def test_a_sandbox_that_cannot_start_is_a_failed_score(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rloom.rewards.sandbox.client._START", "raise SystemExit(1)")
    keys = QUICK | {"output_kb": 77}  # a sandbox of its own, which is not running yet
    sample = Sample("mbpp", "", "def square(x): return x * x", SQUARE)
    result = FunctionCaller(compute_score, {"sandbox": keys}).for_answer(sample)
    assert (result.value, result.ok) == (None, False)
    assert "the launcher ended" in (result.reason or "")


# the published solutions


def humaneval() -> list[tuple[str, str, dict[str, str]]]:
    """(task id, canonical solution, ground truth)."""
    with gzip.open(SHARED_DATA / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as stream:
        rows = [json.loads(line) for line in stream]
    return [
        (row["task_id"], row["canonical_solution"], {key: row[key] for key in ("entry_point", "test", "prompt")})
        for row in rows
    ]


def mbpp() -> list[tuple[int, str, dict[str, Any]]]:
    rows = [json.loads(line) for line in (SHARED_DATA / "mbpp" / "mbpp.jsonl").read_text("utf-8").splitlines()]
    return [
        (row["task_id"], row["code"].replace("\r\n", "\n"), {key: row[key] for key in ("test_list", "test_setup_code")})
        for row in rows
    ]


def unsolved(
    rows: list[tuple[Any, str, dict[str, Any]]], source: str, change: Callable[[str], str | None]
) -> list[Any]:
    """Ids of the rows whose changed solution does not score 1. `change` returns None to leave a row out."""
    limits = {"cpu_s": 30, "timeout_s": 60} if change is str else {"cpu_s": 1}  # some mutants never end
    found = []
    for task, code, truth in rows:
        program = change(truth.get("prompt", "") + code)
        if program is not None:
            result = compute_score(source, fenced(program), json.dumps(truth), sandbox=KEYS | limits)
            found += [task] if result["score"] != 1 else []
    return found


@needs_shared_data
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_canonical_solutions_of_humaneval_pass_as_continuations(every: int) -> None:
    rows = humaneval()[::every]
    assert len(rows) == 164 // every
    wrong = [task for task, code, truth in rows if compute_score(HUMANEVAL, code, truth, sandbox=KEYS)["score"] < 1]
    assert wrong == []


@needs_shared_data
def test_every_10th_reference_solution_of_mbpp_passes() -> None:
    assert unsolved(mbpp()[::10], MBPP, str) == []


@pytest.mark.long
@needs_shared_data
def test_all_974_reference_solutions_of_mbpp_pass() -> None:
    rows = mbpp()
    assert len(rows) == 974
    assert unsolved(rows, MBPP, str) == []


@needs_shared_data
def test_every_20th_solution_of_mbpp_without_its_body_fails() -> None:
    rows = mbpp()[::20]
    assert len(unsolved(rows, MBPP, without_bodies)) == len(rows) == 49


@pytest.mark.slow
@needs_shared_data
@pytest.mark.parametrize("every", [4, pytest.param(1, marks=pytest.mark.long)])
def test_humaneval_solutions_with_other_values_fail(every: int) -> None:
    rows = humaneval()[::every]
    assert len(unsolved(rows, HUMANEVAL, without_bodies)) == 164 // every
    assert len(unsolved(rows, HUMANEVAL, with_other_returns)) == 164 // every


@pytest.mark.long
@needs_shared_data
def test_humaneval_solutions_with_another_operator_fail_where_their_tests_cover_it() -> None:
    rows = humaneval()
    mutants = [row for row in rows if with_another_operator(row[2]["prompt"] + row[1]) is not None]
    assert len(mutants) == 141
    wrong = unsolved([row for row in mutants if row[0] not in UNCOVERED], HUMANEVAL, with_another_operator)
    assert len(wrong) == 137


# The tests of these problems pass with the changed operator in plain Python, too: they do not cover it. In HumanEval/50
# the changed operator is in a helper function of the prompt, which the tests take from the row.
UNCOVERED = ("HumanEval/40", "HumanEval/50", "HumanEval/129", "HumanEval/147")
