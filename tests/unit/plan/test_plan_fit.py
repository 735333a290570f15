"""The memory check of `rloom train` with the shapes of Qwen2-7B and 72B: bytes worked out by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from rloom import cli, gpus
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.gpus import Gpu
from rloom.launch.early_checks import check_memory
from rloom.plan.make import held, make_plan, with_offload
from rloom.plan.memory import CACHE, GENERATION
from tests.unit.plan.test_plan import ONE_GPU, SMALL, WHOLE, written
from tests.unit.plan.test_plan import SHAPES as SMALL_SHAPES

GIB = 2**30
SHAPES = {
    "7B": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4,
           "intermediate_size": 18944},
    "72B": {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "num_key_value_heads": 8,
            "intermediate_size": 29568},
}  # fmt: skip
CRITIC_MOMENTS = "critic.model.fsdp_config.optimizer_offload"
ACTOR_MOMENTS = "actor_rollout_ref.actor.fsdp_config.optimizer_offload"
EXAMPLE_5 = (  # of the multi-machine guide: 32 GPUs
    "algorithm.adv_estimator=gae",
    "data.train_batch_size=1024",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=4",
    "trainer.n_gpus_per_node=8",
    "trainer.nnodes=4",
    "trainer.master_addr=192.168.1.100",
)


@pytest.fixture
def paths(tmp_path: Path) -> dict[str, str]:
    found = {}
    for name, shape in SHAPES.items():
        (tmp_path / name).mkdir()
        fields = {"model_type": "qwen2", "vocab_size": 152064, "tie_word_embeddings": False, **shape}
        (tmp_path / name / "config.json").write_text(json.dumps(fields))
        found[name] = f"actor_rollout_ref.model.path='{tmp_path / name}'"
    return found


def test_example_5_has_the_critics_moments_on_the_host(paths: dict[str, str], caplog: pytest.LogCaptureFixture) -> None:
    config, actor, critic = load_config([paths["72B"], *EXAMPLE_5]), 72_706_203_648, 71_460_503_552
    assert held(config, 80 * GIB).certain_bytes == 12 * (actor + critic) / 32 + 2 * actor / 4  # 84.2 GiB: generation
    fitting = with_offload(config, 80 * GIB)
    assert fitting.critic.model.fsdp_config.optimizer_offload is True
    assert fitting.actor_rollout_ref.actor.fsdp_config.optimizer_offload is None
    # with vLLM's half of the GPU: 12 actor / 32 + 4 critic / 32 + 2 GiB + 40 GiB
    found = held(fitting, 80 * GIB)
    assert found.fits and found.peak == GENERATION
    assert found.peak_bytes == pytest.approx((12 * actor + 4 * critic) / 32 + 42 * GIB, abs=0.02 * GIB)
    assert caplog.messages == [
        "Note: the weights of all models, gradients and optimizer state alone take 84.2 GiB, of 80.0 GiB a GPU, so "
        f"this run has {CRITIC_MOMENTS}=True (75.7 GiB)"
    ]


def test_offload_that_is_enough_for_shorter_answers_is_switched_on(
    paths: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    moved = with_offload(load_config([paths["7B"], "trainer.n_gpus_per_node=8"]), 24 * GIB)
    for engine in (moved.critic.model.fsdp_config, moved.actor_rollout_ref.actor.fsdp_config):
        assert (engine.param_offload, engine.optimizer_offload) == (True, True)
    assert not held(moved, 24 * GIB).fits and not held(moved, 24 * GIB).certainly_too_large
    assert caplog.messages[0].endswith("which is not enough for answers of full length")


def test_a_key_that_the_user_set_is_not_changed(paths: dict[str, str]) -> None:
    kept = with_offload(load_config([paths["72B"], *EXAMPLE_5, f"{CRITIC_MOMENTS}=False"]), 80 * GIB)
    assert kept.critic.model.fsdp_config.optimizer_offload is False
    assert kept.actor_rollout_ref.actor.fsdp_config.optimizer_offload is True
    sections = ("actor_rollout_ref.actor.fsdp_config", "critic.model.fsdp_config")
    offloads = [f"{section}.{what}_offload=False" for section in sections for what in ("param", "optimizer")]
    with pytest.raises(ConfigError) as caught:
        with_offload(load_config([paths["72B"], *EXAMPLE_5, *offloads]), 80 * GIB)
    assert f"It fits with {CRITIC_MOMENTS}=True (75.7 GiB) or " in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "gib"),
    [
        (["data.train_batch_size=1024", "actor_rollout_ref.rollout.n=5", "algorithm.kl_ctrl.kl_coef=0.001"], 49.6),
        (["data.train_batch_size=512", "data.max_response_length=2048", "actor_rollout_ref.rollout.n=8",
          "algorithm.kl_ctrl.kl_coef=0.002"], 68.6),
        (["data.train_batch_size=1024", "actor_rollout_ref.rollout.n=6"], 51.3),
    ],
    ids=["example 1", "example 2", "example 3"],
)  # fmt: skip
def test_the_rloo_examples_without_a_number_of_gpus_fit_eight(
    paths: dict[str, str], keys: list[str], gib: float
) -> None:
    plan = make_plan(load_config([paths["7B"], "algorithm.adv_estimator=rloo", *keys]), 80)
    assert plan.batches.ranks == 8 and plan.machine.gpus_from.startswith("8 GPUs are assumed")
    assert plan.costs is not None and plan.costs.memory.fits
    assert round(plan.costs.memory.peak_bytes / GIB, 1) == gib
    # (4 + 8) / 8 bytes a parameter of the actor, 2 of the engine's copy, 2 / 8 of the reference where there is KL
    size, kl = 7_615_616_512, "algorithm.kl_ctrl" in keys[-1]
    generation = plan.costs.memory.phases[GENERATION]
    assert sum(generation.values()) == 3.5 * size + kl * size / 4 + 2 * GIB + generation["key-value cache"]


def test_what_cannot_fit_is_an_error_with_keys_that_are_planned(paths: dict[str, str]) -> None:
    config = load_config([paths["7B"], "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=5",
                          "trainer.n_gpus_per_node=1"])  # fmt: skip
    with pytest.raises(ConfigError) as caught:
        with_offload(config, 80 * GIB)
    # 18 × 7,615,616,512 bytes; on one process moments come back for the optimizer's step
    assert (
        ": the weights of all models, gradients and optimizer state alone take 127.7 GiB, of 80.0 GiB a GPU. It fits "
        "with trainer.n_gpus_per_node=4 (71.5 GiB) or actor_rollout_ref.model.lora_rank=16 (56.7 GiB). `rloom plan`"
    ) in str(caught.value)
    assert str(caught.value).endswith("trainer.memory_check=False starts the run without this check")


def test_what_only_long_answers_would_not_fit_is_a_warning(
    paths: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    keys = ["trainer.n_gpus_per_node=8", "actor_rollout_ref.model.enable_gradient_checkpointing=False"]
    config = load_config([paths["7B"], *keys])
    assert with_offload(config, 80 * GIB) is config
    [said] = caplog.messages
    assert "with answers of full length this run takes 94.7 GiB in actor passes, of 80.0 GiB a GPU" in said
    assert "It fits with actor_rollout_ref.model.enable_gradient_checkpointing=True (53.9 GiB) or" in said


def checked(config: Config, monkeypatch: pytest.MonkeyPatch, memory: int | None) -> Config:
    monkeypatch.setattr(gpus, "present_gpus", lambda: (Gpu(0, "GPU-a", memory),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return check_memory(config, critic=True)


def test_training_checks_the_memory_of_its_gpus(paths: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"alone take .* GiB, of 24\.0 GiB a GPU"):
        checked(load_config([paths["7B"]]), monkeypatch, 24 * GIB)


@pytest.mark.parametrize(
    ("keys", "memory"),
    [
        (["trainer.memory_check=False"], 24 * GIB),
        (["trainer.device=cpu"], 24 * GIB),
        (["trainer.val_only=True"], 24 * GIB),
        (["actor_rollout_ref.model.path=embedded"], GIB // 1024),
        (["actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.engine_kwargs={quantization: fp8}"], GIB),
        (["trainer.n_gpus_per_node=8", "trainer.pools.ref=4"], GIB),
        ([], None),  # no GPU, or one whose memory is unknown
    ],
)
def test_no_check_where_the_plan_does_not_count(
    paths: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    keys: list[str],
    memory: int | None,
) -> None:
    config = load_config([paths["7B"], *keys])
    assert checked(config, monkeypatch, memory) is config and not caplog.messages


@pytest.mark.parametrize("fields", [{"model_type": "mixtral"}, {"model_type": "qwen2"}])
def test_a_model_that_cannot_be_counted_is_not_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fields: dict[str, Any]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    config = load_config([f"actor_rollout_ref.model.path='{tmp_path}'"])
    assert checked(config, monkeypatch, GIB) is config and not caplog.messages


def test_the_verdict_names_the_gpu_and_keys_with_which_it_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = written(tmp_path / "model", {**SMALL, **SMALL_SHAPES["0.5B"]})
    keys = [f"actor_rollout_ref.model.path={folder}", ONE_GPU, *WHOLE, "actor_rollout_ref.rollout.n=2"]
    assert cli.main(["plan", *keys]) == 0
    assert "yes: at most " in (said := capsys.readouterr().out)
    assert "of 80 GiB (assumed; --gpu_memory says otherwise)" in said
    assert cli.main(["plan", *keys, "--gpu_memory", "16"]) == 0
    said = capsys.readouterr().out
    # 18 bytes a parameter 8.28 GiB, head 3.76, activations 16,384 × (24 × 896 + 13,568) × 2 bytes = 1.07, context 2
    assert "of 16 GiB; it fits with actor_rollout_ref.model.enable_gradient_checkpointing=True (15.1 GiB)" in said
    one_sample = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
    ways = {"9": "trainer.n_gpus_per_node=8 (8.2 GiB) or actor_rollout_ref.model.lora_rank=16 (7.5 GiB)"}
    for gpu, way in {**ways, "2.5": "a smaller model, or more machines"}.items():
        assert cli.main(["plan", *keys, one_sample, "--gpu_memory", gpu]) == 0
        assert f"of {float(gpu):.0f} GiB; it fits with {way}" in capsys.readouterr().out


def test_servers_elsewhere_hold_weights_and_cache_on_their_own_gpus(paths: dict[str, str]) -> None:
    keys = [paths["7B"], "trainer.n_gpus_per_node=8", "actor_rollout_ref.rollout.name=sglang"]
    elsewhere = held(load_config([*keys, "actor_rollout_ref.rollout.server.urls=[http://10.0.0.1:30000]"]), 80 * GIB)
    here = held(load_config(keys), 80 * GIB)
    assert {CACHE, "rollout engine's weights"} <= here.phases[GENERATION].keys()
    assert CACHE not in elsewhere.phases[GENERATION] and not elsewhere.phases[GENERATION]["rollout engine's weights"]
    assert elsewhere.cache is not None and elsewhere.cache.whole_sequences > 0
