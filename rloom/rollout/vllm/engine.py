"""vLLM's LLMEngine, step by step: requests join a running batch, and each call of `poll` is one step."""

import random
import secrets
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from vllm import EngineArgs, LLMEngine, SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import FinishReason
from vllm.v1.executor import Executor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher

from rloom.errors import ModelError
from rloom.rollout.base import Begun, Completion, Request, Rollout
from rloom.rollout.limits import with_queued
from rloom.rollout.vllm.arguments import VllmSettings, cause_of, engine_arguments
from rloom.rollout.vllm.weights import AdapterWeights, Weights, WholeWeights, divide_logits


class GroupExecutor(ExecutorWithExternalLauncher):  # type: ignore[misc]
    """The engine's ranks are those of the default process group: `as_whole_group` in rloom/engines/distributed.py.

    vLLM's own executor reads rank and address from the environment variables of a launcher such as torchrun.
    """

    def _distributed_args(self) -> tuple[str, int, int]:
        """(address, rank, device). The address is not used, but the shared memory of a CPU's ranks has its last part as
        a name: it differs from that of other runs on the machine."""
        name = [secrets.token_hex(8)]
        dist.broadcast_object_list(name, src=0)
        device = torch.cuda.current_device() if torch.cuda.is_available() else dist.get_rank()
        return f"group:{name[0]}", dist.get_rank(), device


POLLS_PER_REPORT = 8
WEIGHTS, CACHE = "weights", "kv_cache"  # vLLM's names of what it releases in sleep


class VllmRollout(Rollout):
    def __init__(
        self,
        settings: VllmSettings,
        convert: Callable[[Weights], Weights],  # to the names and shapes of a checkpoint
        adapter_config: Mapping[str, Any] | None = None,
    ) -> None:
        self.device, self.temperature = settings.device, settings.temperature
        self.engine = build_engine(settings)
        self.sleeps = settings.free_memory and self.device.type == "cuda"  # vLLM has no sleep mode on a CPU
        self.asleep: list[str] = []
        self.weights = (
            WholeWeights(self.engine, convert)
            if adapter_config is None
            else AdapterWeights(self.engine, adapter_config)
        )
        if self.temperature != 1.0:
            self.engine.apply_model(lambda model: divide_logits(model, self.temperature))
        self.max_sequences = settings.max_sequences
        if settings.tensor_parallel > 1:
            self.polls_per_report = POLLS_PER_REPORT
        self.request_seeds = settings.request_seeds
        self.generator_state = torch.get_rng_state()  # of a CPU's draws: see `seed_generators`
        self.ids, self.version = count(), 0
        self.unfinished: dict[int, Begun | None] = {}

    def submit(self, request: Request) -> int:
        number, whole = next(self.ids), request.without_begun
        if not self.unfinished:
            self.seed_generators(whole.seed)
        prompt = {"prompt_token_ids": list(whole.tokens)}
        self.engine.add_request(str(number), prompt, self.parameters(whole), lora_request=self.weights.request)
        self.unfinished[number] = request.begun
        return number

    def seed_generators(self, seed: int) -> None:
        """vLLM draws from torch's global generators: from the GPU's for requests without seeds, from the CPU's always.

        By the first request, so that engines, steps and resumed runs do not repeat each other's draws.
        """
        self.generator_state = torch.Generator().manual_seed(seed).get_state()
        if self.device.type == "cuda":
            with torch.cuda.device(self.device):
                torch.cuda.manual_seed(seed)

    def parameters(self, request: Request) -> SamplingParams:
        sampling = request.sampling
        return SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature / self.temperature,  # the logits are divided by the latter already
            top_p=sampling.top_p,
            top_k=max(sampling.top_k, 0),
            seed=request.seed if self.request_seeds else None,
            stop_token_ids=[] if sampling.ignore_eos else list(sampling.stop_ids),
            ignore_eos=True,  # the model's own: only the stop tokens of the request stop
            logprobs=0,  # of the sampled token alone
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )

    def max_unfinished(self) -> int:
        return with_queued(self.max_sequences)

    def cancel(self, request: int) -> None:
        if request in self.unfinished:
            del self.unfinished[request]
            self.engine.abort_request([str(request)])

    def interrupt(self, request: int) -> Completion:
        [completion] = self.interrupt_all([request])
        return completion

    def interrupt_all(self, requests: Sequence[int]) -> list[Completion]:
        """vLLM keeps the tokens of a request until it ends, and makes an output of them where its server aborts it."""
        states = {state.external_req_id: state for state in self.engine.output_processor.request_states.values()}
        outputs = [
            states[str(number)].make_request_output([], None, FinishReason.ABORT, None, None) for number in requests
        ]
        completions = [replace(self.completion(output), interrupted=True) for output in outputs]
        self.engine.abort_request([str(number) for number in requests])
        for number in requests:
            del self.unfinished[number]
        return completions

    def poll(self) -> list[Completion]:
        if not self.unfinished:
            return []
        try:
            with torch.random.fork_rng(devices=[]):  # the trainer draws from the CPU's generator, too
                torch.set_rng_state(self.generator_state)
                outputs = [output for output in self.engine.step() if output.finished]
                self.generator_state = torch.get_rng_state()
        except BaseException:
            self.abort()
            raise
        completions = [self.completion(output) for output in outputs if int(output.request_id) in self.unfinished]
        for completion in completions:
            del self.unfinished[completion.request]
        return completions

    def completion(self, output: Any) -> Completion:
        [answer] = output.outputs
        number = int(output.request_id)
        return Completion(
            request=number,
            tokens_L=torch.tensor(answer.token_ids, dtype=torch.long),
            logprobs_L=torch.tensor(answer.logprobs.logprobs, dtype=torch.float32),
            finished=answer.finish_reason == "stop",
            version=self.version,
            reused_tokens=output.num_cached_tokens or 0,
        ).behind(self.unfinished[number])

    def abort(self) -> None:
        """After an error: no request is left."""
        self.engine.abort_request([str(number) for number in self.unfinished])
        self.unfinished.clear()

    def load_weights(self, weights: Weights, version: int) -> None:
        """The next token is computed with them: cached keys and values of the old ones are dropped."""
        assert not self.unfinished
        self.wake_up(WEIGHTS)
        with torch.no_grad():
            self.weights.load(weights)
        if not self.engine.reset_prefix_cache():
            raise ModelError("vLLM did not drop its prefix cache after new weights; this is an error of rloom or vLLM")
        self.version = version

    def sleep(self) -> None:
        """Weights go to the host: the next generation may come without new ones. The cache is dropped."""
        if self.sleeps and not self.asleep:
            self.engine.sleep(level=1)
            self.asleep = [WEIGHTS, CACHE]

    def wake(self) -> None:
        self.wake_up(WEIGHTS)
        self.wake_up(CACHE)

    def wake_up(self, part: str) -> None:
        if part in self.asleep:
            torch.cuda.empty_cache()  # vLLM allocates outside of torch's allocator, which holds what training has freed
            self.engine.wake_up(tags=[part])
            self.asleep.remove(part)


def build_engine(settings: VllmSettings) -> LLMEngine:
    arguments = engine_arguments(settings)
    with keep_process_state():
        try:
            vllm_config = EngineArgs(**arguments).create_engine_config()
            executor = Executor.get_class(vllm_config) if settings.tensor_parallel == 1 else GroupExecutor
            return LLMEngine(vllm_config, executor, log_stats=False)
        except (ValueError, RuntimeError, NotImplementedError) as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            raise ModelError(
                f"actor_rollout_ref.rollout.name=vllm: the engine could not be started: {cause_of(error)}. The keys "
                "gpu_memory_utilization, max_num_seqs and max_num_batched_tokens of actor_rollout_ref.rollout set its "
                "memory; engine_kwargs has further arguments (docs/rollout.md)"
            ) from error


@contextmanager
def keep_process_state() -> Iterator[None]:
    """vLLM seeds the global generators, and on a CPU replaces torch.set_num_threads; the trainer uses both."""
    python, numpy, set_num_threads, threads = (
        random.getstate(),
        np.random.get_state(),
        torch.set_num_threads,
        torch.get_num_threads(),
    )
    try:
        with torch.random.fork_rng(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # vLLM reads deprecated names of torch
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
