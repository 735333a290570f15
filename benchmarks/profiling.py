"""Where the time of one repetition goes, by kernel and by kind."""

import gzip
import json
import re
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import synchronise, table
from torch.profiler import ProfilerActivity, profile

SHOWN = 25
OTHERS = "elementwise"
# tried in this order: a fused attention kernel is built of matrix products and may say so in its name
KINDS = {
    OTHERS: re.compile(r"^triton_(poi|red|per)_"),  # the compiler's fusions list in their names what stands around them
    "attention": re.compile(r"attention|attend|flash|fmha|sdpa|decode", re.I),
    "matmul": re.compile(r"gemm|gemv|matmul|cutlass|cublas|nvjet|xmma|splitk|triton_tem|::(add|b|)mm\b|linear", re.I),
    "copy": re.compile(r"memcpy|memset|direct_copy|::copy_", re.I),
}
ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(frozen=True)
class Span:
    name: str
    start_us: float
    length_us: float


def kind_of(name: str) -> str:
    return next((kind for kind, pattern in KINDS.items() if pattern.search(name)), OTHERS)


def profile_once(work: Callable[[], object], device: torch.device, file: str) -> str:
    """Run `work` under the profiler; its summary as text, the trace in `file` for chrome://tracing or Perfetto."""
    trace = Path(file if file.endswith(".json.gz") else f"{file}.json.gz")
    trace.parent.mkdir(parents=True, exist_ok=True)
    on_gpu = device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    synchronise(device)
    with profile(activities=activities) as profiler:
        started = time.perf_counter()
        work()
        synchronise(device)
        wall_s = time.perf_counter() - started
    profiler.export_chrome_trace(str(trace))
    with gzip.open(trace, "rt", encoding="utf-8") as stream:
        spans = read_spans(json.load(stream)["traceEvents"])
    return f"{summary(spans, wall_s)}\n\nTrace: {trace}"


def read_spans(events: Sequence[dict[str, Any]]) -> list[Span]:
    """What ran on the device; where nothing did, the operators of the CPU, each without those that it called."""
    timed = [event for event in events if event.get("ph") == "X" and "dur" in event]
    on_device = [event for event in timed if event.get("cat") in ON_DEVICE]
    if on_device:
        return [Span(event["name"], event["ts"], event["dur"]) for event in on_device]
    return own_time([event for event in timed if event.get("cat") == "cpu_op"])


def own_time(events: Sequence[dict[str, Any]]) -> list[Span]:
    """Nested operators, each with its own time only."""
    spans: list[Span] = []
    open_calls: dict[Any, list[tuple[float, int]]] = defaultdict(list)  # by thread: (end, place in spans)
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        calls = open_calls[event.get("tid")]
        while calls and calls[-1][0] <= event["ts"]:
            calls.pop()
        if calls:
            caller = spans[calls[-1][1]]
            spans[calls[-1][1]] = Span(caller.name, caller.start_us, caller.length_us - event["dur"])
        calls.append((event["ts"] + event["dur"], len(spans)))
        spans.append(Span(event["name"], event["ts"], event["dur"]))
    return spans


def busy_us(spans: Sequence[Span]) -> float:
    """Time in which at least one of them ran."""
    busy, until = 0.0, float("-inf")
    for span in sorted(spans, key=lambda span: span.start_us):
        end = span.start_us + span.length_us
        busy += max(0.0, end - max(span.start_us, until))
        until = max(until, end)
    return busy


def summary(spans: Sequence[Span], wall_s: float) -> str:
    """The costliest kernels, and the shares of the kinds; what no kernel covers is idle."""
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for span in spans:
        total[span.name] += span.length_us
        count[span.name] += 1
    wall_us = wall_s * 1e6
    kinds: dict[str, float] = {kind: 0.0 for kind in KINDS}
    for name, length_us in total.items():
        kinds[kind_of(name)] += length_us
    kinds["idle"] = max(0.0, wall_us - busy_us(spans))
    costliest = sorted(total, key=lambda name: -total[name])[:SHOWN]
    rows = [
        [short(name), kind_of(name), f"{count[name]:,}", f"{total[name] / 1e3:.2f}", f"{total[name] / wall_us:.1%}"]
        for name in costliest
    ]
    return "\n\n".join(
        [
            f"Profile of {wall_s:.3f} s (the profiler's own cost included)",
            table(["kind", "ms", "share"], [[k, f"{us / 1e3:.2f}", f"{us / wall_us:.1%}"] for k, us in kinds.items()]),
            table(["kernel", "kind", "calls", "ms", "share"], rows),
        ]
    )


def short(name: str, length: int = 90) -> str:
    plain = name.replace("|", "/")  # a bar would end the cell
    return plain if len(plain) <= length else f"{plain[: length - 1]}…"
