"""The files of `rollouts/` and the columns of a dump.

rollouts/train/12.parquet        the answers of step 12, one row for each
rollouts/validation/0.parquet    those of the validation after step 0
rollouts/index.jsonl             what is in each dump, one line for each, see `rloom.runs.dumps.index`
rollouts/tokenizer.json          turns tokens into text
"""

from typing import Literal

import pyarrow as pa

FOLDER = "rollouts"
INDEX = "index.jsonl"
TOKENIZER = "tokenizer.json"

Kind = Literal["train", "validation"]
KINDS: tuple[Kind, ...] = ("train", "validation")

# Three significant digits are enough to look at, in half the bytes of float32.
NUMBERS = pa.list_(pa.float16())
TOKEN_COLUMNS = ("logprobs", "advantages", "entropy", "ratio")

SCHEMA = pa.schema(
    [
        ("group", pa.int32()),  # equal for the answers to one prompt
        ("index", pa.int32()),  # of the prompt: its row in the data set
        ("data_source", pa.string()),
        ("prompt", pa.string()),
        ("ground_truth", pa.string()),  # JSON, unless it is a text
        ("output", pa.string()),
        ("score", pa.float64()),  # null: it failed
        ("accuracy", pa.float64()),
        ("parts", pa.string()),  # of the score, JSON
        ("prediction", pa.string()),
        ("reason", pa.string()),  # why the score failed
        ("detail", pa.string()),  # what the reward found: a judge's words
        ("finished", pa.bool_()),
        ("version", pa.int32()),  # of the weights that generated it
        ("length", pa.int32()),  # tokens that the policy generated
        ("turns", pa.list_(pa.int32())),  # start and stop of each turn, counted from the first token of `tokens`
        ("tokens", pa.list_(pa.int32())),  # those after the prompt, the environment's too
        ("logprobs", NUMBERS),  # from the rollout engine
        ("advantages", NUMBERS),
        ("entropy", NUMBERS),  # of the policy's distribution, in the last update of the step that used the token
        ("ratio", NUMBERS),  # of the token's probability in that update to that of the old policy
    ]
)


def file_name(kind: str, step: int) -> str:
    return f"{kind}/{step}.parquet"
