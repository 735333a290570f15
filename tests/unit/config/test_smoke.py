"""RLOOM_SMOKE=1: which keys change, that the result passes the same checks, and that nothing changes without it."""

import random
from importlib.metadata import PackageNotFoundError
from pathlib import Path
from typing import Any

import pytest
import yaml

from rloom.config.checks import check, check_and_warn
from rloom.config.derived import declared_needs
from rloom.config.frontends import smoke as smoke_module
from rloom.config.frontends.smoke import Available, description, replacements
from rloom.config.load import load_config, with_changes
from rloom.config.schema import Config
from rloom.errors import ConfigError
from rloom.launch import early_checks
from rloom.trainer import main_ppo
from tests.helpers import configured


def nothing(package: str) -> bool:
    return False


def everything(package: str) -> bool:
    return True


NOTHING = Available(gpus=0, installed=nothing, environment={})
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
DOCUMENT_003 = (
    "algorithm.adv_estimator=rloo",
    "data.train_files=train.parquet",
    "data.val_files=test.parquet",
    "data.train_batch_size=1024",
    "data.max_response_length=1024",
    "actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct",
    f"{ACTOR}.ppo_mini_batch_size=256",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=80",
    f"{ROLLOUT}.name=vllm",
    f"{ROLLOUT}.tensor_model_parallel_size=2",
    f"{ROLLOUT}.n=5",
    f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=160",
    'trainer.logger=["console","wandb"]',
    "trainer.n_gpus_per_node=8",
    "trainer.save_freq=-1",
    "trainer.test_freq=5",
    "trainer.total_epochs=15",
)


def changes(*overrides: str, available: Available = NOTHING) -> dict[str, Any]:
    return replacements(configured(*overrides), available)


def test_the_tokenizer_of_verls_file_follows_the_model(tmp_path: Path) -> None:
    """It is in each configuration that verl wrote, with a reward model and without one."""
    written = {"actor_rollout_ref": {"model": {"path": "R"}}, "reward_model": {"model": {"input_tokenizer": "R"}}}
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump({"defaults": ["ppo_trainer", "_self_"], **written}))
    config = load_config(config_path=str(tmp_path), config_name="verl")
    small = with_changes(config, replacements(config, NOTHING))
    check(small, declared_needs(small))
    assert small.reward_model.model.input_tokenizer is None


def smoke(*overrides: str, available: Available = NOTHING) -> Config:
    """Checked before and after."""
    config = configured(*overrides)
    check(config, declared_needs(config))
    small = with_changes(config, replacements(config, available))
    check(small, declared_needs(small))
    return small


def test_the_command_of_document_003_changes_in_these_keys() -> None:
    assert changes(*DOCUMENT_003) == {
        "actor_rollout_ref.model.path": "embedded",
        "data.train_files": "embedded",
        "data.train_max_samples": 64,
        "data.val_max_samples": 16,
        "data.val_files": "embedded",
        f"{ROLLOUT}.tensor_model_parallel_size": 1,
        f"{ROLLOUT}.name": "native",
        "trainer.total_training_steps": 2,
        "trainer.default_local_dir": "checkpoints/${trainer.project_name}/${trainer.experiment_name}/smoke",
        "trainer.resume_mode": "disable",
        "trainer.logger": ["console"],
        "trainer.test_freq": 2,
        "data.train_batch_size": 4,
        "data.max_prompt_length": 64,
        "data.max_response_length": 48,
        f"{ROLLOUT}.n": 4,
        "trainer.n_gpus_per_node": 2,
        "trainer.device": "cpu",
        f"{ACTOR}.ppo_mini_batch_size": 2,
        f"{ACTOR}.ppo_micro_batch_size_per_gpu": 8,
    }
    assert smoke(*DOCUMENT_003).workers == 2


def test_four_updates_become_two_and_one_stays_one() -> None:
    assert smoke("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=128").data.train_batch_size == 4
    assert changes("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=128")[f"{ACTOR}.ppo_mini_batch_size"] == 2
    one = smoke("data.train_batch_size=512", f"{ACTOR}.ppo_mini_batch_size=512", "critic.ppo_mini_batch_size=64")
    assert one.updates_once
    assert one.critic_updates == (2, 1)


def test_groups_keep_two_answers_or_more() -> None:
    for n in (2, 3, 5, 16):
        small = smoke("algorithm.adv_estimator=grpo", f"{ROLLOUT}.n={n}")
        assert small.actor_rollout_ref.rollout.n == {2: 2, 3: 2, 5: 4, 16: 4}[n]
    assert smoke("algorithm.adv_estimator=gae").actor_rollout_ref.rollout.n == 1


def test_valid_sizes_stay_valid_whatever_they_are() -> None:
    """20 random configurations, odd and prime numbers among them; those that are invalid as given are left out."""
    draws, tried = random.Random(0), 0
    while tried < 20:
        updates, mini, n = draws.choice([1, 2, 3, 7]), draws.choice([1, 2, 3, 5, 12, 64]), draws.choice([1, 2, 3, 6, 8])
        gpus, nodes = draws.choice([1, 2, 3, 4, 8]), draws.choice([1, 1, 2])
        divisors = [d for d in range(1, mini * n + 1) if mini * n % d == 0]
        micro = draws.choice(["_per_gpu", ""])
        config = configured(
            f"algorithm.adv_estimator={draws.choice(['gae', 'rloo'])}",
            f"data.train_batch_size={updates * mini}",
            f"data.max_response_length={draws.choice([1, 7, 512])}",
            f"{ACTOR}.ppo_mini_batch_size={mini}",
            f"{ACTOR}.ppo_micro_batch_size{micro}={draws.choice(divisors)}",
            f"{ACTOR}.ulysses_sequence_parallel_size={draws.choice([1, 1, 2, 3, 4])}",
            f"{ACTOR}.fsdp_config.fsdp_size={draws.choice([-1, 1, 2, 4])}",
            f"critic.ppo_max_token_len_per_gpu={draws.choice([600, 1024, 32768])}",
            f"{ROLLOUT}.n={n}",
            f"{ROLLOUT}.log_prob_micro_batch_size={draws.choice([1, 2, 3, 16])}",
            f"trainer.n_gpus_per_node={gpus}",
            f"trainer.nnodes={nodes}",
            "trainer.master_addr=10.0.0.1",
            *([f"trainer.pools.rollout={draws.choice([1, 2, [0], [0, 1]])}"] if draws.random() < 0.3 else []),
        )
        needs = declared_needs(config)
        try:
            check(config, needs)
        except ConfigError:
            continue
        tried += 1
        for visible in (0, 1):
            small = with_changes(config, replacements(config, Available(visible, installed=nothing, environment={})))
            check(small, needs)
            assert small.workers == (1 if visible else min(gpus * nodes, 2))
            assert small.updates_once == config.updates_once


def test_workers_fit_the_machine() -> None:
    eight = "trainer.n_gpus_per_node=8"
    assert smoke(eight, available=Available(gpus=1, installed=nothing, environment={})).workers == 1
    assert smoke(eight, available=Available(gpus=4, installed=nothing, environment={})).workers == 2
    assert smoke(eight, available=Available(gpus=0, installed=nothing, environment={})).workers == 2
    on_cpu = smoke(eight, "trainer.device=cpu", available=Available(gpus=1, installed=nothing, environment={}))
    assert on_cpu.workers == 2


def test_another_machine_of_several_becomes_the_only_one() -> None:
    small = smoke(
        "trainer.nnodes=4", "trainer.n_gpus_per_node=8", "trainer.node_rank=3", "trainer.master_addr=10.0.0.1"
    )
    trainer = small.trainer
    assert (trainer.nnodes, trainer.n_gpus_per_node, trainer.node_rank, trainer.master_addr) == (1, 2, 0, None)


def test_pools_keep_one_worker_of_their_own() -> None:
    pools = smoke("trainer.n_gpus_per_node=8", "trainer.pools.rollout=4", "trainer.pools.critic=2").trainer.pools
    assert pools.own == {"rollout": 1}
    alone = Available(gpus=1, installed=nothing, environment={})
    assert smoke("trainer.n_gpus_per_node=8", "trainer.pools.rollout=4", available=alone).trainer.pools.own == {}
    some = ("trainer.n_gpus_per_node=8", "trainer.pools.rollout=[4,5]", "trainer.pools.reward=[2,3]")
    reward = "reward_model.path=a"
    assert smoke(*some, reward).trainer.pools.by_role == {"rollout": [0], "reward": [1]}
    assert smoke(*some, reward, "trainer.pools.critic=1").trainer.pools.by_role == {
        "critic": 1,
        "rollout": [0],
        "reward": [0],
    }
    assert smoke(*some, reward, available=alone).trainer.pools.by_role == {}


def test_vllm_stays_where_it_is_installed_with_a_gpu() -> None:
    has_vllm = Available(gpus=2, installed=everything, environment={})
    keys = (f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.engine_kwargs={{max_logprobs: 2}}", "trainer.n_gpus_per_node=2")
    assert smoke(*keys, available=has_vllm).actor_rollout_ref.rollout.name == "vllm"
    native = smoke(*keys).actor_rollout_ref.rollout
    assert (native.name, native.engine_kwargs) == ("native", {})
    servers = smoke(f"{ROLLOUT}.name=sglang", f"{ROLLOUT}.server.urls=http://10.0.0.1:30000", available=has_vllm)
    assert (servers.actor_rollout_ref.rollout.name, servers.actor_rollout_ref.rollout.server.addresses) == (
        "native",
        (),
    )


def test_a_reward_model_becomes_the_embedded_one() -> None:
    for key in ("reward_model.path", "reward_model.model.path"):
        section = smoke("reward_model.enable=True", f"{key}=RLHFlow/ArmoRM-Llama3-8B-v0.1").reward_model
        assert section.model_path == "embedded"
    labels = smoke("reward_model.path=R", "reward_model.label_weights=[1, 2]", "reward_model.max_length=4096")
    assert (labels.reward_model.label_weights, labels.reward_model.max_length) == (None, None)


@pytest.mark.parametrize(
    ("provider", "variable"),
    [
        ("dashscope", "DASHSCOPE_HTTP_BASE_URL"),
        ("dashscope", "DASHSCOPE_BASE_URL"),
        ("openai", "OPENAI_BASE_URL"),
        ("gemini", "GOOGLE_GEMINI_BASE_URL"),
        ("claude", "ANTHROPIC_BASE_URL"),
    ],
)
def test_a_judge_stays_only_where_an_address_is_given(provider: str, variable: str) -> None:
    keys = ("reward_model.api.enable=True", f"reward_model.api.type={provider}", "reward_model.api.preset=math")
    without = smoke(*keys)
    assert not without.reward_model.api.enable
    local = Available(gpus=0, installed=nothing, environment={variable: "http://127.0.0.1:8000"})
    assert smoke(*keys, available=local).reward_model.api.enable
    assert smoke(*keys, "reward_model.api.base_url=http://127.0.0.1:8000/v1").reward_model.api.enable


def test_a_mix_keeps_the_parts_that_can_be_computed() -> None:
    mix = "reward_model.composite.enable=True"
    weights = "reward_model.composite.weights"
    judge = "reward_model.api.enable=True"
    two = smoke(mix, judge, f"{weights}={{api_score: 0.7, rule_score: 0.3}}")
    assert two.reward_model.composite.weights == {"rule_score": 0.3}
    one = smoke(mix, judge, f"{weights}={{rm_score: 1.0}}")
    assert one.reward_model.composite.weights == {"rule_score": 1.0}
    model = smoke(mix, "reward_model.path=R", f"{weights}={{rm_score: 0.7, rule_score: 0.3}}")
    assert model.reward_model.composite.weights == {"rm_score": 0.7, "rule_score": 0.3}


def test_reward_servers_and_functions() -> None:
    servers = smoke("reward_model.remote.urls=http://10.0.0.1:5000/get_reward", "reward_model.remote.batch_size=16")
    assert servers.reward_model.remote.addresses == ()
    assert smoke("custom_reward_function.path=mine.py").custom_reward_function.path == "mine.py"


def test_no_other_run_is_touched() -> None:
    trainer = smoke(
        "trainer.default_local_dir=runs/real",
        "trainer.rollout_data_dir=runs/answers",
        "trainer.resume_mode=resume_path",
        "trainer.resume_from_path=runs/real/global_step_5",
    ).trainer
    assert trainer.default_local_dir == "runs/real/smoke"
    assert trainer.rollout_data_dir == "runs/real/smoke/rollout_data"
    assert (trainer.resume_mode, trainer.resume_from_path) == ("disable", None)


def test_keys_of_another_model_and_other_files_get_their_defaults() -> None:
    small = smoke(
        "actor_rollout_ref.model.lora_adapter_path=adapter",
        "actor_rollout_ref.model.override_config={num_hidden_layers: 2}",
        "data.prompt_key=question",
        "data.label_key=label",
        "critic.model.path=Qwen/Qwen2-7B",
    )
    model = small.actor_rollout_ref.model
    assert (model.lora_adapter_path, model.lora_rank, model.override_config) == (None, 8, {})
    assert (small.data.prompt_key, small.data.label_key) == ("prompt", None)
    assert small.critic.model.path == "embedded"


def test_options_of_the_rules_are_for_the_given_data() -> None:
    options = ["custom_reward_function.reward_kwargs={method: flexible}"]
    assert smoke(*options).custom_reward_function.reward_kwargs == {}
    own = smoke(*options, "custom_reward_function.path=reward.py").custom_reward_function
    assert own.reward_kwargs == {"method": "flexible"}


def test_a_run_without_validation_gets_none() -> None:
    assert not smoke("data.train_files=train.parquet").validates
    assert smoke("data.train_files=train.parquet", "data.val_files=test.parquet").validates


def test_nothing_changes_without_the_variable(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["data.train_files=train.parquet", "trainer.n_gpus_per_node=8"]
    for value in (None, "", "0"):
        monkeypatch.delenv("RLOOM_SMOKE", raising=False) if value is None else monkeypatch.setenv("RLOOM_SMOKE", value)
        config = load_config(overrides)
        assert (config.data.train_files, config.workers, config.trainer.total_training_steps) == (
            "train.parquet",
            8,
            None,
        )
    assert capsys.readouterr().out == ""


def test_the_block_names_each_key_with_both_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    config = load_config(["actor_rollout_ref.model.path=Qwen/Qwen2-7B", "trainer.total_epochs=3", "trainer.device=cpu"])
    assert config.actor_rollout_ref.model.path == "embedded"
    assert not config.is_given("trainer.total_epochs")  # it would be reported as without effect
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "RLOOM_SMOKE=1: two steps with a tiny model and data"
    assert "  actor_rollout_ref.model.path: Qwen/Qwen2-7B -> embedded" in lines
    assert "  trainer.total_training_steps: null -> 2" in lines


def test_a_replaced_judge_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    load_config(["reward_model.api.enable=True", "reward_model.api.type=openai", "reward_model.api.model=gpt-4o"])
    lines = [line for line in capsys.readouterr().out.splitlines() if "reward_model.api" in line]
    assert lines == [
        "  reward_model.api.enable: True -> False (other parts or rules score the answers; a judge of your own is "
        "called at OPENAI_BASE_URL)"
    ]
    monkeypatch.setenv("RLOOM_LANGUAGE", "zh")
    load_config(["reward_model.api.enable=True", "reward_model.api.type=openai", "reward_model.api.model=gpt-4o"])
    assert "(由其他分项或规则给回答打分；自己的评分服务在 OPENAI_BASE_URL 被调用)" in capsys.readouterr().out


def test_a_fault_of_the_command_is_reported_as_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    with pytest.raises(ConfigError, match=r"ppo_mini_batch_size=100 \(prompts\) does not divide"):
        load_config(["data.train_batch_size=1024", f"{ACTOR}.ppo_mini_batch_size=100"])
    with pytest.raises(ConfigError, match="use 2 or more"):
        load_config(["algorithm.adv_estimator=rloo", "data.train_files=x.parquet", f"{ROLLOUT}.n=1"])


MEGATRON = [f"{ACTOR}.strategy=megatron", "critic.strategy=megatron", "trainer.n_gpus_per_node=8"]


@pytest.mark.parametrize(
    ("given", "gpus", "sizes"),  # tensor and pipeline parallel sizes
    [
        ((4, 2), 0, (2, 1)),
        ((8, 1), 0, (2, 1)),
        ((1, 8), 2, (1, 2)),
        ((1, 1), 0, (1, 1)),
        ((4, 2), 1, (1, 1)),
    ],
)
def test_megatron_divides_the_tiny_model_over_the_workers_that_remain(
    given: tuple[int, int], gpus: int, sizes: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    tensor, pipeline = given
    keys = [f"{ACTOR}.megatron.tensor_model_parallel_size={tensor}"]
    keys += [f"{ACTOR}.megatron_config.pipeline_model_parallel_size={pipeline}"]
    keys += [f"{ACTOR}.ppo_micro_batch_size=8", "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=null"]
    keys += ["+critic.megatron.override_transformer_config.recompute_granularity=selective"]
    config = load_config([*MEGATRON, *keys])
    smaller = with_changes(config, replacements(config, Available(gpus, nothing, {})))
    check_and_warn(smaller, declared_needs(smaller))
    workers = 1 if gpus == 1 else 2
    notice = (
        "strategy=megatron, critic.strategy=megatron: one worker holds the whole model, so megatron-core is not used"
    )
    assert smaller.workers == workers and (notice in caplog.text) == (workers == 1)
    for role in (smaller.actor_rollout_ref.actor, smaller.critic):
        assert role.strategy == "megatron"
        found = role.megatron
        assert (found.tensor_model_parallel_size, found.pipeline_model_parallel_size) == sizes
        assert found.override_transformer_config == {}
    # all micro-batches together have a multiple of the groups of workers that hold a model
    size, model_ranks = smaller.actor_rollout_ref.actor.ppo_micro_batch_size, sizes[0] * sizes[1]
    assert size is not None and size % (workers // model_ranks) == 0


def test_megatron_is_not_dropped_without_its_package(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def absent(package: str) -> str:
        if package == "megatron-core":
            raise PackageNotFoundError(package)
        return "1"

    monkeypatch.setattr(early_checks, "version", absent)
    monkeypatch.setattr(smoke_module, "find_spec", lambda name: None)
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    assert main_ppo.main([*MEGATRON, f"{ACTOR}.megatron.tensor_model_parallel_size=4"]) == 2
    printed = capsys.readouterr()
    assert "trainer.n_gpus_per_node: 8 -> 2\n" in printed.out
    [line] = printed.err.strip().splitlines()  # neither torch nor Ray is announced
    needed = "strategy=megatron with several workers needs megatron-core, not installed here; install: "
    assert line.startswith(f"rloom: configuration error: {needed}")
    assert "-m pip install --constraint" in line and "[megatron]" in line


def test_the_list_says_why_there_is_one_process_and_another_engine() -> None:
    config = configured("trainer.n_gpus_per_node=8", f"{ROLLOUT}.name=vllm")
    for available, workers, engine in (
        (Available(0, everything, {}), "", "vllm needs a GPU"),
        (Available(1, nothing, {}), " (one GPU is visible: one process holds the whole model)", None),
        (Available(0, nothing, {}), "", "vllm is not installed"),
    ):
        lines = description(config, replacements(config, available), available).splitlines()
        assert f"  trainer.n_gpus_per_node: 8 -> {1 if workers else 2}{workers}" in lines
        assert f"  {ROLLOUT}.name: vllm -> native ({engine or 'vllm is not installed'})" in lines


def test_the_tiny_model_has_no_experts() -> None:
    keys = [f"{ACTOR}.megatron.expert_model_parallel_size=4", f"{ACTOR}.megatron.expert_tensor_parallel_size=1"]
    keys += [f"{ACTOR}.router_replay.mode=R3", f"{ROLLOUT}.enable_rollout_routing_replay=True"]
    config = load_config([*MEGATRON, *keys])
    assert config.replays_routing
    smaller = with_changes(config, replacements(config, Available(0, nothing, {})))
    assert not smaller.replays_routing
    assert smaller.critic.megatron.expert_model_parallel_size == 1
    assert smaller.actor_rollout_ref.actor.megatron.expert_tensor_parallel_size is None


def test_other_keys_that_are_refused_stay_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    with pytest.raises(ConfigError, match="other reward managers are not in this version"):
        load_config(["reward_model.reward_manager=rate_limited"])


def test_a_learning_rate_for_a_large_model_is_not_called_unusual(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = ["actor_rollout_ref.actor.optim.lr=1e-6"]
    config = load_config(keys)
    assert ["lr=1e-06 is 200 times lower" in notice for notice in check(config, declared_needs(config))] == [True]
    monkeypatch.setenv("RLOOM_SMOKE", "1")
    config = load_config(keys)
    assert check(config, declared_needs(config)) == []


def test_other_values_of_the_variable_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLOOM_SMOKE", "yes")
    with pytest.raises(ConfigError, match="RLOOM_SMOKE=yes: use 1"):
        load_config([])


SERVED_KIND = """
from rloom.rewards.kinds import RewardKind, ServerTraits

KIND = RewardKind(
    parts=("own_score",),
    build=lambda config: None,
    server=ServerTraits(lambda config, environment: "OWN_SERVER" not in environment, lambda config: "rules"),
)
"""


def test_the_server_of_a_users_kind_is_not_called(tmp_path: Path) -> None:
    file = tmp_path / "served_kind.py"
    file.write_text(SERVED_KIND)
    key = f"reward_model.kinds=['{file}:KIND']"
    assert smoke(key).reward_model.kinds == []
    here = Available(gpus=0, installed=nothing, environment={"OWN_SERVER": "http://127.0.0.1:1"})
    assert smoke(key, available=here).reward_model.kinds == [f"{file}:KIND"]
    mix = (
        key,
        "reward_model.composite.enable=True",
        "+reward_model.composite.weights={rule_score: 0.5, own_score: 0.5}",
    )
    assert {**smoke(*mix).reward_model.composite.weights} == {"rule_score": 0.5}
