"""Which of several failed workers is the cause: one that died or raised, rather than one that lost its peer."""

import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum

import torch

from rloom.errors import RloomError, WorkerError

# what gloo, NCCL and torch's store say on a rank whose peer is gone
LOST_A_PEER = re.compile(
    r"connection (was likely |was )?(closed|reset|refused|aborted)|broken pipe|socket closed|pair closure"
    r"|remote process exited|communicator was aborted|timed out (waiting|after)|^Dist(Network|Store|Backend)Error",
    re.IGNORECASE,
)
RAISED_WAIT_S = 5.0  # a peer's death may be reported later than an error that it caused
LOST_A_PEER_WAIT_S = 30.0  # Ray reports a lost machine after some health checks


class CallFailed(Exception):
    """Replaces a worker's exception on its way to the driver, where that exception's class may not unpickle."""

    def __init__(self, what: str, trace: str, out_of_memory: bool) -> None:
        super().__init__(what, trace, out_of_memory)
        self.what = what  # type and message
        self.trace = trace
        self.out_of_memory = out_of_memory


@contextmanager
def portable_errors() -> Iterator[None]:
    """Any exception leaves as one that every process can unpickle."""
    try:
        yield
    except RloomError:
        raise
    except Exception as error:
        below = error.__traceback__.tb_next if error.__traceback__ is not None else None  # without this function
        trace = "".join(traceback.format_exception(type(error), error, below))
        memory = isinstance(error, torch.OutOfMemoryError)
        raise CallFailed(f"{type(error).__name__}: {error}", trace, memory) from None


class Kind(IntEnum):
    """Of a failure, the likeliest cause of the others first."""

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
    """How long another worker may take to report a likelier cause than those known."""
    first = min(failures, key=lambda failure: failure.kind)
    if first.kind is Kind.LOST_A_PEER:
        return LOST_A_PEER_WAIT_S
    # a death is not caused by another worker's error; a RloomError of the worker's own already names what is wrong
    return RAISED_WAIT_S if first.kind is Kind.RAISED and isinstance(first.error, WorkerError) else 0.0


def cause_first(failures: Sequence[Failure]) -> RloomError:
    """The likeliest cause, of equal ones the first to arrive, with the other failures as its notes."""
    first, *others = sorted(failures, key=lambda failure: failure.kind)
    for other in others:
        first.error.add_note(f"A consequence, or at the same time: {other.summary}")
    return first.error
