r"""HH-RLHF: dialogues with a preferred and a rejected last answer, for runs with a reward model.

A dialogue is one text: "\n\nHuman: ...\n\nAssistant: ...\n\nHuman: ...\n\nAssistant: ...". The prompt is the
dialogue up to the last human turn. The preferred last answer is the ground truth, which a reward model does not read.
"""

import logging
import re
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path

from rloom.data.files import Row
from rloom.data.prepare.sources import RawFiles, RawRow, read_split
from rloom.errors import DataError

log = logging.getLogger(__name__)

DATA_SOURCE = "Anthropic/hh-rlhf"
# harmless-base, helpful-base, helpful-online and helpful-rejection-sampled, but not red-team-attempts
FILES = {split: RawFiles(DATA_SOURCE, f"h*/{split}.jsonl.gz", f"*_{split}.jsonl*") for split in ("train", "test")}
ROLES = {"Human": "user", "Assistant": "assistant"}
TEST_SHARE = 20  # one prompt in 20 of a single file is for the test
_TURN = re.compile(r"\n\n(Human|Assistant):")


def splits(source: Path | None) -> tuple[list[Row], list[Row]]:
    if source is not None and source.is_file():
        return _divided(source)
    return _rows("train", read_split(FILES["train"], source)), _rows("test", read_split(FILES["test"], source))


def _divided(file: Path) -> tuple[list[Row], list[Row]]:
    """A single file: divided by a checksum of the prompt, so that no prompt is in both splits."""
    train: list[RawRow] = []
    test: list[RawRow] = []
    for row in read_split(replace(FILES["train"], single=True), file):
        prompt = str(row.values.get("chosen")).rpartition("\n\nAssistant:")[0]
        (test if zlib.crc32(prompt.encode()) % TEST_SHARE == 0 else train).append(row)
    log.warning("hh_rlhf: %s is one file; %d rows are for training, %d for the test", file, len(train), len(test))
    return _rows("train", train), _rows("test", test)


def _rows(split: str, raw: list[RawRow]) -> list[Row]:
    kept: list[Row] = []
    faults: Counter[str] = Counter()
    first: dict[str, str] = {}  # fault -> its first row
    for row in raw:
        try:
            kept.append(_row(row, split))
        except ValueError as error:
            faults[str(error)] += 1
            first.setdefault(str(error), row.place)
    for fault, count in faults.items():
        log.warning("hh_rlhf: left out %d of %d %s rows: %s (first: %s)", count, len(raw), split, fault, first[fault])
    if not kept:
        raise DataError(
            f"hh_rlhf: none of the {len(raw)} {split} rows is a pair of dialogues (chosen and rejected); "
            "pass the published files as --source"
        )
    return kept


def _row(row: RawRow, split: str) -> Row:
    *messages, answer = dialogue(row.values.get("chosen"), "chosen")
    *_, rejected = dialogue(row.values.get("rejected"), "rejected")
    return {
        "data_source": DATA_SOURCE,
        "prompt": messages,
        "ability": "alignment",
        "reward_model": {"style": "model", "ground_truth": answer["content"]},
        "extra_info": {"split": split, "index": row.index, "rejected": rejected["content"]},
    }


def dialogue(text: object, column: str) -> list[dict[str, str]]:
    """The turns as chat messages. ValueError if the text is no dialogue that ends with an answer."""
    if not isinstance(text, str):
        raise ValueError(f"{column} is not text")
    before, *pieces = _TURN.split(text)
    if before.strip() or len(pieces) < 4:
        raise ValueError(f"{column} has no human turn and an answer to it")
    messages = [
        {"role": ROLES[name], "content": content.strip()}
        for name, content in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    expected = ["user", "assistant"] * (len(messages) // 2)
    if [message["role"] for message in messages] != expected:
        raise ValueError(f"the turns of {column} do not alternate from a human turn to an answer")
    if not all(message["content"] for message in messages):
        raise ValueError(f"{column} has an empty turn")
    return messages
