"""Which rule a data source gets, what is said when there is none, and what an answer can do to a rule."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading

import pytest

from rloom.errors import RewardError
from rloom.rewards.pool import RulePool
from rloom.rewards.routing import ANSWER_LINE, GSM8K, MATH, MATH_REASONING, check_sources, options_for, rule_for
from rloom.types import Sample, Score


@pytest.mark.parametrize(
    ("data_source", "rule"),
    [
        ("openai/gsm8k", GSM8K),
        ("lighteval/MATH", MATH),
        ("DigitalLearningGmbH/MATH-lighteval", MATH),
        ("HuggingFaceH4/MATH-500", MATH),
        ("MATH", MATH),
        ("math", MATH),
        ("math_dapo", ANSWER_LINE),
        ("math_dapo_reasoning", ANSWER_LINE),
        ("aime2024", ANSWER_LINE),
        ("AIME_2025", ANSWER_LINE),
        ("math_reasoning", MATH_REASONING),
        ("math_reasoning_hard", MATH_REASONING),
        ("openai/gsm8k2", None),
        ("lighteval/other", None),
        ("", None),
    ],
)
def test_a_data_source_finds_its_rule(data_source, rule):
    assert rule_for(data_source) is rule


def test_unknown_sources_are_named_with_their_rows_and_the_way_out():
    with pytest.raises(RewardError) as caught:
        check_sources({"openai/gsm8k": [0], "acme/poems": [3, 8, 9, 12, 40], "acme/chess": [7]})
    message = str(caught.value)
    assert "'acme/poems' (rows 3, 8, 9 and 2 more); 'acme/chess' (row 7)" in message
    assert "Registered: openai/gsm8k, lighteval/MATH," in message
    assert "math_reasoning*, math_dapo*, math*, aime*" in message
    assert "custom_reward_function.path=my_rewards.py" in message


def test_known_sources_pass():
    check_sources({"openai/gsm8k": [0, 1], "math_reasoning": [2]}, {"method": "flexible"})


def test_an_option_that_no_rule_reads_is_an_error():
    with pytest.raises(RewardError, match=r"reward_kwargs\.metod='flexible': no rule .* they read: method"):
        check_sources({"openai/gsm8k": [0]}, {"metod": "flexible"})
    with pytest.raises(RewardError, match=r"no rule for aime24 reads it; options they read: none"):
        check_sources({"aime24": [0]}, {"method": "flexible"})


def test_an_option_value_that_the_rule_does_not_know_is_an_error():
    with pytest.raises(RewardError, match=r"reward_kwargs\.method='loose': use one of strict, flexible"):
        check_sources({"openai/gsm8k": [0]}, {"method": "loose"})


def test_each_rule_gets_only_the_options_that_it_reads():
    assert options_for(GSM8K, {"method": "flexible"}) == {"method": "flexible"}
    assert options_for(MATH, {"method": "flexible"}) == {}


def test_importing_the_rewards_imports_neither_torch_nor_sympy():
    program = (
        "import sys, pkgutil, importlib, rloom.rewards as package\n"
        "names = [m.name for m in pkgutil.walk_packages(package.__path__, 'rloom.rewards.')]\n"
        "[importlib.import_module(name) for name in names]\n"
        "print('rloom.rewards.pool' in names, [m for m in ('torch', 'sympy', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True []"


def scores(pool: RulePool, data_source: str, truth: str, *responses: str) -> list[Score]:
    groups = [(Sample(data_source, "p", response, truth),) for response in responses]
    return [found for [found] in asyncio.run(pool.score(groups))]


def test_an_answer_that_a_rule_cannot_evaluate_is_wrong_and_a_ground_truth_fails():
    """SIGVTALRM is what the worker's timer sends in code that runs no Python; other signals come from the system."""
    tower = r"\boxed{9^{9^{9^9}}}"  # takes hours
    with contextlib.closing(RulePool(num_workers=1, timeout_s=0.5)) as pool:  # shorter than the limit of a rule
        slow, right = scores(pool, "math", "5", tower, r"\boxed{5}")
        assert (slow.value, right.value) == (0.0, 1.0)
        assert slow.detail == "the answer was not compared: evaluating it took over 2 s"
        [failed] = scores(pool, "math", "", r"\boxed{5}")
        assert failed.value is None and "ground_truth='' of a math row has no answer" in str(failed.reason)
        assert pool.metrics()["workers_replaced"] == 0
        for number, value in ((signal.SIGVTALRM, -1.0), (signal.SIGKILL, None)):
            process = pool._workers[0]._process
            assert process is not None
            threading.Timer(0.3, os.kill, [process._process.pid, number]).start()
            first, second = scores(pool, "aime", "5", tower, "Answer: 5")
            assert (first.value, second.value) == (value, 1.0)
            assert value is None or first.detail == "the answer was not compared: evaluating it took over 6 s"
