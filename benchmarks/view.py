"""`rloom view` on a run of real size: seconds of a cold start and of each request, size of the answers, peak memory.

    python -m benchmarks.view                                     writes 1,000 steps x 128 prompts x 8 answers, and asks
    python -m benchmarks.view --steps 100 --folder FOLDER     keeps the run for the next call

The viewer is a process of its own, as for a user. `again` is the same request once more. With Chromium and its driver,
also the time until pages are drawn. TensorBoard reads the same metrics from its own files, for comparison.
"""

import argparse
import gzip
import os
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from benchmarks.measuring import note, table
from rloom.runs.run_folder import RunFolder
from tests.browser import chromium
from tests.view_runs import write_big_run

TOKEN = "token-of-the-benchmark"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=8, help="to each prompt")
    parser.add_argument("--tokens", type=int, default=256, help="of an answer, on average")
    parser.add_argument("--folder", type=Path, help="for the run; one that is there is used")
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (given.folder or Path(temporary)) / "big" / "run"
        if not folder.exists():
            note(f"writing {given.steps} steps x {given.prompts} prompts x {given.answers} answers")
            sizes = {"prompts": given.prompts, "answers": given.answers, "tokens": given.tokens}
            write_big_run(folder, steps=given.steps, **sizes)
        written = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        note(f"{folder}: {written / 2**20:.0f} MiB")
        print(f"{measure_requests(folder, given.steps)}\n")
        found = [*measure_pages(folder, given.steps), *measure_tensorboard(folder)]
        print(table(["", "s"], [[name, f"{seconds:.2f}"] for name, seconds in found]))
    return 0


@contextmanager
def viewer(folder: Path) -> Iterator[tuple[str, int]]:
    """Address and process id."""
    command = [sys.executable, "-m", "rloom", "view", str(folder), "--port", "0", "--no-open"]
    environment = {**os.environ, "RLOOM_VIEW_TOKEN": TOKEN}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


def measure_requests(folder: Path, steps: int) -> str:
    started = time.perf_counter()
    with viewer(folder) as (address, process):
        rows = [["start", f"{time.perf_counter() - started:.3f}", "", "", f"{peak_mib(process):.0f}"]]
        run, middle = "/api/runs/0", steps // 2
        for path in (
            *("/", "/api/runs", f"{run}/metrics", f"{run}/dumps", f"{run}/train/{steps}/prompts"),
            *(f"{run}/train/{steps}/prompts/3", f"{run}/stages?step={middle}", f"{run}/config"),
            *(f"{run}/train/{middle}/prompts?text=apples%20and%2077&sort=mean", f"{run}/prompts/7/history"),
            f"{run}/findings",
        ):
            (first, size), (again, _) = fetch(address, path), fetch(address, path)
            rows.append([path, f"{first:.3f}", f"{again:.3f}", f"{size / 1024:.0f}", f"{peak_mib(process):.0f}"])
    return table(["request", "s", "again", "KiB", "peak MiB"], rows)


def measure_pages(folder: Path, steps: int) -> Iterator[tuple[str, float]]:
    """From the address to the drawn page, in a viewer and a browser that have just started."""
    programs = chromium.programs()
    if programs is None:
        note("no Chromium with its driver: pages are not measured")
        return
    with tempfile.TemporaryDirectory() as profile, viewer(folder) as (address, _):
        browser = chromium.start(*programs, Path(profile))
        try:
            step = f"#/run/0/step/{steps}"
            for name, place in (("overview", ""), ("a step", step), ("a prompt", f"{step}/prompt/3")):
                started = time.perf_counter()
                browser.get(f"{address}{place}")
                while not browser.execute_script("return document.querySelector('main')?.dataset.shown"):
                    time.sleep(0.01)
                yield f"{name}, drawn", time.perf_counter() - started
                browser.get("about:blank")
        finally:
            browser.quit()


def measure_tensorboard(folder: Path) -> Iterator[tuple[str, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    metrics = RunFolder(folder).metrics
    with tempfile.TemporaryDirectory() as events:
        with SummaryWriter(events) as writer:
            for record in metrics:
                for name, value in record.items():
                    writer.add_scalar(name, value, int(record["step"]))
        started = time.perf_counter()
        accumulator = EventAccumulator(events, size_guidance={"scalars": 0}).Reload()
        points = sum(len(accumulator.Scalars(tag)) for tag in accumulator.Tags()["scalars"])
        yield f"TensorBoard reads the same {points:,} points", time.perf_counter() - started
    started = time.perf_counter()
    RunFolder(folder)
    yield "rloom reads them, with stages", time.perf_counter() - started


def fetch(address: str, path: str) -> tuple[float, int]:
    """(seconds, bytes that were sent)"""
    host = address.partition("/?")[0]
    request = urllib.request.Request(host + path, headers={"Accept-Encoding": "gzip"})
    request.add_header("Cookie", f"rloom_view_{host.rpartition(':')[2]}={TOKEN}")
    started = time.perf_counter()
    with urllib.request.urlopen(request) as response:
        body = response.read()
        if response.headers["Content-Encoding"] == "gzip":
            gzip.decompress(body)
    return time.perf_counter() - started, len(body)


def peak_mib(process: int) -> float:
    """Of resident memory; Linux only."""
    status = Path(f"/proc/{process}/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.exists() else None
    return int(found[1]) / 1024 if found else float("nan")


if __name__ == "__main__":
    sys.exit(main())
