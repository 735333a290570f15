"""CUDA graphs of a decode step, captured once per batch size and then replayed."""

import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rloom.models.load import first_line

log = logging.getLogger(__name__)


class Graphs:
    """`step(rows)` must only access tensors with fixed addresses."""

    def __init__(self, step: Callable[[int], None], *, capture: bool) -> None:
        self.step = step
        self.capturing = capture
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.stream: torch.cuda.Stream | None = None  # one for all captures: cuBLAS keeps a workspace per stream

    def run(self, rows: int, times: int) -> None:
        if self.capturing and rows not in self.graphs and times:
            self.step(rows)  # a real step, which also compiles and loads kernels: not possible in a capture
            times -= 1
            self.capture(rows)
        graph = self.graphs.get(rows)
        for _ in range(times):
            if graph is not None:
                graph.replay()
            else:
                self.step(rows)

    def capture(self, rows: int) -> None:
        graph = torch.cuda.CUDAGraph()
        try:
            self.record(graph, rows)
        except Exception as error:  # operations that a CUDA graph cannot capture
            log.warning(
                f"the native engine could not capture this model's decode step ({first_line(error)}): "
                "it decodes without CUDA graphs, more slowly. "
                "actor_rollout_ref.rollout.enforce_eager=True avoids this warning"
            )
            self.capturing = False
            self.graphs.clear()
        else:
            self.graphs[rows] = graph

    def record(self, graph: torch.cuda.CUDAGraph, rows: int) -> None:
        """Like torch.cuda.graph(), but without emptying the allocator's cache each time.

        The garbage collector waits: what it releases, such as an earlier engine's memory, may synchronise with the
        device, which is not permitted during a capture.
        """
        if self.stream is None:
            self.stream = torch.cuda.Stream()
        stream, main = self.stream, torch.cuda.current_stream()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None  # graphs never run concurrently
        stream.wait_stream(main)
        with torch.cuda.stream(stream), without_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.step(rows)
            finally:
                graph.capture_end()
        main.wait_stream(stream)


@contextmanager
def without_collection() -> Iterator[None]:
    """No garbage is collected while it is open."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def batch_of(rows: int) -> int:
    """The batch size to which `rows` are padded: two sizes per power of two, four above 256."""
    if rows <= 8:
        return 8
    power = 1 << (rows - 1).bit_length() - 1  # the power of two below
    stride = power // (4 if power >= 256 else 2)
    return -(-rows // stride) * stride
