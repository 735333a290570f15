"""The reward model in a plan: its size as transformers counts it, its memory by phase."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedConfig

from rloom.plan.make import Plan, make_plan
from rloom.plan.memory import ACTOR_STEP, GENERATION, REWARD_SCORING, size_of
from rloom.plan.render import render
from tests.classifiers import deberta_config, llama_config, random_classifier
from tests.helpers import configured

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")


def deberta(**changes: Any) -> PreTrainedConfig:
    config = deberta_config(labels=3)
    for name, value in changes.items():
        setattr(config, name, value)
    return config


@pytest.mark.parametrize(
    "config",
    [
        llama_config(labels=1),
        llama_config(labels=5),
        deberta(),
        deberta(share_att_key=False, position_biased_input=True, conv_kernel_size=3, type_vocab_size=0),
        deberta(relative_attention=False),
    ],
    ids=["llama", "five labels", "v3", "v2", "absolute"],
)
def test_parameters_are_counted_as_transformers_counts_them(config: PreTrainedConfig) -> None:
    model = random_classifier(config)
    _, parameters, _ = size_of(json.loads(config.to_json_string(use_diff=False)), "a", 64)
    assert parameters == sum(parameter.numel() for parameter in model.parameters())


@pytest.fixture
def classifier(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(llama_config().to_json_string(use_diff=False))
    return tmp_path


def plan_of(folder: Path, *keys: str) -> Plan:
    return make_plan(configured(f"reward_model.path={folder}", "algorithm.adv_estimator=grpo", *keys))


def held(plan: Plan, phase: str) -> float:
    assert plan.costs is not None
    return plan.costs.memory.phases[phase]["reward model"]


KEYS = ("actor_rollout_ref.rollout.n=2", "data.max_prompt_length=16", "data.max_response_length=16")


def test_a_shared_gpu_holds_the_model_only_while_it_scores_unless_it_is_to_stay(classifier: Path) -> None:
    plan = plan_of(classifier, *KEYS, "reward_model.micro_batch_size_per_gpu=2")
    assert plan.costs is not None and plan.costs.reward is not None
    weights = 2 * plan.costs.reward.parameters
    # 2 samples of 32 tokens; of a token, twice hidden 32, queries 32, keys 16 and intermediate 48 in bfloat16
    assert held(plan, REWARD_SCORING) == weights + 2 * 64 * 2 * (32 + 32 + 16 + 48)
    assert (held(plan, GENERATION), held(plan, ACTOR_STEP)) == (0, 0)
    stays = plan_of(classifier, *KEYS, "reward_model.model.fsdp_config.param_offload=False")
    assert (held(stays, GENERATION), held(stays, ACTOR_STEP)) == (weights, weights)
    assert "whole on each of its GPUs; bfloat16; on the host while others work" in render(plan)
    assert "always on the GPU" in render(stays)


def test_workers_of_its_own_take_it_from_the_others(classifier: Path) -> None:
    plan = plan_of(classifier, *KEYS, "trainer.n_gpus_per_node=4", "trainer.pools.reward=1")
    assert plan.costs is not None and REWARD_SCORING not in plan.costs.memory.phases
    assert "reward model" not in plan.costs.memory.phases[GENERATION]
    text = render(plan)
    assert "actor + rollout engines on 3, reward model on 1" in text and "1 GPU of its own, 0.0 GiB each" in text


def test_gpus_hold_what_is_placed_on_them_and_the_fullest_is_printed(classifier: Path) -> None:
    batch = ("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    keys = (*KEYS, *batch, "trainer.n_gpus_per_node=4", "trainer.pools.rollout=[0]", "trainer.pools.reward=[1]")
    plan = plan_of(classifier, *keys)
    costs = plan.costs
    assert costs is not None and costs.reward is not None
    generating, scoring, others = costs.gpus
    assert [gpu.numbers for gpu in costs.gpus] == [[0], [1], [2, 3]]
    assert [gpu.memory.cache is not None for gpu in costs.gpus] == [True, False, False]
    rest = others.memory.phases[GENERATION]
    # a whole copy in bfloat16, and a page of 128 tokens for each of 8 prompts and 16 answers
    more = {
        "rollout engine's weights": 2 * costs.actor.parameters,
        "key-value cache": 24 * 128 * costs.cache.token_bytes,
    }
    assert generating.memory.phases[GENERATION] == {**rest, **more}
    assert scoring.memory.total(GENERATION) == sum(rest.values())
    assert scoring.memory.total(REWARD_SCORING) == sum(rest.values()) + costs.reward.scoring
    assert all(REWARD_SCORING not in gpu.memory.phases for gpu in (generating, others))
    assert costs.fullest is generating and plan.batches.engines == 1
    said = " ".join(render(plan).split())
    placed = "actor on 4, rollout engines on GPU 0 of these, reward model on GPU 1 of these"
    assert f"1 node × 4 GPUs = 4: processes, without Ray, {placed}" in said
    assert "GPU 0 actor + rollout engines: at most " in said and "GPU 1 actor + reward model: at most " in said
    assert "GPUs 2 and 3 actor: at most " in said and "on GPU 0 generation" in said


def test_a_reward_model_of_unknown_size_leaves_the_rest_of_the_plan(classifier: Path) -> None:
    fields = json.loads((classifier / "config.json").read_text())
    (classifier / "config.json").write_text(json.dumps({**fields, "model_type": "bert"}))
    plan = plan_of(classifier, *KEYS)
    assert plan.costs is not None and plan.costs.reward is None
    assert plan.notes[-1].startswith("The reward model's memory is left out: reward_model.path=")
    assert "(model_type 'bert'); the reward models counted are llama" in plan.notes[-1]
