"""Whatever JSON the process of an environment replies, the driver gets values of the right form or a WrongReply."""

import contextlib
import json
import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rloom.episodes.base import EnvironmentReport, Observation
from rloom.episodes.record import Ending
from rloom.episodes.replies import (
    WrongReply,
    as_beginning,
    as_end,
    as_object,
    as_observation,
    read_reply,
    shown,
)

NUMBERS = (10**400, -(10**400), 1e308, float("nan"), float("inf"), -0.0, 2**63, True)
KEYS = "messages tools done reward calls facts state metrics number role content name arguments result seconds error"
scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(NUMBERS)
names = st.sampled_from([*KEYS.split(), "function", "tool_calls", "\ud800", "__class__"])
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=6), max_leaves=20
)
messages = st.lists(st.fixed_dictionaries({"role": st.text(max_size=9) | values, "content": st.text() | values}))
calls = st.lists(
    st.fixed_dictionaries(
        {"name": st.text(), "arguments": st.text(), "result": values, "seconds": scalars, "error": values}
    )
)
replies = st.dictionaries(names, values, max_size=8) | st.fixed_dictionaries(
    {
        "messages": messages | values,
        "tools": st.none() | values,
        "done": st.booleans() | values,
        "reward": scalars,
        "calls": calls | values,
        "facts": st.dictionaries(names, values) | values,
        "state": st.dictionaries(names, values) | values,
        "metrics": st.dictionaries(st.text(), scalars) | values,
    }
)


def read(function, reply):
    """As it arrives."""
    body = json.dumps(reply).encode(errors="replace")
    try:
        return read_reply(function, as_object(body))
    except WrongReply as error:
        assert error.ending is Ending.WRONG_REPLY and len(str(error)) < 300
        str(error).encode()
        return None


def is_finite(number):
    return type(number) is float and math.isfinite(number)


@settings(max_examples=200, deadline=None)
@given(replies)
def test_every_json_value_is_read_or_refused(reply):
    begun, seen, ended = (read(function, reply) for function in (as_beginning, as_observation, as_end))
    if begun is not None:
        for message in begun[0]:
            assert isinstance(message["role"], str) and isinstance(message["content"], str)
            json.dumps(message, ensure_ascii=False).encode()
        assert all(isinstance(tool["function"]["name"], str) for tool in begun[1] or ())
    if seen is not None:
        assert isinstance(seen, Observation) and type(seen.done) is bool
        assert seen.reward is None or is_finite(seen.reward)
        for call in seen.calls:
            assert call.error is None or isinstance(call.error, str)
            f"{sum([call.seconds]) / 3:.3f} {call.name} {call.arguments} {call.result}".encode()
    if ended is not None:
        reward, report = ended
        assert reward is None or is_finite(reward)
        assert isinstance(report, EnvironmentReport) and all(map(is_finite, report.metrics.values()))
        json.dumps([report.facts, report.state], ensure_ascii=False).encode()


@given(st.binary(max_size=200) | st.sampled_from([b"[" * 5000, b'{"a":' * 5000, b"1" * 5000, b"NaN", b'{"a": 1e999}']))
def test_bytes_that_are_no_json_object_are_refused(body):
    with contextlib.suppress(WrongReply):
        assert isinstance(as_object(body), dict)


@pytest.mark.parametrize(
    "reply",
    [
        {"reward": 10**400, "facts": {}, "state": {}, "metrics": {}},
        {"reward": True, "facts": {}, "state": {}, "metrics": {}},
        {"reward": "1.0", "facts": {}, "state": {}, "metrics": {}},
        {"reward": 1e31, "facts": {}, "state": {}, "metrics": {}},
        {"reward": 1.0, "facts": {}, "state": {}, "metrics": {str(n): 1.0 for n in range(1001)}},
        {"reward": 1.0, "facts": {}, "state": {}, "metrics": {"x" * 201: 1.0}},
    ],
)
def test_an_end_with_a_value_that_training_cannot_use_is_refused(reply):
    with pytest.raises(WrongReply):
        as_end(reply)


def test_metrics_that_are_no_numbers_are_left_out():
    metrics = {"a": 2, "b": 10**400, "c": float("nan"), "d": "3", "e": True}
    assert as_end({"reward": None, "facts": {}, "state": {}, "metrics": metrics})[1].metrics == {"a": 2.0}


def test_a_large_value_is_shown_in_a_few_characters_and_at_once():
    large = [["x" * 100] * 100] * 100_000
    start_s = time.monotonic()
    assert len(shown(large)) <= 100
    assert time.monotonic() - start_s < 20  # all of it has 1 GB
