"""Some fields of the classes in TensorRT-LLM's file of this name. rloom reads it without importing it."""

from typing import Any


class BaseLlmArgs:
    model: str
    trust_remote_code: bool
    model_kwargs: dict[str, Any] | None
    dtype: str
    max_seq_len: int
    max_batch_size: int
    max_num_tokens: int
    enable_chunked_prefill: bool
    tensor_parallel_size: int
    kv_cache_config: dict[str, Any]
    backend: str


class TorchLlmArgs(BaseLlmArgs):
    sleep_config: dict[str, Any] | None
    cuda_graph_config: dict[str, Any] | None
    disable_overlap_scheduler: bool
