"""Workers that shard the actor, with an engine each or one together."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rloom.launch.export import export
from tests.e2e.runs import records, train

CHOSEN = (
    "actor_rollout_ref.rollout.name=vllm",
    "algorithm.adv_estimator=grpo",
    "trainer.start_timeout_s=300",
    "actor_rollout_ref.actor.checkpoint.save_contents=[model,optimizer,hf_model]",
)


TENSOR_PARALLEL = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
PLACEMENTS = {
    "each": ("trainer.n_gpus_per_node=2",),
    "apart": ("trainer.n_gpus_per_node=2", "trainer.pools.rollout=1"),
    "tp2": ("trainer.n_gpus_per_node=2", TENSOR_PARALLEL),
    "two engines": ("trainer.n_gpus_per_node=4", TENSOR_PARALLEL),
    # ranks 1 and 2 of the actor are ranks 0 and 1 of the engine
    "some": ("trainer.n_gpus_per_node=3", TENSOR_PARALLEL, "trainer.pools.rollout=[1,2]"),
}


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_engines_of_several_workers_have_the_weights_of_the_sharded_actor(tmp_path: Path, placement: str) -> None:
    run = tmp_path / "run"
    train(run, 2, *CHOSEN, *PLACEMENTS[placement])
    gaps = [record["training/rollout_probs_diff_mean"] for record in records(run)]
    assert len(gaps) == 2 and max(gaps) < 1e-4
    folder = run / "global_step_2" / "actor" / "huggingface"
    exported = load_file(export(run / "global_step_2", tmp_path / "exported") / "model.safetensors")
    written = AutoModelForCausalLM.from_pretrained(folder).state_dict()  # the ranks wrote it together
    assert all(torch.equal(written[name], tensor) for name, tensor in exported.items())
