"""actor_rollout_ref.rollout.name=vllm: its keys and what `rloom plan` counts. vLLM itself is tested in tests/vllm/."""

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from rloom.config.checks import check, notices_on_a_cpu
from rloom.config.derived import declared_needs
from rloom.errors import ConfigError
from rloom.plan import memory
from rloom.rollout.vllm import environment
from tests.helpers import configured
from tests.unit.plan.test_plan import SHAPES, SMALL, costs_of, written

ROLLOUT = "actor_rollout_ref.rollout"
VLLM = f"{ROLLOUT}.name=vllm"
GIB = 2**30


@pytest.mark.parametrize(
    ("key", "sentence"),
    [
        ("tensor_model_parallel_size=2", "=2 does not divide 1, the number of workers with a rollout engine; use 1"),
        ("max_num_batched_tokens=200", "a token of each of the 256 sequences .*use 256 or more"),
        ("val_kwargs.temperature=2.1", "vLLM accepts up to twice .*temperature=1.0; use 2.0 or less"),
    ],
)
def test_what_vllm_cannot_do_is_refused_with_the_way_out(key: str, sentence: str) -> None:
    config = configured(VLLM, f"{ROLLOUT}.{key}", f"{ROLLOUT}.val_kwargs.do_sample=True")
    with pytest.raises(ConfigError, match=sentence):
        check(config, declared_needs(config))


def test_its_arguments_and_limits_pass() -> None:
    keys = ("max_num_seqs=64", "max_num_batched_tokens=64", "engine_kwargs={block_size: 32}", "enforce_eager=True")
    config = configured(VLLM, *(f"{ROLLOUT}.{key}" for key in keys))
    check(config, declared_needs(config))


def test_on_a_cpu_it_has_no_sleep_mode() -> None:
    config = configured(VLLM, f"{ROLLOUT}.free_cache_engine=True")
    [notice] = notices_on_a_cpu(config, declared_needs(config))
    assert notice.endswith("free_cache_engine=True: no effect in this run, because vLLM has no sleep mode on a CPU")


def test_a_missing_package_is_an_error_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: ModuleSpec(name, None))  # of a folder without a module
    with pytest.raises(ConfigError, match=r"name=vllm: the package vllm is not installed.*\n.*pip install.*\[vllm\]"):
        environment.check_installed()


def test_the_plan_counts_a_copy_of_the_weights_while_generating_and_within_vllms_share(tmp_path: Path) -> None:
    """0.5B in bfloat16 is 0.92 GiB: of a share of 0.25 × 80 GiB = 20 GiB, 19.08 GiB are left for the cache."""
    folder = written(tmp_path / "model", {**SMALL, **SHAPES["0.5B"]})
    keys = (
        "algorithm.adv_estimator=rloo",
        f"{ROLLOUT}.n=8",
        f"{ROLLOUT}.gpu_memory_utilization=0.25",
        f"{ROLLOUT}.max_num_seqs=256",
    )
    native, vllm = (costs_of(folder, *keys, *name, gpu_gib=80).memory for name in ((), (VLLM,)))
    copy = vllm.phases[memory.GENERATION]["rollout engine's weights"]
    assert copy == pytest.approx(494_032_768 * 2)
    assert "rollout engine's weights" not in vllm.phases[memory.ACTOR_STEP]  # vLLM sleeps while the actor is trained
    assert "rollout engine's weights" not in native.phases[memory.GENERATION]
    lost = (native.cache.room - vllm.cache.room) * native.cache.token_bytes
    assert lost == pytest.approx(copy, rel=1e-3)
    awake = costs_of(folder, *keys, VLLM, f"{ROLLOUT}.free_cache_engine=False", gpu_gib=80).memory
    assert awake.phases[memory.ACTOR_STEP]["rollout engine's weights"] == copy
