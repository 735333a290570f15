"""`rloom reward try`: one answer, scored by hand."""

import io
import json
from pathlib import Path

import pytest

from rloom.cli import main

RULE = "scored by     rules/gsm8k.py, GSM8K: the number after `####`; in flexible mode, the last number of the answer."


def lines_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str]]:
    code = main(["reward", "try", *arguments])
    captured = capsys.readouterr()
    return code, (captured.out or captured.err).splitlines()


def test_the_extracted_answer_and_the_parsed_ground_truth_are_shown(tmp_path: Path, capsys) -> None:
    file = tmp_path / "answer.txt"
    file.write_text("9 * 2 = 18\n#### $1,018.00 in all")
    code, lines = lines_of(capsys, str(file), "--source", "openai/gsm8k", "--ground_truth", "1,018")
    assert code == 0
    assert lines == [
        RULE,
        "response      32 characters",
        "extracted     1018",
        "ground truth  1018",
        "score         1",
        "acc           1",
    ]


def test_an_answer_without_what_the_rule_reads_scores_zero_and_says_so(capsys, monkeypatch) -> None:
    arguments = ("-", "--source", "openai/gsm8k", "--ground_truth", "18")
    monkeypatch.setattr("sys.stdin", io.StringIO("It is 18."))
    code, lines = lines_of(capsys, *arguments)
    assert (code, lines[2:5]) == (0, ["extracted     nothing", "ground truth  18", "score         0"])
    monkeypatch.setattr("sys.stdin", io.StringIO("It is 18."))
    code, lines = lines_of(capsys, *arguments, "--method", "flexible")
    assert (code, lines[2:5]) == (0, ["extracted     18", "ground truth  18", "score         1"])


def test_a_failed_score_has_its_reason_and_exit_code_1(capsys) -> None:
    code, lines = lines_of(capsys, "--response", "#### 18", "--source", "openai/gsm8k", "--ground_truth", "eighteen")
    assert code == 1
    assert lines[2:4] == ["ground truth  'eighteen', which cannot be parsed", "score         failed"]
    assert lines[4].startswith(
        "reason        GroundTruthError: ground_truth='eighteen' of a openai/gsm8k row is not a number"
    )


def test_a_function_of_trls_style_gets_the_columns(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def right(prompts, completions, solution, log_extra, **kwargs):\n"
        "    log_extra('question', prompts)\n"
        "    return [float(s == int(c)) for c, s in zip(completions, solution)]\n"
    )
    arguments = ("--response", "18", "--prompt", "9 * 2?", "--function", f"{file}:right")
    code, lines = lines_of(capsys, *arguments, "--column", "solution=18")
    assert code == 0
    assert lines == [
        f"scored by     right of {file}",
        "response      2 characters",
        "score         1",
        "detail        question: 9 * 2?",
    ]
    code, lines = lines_of(capsys, *arguments)
    assert code == 1 and "right (rewards.py:1) needs the column 'solution'; this row has" in lines[-1]


def test_a_function_with_lists_and_keywords(tmp_path: Path, capsys) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus):\n"
        "    rows = zip(solution_strs, extra_infos)\n"
        "    return [{'score': bonus + info['level'], 'pred': text[:2]} for text, info in rows]\n"
    )
    arguments = ("--response", "abc", "--function", str(file), "--batch", "--reward_kwargs", "bonus=0.5")
    code, lines = lines_of(capsys, *arguments, "--column", "level=2")
    assert (code, lines[2:]) == (0, ["extracted     ab", "score         2.5"])


MBPP = {"test_list": ["assert f(1) == 2", "assert f(2) == 3"], "test_setup_code": ""}
HUMANEVAL = {
    "entry_point": "f",
    "test": "def check(candidate):\n    assert candidate(1) == 2\n",
    "prompt": "def f(x):\n",
}
STDIN = {"inputs": ["1\n", "2\n"], "outputs": ["2\n", "3\n"]}
CODE = [
    # source, ground truth, answer, the score and what follows
    ("mbpp", MBPP, "def f(x): return x + 1", ["1", "1", "1", "0", "2 of 2 tests passed"]),
    ("mbpp", MBPP, "def f(x): return 2", ["0", "0", "0.5", "0", "1 of 2 tests passed; test 2: "]),
    ("openai/openai_humaneval", HUMANEVAL, "    return x + 1", ["1", "1", "1", "0", "1 of 1 tests passed"]),
    ("codecontests", STDIN, "print(int(input()) + 1)", ["1", "1", "1", "0", "2 of 2 tests passed"]),
    ("codecontests", STDIN, "print(2)", ["0", "0", "0.5", "0", "1 of 2 tests passed; test 2: printed '2\\n'"]),
    ("mbpp", MBPP, "I do not know", ["0", "0", "0", "0", "0 of 2 tests passed"]),
]


@pytest.mark.parametrize(("source", "truth", "answer", "values"), CODE)
def test_a_program_is_run_in_the_sandbox(source: str, truth: dict, answer: str, values: list[str], capsys) -> None:
    code, lines = lines_of(capsys, "--response", answer, "--source", source, "--ground_truth", json.dumps(truth))
    assert code == 0 and lines[0].startswith("scored by     rules/code.py")
    shown = dict(zip(["score", "acc", "tests_passed", "out_of_time", "detail"], values, strict=True))
    for line, (name, value) in zip(lines[-5:], shown.items(), strict=True):
        assert line.startswith(f"{name:<12}  {value}")


def test_keys_of_the_sandbox_may_be_given(capsys) -> None:
    answer = ["--response", "def f(x):\n    return 2", "--source", "mbpp", "--ground_truth", json.dumps(MBPP)]
    code, lines = lines_of(capsys, *answer, "reward_model.sandbox.partial_credit=True")
    assert code == 0
    assert lines[2:6] == [
        "extracted     def f(x):",
        "                  return 2",
        "ground truth  test_list: 2 entries",
        "score         0.5",
    ]


def test_an_answer_that_cannot_be_compared_is_wrong_and_says_why(capsys) -> None:
    code, lines = lines_of(capsys, "--response", rf"\boxed{{{'5' * 1001}}}", "--source", "math", "--ground_truth", "5")
    assert (code, lines[4]) == (0, "score         0")
    assert lines[-1] == "detail        the answer was not compared: it has 1001 characters, more than 1000"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--response", "x"], "--source is missing"),
        (["--source", "math"], "give one answer"),
        (["a.txt", "--response", "x", "--source", "math"], "give one answer"),
        (["no_such_file.txt", "--source", "math"], "no_such_file.txt: cannot be read as text"),
        (["--response", "x", "--source", "acme/poems"], "no reward rule for data_source 'acme/poems'"),
        (["--response", "x", "--source", "math", "--method", "flexible"], "no rule for math reads it"),
        (["--response", "x", "--source", "math", "--column", "level"], "--column level: write it as NAME=VALUE"),
        (["--response", "x", "--function", "no_such_file.py"], "there is no file"),
        (["--response", "x", "--source", "mbpp", "reward_model.sandbox.time=3"], "reward_model.sandbox.time"),
    ],
)
def test_wrong_arguments_are_named(arguments: list[str], message: str, capsys) -> None:
    code, lines = lines_of(capsys, *arguments)
    assert code == 2 and message in "\n".join(lines)
