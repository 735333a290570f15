"""What the viewer answers, in numbers that `tests.view_runs` has put there."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rloom.doctor.run.report import Report
from rloom.doctor.run.samples import Samples
from rloom.runs.run_folder import RunFolder
from rloom.view.run_cache import RunHandle
from rloom.view.runs import elapsed_seconds
from rloom.view.timeline import GENERATION, SYNC, TRAINING, WAITING, Span, idle_shares, recorded
from tests.view_client import Viewer, viewing
from tests.view_runs import (
    ANSWERS,
    CONFIG,
    HOSTILE,
    NOTICE,
    START,
    GrowingRun,
    prompt_text,
    write_hostile_run,
    write_killed_run,
    write_run,
)
from tests.view_versions import write_versions_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("view")


@pytest.fixture(scope="module")
def viewer(folder: Path) -> Iterator[Viewer]:
    write_run(folder / "sums" / "grpo")
    write_killed_run(folder / "sums" / "killed")
    write_hostile_run(folder / "hostile" / "run")
    paths = [folder / "sums" / "grpo", folder / "sums" / "killed", folder / "hostile"]
    with viewing(paths[:1]) as one, viewing(paths) as all_of_them:
        assert [run["name"] for run in one.get("/api/runs")["runs"]] == ["sums/grpo"]
        yield all_of_them


def number(viewer: Viewer, name: str) -> int:
    return next(run["id"] for run in viewer.get("/api/runs")["runs"] if run["name"] == name)


@pytest.fixture(scope="module")
def run(viewer: Viewer) -> str:
    return f"/api/runs/{number(viewer, 'sums/grpo')}"


def test_a_run_has_its_state_algorithm_model_reward_and_accuracy(viewer: Viewer, folder: Path) -> None:
    found = next(run for run in viewer.get("/api/runs")["runs"] if run["name"] == "sums/grpo")
    assert found.pop("id") in (0, 1, 2)
    # right answers of the groups of step 8: 3, 4, 0, 1, 2 and 3, of 23 scores that did not fail
    assert found == {
        "name": "sums/grpo",
        "path": str(folder / "sums" / "grpo"),
        "state": {
            "status": "finished",
            "step": 8,
            "total_steps": 8,
            "started": START,
            "updated": START + 320.0,
            "error": None,
        },
        "algorithm": "grpo",
        "model": "Qwen/Qwen2-0.5B-Instruct",
        "kind": "rl",
        "reward": pytest.approx(13 / 23),
        "tags": [],
        "hidden": False,
        "accuracy": {
            "sums": {"measure": "accuracy", "first": [0, 0.4], "last": [8, 1.0], "best": [8, 1.0]},
            "colours": {
                "measure": "accuracy",
                "first": [0, pytest.approx(2 / 3)],
                "last": [8, 0.25],
                "best": [0, pytest.approx(2 / 3)],
            },
        },
    }


def test_a_killed_run_is_told_from_one_that_runs_or_failed(viewer: Viewer) -> None:
    states = {run["name"]: run["state"] for run in viewer.get("/api/runs")["runs"]}
    assert (states["sums/killed"]["status"], states["sums/killed"]["step"]) == ("killed", 3)
    assert (states["hostile/run"]["status"], states["hostile/run"]["error"]) == ("failed", "<script>Error</script>")


def test_metrics_are_one_list_for_each_with_null_where_a_step_has_none(viewer: Viewer, run: str) -> None:
    found = viewer.get(f"{run}/metrics")
    assert (found["complete"], found["steps"]) == (True, [0, 1, 2, 3, 4, 5, 6, 7, 8])
    metrics = found["metrics"]
    assert all(len(values) == 9 for values in metrics.values()) and "step" not in metrics
    assert metrics["actor/entropy"] == [None, 1.0, 0.5, 1 / 3, 0.25, 0.2, 1 / 6, 1 / 7, 0.125]
    assert metrics["actor/grad_norm"] == [None, 0.5, 0.5, None, 0.5, 0.5, 0.5, 0.5, 0.5]  # NaN at step 3
    assert metrics["val-core/sums/acc/mean@2"] == [0.4, None, None, None, pytest.approx(5 / 6), *[None] * 3, 1.0]
    assert found["state"]["status"] == "finished"
    # a step ends 1 s before its 40 s have passed, a validation at their end; the first value of a step counts
    assert found["seconds"] == [0.0, 39.0, 79.0, 119.0, 159.0, 199.0, 239.0, 279.0, 319.0]
    assert found["measures"] == {"sums": "accuracy", "colours": "accuracy"}
    assert found["answers_per_step"] == 24


def test_later_metrics_begin_with_the_step_that_may_have_gained_some(viewer: Viewer, run: str) -> None:
    generation = viewer.get(f"{run}/metrics")["generation"]
    later = viewer.get(f"{run}/metrics?generation={generation}&after=7")
    assert (later["complete"], later["steps"], later["generation"]) == (False, [7, 8], generation)
    assert later["metrics"]["perf/throughput"] == [1007.0, 1008.0]
    for parameters in (f"generation={generation + 1}&after=7", f"generation={generation}", "after=7"):
        assert viewer.get(f"{run}/metrics?{parameters}")["complete"] is True
    none = viewer.get(f"{run}/metrics?generation={generation}&after=9")
    assert (none["steps"], none["metrics"]) == ([], {})


def test_the_timeline_has_the_stages_of_some_steps_and_idle_shares(viewer: Viewer, run: str) -> None:
    """Of 38 s the engines generate in 20, models compute in 3 and 10."""
    spans = [
        ("generation", "gen", 0.0, 20.0),
        ("other", "sync_weights", 1.0, 2.0),
        ("waiting", "reward", 20.0, 4.0),
        ("training", "old_log_prob", 24.0, 3.0),
        ("training", "update_actor", 28.0, 10.0),
    ]
    assert viewer.get(f"{run}/timeline?first=2&last=2") == {
        "first": 2,
        "last": 2,
        "seconds": 38.0,
        "steps": [[2, 0.0]],
        "spans": [
            {"row": row, "stage": stage, "step": 2, "start": start, "seconds": seconds}
            for row, stage, start, seconds in spans
        ],
        "idle": {"engines": 1 - 20 / 38, "trainer": 1 - 13 / 38, "both": 1 - 33 / 38},
    }
    last = viewer.get(f"{run}/timeline")
    assert (last["first"], last["last"]) == (4, 8) and last["steps"] == [
        [step, 40.0 * step - 160] for step in range(4, 9)
    ]
    none = viewer.get(f"{run}/timeline?first=9&last=9")
    assert (none["spans"], none["steps"], none["idle"]["trainer"]) == ([], [], None)
    assert viewer.fault(f"{run}/timeline?first=-1")[0] == 400
    assert viewer.fault(f"{run}/timeline?first=3&last=2")[0] == 400
    assert viewer.fault(f"{run}/timeline?first=1&last=201")[0] == 400


def test_idle_shares_by_hand() -> None:
    """Engines: 2 s of generation and 1 s of validation. Trainer: 2 s of an update, in which another stage lies, 1 s of
    weight sync and 1 s of a save. A reward uses neither."""
    spans = [
        Span("gen", 1, 10.0, 12.0, GENERATION),
        Span("testing", 1, 12.0, 13.0),
        Span("reward", 1, 13.0, 14.0, WAITING),
        Span("update_actor", 1, 14.0, 16.0, TRAINING),
        Span("probe", 1, 14.5, 15.0, TRAINING),
        Span("update_weights", 1, 16.0, 17.0, SYNC),
        Span("save_checkpoint", 1, 18.0, 19.0),
    ]
    found = idle_shares(spans, 10.0, 20.0, is_recorded=True)
    assert found == {"engines": pytest.approx(0.7), "trainer": pytest.approx(0.6), "both": pytest.approx(0.3)}


def test_a_stage_inside_of_one_with_its_name_ends_first() -> None:
    names, times = ("begin", "begin", "end", "end"), (0.0, 2.0, 3.0, 10.0)
    events = [{"event": "run", "time": 0.0, "step": 0}] + [
        {"event": f"stage_{name}", "time": time, "step": 1, "stage": "gen", "seconds": 1.0 if time == 3.0 else 10.0}
        for name, time in zip(names, times, strict=True)
    ]
    assert [(span.start, span.end) for span in recorded(events)[0]] == [(0.0, 10.0), (2.0, 3.0)]


def test_another_process_goes_on_where_the_one_before_ended() -> None:
    """100 s lie between them. From step 0 on it repeats the validation before the first step."""

    def events(step: int) -> list[dict[str, Any]]:
        return [
            {"event": "run", "time": 0.0, "step": 0},
            {"event": "stage_begin", "time": 0.0, "step": 0, "stage": "testing"},
            {"event": "stage_end", "time": 2.0, "step": 0, "stage": "testing", "seconds": 2.0},
            {"event": "run", "time": 102.0, "step": step},
            {"event": "stage_begin", "time": 102.0, "step": step, "stage": "testing"},
            {"event": "stage_end", "time": 105.0, "step": step, "stage": "testing", "seconds": 3.0},
            {"event": "generation", "time": 106.0, "step": 1, "spans": [[103.0, 106.0]]},
        ]

    for step, before in ((0, []), (1, [(0.0, 2.0)])):
        found, generated, now = recorded(events(step))
        assert [(span.start, span.end) for span in found] == [*before, (2.0, 5.0)]
        assert [(span.start, span.end) for span in generated] == [(3.0, 6.0)] and now == 6.0


def test_the_configuration_is_flat(viewer: Viewer, run: str) -> None:
    config = viewer.get(f"{run}/config")["config"]
    assert config["algorithm.lam"] == 0.95 and config["trainer.logger"] == ["console"]
    assert len(config) == sum(map(len, CONFIG.values()))


def test_the_configuration_has_what_differs_from_the_defaults_the_start_and_the_notices(tmp_path: Path) -> None:
    folder = tmp_path / "sums" / "run"
    config = {
        "algorithm": {"adv_estimator": "grpo", "lam": 1.0},
        "data": {"train_batch_size": 16, "files": ["a", "b"]},
        "actor_rollout_ref": {"rollout": {"n": 4}},
        "trainer": {"default_local_dir": "here"},
        "judge": {"api_key": "sk-secret", "max_tokens": 5},
    }
    defaults = {
        **{"algorithm.adv_estimator": "gae", "algorithm.lam": 1.0, "data.files": ("a", "b")},
        **{"actor_rollout_ref.rollout.n": None, "trainer.default_local_dir": "checkpoints/${trainer.project_name}"},
        **{"data.train_batch_size": 1024, "judge.max_tokens": 5},
    }
    run = GrowingRun(folder, total_steps=2, config=config)
    record = {"command": "rloom train a=1", "commit": "0" * 40, "versions": {"python": "3.12.1"}}
    run.events.write("run", time=START, step=0, total_steps=2, host="machine", pid=7, **record)
    run.events.write("warning", time=START, step=0, kind="notice", message="a key has no effect")
    run.log_step(1, {"critic/score/mean": 0.5})
    run.close()
    with viewing([folder], lambda kind: defaults if kind == "rl" else {}) as viewer:
        found = viewer.get("/api/runs/0/config")
        assert viewer.get("/api/runs/0/metrics")["answers_per_step"] == 64
    assert found["changed"] == {
        **{"algorithm.adv_estimator": "gae", "data.train_batch_size": 1024, "actor_rollout_ref.rollout.n": None},
        "judge.api_key": None,
    }
    assert (found["config"]["judge.api_key"], found["config"]["judge.max_tokens"]) == ("***", 5)
    assert found["start"] == {**record, "host": "machine", "pid": 7, "time": START}
    assert found["starts"] == 2 and found["fault"] is None
    assert [notice["message"] for notice in found["notices"]] == [NOTICE, "a key has no effect"]


def test_the_time_between_two_processes_of_a_run_does_not_count() -> None:
    def event(name: str, time: float, step: int) -> dict[str, Any]:
        return {"event": name, "time": time, "step": step}

    first = [event("run", 100.0, 0), event("step", 110.0, 1), event("step", 130.0, 2)]
    resumed = [event("run", 1000.0, 2), event("step", 1005.0, 3), event("validation", 1007.0, 3)]
    assert elapsed_seconds([*first, *resumed]) == {1: 10.0, 2: 30.0, 3: 35.0}


def test_the_dumped_steps_of_each_kind_are_listed(viewer: Viewer, run: str) -> None:
    assert viewer.get(f"{run}/dumps") == {
        "train": [1, 2, 3, 4, 5, 6, 7, 8],
        "validation": [0, 4, 8],
        "skipped": 0,
    }


def test_a_prompt_of_a_step_is_summed_up(viewer: Viewer, run: str) -> None:
    found = viewer.get(f"{run}/train/3/prompts")
    assert {name: found[name] for name in ("step", "total", "shown", "page", "size")} == {
        **{"step": 3, "total": 6, "shown": 6, "page": 0, "size": 50}
    }
    assert found["sources"] == ["colours", "sums"] and found["of_step"] is None
    assert [prompt["mean"] for prompt in found["prompts"]] == [0.75, 1.0, 0.0, 0.25, 0.5, 1.0]
    assert found["prompts"][4] == {
        "group": 4,
        "index": 10,
        "data_source": "sums",
        "text": prompt_text(10),
        "ground_truth": "10",
        "answers": 4,
        "mean": 0.5,
        "best": 1.0,
        "worst": 0.0,
        "spread": pytest.approx((1 / 3) ** 0.5),
        "failed": 0,
        "length": 21.5,
    }
    assert (found["prompts"][5]["failed"], found["prompts"][5]["mean"]) == (1, 1.0)


def test_a_sampled_step_has_the_number_of_all_its_prompts(tmp_path: Path) -> None:
    write_versions_run(tmp_path / "run")
    with viewing([tmp_path / "run"]) as viewer:
        found = viewer.get("/api/runs/0/train/3/prompts")
    assert (found["total"], found["of_step"]) == (1, 512)


@pytest.mark.parametrize(
    ("parameters", "groups"),
    [
        ("", [0, 1, 2, 3, 4, 5]),
        ("order=desc", [5, 4, 3, 2, 1, 0]),
        ("sort=mean", [2, 3, 4, 0, 1, 5]),
        ("sort=mean&order=desc", [1, 5, 0, 4, 3, 2]),  # equal ones stay in the order of their groups
        ("sort=worst&order=desc", [1, 5, 0, 2, 3, 4]),
        ("sort=spread&order=desc", [4, 0, 3, 1, 2, 5]),
        ("sort=failed&order=desc", [5, 0, 1, 2, 3, 4]),
        ("sort=length&order=desc&size=1", [2]),
        ("sort=index&order=desc", [5, 4, 3, 2, 1, 0]),
        ("sort=source", [1, 3, 5, 0, 2, 4]),
        ("source=sums", [0, 2, 4]),
        ("source=none", []),
        ("min=0.5", [0, 1, 4, 5]),
        ("max=0.25", [2, 3]),
        ("min=0.25&max=0.75&source=colours", [3]),
        ("min=-1e3&max=1e3", [0, 1, 2, 3, 4, 5]),
        ("text=QUESTION%207", [1]),  # in the prompt and its answers
        ("text=answer%203", [0, 1, 2, 3, 4, 5]),  # in answers only
        ("text=%23%23%23%23%2010%0a", []),
        ("text=%23%23%23%23%2010", [4]),
        ("text=%23%23%23%23%2010&source=colours", []),
        ("text=.*", []),  # plain text, no pattern
        ("size=2&page=1", [2, 3]),
        ("size=2&page=9", []),
        ("size=0", [0, 1, 2, 3, 4, 5]),
    ],
)
def test_prompts_are_sorted_filtered_and_paged(viewer: Viewer, run: str, parameters: str, groups: list[int]) -> None:
    found = viewer.get(f"{run}/train/3/prompts?{parameters}")
    assert [prompt["group"] for prompt in found["prompts"]] == groups
    assert found["total"] == 6 and found["sources"] == ["colours", "sums"]


def test_a_page_tells_how_many_rows_there_are_on_all(viewer: Viewer, run: str) -> None:
    found = viewer.get(f"{run}/train/3/prompts?source=sums&size=2&page=1")
    assert [found[name] for name in ("total", "shown", "page", "size")] == [6, 3, 1, 2]
    assert [prompt["group"] for prompt in found["prompts"]] == [4]


def test_an_answer_has_its_tokens_numbers_and_score(viewer: Viewer, run: str) -> None:
    found = viewer.get(f"{run}/train/3/prompts/1")
    assert (found["step"], found["previous"], found["next"]) == (3, 0, 2)
    assert (found["prompt"]["index"], len(found["answers"])) == (7, ANSWERS)
    first = found["answers"][0]
    pieces, length = first.pop("pieces"), first.pop("length")
    assert first.pop("text") == "".join(piece["text"] for piece in pieces)
    assert len(pieces) == length and not any(piece["masked"] for piece in pieces)
    assert first.pop("logprobs") == [-(i % 8) / 4 for i in range(length)]
    assert first.pop("entropy") == [(i % 4) / 2 for i in range(length)]
    assert first.pop("ratio") == [(0.875, 1.0, 1.125)[i % 3] for i in range(length)]
    assert first == {
        "advantages": [0.5] * length,
        "score": 1.0,
        "accuracy": 1.0,
        "parts": {"judge": 1.0, "format": 0.5},
        "reason": None,
        "detail": "The judge gives 1.0: it names the colour.",
        "prediction": None,
        "finished": True,
        "version": 2,
        "turns": [[0, length]],
    }
    assert [answer["finished"] for answer in found["answers"]] == [True, False, True, True]


def test_an_answer_of_several_versions_has_the_version_of_each_token(tmp_path: Path) -> None:
    write_versions_run(tmp_path / "run")
    with viewing([tmp_path]) as viewer:
        [run] = viewer.get("/api/runs")["runs"]
        found = viewer.get(f"/api/runs/{run['id']}/train/3/prompts/0")
    first, second = found["answers"]
    length = first["length"]
    assert (first["version"], first["versions"]) == (0, [[3, 0], [length, 2]])
    assert (second["version"], second["versions"]) == (2, [[length, 2]])


def test_a_tools_output_is_masked_and_between_the_turns(viewer: Viewer, run: str) -> None:
    answer = viewer.get(f"{run}/train/3/prompts/2")["answers"][0]
    (_, end), (start, stop) = answer["turns"]
    masked = [place for place, piece in enumerate(answer["pieces"]) if piece["masked"]]
    assert masked == list(range(end, start)) and stop == len(answer["pieces"]) == len(answer["logprobs"])
    assert "".join(answer["pieces"][place]["text"] for place in masked) == '\n[tool] {"result": 42}\n'
    assert answer["length"] == end + stop - start


def test_a_failed_score_is_null_with_its_reason(viewer: Viewer, run: str) -> None:
    found = viewer.get(f"{run}/train/3/prompts/5")
    answer = found["answers"][3]
    assert found["next"] is None
    assert (answer["score"], answer["accuracy"], answer["reason"]) == (None, None, "judge: no answer within 30 s")


def test_a_validation_has_the_same_addresses_and_no_advantages(viewer: Viewer, run: str) -> None:
    assert viewer.get(f"{run}/validation/4/prompts")["total"] == 6
    answer = viewer.get(f"{run}/validation/4/prompts/0")["answers"][1]
    assert answer["logprobs"] and answer["advantages"] is answer["entropy"] is answer["ratio"] is None
    assert viewer.fault(f"{run}/validation/3/prompts") == (
        404,
        "the run has no dump of the answers of validation step 3",
    )
    assert viewer.fault(f"{run}/train/3/prompts/6") == (404, "the dump of train step 3 has no group 6")


def test_a_prompt_has_the_steps_that_it_was_in(viewer: Viewer, run: str) -> None:
    found = viewer.get(f"{run}/prompts/7/history")
    assert (found["index"], found["text"], found["data_source"], found["ground_truth"]) == (
        *(7, prompt_text(7), "colours", "blue"),
    )
    # row 7 is group 1 of the odd steps, with (1 + step) % 5 right answers of 4
    assert found["steps"] == [
        {"step": step, "group": 1, "answers": 4, "mean": mean, "kind": "train"}
        for step, mean in ((1, 0.5), (3, 1.0), (5, 0.25), (7, 0.75))
    ]
    validated = viewer.get(f"{run}/validation/prompts/5/history")["steps"]
    assert [(at["step"], at["mean"], at["kind"]) for at in validated] == [
        *((0, 1.0, "validation"), (4, 1.0, "validation"), (8, None, "validation")),
    ]
    assert viewer.fault(f"{run}/prompts/12/history") == (404, "no dump of a train step has row 12 of the data")


def test_validations_before_and_after_tell_fixed_from_broken(viewer: Viewer, run: str) -> None:
    found = viewer.get(f"{run}/validation")
    rows: list[dict[str, Any]] = found.pop("rows")
    assert found == {
        "before": 0,
        "after": 8,
        "counts": {"fixed": 2, "broken": 1, "right": 1, "wrong": 1},
        "by_source": {
            "colours": {"fixed": 0, "broken": 1, "right": 0, "wrong": 1},
            "sums": {"fixed": 2, "broken": 0, "right": 1, "wrong": 0},
        },
        "unscored": 1,
        "shown": 5,
        "page": 0,
        "size": 50,
    }
    outcomes = ["fixed", "broken", "right", "wrong", "fixed"]
    assert [(row["index"], row["outcome"]) for row in rows] == list(enumerate(outcomes))
    before, after = rows[0].pop("before"), rows[0].pop("after")
    assert rows[0] == {
        **{"index": 0, "text": prompt_text(0), "ground_truth": "0", "data_source": "sums", "outcome": "fixed"}
    }
    assert (before["group"], before["mean"], before["score"], before["accuracy"]) == (0, 0.0, 0.0, 0.0)
    assert before["answer"].startswith("At step 0, answer 0: ") and before["answer"].endswith("#### 01")
    assert (after["mean"], after["score"]) == (1.0, 1.0) and after["answer"].endswith("#### 0")


@pytest.mark.parametrize(
    ("parameters", "rows"),
    [
        ("outcome=fixed", [0, 4]),
        ("outcome=broken", [1]),
        ("outcome=all&source=colours", [1, 3]),
        ("outcome=fixed&source=colours", []),
        ("before=4&after=8&outcome=fixed", [0]),
        ("before=8&after=0&outcome=broken", [0, 4]),
        ("before=4&after=4", [0, 1, 2, 3, 4, 5]),
        ("text=question%202", [2]),
        ("text=at%20step%208", [0, 1, 2, 3, 4]),
        ("size=2&page=1", [2, 3]),
    ],
)
def test_rows_of_validations_are_chosen(viewer: Viewer, run: str, parameters: str, rows: list[int]) -> None:
    assert [row["index"] for row in viewer.get(f"{run}/validation?{parameters}")["rows"]] == rows


def test_a_validation_that_there_is_not_is_named(viewer: Viewer, run: str) -> None:
    assert viewer.fault(f"{run}/validation?before=3")[0] == 404
    assert viewer.fault(f"{run}/validation?outcome=x") == (
        400,
        "outcome='x': use one of all, fixed, broken, right, wrong",
    )


def test_hostile_texts_arrive_as_they_are(viewer: Viewer) -> None:
    run = f"/api/runs/{number(viewer, 'hostile/run')}"
    expected = [text.replace("\ud83d", "?") for text in HOSTILE]
    prompts = viewer.get(f"{run}/train/1/prompts")["prompts"]
    assert [prompt["text"] for prompt in prompts] == expected
    for group, _ in enumerate(expected):
        answers = viewer.get(f"{run}/train/1/prompts/{group}")["answers"]
        assert [a["text"] for a in answers] == [expected[(group + i) % len(expected)] for i in range(ANSWERS)]
        assert ["".join(p["text"] for p in a["pieces"]) for a in answers] == [a["text"] for a in answers]
        assert [a["finished"] for a in answers] == [True, False, True, True]
    assert viewer.ask(f"{run}/train/1/prompts").body.isascii()
    assert viewer.get(f"{run}/config")["config"]["custom.<b>0</b>"] == HOSTILE[0]


def test_runs_are_compared_by_configuration_and_accuracy(viewer: Viewer) -> None:
    first, second = number(viewer, "sums/grpo"), number(viewer, "sums/killed")
    found = viewer.get(f"/api/compare?runs={first},{second}")
    assert (found["runs"], found["config"]) == ([first, second], [])
    assert {row["source"]: (row["first"], row["last"]) for row in found["accuracy"]} == {
        "sums": ([[0, 0.4], [0, 0.4]], [[8, 1.0], [0, 0.4]]),
        "colours": ([[0, pytest.approx(2 / 3)]] * 2, [[8, 0.25], [0, pytest.approx(2 / 3)]]),
    }
    (sums,) = (row for row in found["accuracy"] if row["source"] == "sums")
    assert sums["best"] == [[8, 1.0], [0, 0.4]] and sums["first_common"] == sums["last_common"] == [[0, 0.4]] * 2
    different = viewer.get(f"/api/compare?runs={number(viewer, 'hostile/run')},{first}")["config"]
    assert {row["key"]: row["present"] for row in different}["custom.<b>0</b>"] == [True, False]
    assert {row["key"]: row["values"] for row in different}["custom.<b>0</b>"] == [HOSTILE[0], None]


@pytest.mark.parametrize("runs", ["", "0", "0,0", "0,x", "0,-1", "0;1", "0,,1", ",".join(map(str, range(30)))])
def test_a_comparison_needs_the_numbers_of_runs(viewer: Viewer, runs: str) -> None:
    status, error = viewer.fault(f"/api/compare?runs={runs}")
    assert status == 400 and error.startswith("runs=")
    assert viewer.fault("/api/compare?runs=0,7") == (404, "there is no run 7")


def test_findings_are_those_of_the_doctor(viewer: Viewer, folder: Path, run: str) -> None:
    found = viewer.get(f"{run}/findings")
    assert (found["steps"], found["state"]) == (8, "finished")
    assert found == Report.of(RunFolder(folder / "sums" / "grpo")).as_json()
    for finding in found["findings"]:
        assert {"kind", "severity", "steps", "title", "evidence", "causes", "changes"} <= finding.keys()
        assert finding["title"].keys() == {"en", "zh"}


def test_the_list_has_the_number_of_findings_and_the_worst(viewer: Viewer, folder: Path) -> None:
    for name in ("sums/grpo", "sums/killed", "hostile/run"):
        findings = Report.of(RunFolder(folder / name)).findings
        badges = viewer.get("/api/findings")
        assert badges["waiting"] == 0
        badge = badges["badges"][str(number(viewer, name))]
        assert badge["count"] == len(findings)
        order = ["error", "warning", "note"]
        worst = min((order.index(finding.severity) for finding in findings), default=None)
        assert (badge["worst"] and order.index(badge["worst"]["severity"])) == worst


def test_findings_of_many_runs_are_read_in_several_requests(
    viewer: Viewer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rloom.view.runs.BADGES_S", -1.0)
    with viewing([folder]) as fresh:
        assert fresh.get("/api/findings") == {"badges": {}, "waiting": 3}
    monkeypatch.setattr("rloom.view.runs.BADGES_S", 60.0)
    with viewing([folder]) as fresh:
        assert len(fresh.get("/api/findings")["badges"]) == 3


def test_metrics_need_no_answers_and_findings_read_them_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr(Samples, "of", lambda path, *rest: read.append(path) or Samples())
    with viewing([folder]) as fresh:
        run = f"/api/runs/{number(fresh, 'sums/grpo')}"
        assert fresh.get(f"{run}/metrics")["answers_per_step"] is not None and read == []
        assert fresh.get(f"{run}/findings") == fresh.get(f"{run}/findings")
        assert len(read) == 1


def test_a_run_whose_check_fails_has_no_badge_and_the_others_have_theirs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = RunHandle.report

    def report(run: RunHandle) -> Report:
        if run.path.name == "killed":
            raise TypeError("'<' not supported between instances of 'str' and 'int'")
        return whole(run)

    monkeypatch.setattr(RunHandle, "report", report)
    monkeypatch.setattr("rloom.view.runs.BADGES_S", 60.0)
    with viewing([folder]) as fresh:
        found = fresh.get("/api/findings")
        assert len(found["badges"]) == 2 and str(number(fresh, "sums/killed")) not in found["badges"]


def test_large_answers_are_compressed_for_who_accepts_it(viewer: Viewer, run: str) -> None:
    path = f"{run}/train/3/prompts/2"
    plain, packed = viewer.ask(path), viewer.ask(path, headers={"Accept-Encoding": "gzip, deflate"})
    assert plain.headers["Content-Encoding"] is None
    assert packed.body == plain.body
    assert (packed.headers["Content-Encoding"] == "gzip") == (len(plain.body) >= 16_384)
