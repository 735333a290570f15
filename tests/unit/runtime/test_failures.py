"""Several workers fail: which one is the cause."""

import pickle

import pytest
import torch

from rloom.errors import CheckpointError, ModelError, RloomError, WorkerError
from rloom.runtime.failures import CallFailed, Failure, Kind, cause_first, kind_of, portable_errors, wait_for_others_s

GLOO = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:29848"


@pytest.mark.parametrize(
    "what",
    [
        GLOO,
        "RuntimeError: Read error [10.0.0.2]:1: Connection reset by peer",
        "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 1800000ms for recv operation",
        "RuntimeError: Application timeout caused pair closure",
        "DistNetworkError: failed to recv, got 0 bytes. Connection was likely closed.",
        "DistBackendError: NCCL error: remote process exited or there was a network error",
    ],
)
def test_what_ranks_say_that_lost_a_peer(what: str) -> None:
    assert kind_of(what) is Kind.LOST_A_PEER


@pytest.mark.parametrize("what", ["KeyError: 'x'", "OutOfMemoryError: CUDA out of memory.", "RuntimeError: shape"])
def test_any_other_error_is_a_cause(what: str) -> None:
    assert kind_of(what) is Kind.RAISED


def died() -> Failure:
    return Failure(Kind.DIED, WorkerError("worker 2 died. exit code 1\nIts last lines", lost=True))


def raised() -> Failure:
    return Failure(Kind.RAISED, WorkerError("worker 1 failed: KeyError: 'x'\nTraceback"))


def lost_a_peer() -> Failure:
    return Failure(Kind.LOST_A_PEER, WorkerError(f"worker 0 failed: {GLOO}\nTraceback"))


def test_the_cause_is_named_before_what_came_of_it_whoever_reported_first() -> None:
    error = cause_first([lost_a_peer(), raised()])
    assert str(error).startswith("worker 1 failed: KeyError: 'x'")
    assert error.__notes__ == [f"Another failure, possibly a consequence: worker 0 failed: {GLOO}"]
    assert str(cause_first([lost_a_peer(), raised(), died()])).startswith("worker 2 died")


def test_of_equal_failures_the_first_to_arrive_is_named() -> None:
    second = Failure(Kind.RAISED, WorkerError("worker 3 failed: KeyError: 'y'"))
    assert str(cause_first([raised(), second])).startswith("worker 1")
    assert str(cause_first([second, raised()])).startswith("worker 3")


def test_only_a_likelier_cause_is_waited_for() -> None:
    assert wait_for_others_s([lost_a_peer()]) == 30
    assert wait_for_others_s([lost_a_peer(), raised()]) == 5  # its peer's death may be on its way
    assert wait_for_others_s([died(), lost_a_peer()]) == 0
    assert wait_for_others_s([Failure(Kind.RAISED, ModelError("worker 1: no such folder"))]) == 0


class TwoArguments(Exception):
    """Cannot be unpickled: its arguments are not those of its constructor."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def test_an_exception_reaches_another_process_whatever_its_class() -> None:
    with pytest.raises(TypeError):
        pickle.loads(pickle.dumps(TwoArguments(1, 2)))
    with pytest.raises(CallFailed) as caught, portable_errors():
        raise TwoArguments(1, 2)
    found = pickle.loads(pickle.dumps(caught.value))
    assert found.what == "TwoArguments: 1 and 2" and not found.out_of_memory
    assert "raise TwoArguments(1, 2)" in found.trace


def test_memory_that_ran_out_is_marked_and_our_own_errors_stay() -> None:
    with pytest.raises(CallFailed) as caught, portable_errors():
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert caught.value.out_of_memory
    with pytest.raises(RloomError, match="full") as ours, portable_errors():
        raise CheckpointError("full")
    assert type(ours.value) is CheckpointError
