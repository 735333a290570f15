"""The keys of generation on workers of its own."""

import pytest

from rloom.config.checks import all_faults, check
from rloom.config.derived import declared_needs
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.launch.build import old_logprobs
from rloom.training.loop import OldLogprobs

MODE = "trainer.v1.trainer_mode=separate_async"
TWO = ("trainer.n_gpus_per_node=2", "trainer.device=cpu", "data.train_batch_size=64")
POOL = "trainer.pools.rollout=1"
SYNC_STEP = "trainer.v1.separate_async.parameter_sync_step"
MINI = "actor_rollout_ref.actor.ppo_mini_batch_size"


def config_of(*overrides: str) -> Config:
    return load_config(["algorithm.adv_estimator=grpo", *overrides])


def faults_of(*overrides: str) -> list[str]:
    config = config_of(*overrides)
    return all_faults(config, declared_needs(config))


def notices_of(*overrides: str) -> list[str]:
    config = config_of(*overrides)
    return check(config, declared_needs(config))


@pytest.mark.parametrize("where", [(), ("trainer.pools.rollout=[0]",)])
def test_generation_needs_workers_of_its_own(where: tuple[str, ...]) -> None:
    [found] = faults_of(MODE, *TWO, *where)
    assert "set trainer.pools.rollout=N, a number below 2" in found and "use colocate_async" in found
    assert faults_of(MODE, *TWO, POOL) == []


def test_servers_are_called_by_a_worker_that_trains() -> None:
    [found] = [fault for fault in faults_of(MODE, *TWO, "actor_rollout_ref.rollout.name=sglang") if MODE in fault]
    assert "the actor's first worker sends the requests to the servers" in found and "colocate_async" in found


def test_verls_parameter_sync_step_is_the_number_of_updates_of_a_step() -> None:
    assert faults_of(MODE, *TWO, POOL, f"{MINI}=16", f"{SYNC_STEP}=4") == []
    [found] = faults_of(MODE, *TWO, POOL, f"{MINI}=32", f"{SYNC_STEP}=4")
    assert found == (
        f"{SYNC_STEP}=4 × {MINI}=32 is 128, not data.train_batch_size=64, and weights are sent after each step; use "
        f"data.train_batch_size=128, or {MINI}=16, or remove parameter_sync_step"
    )
    for given in ("data.train_batch_size=128", f"{MINI}=16"):
        assert faults_of(MODE, *TWO, POOL, f"{MINI}=32", f"{SYNC_STEP}=4", given) == []
    [found] = faults_of(MODE, *TWO, POOL, f"{MINI}=32", f"{SYNC_STEP}=3")
    assert "use data.train_batch_size=96, or remove" in found


@pytest.mark.parametrize(
    ("keys", "staleness"),
    [
        ((MODE,), 8),
        ((MODE, "trainer.v1.separate_async.num_warmup_batches=0"), 8),  # the next step's, with the weights before it
        ((MODE, "trainer.v1.sampler.max_off_policy_threshold=0"), 0),
        (("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0"), 0),
        ((), 0),
    ],
)
def test_the_largest_staleness_of_a_run(keys: tuple[str, ...], staleness: int) -> None:
    config = config_of(*TWO, POOL, *keys)
    assert config.max_staleness == staleness


def test_keys_of_the_other_mode_have_no_effect() -> None:
    [found] = notices_of(MODE, *TWO, POOL, "trainer.v1.colocate_async.num_warmup_batches=3")
    assert "trainer.v1.trainer_mode=separate_async does not generate ahead on the workers that train" in found
    [found] = notices_of("trainer.v1.trainer_mode=colocate_async", "trainer.v1.separate_async.num_warmup_batches=3")
    assert "trainer.v1.trainer_mode=colocate_async does not generate while a step trains" in found
    assert notices_of(MODE, *TWO, POOL, "trainer.v1.sampler.max_off_policy_threshold=0") == []


def test_verls_workers_that_change_their_role_are_refused() -> None:
    section = "trainer.v1.separate_async.hybrid_rollout"
    assert not config_of(MODE, *TWO, POOL, f"{section}.enable_switch=False").one_behaviour
    assert len(config_of(MODE, *TWO, POOL, f"{section}.switch_threshold_ratio=0.4").one_behaviour) == 1
    with pytest.raises(ConfigError, match=r"trainer\.pools\.rollout is the number of workers that generate"):
        config_of(MODE, *TWO, POOL, f"{section}.enable_switch=True")


KEEP = "trainer.v1.kv_on_update=keep"
COLOCATED = ("trainer.v1.trainer_mode=colocate_async", "trainer.device=cpu", KEEP)
FREE = "actor_rollout_ref.rollout.free_cache_engine"


def test_a_cache_that_stays_over_an_update_needs_an_engine_that_keeps_it_and_memory_that_is_not_released() -> None:
    assert faults_of(MODE, *TWO, POOL, KEEP) == []
    [found] = [one for one in faults_of(MODE, *TWO, POOL, KEEP, "actor_rollout_ref.rollout.name=vllm") if KEEP in one]
    assert found == (
        f"{KEEP}: vLLM cannot keep the cache of an answer that it has not finished; use "
        "actor_rollout_ref.rollout.name=native, or refill"
    )
    assert config_of(MODE, *TWO, POOL, KEEP).trainer.v1.keeps_cache
    [found] = faults_of(*COLOCATED)
    assert f"{KEEP}: {FREE}=True releases the cache before each update" in found
    assert faults_of(*COLOCATED, f"{FREE}=False") == []
    offload = "actor_rollout_ref.actor.fsdp_config.param_offload=True"
    [found] = faults_of(*COLOCATED, f"{FREE}=False", offload)
    assert "param_offload=True of the actor moves the weights" in found
    for name in ("vllm", "sglang"):
        server = (f"actor_rollout_ref.rollout.name={name}", "actor_rollout_ref.rollout.server.count=1")
        assert any("cannot keep the cache" in one for one in faults_of(*COLOCATED, f"{FREE}=False", *server))


@pytest.mark.parametrize(
    "keys", [(), ("trainer.v1.trainer_mode=colocate_async", "trainer.v1.colocate_async.num_warmup_batches=0")]
)
def test_where_no_answer_goes_on_after_an_update_there_is_no_cache_to_keep(keys: tuple[str, ...]) -> None:
    assert faults_of(*keys, KEEP) == [] and not config_of(*keys, KEEP).trainer.v1.keeps_cache
    assert any("no answer goes on after an update" in one for one in notices_of(*keys, KEEP))


def test_a_cache_that_stays_is_not_released_in_sleep_either() -> None:
    assert any("keep keeps the cache" in one for one in notices_of(MODE, *TWO, POOL, KEEP, f"{FREE}=True"))


def test_dynamic_sampling_ahead_needs_a_known_length_and_scores_while_answers_are_generated() -> None:
    ahead = ("trainer.v1.trainer_mode=colocate_async", "trainer.device=cpu", "algorithm.filter_groups.enable=True")
    ahead = (*ahead, "actor_rollout_ref.rollout.n=4")
    [found] = faults_of(*ahead)
    assert "the data would end while groups wait; set trainer.total_training_steps=N" in found
    steps = (*ahead, "trainer.total_training_steps=9")
    assert faults_of(*steps) == []
    model = ("reward_model.enable=True", "reward_model.path=somewhere")
    [found] = [one for one in faults_of(*steps, *model) if "filter_groups" in one]
    assert "give it workers of its own with trainer.pools.reward=N" in found
    apart = ("trainer.n_gpus_per_node=2", "trainer.pools.reward=1")
    assert not any("filter_groups" in one for one in faults_of(*steps, *model, *apart))


@pytest.mark.parametrize(("prompts_per_update", "expected"), [(64, None), (32, OldLogprobs.TRAINER)])
def test_a_single_update_needs_no_pass_before_it_however_old_the_answers_are(
    prompts_per_update: int, expected: OldLogprobs | None
) -> None:
    keys = ("data.train_batch_size=64", f"actor_rollout_ref.actor.ppo_mini_batch_size={prompts_per_update}")
    config = config_of(*TWO, POOL, MODE, *keys, "algorithm.adv_estimator=grpo")
    assert config.max_staleness == 8
    assert old_logprobs(config) is expected
