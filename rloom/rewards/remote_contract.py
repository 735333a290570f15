"""The JSON bodies of a reward server: docs/remote_reward.md describes them. They include those of OpenRLHF.

request: {"query": [...], "prompts": [...], "labels": [...], "responses": [...], ...}, one entry per answer
response: {"rewards": [...], "scores": [...], "extra_logs": {name: [...]}}, of which only rewards is required
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rloom.net.http import RequestFailed, shortened
from rloom.types import Sample, Score, is_usable

EncodedSample = Mapping[str, str]  # field of the request -> JSON


class InvalidReply(RequestFailed):
    """A body that is not a response to the request."""


def encode(sample: Sample) -> EncodedSample:
    """ValueError or TypeError: the row holds a value that JSON does not have."""
    truth = sample.ground_truth
    fields = {
        "query": sample.prompt + sample.response,
        "prompts": sample.prompt,
        "labels": "" if truth is None else truth,
        "responses": sample.response,
        "data_sources": sample.data_source,
        "ground_truths": truth,
        "extra_infos": dict(sample.extra_info),
    }
    return {name: json.dumps(value, allow_nan=False) for name, value in fields.items()}


def request_body(samples: Sequence[EncodedSample]) -> bytes:
    columns = (f'"{name}": [{", ".join(sample[name] for sample in samples)}]' for name in samples[0])
    return ("{" + ", ".join(columns) + "}").encode("ascii")


def read_reply(body: bytes, answers: int) -> list[Score]:
    """One score per answer. An entry without a number is a failed score; other faults are an InvalidReply."""
    try:
        reply = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidReply(f"returned a body that is not JSON ({shortened(str(error))})") from error
    try:
        return scores_in(reply, answers)
    except InvalidReply:
        raise
    except Exception as error:  # one that was not foreseen: only this request fails
        raise InvalidReply(
            f"returned a body that cannot be read ({type(error).__name__}: {shortened(str(error))})"
        ) from error


def scores_in(reply: Any, answers: int) -> list[Score]:
    if not isinstance(reply, dict) or reply.get("rewards") is None:
        raise InvalidReply(f"returned no 'rewards': {shortened(json.dumps(reply))}")
    rewards = column("rewards", reply["rewards"], answers)
    columns = extra_logs(reply, answers)
    if reply.get("scores") is not None:
        columns["acc"] = column("scores", reply["scores"], answers)
    return [score(reward, {name: values[i] for name, values in columns.items()}) for i, reward in enumerate(rewards)]


def extra_logs(reply: Mapping[str, Any], answers: int) -> dict[str, list[Any]]:
    """One value per answer; a single value counts for all of them."""
    found = reply.get("extra_logs") or {}
    if not isinstance(found, dict):
        raise InvalidReply(f"returned 'extra_logs' that are not an object: {shortened(json.dumps(found))}")
    return {
        name: column(f"extra_logs.{name}", values, answers) if isinstance(values, list) else [values] * answers
        for name, values in found.items()
    }


def column(name: str, values: Any, answers: int) -> list[Any]:
    if not isinstance(values, list) and answers == 1:  # a server for one answer per request, as OpenRLHF sends them
        return [values]
    if not isinstance(values, list):
        raise InvalidReply(
            f"returned {shortened(json.dumps(values))} as {name!r} of {answers} answers; it takes a list "
            "(reward_model.remote.batch_size=1 sends one answer per request)"
        )
    if len(values) != answers:
        raise InvalidReply(
            f"returned {len(values)} {name!r} for {answers} answers "
            "(reward_model.remote.batch_size=1 sends one answer per request)"
        )
    return values


def score(reward: Any, parts: Mapping[str, Any]) -> Score:
    """Numbers of `parts` become metrics; other entries are left out."""
    if isinstance(reward, dict) and "error" in reward:
        return Score.failed(f"reported an error: {shortened(str(reward['error']))}")
    if not is_number(reward):
        return Score.failed(f"returned {shortened(json.dumps(reward))} as a reward, which is not a finite number")
    numbers = {name: float(value) for name, value in parts.items() if is_number(value) and is_usable(value)}
    return Score.of(float(reward), numbers, subject=f"returned {shortened(json.dumps(reward))}")


def is_number(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and math.isfinite(value)
    except OverflowError:  # an int too large for a float
        return False
