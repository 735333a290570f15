"""A run with an answer that two versions of the weights generated, for tests of `rloom view`."""

from functools import partial
from pathlib import Path

import torch

from rloom.batch import Trajectory, Turn
from rloom.runs.dumps.writer import validation_table
from rloom.types import Prompt, Score
from tests.view_runs import GrowingRun, tokenizer

PROMPT = Prompt(0, (), "What is 20 + 22?", (1, 2), "sums")
TEXT = "The answer is 42."


def answer_of(runs: list[tuple[int, int]]) -> Trajectory:
    """`runs`: (tokens, version) of the first tokens; the last version has the rest."""
    tokens = tokenizer().encode(TEXT).ids
    rest = len(tokens) - sum(count for count, _ in runs[:-1])
    turn = Turn.of_runs(2, [*runs[:-1], (rest, runs[-1][1])])
    logprobs_L = torch.full((2 + len(tokens),), -0.5)
    return Trajectory(PROMPT, 0, torch.tensor([1, 2, *tokens]), logprobs_L, (turn,), True, Score(1.0), text=TEXT)


def write_versions_run(folder: Path) -> Path:
    """Two answers: three tokens of the first weights and the rest after step 2, and all after step 2. Their prompt was
    drawn from 512."""
    run = GrowingRun(folder, total_steps=3)
    answers = [answer_of([(3, 0), (0, 2)]), answer_of([(0, 2)])]
    run.dumps.write("train", 3, partial(validation_table, answers), groups_of_step=512)
    run.log_step(3, {"critic/score/mean": 1.0})
    run.close()
    return folder
