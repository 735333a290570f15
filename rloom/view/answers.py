"""All answers to one prompt of a step."""

from typing import TYPE_CHECKING

from rloom.view.faults import NotFound
from rloom.view.json_text import Json
from rloom.view.opened import OpenedRun
from rloom.view.prompts import prompt_json, prompts_of

if TYPE_CHECKING:
    from rloom.runs.dumps.layout import Kind
    from rloom.runs.dumps.reader import DumpedAnswer


def group_answers(run: OpenedRun, kind: "Kind", step: int, group: int) -> Json:
    with run.dumps() as dumps:
        prompts = {prompt.group: prompt for prompt in prompts_of(dumps, kind, step)}
        if group not in prompts:
            raise NotFound(f"the dump of {kind} step {step} has no group {group}")
        answers = dumps.answers(kind, step, group)
    groups = sorted(prompts)
    place = groups.index(group)
    return {
        "step": step,
        "prompt": prompt_json(prompts[group]),
        "previous": groups[place - 1] if place > 0 else None,
        "next": groups[place + 1] if place + 1 < len(groups) else None,
        "answers": [answer_json(answer) for answer in answers],
    }


def answer_json(answer: "DumpedAnswer") -> Json:
    return {
        "text": answer.text,
        "pieces": None
        if answer.pieces is None
        else [{"text": piece.text, "masked": piece.masked} for piece in answer.pieces],
        "logprobs": answer.logprobs,
        "advantages": answer.advantages,
        "entropy": answer.entropy,
        "ratio": answer.ratio,
        "score": answer.score,
        "accuracy": answer.accuracy,
        "parts": answer.parts,
        "reason": answer.reason,
        "detail": answer.detail,
        "prediction": answer.prediction,
        "finished": answer.finished,
        "version": answer.version,
        "turns": [list(turn) for turn in answer.turns],
        "length": answer.length,
    }
