"""A step of the device, captured once for each size of batch and then replayed."""

import logging
from collections.abc import Callable

import torch

from rloom.models.load import first_line

log = logging.getLogger(__name__)


class Graphs:
    """`step(rows)` touches nothing but tensors that stay where they are."""

    def __init__(self, step: Callable[[int], None], *, capture: bool) -> None:
        self.step = step
        self.capturing = capture
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.side: torch.cuda.Stream | None = None  # where they are captured; cuBLAS keeps a workspace for each stream

    def run(self, rows: int, times: int) -> None:
        if self.capturing and rows not in self.graphs and times:
            self.step(rows)  # a step like any other, that also compiles and loads what a capture cannot
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
        except Exception as error:  # whatever the model does that a graph cannot hold
            log.warning(
                f"the native engine could not capture this model's decode step ({first_line(error)}): "
                "it goes on without graphs, more slowly. "
                "actor_rollout_ref.rollout.enforce_eager=True says so from the start"
            )
            self.capturing = False
            self.graphs.clear()
        else:
            self.graphs[rows] = graph

    def record(self, graph: torch.cuda.CUDAGraph, rows: int) -> None:
        """As torch.cuda.graph() does, without emptying the allocator's cache each time."""
        if self.side is None:
            self.side = torch.cuda.Stream()
        side, main = self.side, torch.cuda.current_stream()
        pool = next(iter(self.graphs.values())).pool() if self.graphs else None  # one runs at a time: they share
        side.wait_stream(main)
        with torch.cuda.stream(side):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self.step(rows)
            finally:
                graph.capture_end()
        main.wait_stream(side)


def batch_of(rows: int) -> int:
    """The size of batch that so many rows are filled up to: two sizes an octave, four above 256."""
    if rows <= 8:
        return 8
    octave = 1 << (rows - 1).bit_length() - 1  # the power of two below
    stride = octave // (4 if octave >= 256 else 2)
    return -(-rows // stride) * stride
