"""How long a save holds up a step, and how long it takes, on a disk of a given speed.

    python -m benchmarks.checkpoint --parameters 100e6 --disk 2e9

Weights and both moments of one rank in float32, as an engine saves them. The disk is simulated: each write waits until
a disk of that speed would have taken it.
"""

import argparse
import hashlib
import json
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor

from rloom.engines.storage import CheckpointWriter, whole_file
from rloom.hashed_files import HashedFile
from rloom.training.checkpoint import Checkpoints, Writing

ROWS = 4096


def throttle(bytes_a_second: float) -> None:
    write = HashedFile.write

    def slowly(file: HashedFile, data: bytes | memoryview) -> None:
        began = time.perf_counter()
        write(file, data)
        time.sleep(max(0.0, len(data) / bytes_a_second - (time.perf_counter() - began)))

    HashedFile.write = slowly  # type: ignore[method-assign]


def tensors(parameters: float, device: str) -> dict[str, Tensor]:
    """In matrices of 64 MiB, as those of a model are."""
    count = max(1, round(parameters / ROWS / ROWS))
    return {f"{number}/{kind}": torch.rand(ROWS, ROWS, device=device) for number in range(count) for kind in "wmv"}


def cpu_seconds(saved: dict[str, Tensor], folder: Path) -> dict[str, float]:
    """For 1 GB: of the copy that a step waits for, the first time and later, and of hashing, which a thread does."""
    kept: dict[str, Tensor] = {}

    def copy() -> None:
        whole_file(folder, "model", saved).on_host(kept)

    def hash_one() -> None:
        hashlib.sha256(next(iter(kept.values())).numpy().data)

    size = sum(tensor.numel() * tensor.element_size() for tensor in saved.values())
    found = {}
    for name, work, worked in (("first_copy", copy, size), ("copy", copy, size), ("hash", hash_one, 4 * ROWS * ROWS)):
        began = time.process_time()
        work()
        found[f"{name}_cpu_s_a_gb"] = round((time.process_time() - began) / worked * 1e9, 2)
    return found


def measure(
    writer: CheckpointWriter, saved: dict[str, Tensor], folder: Path, step: int, *, background: bool
) -> dict[str, float]:

    def write(draft: Path) -> Writing:
        (draft / "actor").mkdir()
        file = whole_file(draft / "actor", "model", saved)
        writer.write(draft, [file], background=background)
        return Writing([file.file], lambda wait: writer.check(wait=wait))

    began = time.perf_counter()
    saving = Checkpoints(folder, keep={"actor": 1}).begin(step, write, {"step": step, "stream": {}})
    held = time.perf_counter() - began
    saving.finish()
    size = sum(tensor.numel() * tensor.element_size() for tensor in saved.values())
    return {
        "background": background,
        "gb": round(size / 1e9, 2),
        "held_up_s": round(held, 2),
        "sealed_s": round(time.perf_counter() - began, 2),
        "copied_gb_s": round(size / held / 1e9, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=float, default=100e6, help="of one rank")
    parser.add_argument("--disk", type=float, default=2e9, help="bytes a second")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--folder", type=Path, help="on the disk to write to")
    given = parser.parse_args()
    throttle(given.disk)
    saved = tensors(given.parameters, given.device)
    writer = CheckpointWriter()
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        print(json.dumps(cpu_seconds(saved, Path(folder))))
        for step, background in enumerate((False, True, True), start=1):
            print(json.dumps(measure(writer, saved, Path(folder), step, background=background)))


if __name__ == "__main__":
    main()
