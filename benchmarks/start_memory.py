"""Host memory of the workers of a machine while they load their models, as a multiple of the model's files.

    python -m benchmarks.start_memory --workers 4 --layers 20

A model of random weights is made on the spot. What a GPU would hold (the shards of actor and reference, the
copies for generation) is put into shared memory as soon as it is allocated, so that private memory is what the host of
a machine with GPUs has. PSS: memory that processes share is divided among them.
"""

import argparse
import importlib
import json
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, Qwen2Config

from rloom.config.load import load_config
from rloom.engines.fsdp import FSDPEngine
from rloom.engines.storage import local
from rloom.launch import workers as launch
from rloom.launch.early_checks import layout_of
from rloom.launch.worker import GenerationCopy, Worker
from rloom.models.load import load_tokenizer
from rloom.models.source import ModelSource

READ = "read"  # files beside the model: the bytes that each worker read of it


def make_model(folder: Path, layers: int, dtype: torch.dtype) -> int:
    """Returns the bytes of its file."""
    tokenizer = load_tokenizer(ModelSource("embedded"))
    size = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 32_000}
    config = Qwen2Config(**size, num_attention_heads=16, num_key_value_heads=4, max_position_embeddings=2048)
    torch.set_default_dtype(dtype)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    torch.set_default_dtype(torch.float32)
    tokenizer.save_pretrained(folder)
    return (folder / "model.safetensors").stat().st_size


def to_shared_memory(module: nn.Module) -> None:
    for parameter in module.parameters():
        own = local(parameter)
        if not own.is_meta:
            own.untyped_storage().share_memory_()


def then_shared(make: Callable[..., Any], module_of: Callable[..., nn.Module]) -> Callable[..., Any]:
    def made(*arguments: Any, **settings: Any) -> Any:
        found = make(*arguments, **settings)
        to_shared_memory(module_of(*arguments))
        return found

    return made


class MeasuredWorker(Worker):
    def build(self, rendezvous: Any) -> Any:
        from rloom.engines import fsdp

        folder = Path(self.config.actor_rollout_ref.model.path)
        read, load = 0, AutoModelForCausalLM.from_pretrained

        def counted(*arguments: Any, **settings: Any) -> Any:
            nonlocal read
            read += (folder / "model.safetensors").stat().st_size
            return load(*arguments, **settings)

        AutoModelForCausalLM.from_pretrained = counted
        fsdp.allocate_shards = then_shared(fsdp.allocate_shards, lambda root, device: root)
        FSDPEngine.shard = then_shared(FSDPEngine.shard, lambda engine: engine.module)  # type: ignore[method-assign]
        GenerationCopy.__init__ = then_shared(  # type: ignore[method-assign]
            GenerationCopy.__init__, lambda copy, network, *_: network.module
        )
        found = super().build(rendezvous)
        (folder / f"{READ}_{self.slot.number}").write_text(str(read))
        return found


def processes() -> list[int]:
    """This one and its descendants."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, left = [], [os.getpid()]
    while left:
        found.append(left.pop())
        left += children.get(found[-1], [])
    return found


def memory() -> tuple[int, int]:
    """Bytes of all processes: (private, all)."""
    private = together = 0
    for process in processes():
        try:
            lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        sizes = {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}
        private, together = private + sizes["Pss_Anon"], together + sizes["Pss"]
    return private, together


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--dtype", default="bfloat16", help="of the model's file; engines compute in bfloat16")
    parser.add_argument("keys", nargs="*")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model_bytes = make_model(folder, given.layers, getattr(torch, given.dtype))
        settings = [
            f"actor_rollout_ref.model.path={folder}",
            f"trainer.n_gpus_per_node={given.workers}",
            *("algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4", "trainer.device=cpu"),
            "actor_rollout_ref.actor.fsdp_config.dtype=bfloat16",
        ]
        config = load_config([*settings, *given.keys])
        series: list[tuple[float, int, int]] = []
        loading, done = threading.Event(), threading.Event()

        def sample() -> None:
            while not done.is_set():
                series.append((float(loading.is_set()), *memory()))
                time.sleep(0.05)

        def announced(text: str) -> None:
            if text.startswith("Loading"):
                time.sleep(1)
                loading.set()

        launch.announce = announced  # type: ignore[assignment]
        # workers import its module, which is not __main__ to them
        launch.Worker = importlib.import_module("benchmarks.start_memory").MeasuredWorker  # type: ignore[misc]
        watcher = threading.Thread(target=sample)
        watcher.start()
        try:
            with launch.open_groups(config, layout_of(config), None):
                done.set()
                watcher.join()
        finally:
            done.set()
        before = [private for is_loading, private, _ in series if not is_loading][-1]
        peak = max(private for is_loading, private, _ in series if is_loading)
        read = sum(int(file.read_text()) for file in folder.glob(f"{READ}_*"))
        found = {
            "model_gb": round(model_bytes / 1e9, 3),
            "read": round(read / model_bytes, 2),
            "host": round((peak - before) / model_bytes, 2),
            "all_with_devices": round((max(one[2] for one in series) - before) / model_bytes, 2),
            "processes_gb": round(before / 1e9, 2),
            "samples": len(series),
        }
        print(json.dumps(found))


if __name__ == "__main__":
    main()
