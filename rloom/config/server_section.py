"""The keys of inference servers, and the rules for them."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from rloom.config.remote_section import VARIABLE, is_plain_address
from rloom.config.section import Section, key

if TYPE_CHECKING:
    from rloom.config.rollout_section import RolloutSection
    from rloom.config.schema import Config

NAME = "actor_rollout_ref.rollout.server"
EXAMPLE = "http://127.0.0.1:30000"


class ServerSection(Section):
    urls: str | list[str] = key(
        [],
        "Generate with the servers at these URLs, which the user starts: one, a list, or one text with commas. "
        "Empty: rloom starts them.",
        needs_consent=bool,
    )
    count: int | None = key(
        None,
        "Servers that rloom starts on this machine. null: one for each `tensor_model_parallel_size` workers; one with "
        "name=trtllm; with name=vllm, an engine in each worker's process and no server.",
        ge=1,
    )
    command: str | None = key(
        None,
        "Command that starts a server, in place of the engine's own. `{model}` and `{port}` are replaced.",
        needs_consent=bool,
    )
    start_timeout_s: float = key(
        600.0, "Time limit for a server to start, and of the wait for one while none can be used.", gt=0
    )
    request_timeout_s: float = key(
        3600.0, "Time limit of one request, from when it is sent. A server that exceeds it counts as down.", gt=0
    )
    health_interval_s: float = key(10.0, "Time between health checks of a server that has requests.", gt=0)
    max_restarts: int = key(
        3,
        "How often rloom starts a server again that has failed. With `urls`: how often a server may fail without an "
        "answer in between.",
        ge=0,
    )
    weight_transfer: Literal["auto", "collective", "shared"] = key(
        "auto",
        "How weights are sent. collective: by broadcast in a process group, to other GPUs or machines; shared: by "
        "handles of the memory, on the trainer's own GPU. auto: shared for name=trtllm and for servers that rloom "
        "starts on the trainer's GPU, otherwise collective.",
    )
    key_env: str | None = key(
        None,
        "Name of the environment variable that has the servers' API key. trtllm: the key that signs control requests.",
        needs_consent=bool,
    )

    @property
    def addresses(self) -> tuple[str, ...]:
        texts = [self.urls] if isinstance(self.urls, str) else self.urls
        return tuple(url.strip().rstrip("/") for text in texts for url in text.split(",") if url.strip())


def server_faults(config: "Config") -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    section, name = rollout.server, rollout.name
    if not rollout.uses_servers:
        return
    yield from address_faults(section)
    yield from placement_faults(config)
    if config.actor_rollout_ref.model.has_lora:
        yield (
            f"actor_rollout_ref.model.lora_rank: rloom sends servers whole weights, not adapters; use "
            f"actor_rollout_ref.rollout.name=native, or vllm without {NAME}"
        )
    if name == "trtllm":
        yield from trtllm_faults(rollout)


def server_notices(config: "Config") -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "trtllm" and rollout.starts_servers and config.workers > 1:
        yield (
            f"actor_rollout_ref.rollout.name=trtllm: one server generates all answers, on the GPU of the first of "
            f"{config.workers} workers; vllm and sglang use all GPUs"
        )


def trtllm_faults(rollout: "RolloutSection") -> Iterator[str]:
    section = rollout.server
    handles = "TensorRT-LLM's server takes weights as handles of memory on its own GPU, which is the first worker's"
    if rollout.tensor_model_parallel_size > 1:
        size = rollout.tensor_model_parallel_size
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}: {handles}; use 1, or "
            "actor_rollout_ref.rollout.name=vllm"
        )
    if section.count is not None and section.count > 1:
        yield f"{NAME}.count={section.count}: {handles}; use 1, or actor_rollout_ref.rollout.name=vllm"
    if rollout.temperature != 1.0:
        yield (
            f"actor_rollout_ref.rollout.temperature={rollout.temperature}: TensorRT-LLM's log-probs are those before "
            "the temperature, and equal the trainer's at 1.0 only; use 1.0, or another engine"
        )
    if section.weight_transfer == "collective":
        yield f"{NAME}.weight_transfer=collective: TensorRT-LLM's server takes handles of memory only; use shared"


def address_faults(section: ServerSection) -> Iterator[str]:
    for url in section.addresses:
        if not is_plain_address(url):
            yield (
                f"{NAME}.urls has an entry that is not a URL of the form {EXAMPLE}, without user name and query; "
                f"correct it; {NAME}.key_env names a variable with the servers' key"
            )
    if section.key_env is not None and not VARIABLE.fullmatch(section.key_env):
        yield f"{NAME}.key_env takes the name of an environment variable, such as SERVER_KEY, and not the key itself"
    if section.addresses and (section.count is not None or section.command is not None):
        yield f"{NAME}.urls: these servers are running; remove {NAME}.count and {NAME}.command, or the URLs"


def placement_faults(config: "Config") -> Iterator[str]:
    rollout, trainer = config.actor_rollout_ref.rollout, config.trainer
    if trainer.pools.rollout:
        yield (
            f"trainer.pools.rollout={trainer.pools.rollout}: servers are processes of their own, and the actor's first "
            f"worker sends them the requests; remove the key ({NAME}.count servers take the first GPUs)"
        )
    if rollout.server.addresses:
        return
    if trainer.nnodes > 1:
        yield (
            f"trainer.nnodes={trainer.nnodes}: rloom starts servers on one machine; start them on all and name them in "
            f"{NAME}.urls"
        )
    size, workers = rollout.tensor_model_parallel_size, config.workers
    if rollout.server.count is None and workers > 1 and workers % size:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size} does not divide {workers} workers; use a "
            f"number that does, or set {NAME}.count"
        )
