"""Of several failed workers, which is the cause: one that died or raised, rather than one that lost its peer."""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch

from rloom.errors import RloomError, WorkerError

# messages of gloo, NCCL and torch's store on a rank whose peer has died
LOST_A_PEER = re.compile(
    r"connection (was likely |was )?(closed|reset|refused|aborted)|broken pipe|socket closed|pair closure"
    r"|remote process exited|communicator was aborted|timed out (waiting|after)|^Dist(Network|Store|Backend)Error",
    re.IGNORECASE,
)
RAISED_WAIT_S = 5.0  # a peer's death may be reported later than an error that it caused
LOST_A_PEER_WAIT_S = 30.0  # Ray reports a lost machine after several health checks


class CallFailed(Exception):
    """Sent to the driver instead of a worker's exception, whose class may not unpickle there."""

    def __init__(self, what: str, trace: str, out_of_memory: bool) -> None:
        super().__init__(what, trace, out_of_memory)
        self.what = what  # type and message
        self.trace = trace
        self.out_of_memory = out_of_memory


@contextmanager
def portable_errors() -> Iterator[None]:
    """Replace any exception by one that every process can unpickle."""
    try:
        yield
    except (RloomError, CallFailed):
        raise
    except Exception as error:
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this frame
        trace = "".join(traceback.format_exception(type(error), error, below))
        memory = isinstance(error, torch.OutOfMemoryError)
        raise CallFailed(f"{type(error).__name__}: {error}", trace, memory) from None


class Kind(IntEnum):
    """Kinds of failure, ordered by how likely one is the cause of the others."""

    DIED = 0
    RAISED = 1
    LOST_A_PEER = 2


@dataclass(frozen=True)
class Failure:
    kind: Kind
    error: RloomError  # for the user

    @property
    def summary(self) -> str:
        return str(self.error).splitlines()[0]


def kind_of(what: str) -> Kind:
    """`what`: the type and the message of an exception."""
    return Kind.LOST_A_PEER if LOST_A_PEER.search(what) else Kind.RAISED


def wait_for_others_s(failures: Sequence[Failure]) -> float:
    """How long to wait for other workers to report a likelier cause."""
    first = min(failures, key=lambda failure: failure.kind)
    if first.kind is Kind.LOST_A_PEER:
        return LOST_A_PEER_WAIT_S
    # another worker's error does not cause a death; a RloomError raised by the worker already names the fault
    return RAISED_WAIT_S if first.kind is Kind.RAISED and isinstance(first.error, WorkerError) else 0.0


def cause_first(failures: Sequence[Failure]) -> RloomError:
    """The likeliest cause, the earliest among equals, with the other failures as notes."""
    first, *others = sorted(failures, key=lambda failure: failure.kind)
    for other in others:
        first.error.add_note(f"Another failure, possibly a consequence: {other.summary}")
    return first.error
