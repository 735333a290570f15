import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from rloom.data.check import Fault, check_file, length_histogram, render_report
from rloom.errors import DataError


class CharacterTokenizer:
    """One token a character, no chat template."""

    name_or_path = "characters"
    chat_template = None
    bos_token = None
    eos_token_id = None

    def __call__(self, text: list[str], *, add_special_tokens: bool, verbose: bool) -> Mapping[str, Any]:
        return {"input_ids": [[ord(character) for character in one] for one in text]}

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> str:
        raise AssertionError("there is no template")


def write(tmp_path: Path, rows: list[dict[str, Any]]) -> Path:
    path = tmp_path / "a.json"
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def gsm8k(prompt: Any, truth: Any) -> dict[str, Any]:
    return {"data_source": "openai/gsm8k", "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}}


def test_a_sound_file_is_ok(tmp_path: Path) -> None:
    kit_row = {"data_source": "math_reasoning", "prompt": "b", "ground_truth": "42"}
    path = write(tmp_path, [gsm8k("a", "72"), gsm8k("c", "-1,080.5"), kit_row])
    report = check_file(path)
    assert report.ok
    assert report.rows == 3
    assert report.columns == ("data_source", "prompt", "reward_model", "ground_truth")
    assert report.sources == {"openai/gsm8k": 2, "math_reasoning": 1}
    assert report.prompt_lengths is None
    assert render_report(report) == (
        f"{path}: 3 rows (numbered from 0)\n"
        "columns: data_source, prompt, reward_model, ground_truth\n"
        "data sources:\n"
        "  openai/gsm8k: 2 rows\n"
        "  math_reasoning: 1 row\n"
        "ok"
    )


def test_faults_of_the_schema_are_listed_with_their_rows(tmp_path: Path) -> None:
    rows = [
        gsm8k("a", "1"),
        gsm8k([], "1"),
        {"prompt": "b", "ground_truth": "1"},
        {**gsm8k("c", "1"), "extra_info": "x"},
        {**gsm8k("d", "1"), "reward_model": "1"},
    ]
    report = check_file(write(tmp_path, rows))
    assert not report.ok
    assert [fault.row for fault in report.schema_faults] == [1, 2, 3, 4]
    assert report.schema_faults[0] == Fault(1, "the prompt is an empty list of messages")
    assert report.schema_faults[1].reason.startswith("has nothing under 'data_source'")
    assert report.truth_faults == ()
    assert "faults: 4\n  row 1: the prompt is an empty list of messages\n" in render_report(report)


def test_ground_truths_that_are_missing_or_no_number_are_faults(tmp_path: Path) -> None:
    rows = [gsm8k("a", "72"), gsm8k("b", None), gsm8k("c", "  "), gsm8k("d", "seven"), gsm8k("e", 7), gsm8k("f", 0)]
    rows.append({"data_source": "math_reasoning", "prompt": "g", "ground_truth": "seven"})
    report = check_file(write(tmp_path, rows))
    assert [fault.row for fault in report.truth_faults] == [1, 2, 3]
    assert "ground_truth='seven' of a openai/gsm8k row is not a number" in report.truth_faults[2].reason
    assert not report.ok


def test_a_row_for_a_reward_model_is_refused_as_training_refuses_it(tmp_path: Path) -> None:
    path = write(tmp_path, [{"data_source": "some/dialogues", "prompt": "a", "reward_model": {"style": "model"}}])
    assert check_file(path).sources_without_rule == ("some/dialogues",)
    assert check_file(path, own_reward=True).ok


def test_a_missing_ground_truth_is_to_go_where_the_rows_keep_theirs(tmp_path: Path) -> None:
    rows = [{"data_source": "math_reasoning", "prompt": "a"}, gsm8k("b", None)]
    found = [fault.reason for fault in check_file(write(tmp_path, rows)).truth_faults]
    assert found == [
        "no ground truth; set ground_truth",
        "no ground truth; set reward_model.ground_truth",
    ]


def test_the_way_out_of_an_unknown_source_is_one_that_exists(tmp_path: Path) -> None:
    said = render_report(check_file(write(tmp_path, [{"data_source": "my/own", "prompt": "a", "ground_truth": "x"}])))
    assert "custom_reward_function.path=FILE" in said
    assert "judge" not in said and "reward model" not in said
    assert ": 1 row (numbered from 0)\n" in said
    assert "  my/own: 1 row\n" in said


def test_a_data_source_without_a_rule_is_named_once(tmp_path: Path) -> None:
    rows = [{"data_source": "my/own", "prompt": str(number), "ground_truth": "x"} for number in range(3)]
    path = write(tmp_path, rows)
    report = check_file(path)
    assert report.sources_without_rule == ("my/own",)
    assert not report.ok
    assert "data sources without a reward rule: 1\n  my/own: " in render_report(report)
    assert check_file(path, own_reward=True).ok


def test_repeated_prompts_are_told_but_allowed(tmp_path: Path) -> None:
    as_messages = [{"role": "user", "content": "a"}]
    report = check_file(write(tmp_path, [gsm8k("a", "1"), gsm8k("b", "1"), gsm8k(as_messages, "1"), gsm8k("a", "1")]))
    assert report.duplicates == ((2, 0), (3, 0))
    assert report.ok
    assert "repeated prompts: 2\n  row 2 repeats row 0\n  row 3 repeats row 0\nok" in render_report(report)


def test_long_lists_are_cut_in_the_rendering_only(tmp_path: Path) -> None:
    report = check_file(write(tmp_path, [gsm8k(str(number), None) for number in range(25)]))
    assert len(report.truth_faults) == 25
    assert "ground truths: 25\n" in render_report(report)
    assert "  row 19: " in render_report(report)
    assert "  row 20: " not in render_report(report)
    assert "  and 5 more\n" in render_report(report)


def test_prompt_lengths_are_those_of_the_rendered_prompts(tmp_path: Path) -> None:
    path = write(tmp_path, [gsm8k("a", "1"), gsm8k([], "1"), gsm8k("b" * 40, "1")])
    report = check_file(path, tokenizer=CharacterTokenizer())
    assert report.prompt_lengths == (19, 58)  # "User: " + content + "\n\nAssistant:" is 18 characters more
    assert (
        "prompt length in tokens: 19 to 58, mean 38.5\n"
        "  up to 16   0\n"
        f"  up to 32  {'█' * 40} 1\n"
        f"  up to 64  {'█' * 40} 1\n"
    ) in render_report(report)


def test_the_histogram_has_doubling_bounds() -> None:
    assert length_histogram([1, 16, 17, 64, 65]) == [(16, 2), (32, 1), (64, 1), (128, 1)]


def test_other_keys_can_be_told(tmp_path: Path) -> None:
    path = write(tmp_path, [{"question": "a", "origin": "openai/gsm8k", "ground_truth": "1"}])
    assert check_file(path, prompt_key="question", reward_fn_key="origin").ok
    assert not check_file(path).ok


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no such file"):
        check_file(tmp_path / "none.parquet")
