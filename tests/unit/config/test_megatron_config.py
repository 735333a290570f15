"""The keys of the Megatron engine: spellings, verl's keys with one behaviour, and the splits that are refused."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks.plan_scaling import QWEN_7B
from rloom.config.checks import check, check_and_warn
from rloom.config.derived import declared_needs, model_ranks, ranks_per_share
from rloom.config.engine_checks import divided_strategies
from rloom.config.from_checkpoint import ONE_PROCESS
from rloom.config.keys import value_at
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.launch import early_checks
from rloom.packing import MicroBatching

ACTOR, REF, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
BOTH = (f"{ACTOR}.strategy=megatron", "critic.strategy=megatron", "trainer.n_gpus_per_node=8")
GRPO = (*("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n=4", f"{ACTOR}.strategy=megatron", "trainer.n_gpus_per_node=8"),)
SPARSE = {  # Qwen3-30B-A3B
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 151936,
}


def sizes(tensor: int, pipeline: int, role: str = ACTOR) -> list[str]:
    section = f"{role}.megatron"
    return [f"{section}.tensor_model_parallel_size={tensor}", f"{section}.pipeline_model_parallel_size={pipeline}"]


def faults(*overrides: str) -> str:
    config = load_config(overrides)
    with pytest.raises(ConfigError) as caught:
        check(config, declared_needs(config))
    return str(caught.value)


def passed(*overrides: str) -> Config:
    config = load_config(overrides)
    check(config, declared_needs(config))
    return config


@pytest.mark.parametrize("section", ["megatron", "megatron_config"])
def test_both_spellings_are_the_same_section(section: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(
        "defaults: [ppo_trainer, _self_]\n"
        "actor_rollout_ref:\n  actor:\n    strategy: megatron\n"
        f"    {section}: {{tensor_model_parallel_size: 2, param_offload: true}}\n"
        f"critic: {{strategy: megatron, {section}: {{optimizer_offload: true}}}}\n"
        "trainer: {n_gpus_per_node: 8}\n"
    )
    typed = f"{ACTOR}.{section}.pipeline_model_parallel_size=4"
    config = load_config([typed], config_path=str(tmp_path), config_name="mine")
    check(config, declared_needs(config))
    actor, critic = config.actor_rollout_ref.actor.megatron, config.critic.megatron
    assert (actor.tensor_model_parallel_size, actor.pipeline_model_parallel_size, actor.model_ranks) == (2, 4, 8)
    assert (actor.offloaded, critic.offloaded) == (["parameters"], ["optimizer state"])
    assert (critic.tensor_model_parallel_size, critic.pipeline_model_parallel_size) == (2, 4)  # null: the actor's
    assert f"{ACTOR}.megatron.tensor_model_parallel_size" in config.given
    assert "critic.megatron.tensor_model_parallel_size" not in config.given


def test_recomputation_follows_gradient_checkpointing_unless_it_is_given() -> None:
    keys = f"+{ACTOR}.megatron.override_transformer_config"
    entries = {
        "{}": ({}, [False, True]),  # what megatron-core gets; whether layers are recomputed without and with the key
        "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}": ({}, [True, True]),
        "{recompute_granularity: selective, apply_rope_fusion: true}": (
            {"recompute_granularity": "selective"},
            [False, False],
        ),
    }
    for text, (passed_on, recomputes) in entries.items():
        section = passed(*BOTH, f"{keys}={text}").actor_rollout_ref.actor.megatron
        assert section.transformer_config() == passed_on
        assert [section.recomputes_layers(checkpointing=on) for on in (False, True)] == recomputes


def test_verls_keys_with_one_behaviour_here_are_accepted(caplog: pytest.LogCaptureFixture) -> None:
    silent = {"context_parallel_size": 1, "virtual_pipeline_model_parallel_size": "null", "forward_only": True}
    silent |= {"use_distributed_optimizer": True, "use_dist_checkpointing": False, "use_remove_padding": True}
    silent |= {"use_mbridge": True}
    notices = {"seed": 7, "use_distributed_optimizer": False, "grad_offload": True}
    notices |= {"virtual_pipeline_model_parallel_size": 2, "dist_checkpointing_path": "/w"}
    keys = [f"{REF}.megatron.{name}={value}" for name, value in silent.items()]
    keys += [f"{ACTOR}.megatron.{name}={value}" for name, value in notices.items()]
    keys += [f"{ACTOR}.optim.optimizer=adam", f"{ACTOR}.load_weight=True"]
    keys += [f"+{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload=True", f"{ACTOR}.use_kl_loss=True"]
    keys += [f"+{ACTOR}.megatron.override_transformer_config.moe_permute_fusion=True"]
    config = passed(*BOTH, *keys)
    check_and_warn(config, declared_needs(config))
    logged = [re.split("[=:]", record.message.removeprefix("Note: "))[0] for record in caplog.records]
    assert sorted(logged) == sorted(
        [
            *(f"{ACTOR}.megatron.{name}" for name in notices),
            f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload",
            f"{ACTOR}.megatron.override_transformer_config (moe_permute_fusion",
        ]
    )


def test_megatrons_names_of_the_optimizer_are_those_of_rlooms_keys() -> None:
    names = [f"{ACTOR}.optim.lr_decay_style=cosine", f"{ACTOR}.optim.clip_grad=0.5", "critic.optim.clip_grad=2.0"]
    config = passed(*BOTH, *names)
    actor = config.actor_rollout_ref.actor
    assert (actor.optim.lr_scheduler_type, actor.grad_clip, config.critic.grad_clip) == ("cosine", 0.5, 2.0)


@pytest.mark.parametrize(
    ("key", "what"),
    [
        (f"{ACTOR}.megatron.context_parallel_size=2", "use 1 and a larger tensor_model_parallel_size"),
        (f"{ACTOR}.optim.min_lr=1e-7", "use min_lr_ratio, its share of lr"),
        (f"{ACTOR}.optim.lr_decay_steps=100", "use lr_scheduler_type, lr_warmup_steps and min_lr_ratio"),
        (f"{ACTOR}.optim.optimizer=sgd", "another optimizer than AdamW"),
        (f"{ACTOR}.router_replay.mode=R2", "use R3"),
        (f"{ACTOR}.megatron.dtype=float16", "auto|float32|bfloat16"),
        (f"{ACTOR}.megatron.tensor_parallel_size=2", "did you mean"),
    ],
)
def test_values_that_would_give_another_result_are_refused(key: str, what: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config([*BOTH, f"+{key}"])
    assert what in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (
            [*BOTH, *sizes(3, 2)],
            f"{ACTOR}.megatron: tensor_model_parallel_size × pipeline_model_parallel_size = 3 × 2 = 6 does not divide "
            "8 workers; TP × PP that do: 4 × 1, 4 × 2, 2 × 2, 2 × 4, 1 × 4, 1 × 8, ...; ",
        ),
        ([*GRPO, *sizes(2, 1), "trainer.pools.rollout=3"], "= 2 × 1 = 2 does not divide 5 workers; TP × PP that do: "),
        ([*BOTH[:2], *sizes(2, 1)], "does not divide 1 worker; TP × PP that do: 1 × 1; trainer.nnodes × "),
        (
            [*BOTH, *sizes(4, 2), *sizes(2, 2, "critic")],
            f"critic.megatron.tensor_model_parallel_size=2: actor and critic share their workers, and {ACTOR}.megatron."
            "tensor_model_parallel_size=4; use the same value, or give the critic workers of its own (trainer.pools.",
        ),
        ([BOTH[0], BOTH[2], "critic.strategy=fsdp"], "use the same strategy, or give the critic workers of its own"),
        ([*GRPO, f"{ACTOR}.megatron.expert_tensor_parallel_size=4"], "use 1, or null for tensor_model_parallel_size=1"),
        (
            [*GRPO, *sizes(2, 2), f"{ACTOR}.megatron.expert_model_parallel_size=4"],
            "expert_model_parallel_size=4 does not divide 2: 8 workers / pipeline_model_parallel_size 2 / "
            "expert_tensor_parallel_size 2; use 2",
        ),
        ([*GRPO, "actor_rollout_ref.model.lora_rank=8"], "trains all weights, not LoRA adapters; use strategy=fsdp"),
        (
            [*GRPO, f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"],
            "a KL over the whole vocabulary needs whole logits on each worker; use strategy=fsdp",
        ),
        ([*GRPO, f"{ACTOR}.ulysses_sequence_parallel_size=2"], f"use 1 and {ACTOR}.megatron.sequence_parallel=True"),
        (
            [*GRPO, f"{ACTOR}.use_kl_loss=True", *sizes(2, 1), f"{REF}.megatron.tensor_model_parallel_size=4"],
            f"{REF}.megatron.tensor_model_parallel_size=4: the reference is divided as the actor is",
        ),
        (
            [*GRPO, f"{ACTOR}.use_kl_loss=True", *sizes(2, 2), "trainer.pools.ref=2", "trainer.n_gpus_per_node=6"],
            "trainer.pools.ref=2: a copy of the reference is on 4 workers",
        ),
        (
            [*GRPO, f"+{ACTOR}.megatron.override_transformer_config.num_layers_in_last_pipeline_stage=13"],
            "num_layers_in_last_pipeline_stage=13: stages have equal numbers of layers; remove it",
        ),
        (
            [*GRPO, f"+{ACTOR}.megatron.override_transformer_config.hidden_dropout=0.1"],
            "hidden_dropout=0.1: rloom trains without dropout",
        ),
        ([*sizes(2, 1)], f"{ACTOR}.strategy=fsdp does not read it; set {ACTOR}.strategy=megatron"),
        (
            [*GRPO[:2], f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.name=hf"],
            f"{ACTOR}.router_replay.mode=R3: {ROLLOUT}.name=hf does not return the experts",
        ),
        (
            [*GRPO[:2], f"{ACTOR}.router_replay.mode=disabled", f"{ROLLOUT}.enable_rollout_routing_replay=True"],
            "contradict each other; keep one",
        ),
        (
            [*GRPO, *sizes(2, 2), f"{ACTOR}.ppo_micro_batch_size=1"],
            "ppo_micro_batch_size=1 (samples of all GPUs together) does not divide among 2 GPUs",
        ),
    ],
)
def test_a_wrong_combination_is_refused_with_the_way_out(keys: list[str], what: str) -> None:
    assert what in faults(*keys)


def test_router_replay_has_two_names() -> None:
    assert not passed(*GRPO).replays_routing
    assert passed(*GRPO, f"{ACTOR}.router_replay.mode=R3").replays_routing
    assert passed(*GRPO, f"{ROLLOUT}.enable_rollout_routing_replay=True").replays_routing


def test_workers_of_its_own_let_the_critic_be_divided_in_another_way() -> None:
    keys = [*BOTH, *sizes(2, 2), *sizes(1, 2, "critic"), "trainer.pools.critic=4"]
    config = passed(*keys)
    assert (model_ranks(config.actor_rollout_ref.actor, 4), model_ranks(config.critic, 4)) == (4, 2)
    assert passed(BOTH[0], BOTH[2], "critic.strategy=fsdp", "trainer.pools.critic=4", *sizes(2, 2))
    assert passed(BOTH[0], BOTH[2]).critic.strategy == "megatron"  # null: the actor's


def test_ranks_that_divide_a_model_get_the_same_samples_and_each_has_all_tokens() -> None:
    whole = [f"{ACTOR}.ppo_micro_batch_size=16", f"{ROLLOUT}.log_prob_micro_batch_size=32"]
    config = passed(*GRPO, *sizes(2, 2), *whole, "data.train_batch_size=256", f"{ACTOR}.ppo_mini_batch_size=256")
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    assert ranks_per_share(actor, 8) == model_ranks(actor, 8) == 4
    assert ranks_per_share(actor, 1) == 1  # evaluation has one rank
    # two copies of the model: each takes half of the samples that all GPUs take together
    assert actor.batching(8, 1, 4) == MicroBatching(samples=8)
    assert rollout.batching(8, 1, 4) == MicroBatching(samples=16)
    by_tokens = passed(*GRPO, *sizes(2, 2)).actor_rollout_ref.actor
    assert by_tokens.batching(8, 1, 4) == MicroBatching(tokens=16384)
    ulysses = passed(*GRPO[:2], GRPO[3], f"{ACTOR}.ulysses_sequence_parallel_size=4").actor_rollout_ref.actor
    assert ulysses.batching(8, ranks_per_share(ulysses, 8)) == MicroBatching(tokens=4 * 16384)


def test_one_process_divides_nothing() -> None:
    """For evaluation and export of a checkpoint of any split."""
    given = [*sizes(4, 2), f"{ACTOR}.megatron.expert_tensor_parallel_size=1"]
    config = passed(*BOTH, *given, *(f"{REF}.megatron.{name.rpartition('.')[2]}" for name in sizes(4, 2)),
                    f"{ACTOR}.use_kl_loss=True")  # fmt: skip
    assert config.critic.megatron.expert_tensor_parallel_size == 1
    one = passed(*BOTH, *given, f"{ACTOR}.use_kl_loss=True", *ONE_PROCESS)
    for role in (one.actor_rollout_ref.actor, one.critic):
        assert (role.megatron.model_ranks, role.megatron.expert_tensor_ranks) == (1, 1)
    assert value_at(one, f"{REF}.megatron.tensor_model_parallel_size") is None


def split_faults(folder: Path, fields: Mapping[str, Any], *keys: str) -> str:
    (folder / "config.json").write_text(json.dumps(fields))
    config = passed(*keys, f"actor_rollout_ref.model.path='{folder}'")
    with pytest.raises(ConfigError) as caught:
        early_checks.check_split(config, critic=declared_needs(config).estimator.needs_critic)
    return str(caught.value).replace(str(folder), "FOLDER")


OF_MODEL = "of actor_rollout_ref.model.path=FOLDER"


@pytest.mark.parametrize(
    ("fields", "keys", "what"),
    [
        (
            QWEN_7B,  # 28 layers, 28 heads, 4 key-value heads
            [*GRPO, *sizes(8, 1)],
            f"{ACTOR}.megatron.tensor_model_parallel_size=8 does not divide num_attention_heads=28 "
            f"{OF_MODEL}; TP × PP that work with it on 8 workers: 4 × 2, 2 × 4, 4 × 1, 2 × 2, "
            "1 × 4, 2 × 1, ...",
        ),
        (
            {**QWEN_7B, "num_attention_heads": 24, "num_key_value_heads": 3},
            [*GRPO, *sizes(2, 1)],
            f"{ACTOR}.megatron.tensor_model_parallel_size=2 neither divides num_key_value_heads=3 nor is a multiple of "
            f"it, {OF_MODEL}; TP × PP that work with it on 8 workers: 1 × 2, 1 × 1, 1 × 4",
        ),
        (
            QWEN_7B,
            [*GRPO, *sizes(1, 8)],
            f"{ACTOR}.megatron.pipeline_model_parallel_size=8 does not divide num_hidden_layers=28 {OF_MODEL}; "
            "TP × PP that work with it on 8 workers: 2 × 4, 4 × 2, 1 × 4, 2 × 2, 4 × 1, 1 × 2, ...",
        ),
        (
            {**QWEN_7B, "vocab_size": 152065, "intermediate_size": 18945},  # the vocabulary is padded
            [*GRPO, *sizes(2, 1)],
            f"{ACTOR}.megatron.tensor_model_parallel_size=2 does not divide intermediate_size=18945 {OF_MODEL}; "
            "TP × PP that work with it on 8 workers: 1 × 2, 1 × 1, 1 × 4",
        ),
        (
            {**QWEN_7B, "model_type": "gemma2"},
            [*GRPO, *sizes(2, 1)],
            f"{ACTOR}.strategy=megatron: actor_rollout_ref.model.path=FOLDER is of the family 'gemma2', and the "
            "Megatron engine has Llama, Mistral, Qwen2, Qwen3, Qwen3-MoE, Mixtral; use "
            f"{ACTOR}.strategy=fsdp",
        ),
        (QWEN_7B, [*GRPO, f"{ACTOR}.megatron.expert_model_parallel_size=2"], "has no experts; use 1"),
        (
            {**SPARSE, "num_experts": 6},
            [*GRPO, f"{ACTOR}.megatron.expert_model_parallel_size=4"],
            f"expert_model_parallel_size=4 does not divide num_experts=6 {OF_MODEL}; use 1 or 2",
        ),
        (
            {**SPARSE, "moe_intermediate_size": 770},
            [*GRPO, *sizes(4, 1)],
            f"expert_tensor_parallel_size=4 does not divide moe_intermediate_size=770 {OF_MODEL}; use "
            "expert_tensor_parallel_size=1",
        ),
        (
            QWEN_7B,
            [*GRPO[:2], f"{ACTOR}.router_replay.mode=R3"],
            "router_replay.mode=R3: actor_rollout_ref.model.path=FOLDER has no experts; remove the key",
        ),
    ],
)
def test_a_split_that_does_not_fit_the_model_is_refused_with_those_that_do(
    fields: Mapping[str, Any], keys: list[str], what: str, tmp_path: Path
) -> None:
    assert split_faults(tmp_path, fields, *keys).endswith(what)


def test_the_critic_is_checked_with_its_own_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": 27}))
    config = passed(*BOTH, *sizes(1, 2), f"critic.model.path='{tmp_path}'")
    with pytest.raises(ConfigError) as caught:  # the embedded policy has 4 layers
        early_checks.check_split(config, critic=True)
    [fault] = str(caught.value).splitlines()
    assert fault.startswith("critic.megatron.pipeline_model_parallel_size=2 does not divide num_hidden_layers=27")


def test_splits_that_fit_pass(tmp_path: Path) -> None:
    keys = [*sizes(4, 2), f"{ACTOR}.router_replay.mode=R3", f"{ACTOR}.megatron.expert_tensor_parallel_size=1"]
    keys += [f"{ACTOR}.megatron.expert_model_parallel_size=4"]  # DP 1 × TP 4 ranks of a stage
    (tmp_path / "config.json").write_text(json.dumps(SPARSE))
    config = passed(*GRPO, *keys, f"actor_rollout_ref.model.path='{tmp_path}'")
    early_checks.check_split(config, critic=False)
    (tmp_path / "config.json").write_text(json.dumps({**QWEN_7B, "num_hidden_layers": 7}))
    replaced = "+actor_rollout_ref.model.override_config.num_hidden_layers=8"
    config = passed(*GRPO, *sizes(4, 2), replaced, f"actor_rollout_ref.model.path='{tmp_path}'")
    early_checks.check_split(config, critic=False)


def test_one_worker_needs_no_megatron_core() -> None:
    several = divided_strategies(passed(*GRPO), critic=False)
    assert {name: kind.packages for name, kind in several.items()} == {"megatron": ("megatron-core",)}
    assert divided_strategies(passed(*GRPO[:3]), critic=False) == {}
