"""The keys of generation."""

from typing import Any, Literal

from rloom.config.section import Section, key, section
from rloom.config.server_section import ServerSection


class ValKwargs(Section):
    n: int = key(1, "Answers per validation prompt.", ge=1)
    temperature: float = key(0.0, "Sampling temperature in validation. 0: greedy.", ge=0)
    top_p: float = key(1.0, "Nucleus sampling in validation.", gt=0, le=1)
    top_k: int = key(-1, "Top-k sampling in validation. -1: off.", ge=-1)
    do_sample: bool = key(False, "False: greedy at any temperature.")


class RolloutSection(Section):
    name: Literal["native", "hf", "vllm", "sglang", "trtllm"] = key(
        "native",
        "Engine. native: part of rloom, with continuous batching; hf: generate() of transformers; vllm: vLLM in each "
        "worker's own process (extra `vllm`), or its servers; sglang, trtllm: servers of SGLang and TensorRT-LLM.",
        same_run=True,
    )
    n: int = key(
        None,
        "Answers per prompt. null: 5 if the estimator compares the answers to one prompt (rloo, grpo), else 1.",
        ge=1,
    )
    temperature: float = key(1.0, "Sampling temperature; log-probs are computed at this temperature.", gt=0)
    top_p: float = key(1.0, "Nucleus sampling.", gt=0, le=1)
    top_k: int = key(-1, "Top-k sampling. -1: off.", ge=-1)
    tensor_model_parallel_size: int = key(
        1,
        "Workers, or GPUs of a server, that share one engine. Above 1, the engine is vllm unless `name` is given.",
        ge=1,
        same_run=True,
    )
    gpu_memory_utilization: float = key(
        0.5,
        "Share of a GPU's memory in use, at most, once the key-value cache is allocated. vllm: by vLLM itself.",
        gt=0,
        le=1,
        same_run=True,
    )
    max_num_seqs: int | None = key(
        None,
        "Maximum concurrent sequences. null: 256; 1024 for native on a GPU. A server gets twice as many requests.",
        ge=1,
        same_run=True,
    )
    max_num_batched_tokens: int = key(
        8192,
        "Maximum prompt tokens in one prefill pass of native; maximum tokens of a step of vllm.",
        ge=1,
        same_run=True,
    )
    enforce_eager: bool = key(
        False,
        "Run each decode step from Python. False: native and vllm use CUDA graphs. No effect on a CPU.",
        same_run=True,
    )
    free_cache_engine: bool = key(
        True, "Free the key-value cache while training; vllm: its weights, too.", same_run=True
    )
    ignore_eos: bool = key(False, "Ignore stop tokens and generate to the length limit. For measurements.")
    log_prob_micro_batch_size_per_gpu: int | None = key(
        None, "Samples per forward pass that computes old log-probs. null: by token budget.", ge=1, same_run=True
    )
    log_prob_micro_batch_size: int | None = key(None, "Older key: the same, summed over all GPUs.", ge=1, same_run=True)
    log_prob_use_dynamic_bsz: bool | None = key(
        None, "Fill these passes up to the token budget. null: if no micro-batch size is given.", same_run=True
    )
    log_prob_max_token_len_per_gpu: int = key(16384, "Token budget of such a pass.", ge=1, same_run=True)
    calculate_log_probs: bool = key(
        True,
        "Report the difference between the engine's log-probs and the trainer's, if the trainer computes them.",
        same_run=True,
    )
    enable_rollout_routing_replay: bool = key(
        False, "Another name of `actor_rollout_ref.actor.router_replay.mode=R3`, which verl's commands set beside it."
    )
    val_kwargs: ValKwargs = section(ValKwargs, "Sampling in validation.", same_run=True)
    engine_kwargs: dict[str, Any] = key(
        {},
        "Further arguments of the engine. hf: of `generate`; vllm: of EngineArgs; sglang: of ServerArgs; trtllm: of "
        "TorchLlmArgs.",
        needs_consent=bool,  # generate() of transformers takes code as custom_generate
    )
    server: ServerSection = section(
        ServerSection, "Inference servers, for name=vllm, sglang and trtllm.", same_run=True
    )

    @property
    def uses_servers(self) -> bool:
        """SGLang and TensorRT-LLM exist only as servers."""
        server = self.server
        asked_for = bool(server.addresses) or server.count is not None or server.command is not None
        return self.name in ("sglang", "trtllm") or (self.name == "vllm" and asked_for)

    @property
    def generates_elsewhere(self) -> bool:
        """On servers of the user's, with GPUs of their own."""
        return self.uses_servers and bool(self.server.addresses)

    @property
    def starts_servers(self) -> bool | None:
        """With the engine's own command. None: no servers."""
        return None if not self.uses_servers else not self.server.addresses and self.server.command is None

    def engines(self, workers: int) -> int:
        """Engines, or servers, of so many workers."""
        if not self.uses_servers:
            return workers // self.tensor_model_parallel_size
        if self.server.addresses:
            return len(self.server.addresses)
        if self.name == "trtllm":  # it reads new weights from the memory of its own GPU, which is the first worker's
            return 1
        return self.server.count or max(1, workers // self.tensor_model_parallel_size)

    @property
    def workers_per_engine(self) -> int:
        """Workers whose processes are the ranks of one engine. Servers have processes of their own."""
        return 1 if self.uses_servers else self.tensor_model_parallel_size

    @property
    def holds_copy(self) -> bool:
        """The engine has weights of its own beside the actor's, which it moves to the host while it sleeps."""
        return self.name in ("vllm", "sglang", "trtllm")
