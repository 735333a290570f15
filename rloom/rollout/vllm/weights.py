"""The trainer's tensors on their way into vLLM's model: whole weights, or a LoRA adapter.

Both go from memory to memory. vLLM fuses projections (qkv, gate and up), pads the vocabulary and repacks weights for
its kernels: its own `reload_weights` does the same here as when it reads a checkpoint, and keeps the addresses that
captured CUDA graphs hold.
"""

import json
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from vllm import LLMEngine
from vllm.lora.lora_model import LoRAModel
from vllm.lora.request import LoRARequest
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, UnquantizedEmbeddingMethod

from rloom.errors import ModelError
from rloom.models.load import first_line

Weights = Iterator[tuple[str, Tensor]]


def divide_logits(model: Any, temperature: float) -> None:
    """Makes vLLM's raw log-probs those of the trainer, which computes them at `temperature` before top-k and top-p.

    vLLM's own choices are log-probs before the temperature, or after top-k and top-p.
    """
    compute_logits = model.compute_logits

    def compute_divided(*args: Any, **kwargs: Any) -> Tensor | None:
        logits: Tensor | None = compute_logits(*args, **kwargs)
        return None if logits is None else logits.float().div_(temperature)

    model.compute_logits = compute_divided


class WholeWeights:
    """All weights of the model."""

    request: LoRARequest | None = None

    def __init__(self, engine: LLMEngine, convert: Callable[[Weights], Weights]) -> None:
        self.engine, self.convert = engine, convert

    def load(self, weights: Weights) -> None:
        try:
            self.engine.collective_rpc("reload_weights", kwargs={"weights_iterator": self.convert(weights)})
        except (ValueError, KeyError, AttributeError) as error:  # from the loaders of vLLM's models
            raise ModelError(
                f"vLLM's model does not take the trainer's weights: {first_line(error)}. Use "
                "actor_rollout_ref.rollout.name=native or hf"
            ) from error
        self.engine.apply_model(repack_head)


def repack_head(model: nn.Module) -> None:
    """A head that is tied to the embedding is not among the weights, and on a CPU it has a packed copy of its own."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead) and isinstance(module.quant_method, UnquantizedEmbeddingMethod):
            module.quant_method.process_weights_after_loading(module)


class AdapterWeights:
    """A LoRA adapter, with which every request is computed. The model's own weights stay as they were read."""

    def __init__(self, engine: LLMEngine, adapter_config: Mapping[str, Any]) -> None:
        self.engine = engine
        folder = tempfile.mkdtemp(prefix="rloom_adapter_")  # for the configuration, which vLLM reads from a file
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        (Path(folder) / "adapter_config.json").write_text(json.dumps(adapter_config, default=json_default))
        self.request = LoRARequest("policy", 1, folder)
        self.update = LoRARequest("policy", 1, folder, load_inplace=True)
        self.manager = engine.collective_rpc(lora_manager)[0]

    def load(self, weights: Weights) -> None:
        tensors = {peft_name(name): tensor.clone() for name, tensor in weights}  # pinned or kept by vLLM
        self.manager._lora_model_cls = in_memory(tensors)
        try:
            self.engine.add_lora(self.update)
        except (ValueError, RuntimeError) as error:  # a module or a kind of adapter that vLLM does not have
            raise ModelError(
                f"vLLM does not take the LoRA adapter: {first_line(error)}. Change "
                "actor_rollout_ref.model.target_modules, or use actor_rollout_ref.rollout.name=native"
            ) from error


def lora_manager(worker: Any) -> Any:
    return worker.model_runner.lora_manager


def peft_name(name: str) -> str:
    """The name in an adapter's file: without that of the adapter."""
    return name.replace(".default.", ".")


def json_default(value: Any) -> Any:
    """peft's configuration has sets and enumerations."""
    return sorted(value) if isinstance(value, set) else str(value)


def in_memory(tensors: dict[str, Tensor]) -> type[LoRAModel]:
    """A LoRAModel whose tensors do not come from the files of a folder."""

    class InMemory(LoRAModel):  # type: ignore[misc]
        @classmethod
        def from_local_checkpoint(
            cls,
            folder: str,
            expected_modules: set[str],
            peft_helper: Any,
            *,
            lora_model_id: int,
            device: str = "cpu",
            dtype: torch.dtype | None = None,
            model_vocab_size: int | None = None,
            weights_mapper: Any = None,
            skip_prefixes: list[str] | None = None,
            **_: Any,
        ) -> LoRAModel:
            refuse_unknown(tensors, expected_modules)
            return LoRAModel.from_lora_tensors(
                lora_model_id,
                tensors,
                peft_helper,
                device=device,
                dtype=dtype,
                model_vocab_size=model_vocab_size,
                weights_mapper=weights_mapper,
                skip_prefixes=skip_prefixes,
            )

    return InMemory


def refuse_unknown(tensors: Mapping[str, Tensor], expected_modules: set[str]) -> None:
    """vLLM would ignore the adapter of a module that it has no LoRA for."""
    modules = {name.partition(".lora_")[0].rpartition(".")[2] for name in tensors}
    unknown = sorted(modules - expected_modules)
    if unknown:
        raise ValueError(f"it has no LoRA for {', '.join(unknown)}; it has for {', '.join(sorted(expected_modules))}")
