"""Users' files as they are written for verl and TRL, and the helpers that they may use."""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from rloom.errors import RewardError
from rloom.rewards import helpers
from rloom.rewards.base import ScoringUnit
from rloom.rewards.pool import RulePool
from rloom.rewards.user_function import check_source
from rloom.types import Sample, SampleGroup, Score

CHAT = ({"role": "user", "content": "9 * 2?"},)
Scorer = Callable[..., list[Score]]


def answers(*responses: str, prompt: object = CHAT, truth: object = "18", **columns: object) -> SampleGroup:
    """The answers to one prompt of a data file."""
    row = {"data_source": "own", "prompt": prompt, **columns}
    return tuple(
        Sample("own", "<user>9 * 2?", text, truth, {"index": 7}, CHAT, (1, 2), (5, len(text)), row)
        for text in responses
    )


@pytest.fixture
def score(tmp_path: Path) -> Scorer:
    """The scores of groups by the function `name` of a file with this code."""

    def run(code: str, *groups: SampleGroup, name: str = "reward_func", **kwargs: object) -> list[Score]:
        (tmp_path / "rewards.py").write_text(code)
        pool = RulePool(num_workers=1, timeout_s=20, path=str(tmp_path / "rewards.py"), name=name, reward_kwargs=kwargs)
        with contextlib.closing(pool):
            pool.check()
            return [one for scores in asyncio.run(pool.score(groups)) for one in scores]

    return run


def values(scores: Sequence[Score]) -> list[float | None]:
    return [one.value for one in scores]


# TRL


def test_a_trl_function_is_called_once_for_the_answers_to_a_prompt(score: Scorer) -> None:
    code = "def reward_func(completions, **kwargs):\n    return [float(len(completions))] * len(completions)\n"
    assert values(score(code, answers("a", "b", "c"), answers("d"))) == [3, 3, 3, 1]


def test_a_chat_prompt_gives_lists_of_one_message(score: Scorer) -> None:
    code = """
def reward_func(prompts, completions, **kwargs):
    assert prompts == [[{"role": "user", "content": "9 * 2?"}]] * 2, prompts
    assert [message["role"] for [message] in completions] == ["assistant"] * 2
    return [float(completion[0]["content"]) for completion in completions]
"""
    assert values(score(code, answers("1", "2"))) == [1, 2]


def test_a_plain_prompt_gives_strings(score: Scorer) -> None:
    code = """
def reward_func(prompts, completions, completion_ids, **kwargs):
    assert prompts == ["9 * 2?"] * 2 and completion_ids == [[5, 1], [5, 2]], (prompts, completion_ids)
    return [float(completion) for completion in completions]
"""
    assert values(score(code, answers("1", "20", prompt="9 * 2?"))) == [1, 20]


def test_the_columns_of_the_row_are_lists_of_the_same_length(score: Scorer) -> None:
    code = """
def reward_func(completions, solution, index, data_source, ground_truth, **kwargs):
    assert solution == [18, 18] and index == [7, 7] and data_source == ["own"] * 2 and ground_truth == ["18"] * 2
    assert kwargs["tags"] == [["x"], ["x"]] and "prompt" not in kwargs, kwargs
    return [float(int(text) == right) for text, right in zip(completions, solution)]
"""
    assert values(score(code, answers("18", "19", prompt="9 * 2?", solution=18, tags=["x"]))) == [1, 0]


def test_a_function_without_keywords_for_the_rest_gets_what_it_names(score: Scorer) -> None:
    code = "def reward_func(completions, solution):\n    return [c == s for c, s in zip(completions, solution)]\n"
    assert values(score(code, answers("a", "b", prompt="?", solution="a"))) == [1, 0]


def test_a_missing_column_is_named_with_those_of_the_row(score: Scorer) -> None:
    code = "def reward_func(completions, solution, **kwargs):\n    return [0.0]\n"
    [failed] = score(code, answers("a", answer="a"))
    assert failed.reason == (
        "reward_func (rewards.py:1) needs the column 'solution'; this row has index, data_source, ground_truth, "
        "answer, prompts, completions, completion_ids"
    )


def test_a_row_without_ground_truth_has_no_such_column(score: Scorer) -> None:
    code = "def reward_func(completions, ground_truth, **kwargs): return [ground_truth[0] in c for c in completions]"
    [failed] = score(code, answers("a", prompt="?", truth=None))
    assert failed.reason == (
        "reward_func (rewards.py:1) needs the column 'ground_truth'; this row has index, data_source, prompts, "
        "completions, completion_ids"
    )
    without = "def reward_func(completions, ground_truth='a'): return [c == ground_truth for c in completions]"
    assert values(score(without, answers("a", "b", prompt="?", truth=None))) == [1, 0]


def test_the_text_of_a_file_shows_faults_and_leaves_doubtful_ones_to_its_import(tmp_path: Path) -> None:
    def fault(code: str, name: str = "f") -> str | None:
        (tmp_path / "mine.py").write_text(code)
        try:
            check_source(str(tmp_path / "mine.py"), name, {"limit": 3}, whole_groups=False)
        except RewardError as error:
            return str(error)
        return None

    verl = "data_source, solution_str, ground_truth, extra_info"
    assert fault(f"def f({verl}, limit): return 0") is None
    assert fault("async def f(completions, limit=1, **kwargs): return []") is None
    assert fault("def f(queries, prompts, labels, limit): return 0") is None
    assert fault(f"if True:\n    def f({verl}): return 0\nelse:\n    f = None") is None  # bound twice
    assert fault("import functools\n@functools.cache\ndef f(x): return 0") is None  # a decorator may change it
    for bound in (
        "f = g = 3",
        "from a import f",
        "import f.a",
        "from a import *",
        "globals()['f'] = 1",
        "for f in (): 0",
    ):
        assert fault(bound) is None, bound
    assert fault("", "extract_final_answer") is None  # rloom's own
    assert "has no such function; it defines a, b" in str(fault("def a(): 0\ndef b(): 0\ndef _c(): 0\nclass D: 0"))
    assert "(data_source, /, *answers, limit: int=2) in " in str(
        fault("def f(data_source, /, *answers, limit: int = 2): 0")
    )
    assert "cannot be loaded: SyntaxError" in str(fault("def f("))


def test_none_means_that_the_function_does_not_apply_and_is_not_a_zero(score: Scorer) -> None:
    code = """
async def reward_func(completions, **kwargs):
    return [None if text == "poem" else 1.0 for text in completions]
"""
    [poem, other] = score(code, answers("poem", "other", prompt="?"))
    assert poem.reason == "reward_func (rewards.py:2) returned None: it does not apply to this row"
    assert other == Score(1.0)


def test_an_array_is_a_list_of_scores_and_a_short_list_fails_the_group(score: Scorer) -> None:
    code = """
import numpy

def reward_func(completions, **kwargs):
    return numpy.array([len(text) / 2 for text in completions], dtype=numpy.float32)[: 2]
"""
    scores = score(code, answers("a", "bc", prompt="?"), answers("a", "b", "c", prompt="?"))
    assert scores[:2] == [Score(0.5), Score(1.0)]
    assert [one.reason for one in scores[2:]] == ["reward_func (rewards.py:4) returned 2 results for 3 answers"] * 3


def test_what_a_function_logs_is_in_the_scores(score: Scorer) -> None:
    code = """
def reward_func(completions, log_metric=None, log_extra=None, **kwargs):
    log_metric("longest", max(map(len, completions)))
    log_extra("first", [text[0] for text in completions])
    return [1.0, 0.0]
"""
    assert score(code, answers("ab", "cde", prompt="?")) == [
        Score(1.0, {"longest": 3.0}, detail="first: a"),
        Score(0.0, {"longest": 3.0}, detail="first: c"),
    ]


def test_an_object_with_a_call_method_and_reward_kwargs(score: Scorer) -> None:
    code = """
class Limit:
    def __call__(self, completion_ids, completions, limit, **kwargs):
        return [float(ids[1] <= limit) for ids in completion_ids]

reward_func = Limit()
"""
    assert values(score(code, answers("ab", "abc"), limit=2)) == [1, 0]


def test_the_signature_decides_whether_groups_are_needed(tmp_path: Path) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(
        "def one(data_source, solution_str, ground_truth, extra_info): return 0\n"
        "def many(completions, **kwargs): return [0] * len(completions)\n"
    )
    pools = [RulePool(num_workers=1, timeout_s=5, path=str(file), name=name) for name in ("one", "many")]
    assert [pool.unit for pool in pools] == [ScoringUnit.ANSWER, ScoringUnit.PROMPT]
    assert RulePool(num_workers=1, timeout_s=5).unit is ScoringUnit.ANSWER


def test_an_object_of_trls_trainer_cannot_be_given(score: Scorer) -> None:
    with pytest.raises(RewardError, match=r"needs trainer_state, an object of TRL's trainer; give this parameter"):
        score("def reward_func(completions, trainer_state, **kwargs): return [0]\n", answers("a"))
    code = "def reward_func(completions, trainer_state=None, **kwargs): return [trainer_state is None]\n"
    assert values(score(code, answers("a"))) == [1]


# verl, and the kit


def test_the_function_that_the_kits_document_prints_runs_as_it_is(score: Scorer) -> None:
    code = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source == "math_reasoning":
        answer = extract_final_answer(solution_str)
        return 1.0 if answer == ground_truth else 0.0
    return 0.0
"""
    texts = ["15 + 27 = 42，答案：42", "所以答案是 **42** 。", "It is 42.0", "15 + 27 = 42\nAnswer: 43", "?"]
    samples = [(Sample("math_reasoning", "计算 15 + 27 的结果", text, "42"),) for text in texts]
    assert values(score(code, *samples, name="compute_score")) == [1, 1, 1, 0, 0]


def test_a_files_own_definition_is_used_instead_of_the_helper(score: Scorer) -> None:
    code = """
def extract_final_answer(text):
    return text.split()[0]

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(extract_final_answer(solution_str) == ground_truth)
"""
    assert values(score(code, answers("18 or 19"), name="compute_score")) == [1]


def test_a_file_may_add_to_the_default_score(score: Scorer) -> None:
    code = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return default_compute_score("openai/gsm8k", solution_str, ground_truth) + 0.25 * ("because" in solution_str)
"""
    found = score(code, answers("because\\n#### 18", "#### 18", "because"), name="compute_score")
    assert values(found) == [1.25, 1, 0.25]


def test_the_default_score_is_a_float_or_daposs_dict() -> None:
    assert helpers.default_compute_score("openai/gsm8k", "so 18", "18", method="flexible") == 1.0
    assert helpers.default_compute_score("lighteval/MATH", r"\boxed{\frac12}", "0.5") == 1.0
    assert helpers.default_compute_score("math_dapo", "Answer: 3", "4") == {"score": -1.0, "acc": 0.0, "pred": "3"}
    with pytest.raises(RewardError, match="no reward rule for data_source='acme/poems'; registered: openai/gsm8k"):
        helpers.default_compute_score("acme/poems", "roses", "red")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("答案：1,000 元", "1000"),
        ("Answer: 500 + 500 = 1000.", "1000"),
        (r"thus \boxed{\frac{3}{4}}", "0.75"),
        ("#### -7", "-7"),
        ("first 3, then 4", "4"),
        ("Answer: Paris.", "Paris"),
        ("Answer: x = 3, y = 4", "x = 3, y = 4"),
        ("Answer:", None),
        ("no number", None),
    ],
)
def test_the_final_answer_is_a_number_where_it_has_one(text: str, answer: str | None) -> None:
    assert helpers.extract_final_answer(text) == answer


def test_the_other_helpers() -> None:
    assert helpers.extract_boxed_answer(r"\boxed{1} or \boxed{\sqrt{2}}") == r"\sqrt{2}"
    assert helpers.extract_solution("#### 1,234") == "1234" and helpers.extract_solution("it is 5") is None
    assert helpers.extract_solution("it is 5", method="flexible") == "5"
    assert helpers.is_equiv(r"\frac12", "0.5") and not helpers.is_equiv("1", "2")
    assert not helpers.is_equiv(None, None)


def test_a_function_of_openrlhf_gets_one_answer_per_call_with_its_query(score: Scorer) -> None:
    code = """
def reward_func(queries, prompts, labels, **kwargs):
    assert queries == ["<user>9 * 2?" + queries[0][12:]] and prompts == ["<user>9 * 2?"]
    right = [float(query[12:] == label) for query, label in zip(queries, labels)]
    return {"rewards": [2 * one for one in right], "scores": right, "extra_logs": {"length": len(queries[0])}}
"""
    found = score(code, answers("18", "7"))
    assert values(found) == [2.0, 0.0]
    assert [dict(one.parts) for one in found] == [{"length": 14.0, "acc": 1.0}, {"length": 13.0, "acc": 0.0}]
    tensor = "import torch\ndef reward_func(queries, prompts, labels):\n    return torch.tensor([0.5])\n"
    assert values(score(tensor, answers("18"))) == [0.5]


def test_a_function_of_openrlhf_without_rewards_fails_with_a_reason(score: Scorer) -> None:
    [found] = score("def reward_func(queries, prompts, labels):\n    return {'scores': [1]}\n", answers("18"))
    assert found.value is None and "returned a dict without 'rewards'" in str(found.reason)
    [found] = score("def reward_func(queries, prompts, labels):\n    return [1, 2]\n", answers("18"))
    assert found.value is None and "2 values for 1 answer" in str(found.reason)


def test_a_function_ends_processes_that_it_started(score: Scorer) -> None:
    """A worker survives SIGTERM; its children, forked or started, have the usual action."""
    code = """
import multiprocessing, subprocess, time

def reward_func(completions, **kwargs):
    forked = multiprocessing.get_context("fork").Process(target=time.sleep, args=(60,))
    forked.start()
    started = subprocess.Popen(["sleep", "60"])
    forked.join(0.5)  # the usual time limit; Python drops a signal that arrives while a process is being forked
    for process in (forked, started):
        process.terminate()
    forked.join()
    return [float(-forked.exitcode - started.wait())] * len(completions)
"""
    assert values(score(code, answers("a"))) == [30.0]
