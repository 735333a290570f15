"""`rloom.train` and its neighbours, in this process: real runs of the embedded model."""

import asyncio
import json
import logging
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import rloom
from rloom.config.load import EMBEDDED_MODEL
from rloom.errors import CheckpointError, ConfigError, DataError, RewardError
from rloom.launch.build import evaluate_checkpoint
from rloom.runs.run_folder import RunFolder
from tests.architecture.source import ROOT
from tests.e2e.runs import SMALL, command, records
from tests.waiting import wait_until

GRPO = {
    "algorithm.adv_estimator": "grpo",
    "data": {"train_batch_size": 4, "max_response_length": 24},
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.rollout.n": 2,
    "trainer.device": "cpu",
}
ROWS = [{"prompt": f"Compute {a} + {b}.", "answer": str(a + b)} for a in range(4) for b in range(2, 5)]


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes as long as a step."""
    monkeypatch.setattr("rloom.launch.run.draw_learning_curve", lambda metrics_file, picture: picture)


def length(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    return float(len(solution_str))


def train(directory: Path, steps: int = 1, keys: Any = None, **arguments: Any) -> rloom.TrainResult:
    own = {"trainer.default_local_dir": directory, "trainer.total_training_steps": steps}
    return rloom.train({**GRPO, **own, **(keys or {})}, **{"train": ROWS, "reward": length, **arguments})


def score_means(result: rloom.TrainResult) -> list[float]:
    return [record["critic/score/mean"] for record in result.history if "critic/score/mean" in record]


# The result


def test_the_result_and_the_callbacks_have_what_the_run_wrote(tmp_path: Path) -> None:
    reports: list[rloom.StepReport] = []
    result = train(tmp_path, 2, {"trainer.test_freq": 1}, validation=ROWS[:3], callbacks=[reports.append])
    assert [report.step for report in reports] == [1, 2]
    for report, record in zip(reports, result.history[1:], strict=True):
        assert report.metrics.items() <= record.items() and "critic/score/mean" in report.metrics
        assert len(report.answers) == 8
        assert all(answer.score == len(answer.text) for answer in report.answers)
        assert report.answers[0].prompt.startswith("<|im_start|>user\nCompute ")
    assert result.run_dir == tmp_path and result.checkpoint == tmp_path / "global_step_2"
    assert [record["step"] for record in result.history] == [0, 1, 2]
    assert not result.stopped_early and result.steps == 2
    events = RunFolder(tmp_path).events
    logged = {event["step"]: event["metrics"] for event in events if event["event"] == "step"}
    validations = [event["metrics"] for event in events if event["event"] == "validation"]
    for step in (1, 2):
        assert logged[step].items() <= result.history[step].items()
    assert result.validation == validations[-1] and len(validations) == 3
    assert repr(result) == (
        f"TrainResult(steps=2, validation on custom={result.validation['val-core/custom/acc/mean@1']:.3g}, "
        f"checkpoint={tmp_path / 'global_step_2'})"
    )
    assert result.curve() == tmp_path / "learning_curve.png"
    shown = result._repr_html_()
    assert '<img style="max-width: 100%" src="data:image/png;base64,iVBORw0KGgo' in shown and "<b>steps</b> 2" in shown
    exported = result.export(tmp_path / "exported")
    assert json.loads((exported / "config.json").read_text())["model_type"] == "qwen2"
    [one], [other] = (rloom.generate(model, ["Compute 1 + 2."]) for model in (exported, tmp_path))
    assert one == other and one


def test_the_result_is_frozen(tmp_path: Path) -> None:
    result = rloom.TrainResult(tmp_path, tmp_path, [], {}, stopped_early=False)
    with pytest.raises(AttributeError):
        result.checkpoint = tmp_path / "other"  # type: ignore[misc]
    assert result.steps == 0


# Rewards


def test_a_closure_of_this_program_is_the_reward_and_its_state_is_this_programs(tmp_path: Path) -> None:
    seen: list[tuple[str, Any, dict[str, Any]]] = []

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any]) -> float:
        seen.append((data_source, ground_truth, extra_info))
        return float(len(seen))

    result = train(tmp_path, reward=score)
    assert len(seen) == 8
    assert {source for source, _, _ in seen} == {"custom"} and {truth for _, truth, _ in seen} == {None}
    assert {extra["answer"] for _, _, extra in seen} <= {row["answer"] for row in ROWS}
    assert score_means(result) == [4.5]  # 1 to 8


def test_a_function_in_trls_style_gets_lists_and_columns(tmp_path: Path) -> None:
    calls: list[tuple[list[str], list[str]]] = []

    def score(prompts: list[str], completions: list[str], answer: list[str], **columns: Any) -> list[float]:
        calls.append((prompts, answer))
        assert columns["data_source"] == ["custom"] * 2
        return [float(place) for place in range(len(completions))]

    result = train(tmp_path, reward=score)
    assert len(calls) == 4 and score_means(result) == [0.5]
    right = {row["prompt"]: row["answer"] for row in ROWS}
    assert all(prompts == [prompts[0]] * 2 and answer == [right[prompts[0]]] * 2 for prompts, answer in calls)


def test_an_async_function_and_a_callable_object(tmp_path: Path) -> None:
    async def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        await asyncio.sleep(0.001)
        return 0.25

    class Scorer:
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [0.75] * len(completions)

    assert score_means(train(tmp_path / "one", reward=score)) == [0.25]
    assert score_means(train(tmp_path / "two", reward=Scorer())) == [0.75]


def test_a_failed_call_is_a_failed_score_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calls: list[int] = []

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("no such unit")
        return 1.0

    reports: list[rloom.StepReport] = []
    result = train(tmp_path, reward=score, callbacks=[reports.append])
    assert result.history[0]["reward/failed"] == 1 and score_means(result) == [1.0], "it counts as no score, not as 0"
    [failed] = [answer for answer in reports[0].answers if answer.score is None]
    assert failed.reason is not None and failed.reason.startswith("ValueError: no such unit (test_python_api.py:")
    assert "1 of 8 rewards failed: 1 × ValueError: no such unit" in capsys.readouterr().out


def test_too_many_failed_calls_stop_the_run_with_their_reasons(tmp_path: Path) -> None:
    with pytest.raises(RewardError, match=r"8 of 8 rewards failed(.|\n)*ZeroDivisionError"):
        train(tmp_path, reward=lambda data_source, solution_str, ground_truth, extra_info: 1 / 0)


def test_a_call_that_does_not_return_fails_after_the_time_limit_and_its_thread_ends(tmp_path: Path) -> None:
    calls: list[int] = []

    def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
        calls.append(1)
        while len(calls) == 2:
            pass
        return 1.0

    result = train(tmp_path, keys={"reward_model.timeout_s": 3.0}, reward=score)
    assert result.history[0]["reward/failed"] == 1 and result.history[0]["reward/workers_replaced"] == 1
    wait_until(lambda: not any(thread.name == "reward-function" for thread in threading.enumerate()))


def test_a_saved_run_tells_that_its_function_and_rows_were_not_saved(tmp_path: Path) -> None:
    checkpoint = train(tmp_path, validation=ROWS[:2], keys={"trainer.val_before_train": False}).checkpoint
    with pytest.raises(DataError, match=r"data.val_files=<python>: the rows of that run were given to rloom.train"):
        evaluate_checkpoint(checkpoint)
    embedded = ["data.val_files=embedded", "data.val_max_samples=2"]
    with pytest.raises(
        RewardError, match=r"was a function given to rloom.train(.|\n)*custom_reward_function.path=FILE"
    ):
        evaluate_checkpoint(checkpoint, embedded)
    found = evaluate_checkpoint(checkpoint, [*embedded, "custom_reward_function.path=null"]).metrics
    assert "val-core/math_reasoning/acc/mean@1" in found


# Short names, lists of rewards, the best validation


def correct(completions: list[str], answer: list[str], **columns: Any) -> list[float]:
    return [float(truth in text) for text, truth in zip(completions, answer, strict=True)]


def brief(completions: list[str], **columns: Any) -> list[float | None]:
    return [1.0 if index % 2 else None for index, _ in enumerate(completions)]


SMALL_RUN = {"trainer.device": "cpu", "data.max_response_length": 24}


def numbers(result: rloom.TrainResult) -> list[dict[str, float]]:
    """Without times and memory."""
    kept = ("critic/score", "critic/advantages", "actor/pg_loss", "actor/grad_norm", "response_length", "reward/")
    return [{name: value for name, value in record.items() if name.startswith(kept)} for record in result.history]


def test_short_names_give_the_numbers_of_the_keys_and_the_rewards_are_summed_by_weight(tmp_path: Path) -> None:
    keys = {
        **SMALL_RUN,
        "algorithm.adv_estimator": "grpo",
        "data.train_batch_size": 4,
        "trainer.total_training_steps": 2,
    }
    keys |= {"actor_rollout_ref.actor.ppo_mini_batch_size": 1, "actor_rollout_ref.rollout.n": 2}
    rewards: Any = {"train": ROWS, "reward": [correct, brief], "reward_weights": [1.0, 0.5]}
    long = rloom.train({**keys, "trainer.default_local_dir": tmp_path / "long"}, **rewards)
    short = rloom.train(SMALL_RUN, algorithm="grpo", batch=4, n=2, steps=2, output_dir=tmp_path / "short", **rewards)
    assert numbers(long) == numbers(short) and len(numbers(short)) == 2
    for record in short.history:
        assert record["reward/brief"] == 1.0 and record["reward/failed"] == 0.0
        # of two answers to a prompt, the second has both parts
        assert record["critic/score/mean"] == pytest.approx(record["reward/correct"] + 0.25)


def test_a_folder_needs_no_other_arguments_and_a_model_can_be_a_part_of_the_reward(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, folder)
    result = rloom.train(
        {"trainer.device": "cpu"},
        model=folder,
        algorithm="grpo",
        train=ROWS,
        batch=4,
        steps=1,
        reward=[correct, "embedded"],
        reward_weights=[1.0, 0.1],
        output_dir=tmp_path / "run",
    )
    [record] = result.history
    assert record["critic/score/mean"] == pytest.approx(
        record["reward/correct"] + 0.1 * record["reward/rm_score"], abs=1e-5
    )
    saved = (result.checkpoint / "config.yaml").read_text()
    assert "max_response_length: 48" in saved and "n: 8" in saved


def test_a_run_that_gets_no_better_stops_and_its_best_checkpoint_is_kept(tmp_path: Path) -> None:
    best = {
        "trainer.keep_best_checkpoint": True,
        "trainer.early_stopping_patience": 2,
        "trainer.val_before_train": False,
    }
    result = train(tmp_path, 9, {**best, "trainer.test_freq": 1}, reward=lambda completions: [1.0] * len(completions),
                   validation=ROWS[:2])  # fmt: skip
    assert (result.stopped_early, result.steps) == (True, 3)
    assert (tmp_path / "best_checkpointed_iteration.txt").read_text() == "1"
    assert {path.name for path in tmp_path.glob("global_step_*")} == {"global_step_1", "global_step_3"}
    again = train(tmp_path, 9, {**best, "trainer.test_freq": 1, "trainer.resume_mode": "auto"},
                  reward=lambda completions: [1.0] * len(completions), validation=ROWS[:2])  # fmt: skip
    assert (again.stopped_early, again.steps) == (True, 3)


def test_zeros_on_chats_are_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{**row, "prompt": [{"role": "user", "content": row["prompt"]}]} for row in ROWS]
    train(tmp_path, 1, train=rows, reward=correct)
    assert "every score of correct is 0 in this step" in caplog.text


# Rows


def test_a_faulty_row_is_refused_with_its_number(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train, row 3 \(counting from 0\): the prompt is an empty string"):
        train(tmp_path, train=[*ROWS[:3], {"prompt": "  "}])
    with pytest.raises(
        DataError, match=r"validation, row 0 .*: has nothing under 'prompt'; its columns are 'question'"
    ):
        train(tmp_path, validation=[{"question": "1 + 1"}])


def test_without_a_function_rows_need_a_data_source_that_has_a_rule(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"train, row 0 \(counting from 0\): has nothing under 'data_source'"):
        train(tmp_path, reward=None)
    rows = [{**row, "data_source": "math_reasoning", "ground_truth": row["answer"]} for row in ROWS]
    assert 0 <= score_means(train(tmp_path, reward=None, train=rows))[0] <= 1


# Callbacks


def test_a_callback_stops_the_run_and_the_step_is_saved(tmp_path: Path) -> None:
    result = train(tmp_path, 5, callbacks=[lambda report: report.step < 2])
    assert result.stopped_early and result.steps == 2
    assert result.checkpoint == tmp_path / "global_step_2" and result.checkpoint.is_dir()
    resumed = train(tmp_path, 3, {"trainer.resume_mode": "auto"})
    assert resumed.steps == 3 and not resumed.stopped_early and len(resumed.history) == 3


def test_an_error_of_a_callback_propagates_and_the_step_is_saved(tmp_path: Path) -> None:
    def callback(report: rloom.StepReport) -> None:
        raise KeyError("unknown metric")

    with pytest.raises(KeyError, match="unknown metric") as raised:
        train(tmp_path, 3, callbacks=[callback])
    assert (tmp_path / "global_step_1" / "actor").is_dir()
    assert any("saved in" in note for note in raised.value.__notes__)
    assert raised.value.__notes__[-1].endswith('"trainer.resume_mode": "auto".')


# Several runs in one process, notebooks


def test_a_second_run_begins_anew_also_in_a_thread_and_in_an_event_loop_as_in_a_notebook(tmp_path: Path) -> None:
    async def cell() -> rloom.TrainResult:
        return train(tmp_path)

    async def in_a_thread() -> rloom.TrainResult:
        return await asyncio.to_thread(train, tmp_path)

    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    levels = logging.getLogger("rloom").level, logging.getLogger("rloom").handlers[:]
    threads = set(threading.enumerate())
    runs = [train(tmp_path), asyncio.run(cell()), asyncio.run(in_a_thread())]
    assert [score_means(run) for run in runs] == [score_means(runs[0])] * 3 and {run.steps for run in runs} == {1}
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers
    assert (logging.getLogger("rloom").level, logging.getLogger("rloom").handlers) == levels


# The pieces of a step, and answers


def own_loop() -> Any:
    space: dict[str, Any] = {"__name__": "own_loop"}
    exec(compile((ROOT / "examples" / "python" / "own_loop.py").read_text(), "own_loop.py", "exec"), space)
    return space["train"]


def test_a_loop_of_ones_own_has_the_numbers_of_rloom_train(tmp_path: Path) -> None:
    keys = [*SMALL, "algorithm.adv_estimator=grpo"]
    own = own_loop()([*keys, f"trainer.default_local_dir={tmp_path / 'own'}"], steps=2)
    assert command(tmp_path / "train", 2, "algorithm.adv_estimator=grpo") == 0
    for found, expected in zip(own, records(tmp_path / "train"), strict=True):
        assert found.items() <= expected.items()
        assert {"actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean"} <= found.keys()
    prompts = ["12 + 20 等于多少？", [{"role": "user", "content": "Compute 90 - 26."}]]
    saved = [
        rloom.generate(tmp_path / run / "global_step_2", prompts, keys=["trainer.device=cpu"])
        for run in ("own", "train")
    ]
    assert saved[0] == saved[1] and all(saved[0])


def test_the_loop_of_the_example_has_at_most_30_lines() -> None:
    text = (ROOT / "examples" / "python" / "own_loop.py").read_text()
    body = text[text.index("def train(") : text.index("\n\nif __name__")].strip().splitlines()
    assert len(body) <= 30


def test_generate_refuses_what_it_cannot_answer(tmp_path: Path) -> None:
    for arguments, words in (
        (("embedded", "1 + 1"), r"prompts is a text; give a list, \['1 \+ 1'\]"),
        ((tmp_path, ["1 + 1"]), "is no checkpoint"),
        (("embedded", ["1 " * 600]), r"tokens and the answer up to 48; the model supports 512 together"),
    ):
        with pytest.raises((DataError, CheckpointError), match=words):
            rloom.generate(*arguments)
    with pytest.raises(ConfigError, match="temperature=-1: use 0"):
        rloom.generate("embedded", ["1 + 1"], temperature=-1)


def test_generation_depends_on_the_seed_and_on_nothing_else() -> None:
    def answers(*, seed: int, prompts: int = 3) -> list[str]:
        asked = ["Compute 12 + 7.", "Compute 30 + 9.", "Compute 5 + 41."][:prompts]
        return rloom.generate("embedded", asked, temperature=1.0, seed=seed, max_new_tokens=24)

    # the model supports 512 tokens; an answer of a run with this total length has what its prompt leaves
    whole = ["data.max_response_length=512", "data.max_length=512"]
    assert rloom.generate("embedded", ["Compute 12 + 7."], keys=whole) == rloom.generate(
        "embedded", ["Compute 12 + 7."]
    )
    first = answers(seed=1)
    assert answers(seed=1) == first != answers(seed=2)
    assert answers(seed=1, prompts=2) == first[:2]
