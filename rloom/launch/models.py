"""The models of a run, and the training and rollout engines that hold them."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, cast

import torch
from transformers import PreTrainedTokenizerBase

from rloom.algos.registry import resolve_algorithm
from rloom.config.base import RunConfig
from rloom.config.derived import model_ranks
from rloom.config.schema import Actor, Config, Critic, Model, Optim
from rloom.config.sections import EngineMemory
from rloom.engines.base import AdamW, Engine, Placement
from rloom.errors import ConfigError
from rloom.families.family import family_of
from rloom.launch.early_checks import check_engine_installed
from rloom.launch.engines import Ranks, make_engine, reads_own_part
from rloom.launch.model_sources import critic_source, policy_source
from rloom.launch.servers import VLLM_ON_CPU, server_key, server_rollout
from rloom.models.checkpoint_format import CheckpointFormat
from rloom.models.load import Lora, load_causal_lm
from rloom.models.network import PolicyNetwork, ValueNetwork
from rloom.models.source import ModelSource, check_folder
from rloom.plugins import referenced
from rloom.rollout.base import Rollout, WeightOwner
from rloom.rollout.hf import HfRollout
from rloom.rollout.native.engine import NativeRollout
from rloom.rollout.servers.arguments import VLLM_ENVIRONMENT, vllm_command
from rloom.rollout.vllm.environment import check_installed, set_environment

if TYPE_CHECKING:
    from rloom.rollout.vllm.arguments import VllmSettings

log = logging.getLogger(__name__)


def pick_device(config: RunConfig) -> torch.device:
    wanted = config.trainer.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError("trainer.device=cuda: torch sees no GPU on this machine; use auto or cpu")
    # with its index, which torch.distributed needs; a worker sees only its own GPU
    return torch.device("cuda", 0) if wanted != "cpu" and torch.cuda.is_available() else torch.device("cpu")


def placement(config: RunConfig, memory: EngineMemory) -> Placement:
    device = pick_device(config)
    return Placement(
        device, pick_dtype(device, memory.dtype), bool(memory.param_offload), bool(memory.optimizer_offload)
    )


def pick_dtype(device: torch.device, name: str) -> torch.dtype:
    auto = torch.bfloat16 if device.type == "cuda" else torch.float32
    dtype: torch.dtype = auto if name == "auto" else getattr(torch, name)
    if (device.type, dtype) == ("cpu", torch.bfloat16) and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        note_slow_bfloat16()
    return dtype


@cache
def note_slow_bfloat16() -> None:
    """Cached: logged once in a process, not once for each role."""
    log.warning(
        "Note: fsdp_config.dtype=bfloat16: this CPU has no bfloat16 arithmetic, and torch's substitute can be "
        "a hundred times slower than float32; use dtype=auto or float32 on it"
    )


def sequence_ranks(role: Actor | Critic, ranks: int) -> int:
    """Ranks that divide a sequence. The reference uses the actor's; a single rank (evaluation) does not divide it."""
    return 1 if ranks == 1 else role.ulysses_sequence_parallel_size


def adamw(optim: Optim, grad_clip: float) -> AdamW:
    return AdamW(optim.weight_decay, optim.betas, grad_clip)


def policy_network(config: Config, *, empty: bool = False) -> PolicyNetwork:
    """Empty: it has no weights; they come from rank 0, from the actor, or each rank reads its part."""
    model, checkpointing = (
        config.actor_rollout_ref.model,
        config.actor_rollout_ref.actor.fsdp_config.gradient_checkpointing,
    )
    return causal_network(
        model,
        policy_source(config),
        temperature=config.actor_rollout_ref.rollout.temperature,
        checkpointing=model.enable_gradient_checkpointing if checkpointing is None else checkpointing,
        empty=empty,
        shares_prompts=config.actor_rollout_ref.actor.use_prefix_grouper,
        replays_routing=config.replays_routing,
    )


def causal_network(
    model: Model,
    source: ModelSource,
    *,
    temperature: float,
    checkpointing: bool,
    empty: bool = False,
    shares_prompts: bool = False,
    replays_routing: bool = False,
) -> PolicyNetwork:
    lora = (
        Lora(model.lora_rank, model.lora_alpha, model.target_modules, model.lora_adapter_path)
        if model.has_lora
        else None
    )
    layout = family_of(source).layout(packed=model.use_remove_padding)
    network = PolicyNetwork(
        load_causal_lm(source, lora=lora, empty=empty, attention=layout.attention),
        packed=layout.packed,
        temperature=temperature,
        chunked=model.use_fused_kernels,
        shares_prompts=shares_prompts,
        replays_routing=replays_routing,
    )
    if checkpointing:
        network.decoder.enable_checkpointing()
    return network


def actor_ranks(config: Config, ranks: int) -> Ranks:
    """Of actor and reference."""
    actor = config.actor_rollout_ref.actor
    return Ranks(
        ranks,
        actor.fsdp_config.fsdp_size,
        sequence_ranks(actor, ranks),
        "actor_rollout_ref.actor",
        policy_source(config),
        actor.megatron,
    )


def policy_engine(
    config: Config,
    network: PolicyNetwork,
    *,
    trained: bool = True,
    reference: Engine | None = None,
    ranks: int = 1,
) -> Engine:
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    shared, divided = sequence_ranks(actor, ranks), model_ranks(actor, ranks)
    return make_engine(
        actor.kind,
        network,
        placement(config, actor.engine_memory),
        actor_ranks(config, ranks),
        scoring=rollout.batching(ranks, shared, divided),
        training=actor.batching(ranks, shared, divided),
        optimizer=adamw(actor.optim, actor.grad_clip) if trained else None,
        reference=reference,
        compiled=actor.use_torch_compile,
    )


def needs_critic(config: Config) -> bool:
    return resolve_algorithm(config.algorithm.adv_estimator).needs_critic


def offloads_reference(config: Config) -> bool:
    ref, section = config.actor_rollout_ref.ref, config.actor_rollout_ref.actor.kind.section
    return bool({"fsdp_config": ref.fsdp_config.param_offload, "megatron": ref.megatron.param_offload}[section])


def reference_engine(config: Config, *, ranks: int = 1, empty: bool = False) -> Engine:
    actor, ref = config.actor_rollout_ref.actor, config.actor_rollout_ref.ref
    where = placement(config, actor.engine_memory)
    shared, divided = sequence_ranks(actor, ranks), model_ranks(actor, ranks)
    return make_engine(
        actor.kind,
        causal_network(
            config.actor_rollout_ref.model,
            policy_source(config),
            temperature=config.actor_rollout_ref.rollout.temperature,
            checkpointing=False,
            empty=empty or reads_own_part(actor, ranks),
            shares_prompts=actor.use_prefix_grouper,
        ),
        Placement(where.device, where.dtype, offload_parameters=offloads_reference(config)),
        actor_ranks(config, ranks),
        scoring=ref.batching(ranks, shared, divided),
        compiled=actor.use_torch_compile if ref.use_torch_compile is None else ref.use_torch_compile,
    )


def critic_network(config: Config, *, empty: bool = False) -> ValueNetwork:
    critic, source = config.critic, critic_source(config)
    layout = family_of(source).layout(packed=critic.model.use_remove_padding)
    network = ValueNetwork(
        load_causal_lm(source, empty=empty, attention=layout.attention),
        packed=layout.packed,
        shares_prompts=config.actor_rollout_ref.actor.use_prefix_grouper,
    )
    checkpointing = critic.model.fsdp_config.gradient_checkpointing
    if critic.model.enable_gradient_checkpointing if checkpointing is None else checkpointing:
        network.decoder.enable_checkpointing()
    return network


def critic_engine(config: Config, network: ValueNetwork, *, ranks: int = 1) -> Engine:
    critic, fsdp = config.critic, config.critic.model.fsdp_config
    shared = sequence_ranks(critic, ranks)
    batching = critic.batching(ranks, shared, model_ranks(critic, ranks))
    return make_engine(
        critic.kind,
        network,
        placement(config, critic.engine_memory),
        Ranks(ranks, fsdp.fsdp_size, shared, "critic", critic_source(config), critic.megatron),
        scoring=batching,
        training=batching,
        optimizer=adamw(critic.optim, critic.grad_clip),
        compiled=critic.use_torch_compile,
    )


def hf_rollout(
    config: Config, network: PolicyNetwork, owner: WeightOwner, tokenizer: PreTrainedTokenizerBase
) -> Rollout:
    rollout = config.actor_rollout_ref.rollout
    generation = family_of(policy_source(config)).hf_generation()
    return HfRollout(
        network,
        owner=owner,
        pad_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        max_sequences=rollout.sequences(owner.device.type),
        generate_kwargs=rollout.engine_kwargs,
        attention=generation.attention,
        pads_prompts=generation.pads_prompts,
    )


def native_rollout(
    config: Config, network: PolicyNetwork, owner: WeightOwner, tokenizer: PreTrainedTokenizerBase
) -> Rollout:
    rollout = config.actor_rollout_ref.rollout
    return NativeRollout(
        network,
        owner=owner,
        max_sequences=rollout.sequences(owner.device.type),
        max_prefill_tokens=rollout.max_num_batched_tokens,
        memory_share=rollout.gpu_memory_utilization,
        free_cache=rollout.free_cache_engine,
        eager=rollout.enforce_eager,
        longest_prompt=config.data.max_prompt_length,
        records_routing=config.replays_routing,
        keeps_cache=config.trainer.v1.keeps_cache,
    )


def vllm_rollout(
    config: Config, network: PolicyNetwork, owner: WeightOwner | None, tokenizer: PreTrainedTokenizerBase
) -> Rollout:
    from rloom.rollout.vllm.engine import VllmRollout  # an extra, and slow to import

    adapter, convert = network.adapter_config(), CheckpointFormat(network)
    settings = vllm_settings(config, None if adapter is None else adapter["r"])
    reads_weights = adapter is not None or not convert.complete
    return VllmRollout(replace(settings, reads_weights=reads_weights), convert, adapter)


def vllm_settings(config: Config, lora_rank: int | None) -> "VllmSettings":
    from rloom.rollout.vllm.arguments import VllmSettings

    rollout, where = config.actor_rollout_ref.rollout, placement(config, config.actor_rollout_ref.actor.engine_memory)
    return VllmSettings(
        source=policy_source(config),
        device=where.device,
        dtype=where.dtype,
        max_sequences=rollout.sequences(where.device.type),
        max_batched_tokens=rollout.max_num_batched_tokens,
        max_model_tokens=config.data.longest_sample,
        memory_share=rollout.gpu_memory_utilization,
        free_memory=rollout.free_cache_engine,
        eager=rollout.enforce_eager,
        temperature=rollout.temperature,
        request_seeds=rollout.request_seeds,
        lora_rank=lora_rank,
        tensor_parallel=rollout.workers_per_engine,
        engine_kwargs=rollout.engine_kwargs,
    )


def vllm_server_command(
    config: Config, device: torch.device, dtype: torch.dtype, key: str | None
) -> tuple[list[str], dict[str, str]]:
    from rloom.rollout.vllm.arguments import engine_arguments

    arguments = engine_arguments(vllm_settings(config, None))
    environment = VLLM_ENVIRONMENT | ({} if device.type == "cuda" else VLLM_ON_CPU)
    return vllm_command(arguments, config.actor_rollout_ref.rollout.tensor_model_parallel_size), environment


def prepare_vllm(config: Config, device: torch.device, dtype: torch.dtype) -> None:
    check_installed()
    set_environment()
    from rloom.rollout.vllm.arguments import check_model

    model = config.actor_rollout_ref.model
    check_model(vllm_settings(config, model.lora_rank if model.has_lora else None))


def rollout_engine(
    config: Config,
    network: PolicyNetwork,
    owner: WeightOwner | None,
    tokenizer: PreTrainedTokenizerBase,
    gpus: Sequence[str] = (),
) -> Rollout:
    """`owner` of all the network's weights, if this process has them. `gpus`: where servers can be started."""
    rollout, where = config.actor_rollout_ref.rollout, placement(config, config.actor_rollout_ref.actor.engine_memory)
    if rollout.uses_servers:
        actor = cast(Engine | None, owner)  # a copy for generation has no servers
        return server_rollout(config, network, actor, where.device, where.dtype, gpus)
    assert rollout.kind.build is not None  # it is no server
    engine: Rollout = referenced(rollout.kind.build)(config, network, owner, tokenizer)
    return engine


def check_rollout(config: Config) -> None:
    """On the machine that generates, before weights are read."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.uses_servers:
        server_key(rollout.server.key_env)
    if rollout.kind.prepare is not None and rollout.starts_servers is not False:
        where = placement(config, config.actor_rollout_ref.actor.engine_memory)
        referenced(rollout.kind.prepare)(config, where.device, where.dtype)


def check_policy_family(config: Config) -> None:
    """Before weights are read: the model can be trained here, and the rollout engine can generate with it."""
    source, rollout = policy_source(config), config.actor_rollout_ref.rollout
    check_folder(source)
    family = family_of(source)
    family.layout(packed=config.actor_rollout_ref.model.use_remove_padding)
    if rollout.uses_servers:  # these have models of their own, perhaps elsewhere
        return
    check_engine_installed(rollout)
    if rollout.kind.check_family is not None:
        referenced(rollout.kind.check_family)(family)
