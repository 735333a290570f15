"""The dumps of answers: what is written, what is read, and which steps stay when the folder is full."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE

from rloom.batch import Batch, TokenOutputs, TokenRecord, TrainBatch, Trajectory, Turn
from rloom.errors import DataError
from rloom.runs.dumps.index import DumpEntry, Index, Kind, places_to_remove
from rloom.runs.dumps.reader import Dumps, PromptAtStep, TokenText
from rloom.runs.dumps.writer import DumpWriter, training_table, validation_table
from rloom.types import Prompt, Score

PROMPT = Prompt(index=17, messages=(), text="1 + 1?", tokens=(5, 6), data_source="sums", ground_truth=2)
OTHER = Prompt(index=3, messages=(), text="red?", tokens=(5,), data_source="colours", ground_truth="red")


def trajectories() -> list[Trajectory]:
    """A prompt with two answers, one of them with a tool's output between two turns, and one whose score failed."""
    zero = torch.zeros(1)
    return [
        Trajectory(
            PROMPT, 0, torch.tensor([5, 6, 0, 1]), torch.tensor([0, 0, -0.5, -0.25]), (Turn(2, 4, version=3),), True,
            Score(1.0, parts={"format": 0.5}, prediction="2", detail="well done"), text="ab",
        ),
        Trajectory(
            PROMPT, 0, torch.tensor([5, 6, 0, 2, 1]), torch.tensor([0, 0, -1.0, 0, -2.0]),
            (Turn(2, 3, version=2), Turn(4, 5, version=3)), False, Score(0.0), text="ab",
        ),
        Trajectory(OTHER, 1, torch.tensor([5]), zero, (), True, Score.failed("judge: timeout"), text=""),
    ]  # fmt: skip


def train_batch() -> TrainBatch:
    batch = Batch.pack(trajectories())
    return TrainBatch(
        **vars(batch),
        advantages_T=torch.tensor([0.0, 0, 1.5, 1.5, 0, 0, -1.5, 0, -1.5, 0]),
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=None,
        returns_T=None,
    )


def record() -> TokenRecord:
    return replace(TokenRecord.empty(train_batch()), entropy_T=torch.arange(10) / 8, ratio_T=torch.full((10,), 1.25))


def save_tokenizer(file: Path) -> None:
    tokenizer = Tokenizer(BPE({"a": 0, "b": 1, "ĠC": 2, "Ã": 3, "©": 4}, []))
    tokenizer.decoder = ByteLevel()
    tokenizer.save(str(file))


def writer(run: Path, limit: float = math.inf) -> DumpWriter:
    return DumpWriter(run / "rollouts", limit=limit, seed=1, report=pytest.fail, save_tokenizer=save_tokenizer)


@pytest.fixture
def dumps(tmp_path: Path) -> Dumps:
    out = writer(tmp_path)
    out.write("train", 1, partial(training_table, trajectories(), train_batch(), record()))
    out.write("validation", 0, partial(validation_table, trajectories()))
    out.close()
    return Dumps(tmp_path)


def test_a_prompt_is_summed_up_over_the_answers_whose_score_did_not_fail(dumps: Dumps) -> None:
    first, second = dumps.prompts("train", 1)
    assert (first.group, first.index, first.data_source, first.text) == (0, 17, "sums", "1 + 1?")
    assert (first.ground_truth, first.answers, first.failed, first.length) == ("2", 2, 0, 2.0)
    assert (first.mean, first.best, first.worst, first.spread) == (0.5, 1.0, 0.0, math.sqrt(0.5))
    assert (second.mean, second.best, second.spread, second.failed, second.length) == (None, None, None, 1, 0.0)


def test_an_answer_has_one_number_for_each_token_after_the_prompt(dumps: Dumps) -> None:
    first, second = dumps.answers("train", 1, 0)
    assert first.pieces == [TokenText("a", False), TokenText("b", False)]
    assert (first.logprobs, first.advantages) == ([-0.5, -0.25], [1.5, 1.5])
    assert (first.entropy, first.ratio) == ([0.25, 0.375], [1.25, 1.25])
    assert (first.parts, first.prediction, first.detail) == ({"format": 0.5}, "2", "well done")
    assert (first.version, first.finished, first.turns, first.length) == (3, True, [(0, 2)], 2)
    assert second.pieces == [TokenText("a", False), TokenText(" C", True), TokenText("b", False)]
    assert (second.logprobs, second.turns, second.version) == ([-1.0, 0.0, -2.0], [(0, 1), (2, 3)], 2)
    assert (second.finished, second.length, second.score) == (False, 2, 0.0)


def test_an_answer_of_several_versions_has_the_version_of_each_token(tmp_path: Path) -> None:
    """The prompt has 2 tokens. Only a dump with such an answer has the column."""
    first, second, third = trajectories()
    first = replace(first, turns=(Turn.of_runs(2, [(1, 3), (1, 5)]),))
    assert "versions" not in validation_table(trajectories()).column_names
    assert validation_table([first, second, third])["versions"].to_pylist() == [[1, 3, 2, 5], [1, 2, 3, 3], []]
    out = writer(tmp_path)
    out.write("train", 1, partial(validation_table, [first, second, third]))
    out.close()
    dumps = Dumps(tmp_path)
    found, other = dumps.answers("train", 1, 0)
    assert (found.version, found.versions) == (3, [(1, 3), (2, 5)])
    assert (other.version, other.versions) == (2, [(1, 2), (3, 3)])
    assert [answer.versions for answer in dumps.answers("train", 1, 1)] == [[]]
    assert [row["length"] for row in dumps.rows("train", 1)] == [2, 2, 0]
    assert dumps.texts("train", 1) == {0: ["ab", "ab"], 1: [""]}


def test_a_dump_without_the_column_has_no_versions_of_tokens(dumps: Dumps) -> None:
    assert [answer.versions for answer in dumps.answers("train", 1, 0)] == [None, None]


@pytest.mark.parametrize("versions", [[1], [2, 5], [2, 3, 1, 5], [1, 3, 9, 5], []])
def test_versions_that_do_not_fit_the_turns_are_an_error(tmp_path: Path, versions: list[int]) -> None:
    """One turn has the token 0, another the token 2."""
    first, second, third = trajectories()
    first = replace(first, turns=(Turn.of_runs(2, [(1, 3), (1, 5)]),))
    table = validation_table([second, first, third])
    place = table.column_names.index("versions")
    rows = [versions, *table["versions"].to_pylist()[1:]]
    out = writer(tmp_path)
    changed = table.set_column(place, table.schema.field(place), pa.array(rows, pa.list_(pa.int32())))
    out.write("train", 1, lambda: changed)
    out.close()
    with pytest.raises(DataError, match="row 0 has no valid versions"):
        Dumps(tmp_path).answers("train", 1, 0)


def test_a_failed_score_has_its_reason_and_no_number(dumps: Dumps) -> None:
    (answer,) = dumps.answers("train", 1, 1)
    assert (answer.score, answer.reason, answer.text, answer.pieces) == (None, "judge: timeout", "", [])


def test_a_validation_has_log_probs_and_no_advantages(dumps: Dumps) -> None:
    first, _ = dumps.answers("validation", 0, 0)
    assert first.logprobs == [-0.5, -0.25]
    assert first.advantages is None and first.entropy is None and first.ratio is None


def test_texts_are_grouped_by_prompt(dumps: Dumps) -> None:
    assert dumps.texts("train", 1) == {0: ["ab", "ab"], 1: [""]}


def test_the_first_answer_of_each_prompt_has_its_text_and_score(dumps: Dumps) -> None:
    assert dumps.first_answers("train", 1) == {0: ("ab", 1.0), 1: ("", None)}


def test_the_history_of_a_prompt_comes_from_the_index(dumps: Dumps, tmp_path: Path) -> None:
    (tmp_path / "rollouts" / "train" / "1.parquet").unlink()
    assert dumps.history("train", 17) == [PromptAtStep(step=1, group=0, answers=2, mean=0.5)]
    assert dumps.history("train", 3) == [PromptAtStep(step=1, group=1, answers=1, mean=None)]
    assert dumps.history("train", 4) == []


def test_a_dump_that_is_missing_or_damaged_is_named(dumps: Dumps, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no dump of train step 9"):
        dumps.prompts("train", 9)
    (tmp_path / "rollouts" / "train" / "1.parquet").write_bytes(b"PAR1 not any more")
    with pytest.raises(DataError, match="train step 1 cannot be read"):
        dumps.prompts("train", 1)


def test_a_character_of_several_tokens_is_the_text_of_the_last(tmp_path: Path) -> None:
    save_tokenizer(tmp_path / "tokenizer.json")
    from rloom.runs.dumps.reader import TokenTexts

    assert TokenTexts(tmp_path / "tokenizer.json").split([0, 3, 4, 2]) == ["a", "", "é", " C"]
    assert TokenTexts(tmp_path / "missing.json").split([0]) is None


def test_half_a_surrogate_pair_in_the_data_is_replaced(tmp_path: Path) -> None:
    odd = [Trajectory(
        Prompt(0, (), "a\ud800b", (5,), "sums"), 0, torch.tensor([5, 0]), torch.zeros(2), (Turn(1, 2, 0),), True,
        Score(1.0), text="x",
    )]  # fmt: skip
    out = writer(tmp_path)
    out.write("validation", 0, partial(validation_table, odd))
    out.close()
    assert Dumps(tmp_path).prompts("validation", 0)[0].text == "a?b"


def test_a_number_beyond_float16_is_the_largest_of_it(tmp_path: Path) -> None:
    large = train_batch()
    large.advantages_T[2] = 1e9
    table = training_table(trajectories(), large, None)
    assert table["advantages"].to_pylist()[0][0] == 65504.0
    assert table["entropy"].null_count == 3


def test_numbers_of_tokens_have_no_dictionary_and_no_statistics(tmp_path: Path) -> None:
    """Nearly all of them differ. Tokens, of which many are equal, keep both."""
    out = writer(tmp_path)
    out.write("train", 1, partial(training_table, trajectories(), train_batch(), record()))
    out.close()
    (file,) = (tmp_path / "rollouts" / "train").iterdir()
    group = pq.ParquetFile(file).metadata.row_group(0)
    columns = {column.path_in_schema: column for column in map(group.column, range(group.num_columns))}
    for name in ("logprobs", "advantages", "entropy", "ratio"):
        column = columns[f"{name}.list.element"]
        assert "BYTE_STREAM_SPLIT" in column.encodings and not column.has_dictionary_page and column.statistics is None
    tokens = columns["tokens.list.element"]
    assert tokens.has_dictionary_page and tokens.statistics.max == 2
    assert pq.read_table(file)["ratio"].to_pylist() == [[1.25] * 2, [1.25] * 3, []]


def test_a_resumed_run_replaces_later_steps(tmp_path: Path) -> None:
    out = writer(tmp_path)
    for step in (1, 2, 3):
        out.write("train", step, partial(training_table, trajectories(), train_batch(), record()))
    out.close()
    dumps = Dumps(tmp_path)
    again = writer(tmp_path)
    again.remove_after(1)
    again.close()
    assert dumps.refresh() and dumps.steps("train") == [1]
    assert [file.name for file in (tmp_path / "rollouts" / "train").iterdir()] == ["1.parquet"]


def test_a_line_of_the_index_that_a_crash_cut_short_is_skipped(tmp_path: Path) -> None:
    out = writer(tmp_path)
    out.write("train", 1, partial(training_table, trajectories(), train_batch(), record()))
    out.close()
    with (tmp_path / "rollouts" / "index.jsonl").open("a") as index:
        index.write('{"kind": "train", "st')
    assert Dumps(tmp_path).steps("train") == [1]
    again = writer(tmp_path)
    again.write("train", 2, partial(training_table, trajectories(), train_batch(), record()))
    again.close()
    assert Dumps(tmp_path).steps("train") == [1, 2]


def entries(*steps: int, kind: str = "train", size: int = 10) -> dict[tuple[str, int], DumpEntry]:
    return {(kind, step): DumpEntry(size, [], [], [], []) for step in steps}


def test_a_full_folder_keeps_steps_that_are_spread_over_the_run() -> None:
    assert places_to_remove(entries(1, 2, 3, 4, 5), limit=50) == []
    assert places_to_remove(entries(1, 2, 3, 4, 5), limit=40) == [("train", 2)]
    # 1 . 3 4 5 -> 3 has neighbours 1 and 4 (3 apart), 4 has 3 and 5 (2 apart)
    assert places_to_remove(entries(1, 3, 4, 5), limit=30) == [("train", 4)]
    # ... until the first and the last are left
    assert places_to_remove(entries(1, 2, 3, 4, 5), limit=0) == [("train", 2), ("train", 4), ("train", 3)]


def test_validations_are_removed_after_training_steps() -> None:
    both = entries(1, 2, 3) | entries(0, 4, 8, kind="validation")
    assert places_to_remove(both, limit=50) == [("train", 2)]
    assert places_to_remove(both, limit=40) == [("train", 2), ("validation", 4)]


def test_the_writer_keeps_the_folder_within_its_limit(tmp_path: Path) -> None:
    table = partial(training_table, trajectories(), train_batch(), record())
    out = writer(tmp_path)
    out.write("train", 1, table)
    out.close()
    (size,) = (entry.bytes for entry in Index(tmp_path / "rollouts").entries.values())
    bounded = writer(tmp_path, limit=4.5 * size)
    for step in range(2, 12):
        bounded.write("train", step, table)
    bounded.close()
    files = {int(file.stem): file.stat().st_size for file in (tmp_path / "rollouts" / "train").iterdir()}
    assert sorted(files) == Dumps(tmp_path).steps("train") and len(files) == 4
    assert {1, 11} <= files.keys() and sum(files.values()) <= 4.5 * size


def test_a_folder_that_cannot_be_written_is_reported_once_and_the_run_goes_on(tmp_path: Path) -> None:
    (tmp_path / "rollouts").write_text("a file")
    reports: list[str] = []
    out = DumpWriter(tmp_path / "rollouts", limit=math.inf, seed=1, report=reports.append)
    for step in (1, 2):
        out.write("train", step, partial(training_table, trajectories(), train_batch(), record()))
    out.close()
    assert len(reports) == 1 and str(tmp_path / "rollouts") in reports[0]


def test_a_report_that_fails_does_not_stop_the_writer(tmp_path: Path) -> None:
    """On a full disk the warning cannot be written either. If the thread ended, the fourth write would wait."""
    (tmp_path / "rollouts").write_text("a file")

    def fail(message: str) -> None:
        raise OSError("No space left on device")

    out = DumpWriter(tmp_path / "rollouts", limit=math.inf, seed=1, report=fail)
    for step in range(8):
        out.write("train", step, partial(training_table, trajectories(), train_batch(), record()))
    out.close()


def test_a_dump_is_a_plain_parquet_file(dumps: Dumps, tmp_path: Path) -> None:
    rows = pq.read_table(tmp_path / "rollouts" / "train" / "1.parquet").to_pylist()
    assert [row["output"] for row in rows] == ["ab", "ab", ""]
    assert rows[1]["tokens"] == [0, 2, 1]


def of_groups(*tokens: int) -> list[Trajectory]:
    """For each group, two answers with half of these tokens each, behind a prompt of two."""
    return [
        Trajectory(
            PROMPT, group, torch.zeros(2 + count // 2, dtype=torch.long), torch.zeros(2 + count // 2),
            (Turn(2, 2 + count // 2, version=0),), True, Score(1.0), text="",
        )
        for group, count in enumerate(tokens)
        for _ in range(2)
    ]  # fmt: skip


def drawn(limit_tokens: int, *tokens: int, kind: Kind = "train", step: int = 1, seed: int = 1) -> list[int] | None:
    """The groups that are dumped of a step, in a folder with room for 32 such steps."""
    out = DumpWriter(Path("none"), limit=32 * 16 * limit_tokens, seed=seed, report=pytest.fail)
    answers = of_groups(*tokens)
    found = out.sample(kind, step, answers)
    if found is None:
        return None
    groups = [answers[row].group for row in found.rows]
    assert groups == sorted(groups) and groups[::2] == groups[1::2], "whole groups, in the order of the step"
    assert (found.groups, found.groups_of_step) == (len(groups) // 2, len(tokens))
    return groups[::2]


def test_a_step_is_dumped_as_a_whole_up_to_a_32nd_of_the_folder() -> None:
    assert drawn(40, 10, 10, 20) is None
    assert len(drawn(39, 10, 10, 20) or ()) == len(drawn(20, 10, 10, 10, 10) or ()) == 2
    assert len(drawn(5, 10, 10, 10) or ()) == 1  # one at least


def test_the_groups_that_are_dumped_are_drawn_by_seed_and_step() -> None:
    """Of 1,000 groups, 100 of each step; a group is in about a tenth of the steps, so the draw prefers none."""
    steps = [drawn(1000, *[10] * 1000, step=step) for step in range(1, 51)]
    assert [step and len(step) for step in steps] == [100] * 50
    assert drawn(1000, *[10] * 1000, step=7) == steps[6] and drawn(1000, *[10] * 1000, step=7, seed=2) != steps[6]
    halves = [sum(group < 500 for group in step or ()) for step in steps]
    assert 2300 < sum(halves) < 2700 and min(halves) < 50 < max(halves)


def test_validations_have_the_same_prompts_in_each_step() -> None:
    first, later = (drawn(100, *[10] * 100, kind="validation", step=step) for step in (0, 50))
    assert first is not None and first == later and len(first) == 10


def test_a_dump_has_how_many_prompts_its_own_were_drawn_from(tmp_path: Path) -> None:
    out, table = writer(tmp_path), partial(training_table, trajectories(), train_batch(), record())
    out.write("train", 1, table)
    out.write("train", 2, table, groups_of_step=512)
    out.close()
    dumps = Dumps(tmp_path)
    assert [dumps.groups_of_step("train", step) for step in (1, 2)] == [None, 512]
    index = tmp_path / "rollouts" / "index.jsonl"
    index.write_text(index.read_text().replace("512", '"many"'))
    assert Dumps(tmp_path).steps("train") == [1]


def test_the_record_of_a_sample_has_its_tokens_alone() -> None:
    """Samples of 4, 5 and 1 tokens; the first and the last are recorded. The update had them in the order 2, 0, 1."""
    batch = replace(train_batch(), old_logprobs_T=torch.zeros(10), recorded_N=torch.tensor([True, False, True]))
    found = TokenRecord.empty(batch)
    assert (found.entropy_T.tolist(), found.ratio_T.tolist()) == ([0.0] * 5, [1.0] * 5)
    outputs = TokenOutputs(torch.tensor([9.0, 1, 2, 3, 4]).log(), torch.tensor([0.9, 0.1, 0.2, 0.3, 0.4]))
    found.put([0, 4, 9, 10], [2, 0, 1], outputs, batch)
    assert found.entropy_T.tolist() == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.9])
    assert found.ratio_T.tolist() == pytest.approx([1, 2, 3, 4, 9])
