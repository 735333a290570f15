"""`rloom plan` with the Megatron engine: numbers worked out by hand, and the parameters that the engine itself has."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import Qwen2Config, Qwen3Config

from rloom.config.load import load_config
from rloom.engines.megatron.layout import ParameterLayout
from rloom.engines.megatron.sizes import ModelParallel, shape_of
from rloom.errors import ConfigError
from rloom.plan import megatron
from rloom.plan.architecture import ModelPlan
from rloom.plan.make import Plan, make_plan
from rloom.plan.memory import ACTOR_PASSES, ACTOR_STEP, GENERATION, SAVE
from rloom.plan.render import render
from rloom.plan.timing import ACTOR_UPDATE, INFINIBAND, NVLINK, OLD_LOGPROBS

ACTOR = "actor_rollout_ref.actor"
MODEL = {  # a layer has 36,864 numbers in matrices, 128 in biases, 128 in norms
    "model_type": "qwen2",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
    "tie_word_embeddings": False,
}
LAYER_OF_A_RANK = (36864 + 128) // 2 + 128  # TP 2; norms are whole
FIRST = 2 * LAYER_OF_A_RANK + 1000 * 64 // 2  # PP 2: two layers, and the embedding
LAST = 2 * LAYER_OF_A_RANK + 1000 * 64 // 2 + 64  # the head and the last norm
KEYS = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=32",
    "data.max_prompt_length=128",
    "data.max_response_length=128",
    "actor_rollout_ref.rollout.n=4",
    f"{ACTOR}.strategy=megatron",
    f"{ACTOR}.ppo_mini_batch_size=16",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
    f"{ACTOR}.megatron.tensor_model_parallel_size=2",
    f"{ACTOR}.megatron.pipeline_model_parallel_size=2",
    "trainer.n_gpus_per_node=8",
)


def plan_of(folder: Path, *keys: str, model: dict[str, Any] = MODEL) -> Plan:
    (folder / "config.json").write_text(json.dumps(model))
    return make_plan(load_config([*KEYS, f"actor_rollout_ref.model.path='{folder}'", *keys]))


def actor_of(plan: Plan) -> ModelPlan:
    assert plan.costs is not None
    return plan.costs.actor


def phase(plan: Plan, name: str) -> dict[str, float]:
    assert plan.costs is not None
    parts = plan.costs.memory.phases[name]
    return {part: size for part, size in parts.items() if part in PARTS and size}


PARTS = ("weights", "masters", "moments", "gradients", "activations", "head", "reference")


def test_the_ranks_of_a_copy_get_the_same_samples(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert (plan.batches.ranks, plan.batches.shares) == (8, 2)
    passes = plan.batches.actor.passes  # 16 prompts × 4 = 64 samples for two copies, 4 a pass
    assert (passes.samples, passes.count, passes.tokens) == (32, 8, 4 * 256)
    older = plan_of(tmp_path, f"{ACTOR}.ppo_micro_batch_size_per_gpu=null", f"{ACTOR}.ppo_micro_batch_size=8")
    assert older.batches.actor.passes == passes  # 8 samples of two copies


def test_a_rank_holds_its_part_and_its_share_of_the_optimizer_state(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    actor = actor_of(plan)
    assert [megatron.rank_parameters(replace(actor, stage=stage)) for stage in (0, 1)] == [FIRST, LAST]
    assert (FIRST, LAST) == (69248, 69312)
    # bfloat16 weights; float32 masters, and two moments, divided over two copies
    assert phase(plan, GENERATION) == {"weights": 2 * LAST, "masters": 4 * LAST / 2, "moments": 8 * LAST / 2}
    # the gradient is not divided; in the step, the sum of its half lies beside it
    assert phase(plan, ACTOR_STEP)["gradients"] == 4 * LAST * 1.5


def test_the_first_stage_keeps_the_inputs_of_two_passes_and_the_last_one_has_logits(tmp_path: Path) -> None:
    actor = actor_of(plan_of(tmp_path))
    first, last = (megatron.in_passes(replace(actor, stage=stage)) for stage in (0, 1))
    # 64 / TP 2 numbers of a token at the input of each layer; a recomputed layer saves 2 (32 + (64 + 32 + 128) / 2)
    assert first["activations"] == 2 * 1024 * (2 * 2 * 32 + 288)
    assert last["activations"] == 2 * 1024 * (1 * 2 * 32 + 288)
    assert (first["head"], last["head"]) == (0, (4 + 2) * (1024 * 500 + 500 * 64))
    assert (first["gradients"], last["gradients"]) == (4 * FIRST, 4 * LAST)


def test_without_sequence_parallelism_every_rank_has_all_tokens_between_layers(tmp_path: Path) -> None:
    whole = replace(actor_of(plan_of(tmp_path, f"{ACTOR}.megatron.sequence_parallel=False")), stage=0)
    assert megatron.in_passes(whole)["activations"] == 2 * 1024 * (2 * 2 * 64 + 2 * (64 + 112))
    keys = ["actor_rollout_ref.model.enable_gradient_checkpointing=False"]
    saved = replace(actor_of(plan_of(tmp_path, *keys)), stage=0)
    assert megatron.in_passes(saved)["activations"] == 2 * 1024 * 2 * 2 * 288  # two layers of two passes
    again = [*keys, f"+{ACTOR}.megatron.override_transformer_config.recompute_granularity=full"]
    assert actor_of(plan_of(tmp_path, *again)).checkpointing


def test_the_larger_stage_of_each_phase_counts(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    actor = actor_of(plan)
    last = megatron.in_passes(replace(actor, stage=1))
    assert phase(plan, ACTOR_PASSES) == last  # logits are more than the inputs of another pass here


def test_offloaded_parts_leave_the_gpu_between_uses(tmp_path: Path) -> None:
    section = f"{ACTOR}.megatron"
    keys = [f"{section}.param_offload=True", f"{section}.optimizer_offload=True"]
    keys += [f"{ACTOR}.use_kl_loss=True", "actor_rollout_ref.ref.megatron.param_offload=True"]
    plan = plan_of(tmp_path, *keys)
    assert phase(plan, GENERATION) == {}
    assert phase(plan, ACTOR_PASSES).keys() == {"weights", "gradients", "activations", "head"}
    assert phase(plan, ACTOR_STEP).keys() == {"weights", "masters", "moments", "gradients"}
    assert megatron.offloaded_bytes(actor_of(plan)) == 2 * (4 + 8) * FIRST / 2 + 4 * 2 * FIRST
    kept = plan_of(tmp_path, f"{ACTOR}.use_kl_loss=True")
    assert phase(kept, ACTOR_STEP)["reference"] == 2 * LAST  # not divided over copies


def test_a_critic_has_no_logits_and_a_tied_embedding_is_on_both_ends(tmp_path: Path) -> None:
    keys = ["algorithm.adv_estimator=gae", "critic.strategy=megatron"]
    plan = plan_of(tmp_path, *keys, model={**MODEL, "tie_word_embeddings": True})
    assert plan.costs is not None and plan.costs.critic is not None
    stages = [replace(plan.costs.critic, stage=stage) for stage in (0, 1)]
    assert [megatron.rank_parameters(stage) for stage in stages] == [FIRST, 2 * LAYER_OF_A_RANK + 2 * 64]
    assert [megatron.in_passes(stage)["head"] for stage in stages] == [0, 0]
    actor = [megatron.rank_parameters(replace(plan.costs.actor, stage=stage)) for stage in (0, 1)]
    assert actor == [FIRST, LAST]
    one = plan_of(
        tmp_path, f"{ACTOR}.megatron.pipeline_model_parallel_size=1", model={**MODEL, "tie_word_embeddings": True}
    )
    assert megatron.rank_parameters(actor_of(one)) == 4 * LAYER_OF_A_RANK + 32000 + 64


@pytest.mark.parametrize("family", [Qwen2Config, Qwen3Config])
@pytest.mark.parametrize(("tensor", "pipeline", "tied"), [(2, 2, True), (2, 2, False), (2, 1, True), (1, 4, False)])
def test_the_engine_has_the_parameters_that_are_counted(
    family: type[Any], tensor: int, pipeline: int, tied: bool, tmp_path: Path
) -> None:
    config = family(**{**MODEL, "tie_word_embeddings": tied, "head_dim": 16, "model_type": family.model_type})
    keys = [f"{ACTOR}.megatron.tensor_model_parallel_size={tensor}"]
    keys += [f"{ACTOR}.megatron.pipeline_model_parallel_size={pipeline}"]
    actor = actor_of(plan_of(tmp_path, *keys, model={**config.to_dict(), "use_sliding_window": False}))
    divided = ParameterLayout(shape_of(config, key="key"), ModelParallel(tensor, pipeline), True)
    for stage in (0, pipeline - 1):
        held = 0
        for parameter in divided.parameters(stage):
            rows, *columns = parameter.shape
            held += rows * (columns[0] if columns else 1)
        assert megatron.rank_parameters(replace(actor, stage=stage)) == held


def test_bytes_between_the_ranks_are_counted(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    actor = actor_of(plan)
    # TP: two sums in each of two layers, forward, again for recomputation, and backward: 12 sums of 128 bytes a token,
    # of which 2 (2 - 1) / 2 reach a rank. PP: half of a token's 128 bytes, forward and backward.
    tensor, pipeline = megatron.between_layers(actor, tokens=1.0, forwards=2, backwards=1)
    assert (tensor.received, tensor.span) == (12 * 128, 2)
    assert (pipeline.received, pipeline.span) == (2 * 64, 4)
    copies = megatron.between_copies(actor)  # float32 gradients, bfloat16 weights, half of them from the other copy
    assert (copies.received, copies.span) == ((4 + 2) * FIRST / 2, 8)
    assert plan.costs is not None and plan.costs.time is not None
    stages = {stage.name: stage for stage in plan.costs.time.stages}
    tokens = 128 * 256 / 2  # of a copy in a step
    updates = 2 * copies.received
    assert stages[ACTOR_UPDATE].wire_bytes == pytest.approx(tokens * (12 * 128 + 2 * 64) + updates)
    assert stages[OLD_LOGPROBS].wire_bytes == pytest.approx(tokens * (4 * 128 + 64))
    assert stages[ACTOR_UPDATE].wire_s == pytest.approx(stages[ACTOR_UPDATE].wire_bytes / NVLINK)
    machines = plan_of(tmp_path, "trainer.nnodes=4", "trainer.n_gpus_per_node=2", "trainer.master_addr=10.0.0.1")
    assert machines.costs is not None and machines.costs.time is not None
    [update] = [stage for stage in machines.costs.time.stages if stage.name == ACTOR_UPDATE]
    slow = tokens * 2 * 64 + updates  # PP and copies leave the machine, TP does not
    assert update.wire_s == pytest.approx(tokens * 12 * 128 / NVLINK + slow / INFINIBAND)


def test_stages_wait_at_both_ends_of_a_mini_batch(tmp_path: Path) -> None:
    actor = actor_of(plan_of(tmp_path))
    assert megatron.bubble(actor, passes=8) == 9 / 8
    assert megatron.bubble(actor, passes=1) == 2


def test_the_text_has_the_split(tmp_path: Path) -> None:
    text = render(plan_of(tmp_path, f"{ACTOR}.megatron.param_offload=True"))
    assert (
        "Megatron TP 2 × PP 2: 2 copies, each over 4 ranks; they divide the optimizer state; on the host between uses: "
        "parameters"
    ) in text
    assert "32 a rank" in text


def test_a_split_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pipeline_model_parallel_size=8 does not divide num_hidden_layers=4"):
        plan_of(
            tmp_path,
            f"{ACTOR}.megatron.tensor_model_parallel_size=1",
            f"{ACTOR}.megatron.pipeline_model_parallel_size=8",
        )


def test_a_save_puts_one_parameter_together_at_a_time(tmp_path: Path) -> None:
    """The embedding of 1,000 x 64: half of it from the copies, both halves from the two ranks of TP, and its file's
    tensor. Without TP the first is the whole, and there are no parts."""
    plan = plan_of(tmp_path)
    assert plan.costs is not None
    assert plan.costs.memory.phases[SAVE]["gathered parameter"] == 4 * 1000 * 64 * 2.5
    assert phase(plan, SAVE) == phase(plan, GENERATION)  # beside what stays on the GPU
    whole = actor_of(plan_of(tmp_path, f"{ACTOR}.megatron.tensor_model_parallel_size=1"))
    assert megatron.in_save(whole)["gathered parameter"] == 4 * 1000 * 64 * 2
    # a stage without embedding and head: gate and up of the MLP, 128 x 64 each
    between = replace(actor_of(plan), stage=1, vocabulary=0)
    assert megatron.in_save(between)["gathered parameter"] == 4 * 2 * 128 * 64 * 2.5


def test_no_rank_of_megatron_reads_a_model(tmp_path: Path) -> None:
    plan = plan_of(tmp_path)
    assert plan.costs is not None and plan.costs.host_bytes == 0
    assert "host, at the start" not in render(plan)
