"""The parts of the Python interface that need no run: names, configuration, rows, functions, callbacks."""

import asyncio
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

import rloom
from rloom.api.train import after_step
from rloom.data.in_memory import rows_of, with_defaults
from rloom.errors import ConfigError, DataError, RewardError
from rloom.rewards.base import ScoringUnit
from rloom.rewards.function_reward import FunctionReward
from rloom.types import Sample, Score
from tests.architecture.source import ROOT

# Names


def test_every_public_name_exists_and_is_documented_in_both_languages() -> None:
    assert rloom.__all__ == sorted(rloom.__all__) and set(rloom.__all__) <= set(dir(rloom))
    for page in ("python.md", "python.zh.md"):
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs" / page).read_text(encoding="utf-8"), re.M)
        documented = {name for heading in headings for name in re.findall(r"`(\w+)", heading)}
        assert set(rloom.__all__) == documented, page
    for name in rloom.__all__:
        assert getattr(rloom, name) is not None
    with pytest.raises(AttributeError, match="module 'rloom' has no attribute 'tarin'"):
        rloom.tarin  # noqa: B018


# The configuration


def test_the_forms_of_the_configuration_are_equal(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("defaults: [ppo_trainer, _self_]\nalgorithm: {adv_estimator: grpo}\ndata: {seed: 7}\n")
    keys = {"algorithm.adv_estimator": "grpo", "data": {"seed": 7}}
    expected = rloom.load_config(["algorithm.adv_estimator=grpo", "data.seed=7"])
    from_keys = rloom.load_config(keys)
    assert from_keys == expected and from_keys.given == expected.given == {"algorithm.adv_estimator", "data.seed"}
    assert rloom.load_config(expected) is expected
    one, other = rloom.load_config(file, {"data.seed": 9}), rloom.load_config(expected, ["data.seed=9"])
    assert one == other and one.data.seed == 9


def test_values_keep_their_types() -> None:
    config = rloom.load_config({"data.train_files": (Path("a $b.parquet"), "c=d.parquet"), "data.val_files": None})
    assert config.data.train_files == ["a $b.parquet", "c=d.parquet"] and config.data.val_files is None


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ({"data.sed": 1}, "data.sed: there is no such key"),
        ({"data.seed": 1, "data": {"seed": 2}}, "data.seed: written twice"),
        ({"hydra.job": 1}, "hydra.job: there is no such key"),
        ("mine.json", "is not the path of a YAML file"),
        ("missing.yaml", "there is no such file"),
        (3, "3 is not a configuration"),
        ({"trainer.val_only": True}, "trainer.val_only=True: use the command `rloom train`"),
        ({"data.train_files": "a.parquet"}, "data.train_files and the argument train are both given"),
        (["data.train_files=a.parquet"], "data.train_files and the argument train are both given"),
    ],
)
def test_a_wrong_configuration_is_named(source: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        rloom.train(source, train=[{"prompt": "1"}], reward=lambda completions: [1.0])


# Rows

MESSAGES = [{"role": "user", "content": "1 + 1"}]


def dataset(rows: Any) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


@pytest.mark.parametrize("kind", [list, iter, pandas.DataFrame, dataset])
def test_rows_of_every_kind_are_the_same_rows(kind: Callable[[Any], Any]) -> None:
    rows = [{"prompt": MESSAGES, "answer": "2"}, {"prompt": [*MESSAGES, *MESSAGES], "answer": None}]
    assert rows_of(kind(rows), "train") == rows


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ([{"prompt": "1"}, "1 + 1"], r"train, row 1 \(counting from 0\): is str; a row is a mapping"),
        ([], "train holds no rows"),
        ("train.parquet", r"A file is named by the key data\.train_files"),
        (7, "train is int; use a list of dicts"),
        ({"train": [], "test": []}, "train is a mapping with 'train', 'test'.*of a DatasetDict, one of its splits"),
        (pandas.DataFrame({"prompt": ["a", 1]}), "train: the DataFrame cannot be read"),
    ],
)
def test_what_is_no_list_of_rows_is_refused(given: Any, words: str) -> None:
    with pytest.raises(DataError, match=words):
        rows_of(given, "train")


def test_further_columns_are_in_extra_info_and_the_rows_own_values_win() -> None:
    row = {"question": "1 + 1", "answer": "2", "level": 3, "extra_info": {"level": 4}}
    filled = with_defaults(row, prompt_key="question", reward_fn_key="source", data_source="custom")
    assert filled == row | {"source": "custom", "extra_info": {"answer": "2", "level": 4}}
    assert row["extra_info"] == {"level": 4}, "the caller's row is unchanged"
    assert with_defaults({"source": "a"}, prompt_key="prompt", reward_fn_key="source", data_source="b")["source"] == "a"


# Functions of this program as the reward


def sample(text: str, **extra: Any) -> Sample:
    return Sample("custom", "1 + 1", text, "2", extra, columns={"prompt": "1 + 1", "level": 3})


def score(function: Callable[..., Any], *groups: tuple[Sample, ...], **settings: Any) -> list[list[Score]]:
    reward = FunctionReward(
        function,
        **{"concurrent_calls": 1, "timeout_s": 90.0, "reward_kwargs": {}, "whole_groups": False, **settings},
    )
    try:
        return asyncio.run(reward.score(groups))
    finally:
        reward.close()


def test_a_row_is_not_changed_by_a_function_that_changes_its_arguments() -> None:
    one = sample("2", index=1)

    def forgetful(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        return float(extra_info.pop("index"))

    assert [[found.value for found in group] for group in score(forgetful, (one,), (one,))] == [[1.0], [1.0]]
    assert one.extra_info == {"index": 1}


def test_by_default_one_call_at_a_time_and_with_more_threads_several() -> None:
    meeting = threading.Barrier(2)

    def meet(completions: list[str], **columns: Any) -> list[float]:
        meeting.wait(timeout=60)
        return [1.0]

    assert [found.value for [found] in score(meet, (sample("a"),), (sample("b"),), concurrent_calls=2)] == [1.0, 1.0]
    running: list[int] = []
    most: list[int] = []

    def count(completions: list[str], **columns: Any) -> list[float]:
        running.append(1)
        most.append(len(running))
        running.pop()
        return [1.0]

    score(count, *[(sample("a"),)] * 20)
    assert most == [1] * 20


def test_a_call_over_the_time_limit_fails_alone_and_its_python_code_ends() -> None:
    ended = threading.Event()

    def endless(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        try:
            while solution_str == "endless":
                pass
        finally:
            if solution_str == "endless":
                ended.set()
        return 1.0

    [[first], [second], [third]] = score(endless, (sample("1"),), (sample("endless"),), (sample("2"),), timeout_s=2.0)
    assert (first.value, third.value) == (1.0, 1.0)
    assert second.reason == (
        "timed out after reward_model.timeout_s=2 s (data_source='custom', a response of 7 characters)"
    )
    assert ended.wait(60)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda text: 1.0, r"reward=<lambda>\(text\) cannot be called with the keywords data_source, solution_str"),
        (lambda completions, trainer_state: [], "needs trainer_state, an object of TRL's trainer"),
        ("score", "reward is str; it must be a function"),
    ],
)
def test_a_wrong_signature_is_an_error_that_prints_both(function: Any, words: str) -> None:
    with pytest.raises(RewardError, match=words) as raised:
        score(function, (sample("1"),))
    for signature in ("(data_source, solution_str, ground_truth, extra_info)", "(prompts, completions, **columns)"):
        assert signature in str(raised.value)


def test_the_unit_is_that_of_the_signature() -> None:
    for function, whole_groups, unit in (
        (lambda data_source, solution_str, ground_truth, extra_info: 1.0, False, ScoringUnit.ANSWER),
        (lambda data_sources, solution_strs, ground_truths, extra_infos: [1.0], True, ScoringUnit.PROMPT),
        (lambda completions, **columns: [1.0], False, ScoringUnit.PROMPT),
    ):
        reward = FunctionReward(
            function, concurrent_calls=1, timeout_s=1.0, reward_kwargs={}, whole_groups=whole_groups
        )
        assert reward.unit is unit
        reward.close()


# Callbacks


def test_a_run_stops_if_a_callback_returns_false_or_raises_stop_training_after_all_were_called() -> None:
    called: list[str] = []

    def stop(report: rloom.StepReport) -> None:
        called.append("stop")
        raise rloom.StopTraining

    def go_on(report: rloom.StepReport) -> None:
        called.append("go on")

    def false(report: rloom.StepReport) -> bool:
        called.append("false")
        return False

    rows = [{"input": "1 + 1", "output": "2", "score": 1.0, "reason": None, "gts": "2", "data_source": "custom"}]
    assert after_step([go_on])(1, {}, lambda: rows)
    assert not after_step([stop, go_on])(1, {}, lambda: rows)
    assert not after_step([false, go_on])(1, {}, lambda: rows)
    assert called == ["go on", "stop", "go on", "false", "go on"]
    assert rloom.StepReport(1, {}, lambda: rows).answers == [rloom.Answer("1 + 1", "2", 1.0, None, "2", "custom")]
