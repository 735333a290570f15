"""The rollout engines of a run: what each needs, can do and defaults to, and where its code is. Imports no torch.

Configuration, plan, doctor, smoke run and launch read these declarations, and compare no names. A `Reference` is the
`module:name` of a function, which is imported when the function is called. Arguments named `config` are the whole
configuration of a run.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from rloom.plugins import Reference, resolve_kind

KEY, GROUP = "actor_rollout_ref.rollout.name", "rloom.rollout_engines"  # GROUP: entry points of other packages
SLOW = "takes several times as long"


@dataclass(frozen=True, kw_only=True)
class ServerKind:
    """How rloom calls and starts the servers of an engine."""

    wire: Reference  # (config) -> Wire
    command: Reference  # (config, device, dtype, key) -> command line, variables of its environment
    # the server takes weights as handles of memory on its own GPU, which is the first worker's, and only with a key
    takes_handles: bool = False
    partial_answers: bool = False  # an interrupted request returns the tokens that were sampled of it


@dataclass(frozen=True, kw_only=True)
class RolloutKind:
    title: str  # in sentences
    # (config, network, owner, tokenizer) -> Rollout, in the process of a worker; None: it exists only as servers
    build: Reference | None = None
    servers: ServerKind | None = None  # None: the engine has none
    own_model: bool = False  # it reads the model itself, holds a copy of the weights and gets every update
    tensor_parallel: bool = False  # several workers, or GPUs of a server, can share one engine
    records_routing: bool = False  # it returns the experts that the router chose
    # in process, an interrupted request returns the tokens that were sampled of it. False: the next call samples them
    # again
    partial_answers: bool = False
    keeps_cache: bool = False  # in process, the cache of an interrupted answer can stay over an update of the weights
    # in process, its answers follow from the requests and from the number of polls between them: a run can be repeated
    repeats: bool = False
    takes_engine_kwargs: bool = True
    reads_cache_keys: bool = True  # gpu_memory_utilization, max_num_batched_tokens, enforce_eager, free_cache_engine
    sleeps_on_cpu: bool = True  # free_cache_engine has an effect on a CPU
    optional_seeds: bool = False  # requests have seeds only with request_seeds
    needs_gpu: bool = False  # a smoke run without a GPU uses native
    packages: tuple[str, ...] = ()  # modules that it imports here, in process or in a server that rloom starts
    gpu_sequences: int = 256  # max_num_seqs where it is null
    cpu_sequences: int = 256
    # how its speed compares with that of native, which `rloom plan` has the rates of; None: it is native's
    speed: str | None = "may take another time"
    faults: Reference | None = None  # (config) -> sentences: rules over its own keys
    check_installed: Reference | None = None  # () raises if a package is missing; None: `packages` are looked up
    check_family: Reference | None = None  # (family) raises if the engine cannot generate with models of the family
    # (config, device, dtype) before weights are read, in a process that generates or starts servers
    prepare: Reference | None = None
    diagnose: Reference | None = None  # (installation) -> row of `rloom doctor env`; None: by `packages`


ROLLOUTS: Mapping[str, RolloutKind] = {
    "native": RolloutKind(
        title="the native engine",
        build="rloom.launch.models:native_rollout",
        records_routing=True,
        partial_answers=True,
        keeps_cache=True,
        repeats=True,
        takes_engine_kwargs=False,
        gpu_sequences=1024,  # a GPU decodes 1,024 in little more time than 100; a CPU lacks the memory
        speed=None,
        check_family="rloom.families.family:Family.check_native",
        diagnose="rloom.doctor.machine.features:native",
    ),
    "hf": RolloutKind(
        title="the hf engine",
        build="rloom.launch.models:hf_rollout",
        reads_cache_keys=False,
        speed=SLOW,
        check_family="rloom.families.family:Family.hf_generation",
    ),
    "vllm": RolloutKind(
        title="vLLM",
        build="rloom.launch.models:vllm_rollout",
        servers=ServerKind(
            wire="rloom.launch.servers:vllm_wire",
            command="rloom.launch.models:vllm_server_command",
            partial_answers=True,
        ),
        own_model=True,
        optional_seeds=True,
        tensor_parallel=True,
        partial_answers=True,
        sleeps_on_cpu=False,
        needs_gpu=True,
        packages=("vllm",),
        speed="takes longer (docs/plan.md)",
        faults="rloom.config.engine_checks:vllm_faults",
        check_installed="rloom.rollout.vllm.environment:check_installed",
        prepare="rloom.launch.models:prepare_vllm",
        diagnose="rloom.doctor.machine.features:vllm",
    ),
    "sglang": RolloutKind(
        title="SGLang",
        servers=ServerKind(
            wire="rloom.launch.servers:sglang_wire",
            command="rloom.launch.servers:sglang_server_command",
            partial_answers=True,
        ),
        own_model=True,
        tensor_parallel=True,
        packages=("sglang",),
        speed="takes longer (docs/plan.md)",
        prepare="rloom.launch.servers:check_sglang_server",
    ),
    "trtllm": RolloutKind(
        title="TensorRT-LLM",
        servers=ServerKind(
            wire="rloom.launch.servers:trtllm_wire",
            command="rloom.launch.servers:trtllm_server_command",
            takes_handles=True,
        ),
        own_model=True,
        tensor_parallel=True,
        packages=("tensorrt_llm", "ray"),  # AsyncLLM's workers belong to Ray
        speed="takes longer (docs/plan.md)",
        faults="rloom.config.engine_checks:trtllm_faults",
        prepare="rloom.launch.servers:check_trtllm_server",
    ),
}


def rollout_kind(name: str) -> RolloutKind:
    return resolve_kind(KEY, name, ROLLOUTS, GROUP, RolloutKind)
