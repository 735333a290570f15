"""A run directory with answers of several turns, for tests of the dumps and of `rloom view`.

group 0   answer 1: three turns, a tool that answers and one that raises an error; ends done, with a reward at two turns
          answer 2: two branches, the second begun by the chat template; ends at the limit of turns
          answer 3: the environment failed before the first answer
group 1   one answer of 100 turns
group 2   texts that do harm where they are taken for markup, in every place that has a text
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

from rloom.batch import Batch, TokenRecord, TrainBatch, Trajectory, Turn
from rloom.runs.dumps.writer import training_table, validation_table
from rloom.types import EpisodeStep, EpisodeSummary, Prompt, Score, ToolCall
from tests.view_runs import HOSTILE, GrowingRun, tokenizer

PROMPT = "<|im_start|>user\nGuess my number.<|im_end|>\n<|im_start|>assistant\n"
CALLS = (
    ToolCall("check", '{"number": 8}', "too low", 0.25),
    ToolCall("chek", '{"number": 9}', "Error: there is no tool 'chek'", 0.0, "there is no tool 'chek'"),
)
MANY = 100

Spoken = tuple[str, str]  # source, text


def encoded(text: str) -> list[int]:
    return list(tokenizer().encode(text.encode("utf-8", "replace").decode()).ids)


def branch_of(spoken: Sequence[Spoken], trained_from: int = 0) -> tuple[list[int], tuple[EpisodeStep, ...]]:
    """Tokens and steps; turns of the policy before `trained_from` belong to another branch."""
    tokens: list[int] = []
    steps = []
    roles = {"prompt": "user", "policy": "assistant", "environment": "tool"}
    for place, (source, text) in enumerate(spoken):
        start = len(tokens)
        tokens += encoded(text)
        trained = source == "policy" and place >= trained_from
        step = EpisodeStep(source, start, len(tokens), ((roles[source], text),), trained, version=place // 2 % 2)
        steps.append(replace(step, seconds=0.5 if source == "policy" else 0.25))
    return tokens, tuple(steps)


def trajectories_of(
    group: int, summary: EpisodeSummary, tokens: Sequence[list[int]], score: Score, prompt: str = PROMPT
) -> list[Trajectory]:
    asked = Prompt(group, (), prompt, tuple(encoded("another prompt than the episode's")), "guess", "12")
    return [
        Trajectory(
            asked,
            group,
            torch.tensor(own),
            torch.zeros(len(own)),
            tuple(Turn(step.start, step.stop, step.version) for step in steps if step.trained),
            summary.ending == "done",
            score,
            text="\n".join(step.messages[0][1] for step in summary.turns),
            episode=summary,
            branch=branch,
        )
        for branch, (own, steps) in enumerate(zip(tokens, summary.branches, strict=True))
    ]


def trajectories() -> list[Trajectory]:
    tokens, steps = branch_of(
        [("prompt", PROMPT), ("policy", "8"), ("environment", "too low"), ("policy", "12?"), ("environment", "no"),
         ("policy", "I say 12.")]
    )  # fmt: skip
    steps = (
        steps[0], replace(steps[1], calls=CALLS, reward=0.25), *steps[2:5], replace(steps[5], reward=0.5)
    )  # fmt: skip
    done = EpisodeSummary("done", (steps,), ("prompt",), 0.75, environment_s=0.5, tools=1)
    first, first_steps = branch_of([("prompt", PROMPT), ("policy", "<think>a</think>7")])
    second, second_steps = branch_of([("prompt", f"{PROMPT}7, then: +"), ("policy", "<think>b</think>9")])
    branched = EpisodeSummary("turn limit", (first_steps, second_steps), ("prompt", "template"), 0.0, rewritten=1)
    none, none_steps = branch_of([("prompt", PROMPT)])
    failed = EpisodeSummary("environment failed", (none_steps,), ("prompt",), None, "ValueError: no such move")
    return [
        *trajectories_of(0, done, [tokens], Score(0.75)),
        *trajectories_of(0, branched, [first, second], Score(0.0)),
        *trajectories_of(0, failed, [none], Score.failed("the environment failed: ValueError: no such move")),
        *many_turns(),
        *hostile(),
    ]


def many_turns() -> list[Trajectory]:
    spoken = [("prompt", PROMPT)]
    for turn in range(MANY):
        spoken += [("policy", f"turn {turn}: a guess"), ("environment", f"result {turn}: no")]
    tokens, steps = branch_of(spoken)
    return trajectories_of(1, EpisodeSummary("token limit", (steps,), ("prompt",), 0.0), [tokens], Score(0.0))


def hostile() -> list[Trajectory]:
    found = []
    for number, text in enumerate(HOSTILE):
        tokens, steps = branch_of([("prompt", text), ("policy", text), ("environment", text), ("policy", "end")])
        call = ToolCall(text, text, text, 1.0, text if number % 2 else None)
        steps = (*steps[:1], replace(steps[1], calls=(call,), messages=((text, text),)), *steps[2:])
        summary = EpisodeSummary(text, (steps,), ("prompt",), 1.0, text)
        found += trajectories_of(2, summary, [tokens], Score(1.0), text)
    return found


def train_batch(found: Sequence[Trajectory]) -> TrainBatch:
    batch = Batch.pack(found)
    return TrainBatch(
        **vars(batch),
        advantages_T=batch.mask_T.float(),
        old_logprobs_T=None,
        ref_logprobs_T=None,
        values_T=None,
        returns_T=None,
    )


def write_episode_run(folder: Path) -> Path:
    run = GrowingRun(folder, total_steps=1)
    found = trajectories()
    batch = train_batch(found)
    run.dumps.write("train", 1, partial(training_table, found, batch, TokenRecord.empty(batch)))
    run.dumps.write("validation", 0, partial(validation_table, found))
    run.log_step(1, {"critic/score/mean": 0.5, "episode/turns/mean": 3.5, "episode/ended/done": 0.25})
    run.close()
    return folder
