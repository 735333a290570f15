"""Keys of verl that rloom's tree does not have: accepted in silence, with a notice, or refused with the way out."""

from pathlib import Path

import pytest
import yaml

from rloom.config.checks import check
from rloom.config.derived import declared_needs
from rloom.config.keys import all_keys
from rloom.config.load import load_config
from rloom.config.schema import Config
from rloom.config.verl_keys import verl_keys
from rloom.data.chat import render_chat
from rloom.errors import ConfigError
from rloom.launch.model_sources import policy_tokenizer

ACTOR, MODEL, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
WITH_DEFAULT = {"data.seed", "algorithm.filter_groups.metric"}  # keys of rloom, of which one value is verl's


def noticed(*keys: str) -> list[str]:
    config = load_config([f"+{key}" for key in keys])
    return check(config, declared_needs(config))


def refusal(*keys: str) -> str:
    with pytest.raises(ConfigError) as caught:
        noticed(*keys)
    return str(caught.value)


def test_no_row_hides_a_key_of_rloom() -> None:
    assert set(verl_keys()) & set(all_keys(Config)) == WITH_DEFAULT


def test_values_that_name_what_rloom_does_are_accepted_in_silence() -> None:
    keys = [f"{ROLLOUT}.enable_chunked_prefill=True", f"{ROLLOUT}.load_format=safetensors"]
    keys += [f"{ROLLOUT}.quantization=null", f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=bf16"]
    keys += [f"{MODEL}.mtp.enable=False", f"{MODEL}.mtp.num_speculative_tokens=1", "data.seed=null"]
    keys += [f"{ACTOR}.profiler.ranks=[0]", "reward_model.sandbox_fusion.url=null", "data.sampler.class_path=null"]
    keys += [f"{ROLLOUT}.n=2", f"{ACTOR}.rollout_n=2", "data.max_response_length=40", f"{ROLLOUT}.response_length=40"]
    keys += [f"{MODEL}.tokenizer_path=embedded", "critic.model.tokenizer_path=embedded", "global_profiler.tool=null"]
    keys += [f"{ROLLOUT}.max_model_len=null"]
    assert noticed(*keys) == []
    assert load_config(["data.seed=null"]).data.seed == 1


def test_other_values_that_change_no_result_are_noticed_with_the_reason() -> None:
    assert noticed(
        f"{ROLLOUT}.enable_chunked_prefill=False",
        f"{ACTOR}.profiler.enable=True",
        "actor_rollout_ref.nccl_timeout=1800",
        f"{ACTOR}.fsdp_config.seed=7",
        "critic.model.fsdp_config.seed=8",
    ) == [
        f"{ACTOR}.fsdp_config.seed=7, critic.model.fsdp_config.seed=8: no effect in rloom, because training has no "
        "dropout and draws no random numbers",
        f"{ACTOR}.profiler: no effect in rloom, because a profiler changes no result",
        f"{ROLLOUT}.enable_chunked_prefill=False: no effect in rloom, because each engine decides how it computes "
        "prompts; engine_kwargs has vLLM's own arguments",
        "actor_rollout_ref.nccl_timeout=1800: no effect in rloom, because a lost worker is noticed at once, and "
        "collectives end with an error after 30 minutes",
    ]


@pytest.mark.parametrize(
    ("key", "what"),
    [
        (f"{ROLLOUT}.quantization=fp8", "quantization='fp8': generating with quantised weights is not in this version"),
        (f"{MODEL}.mtp.enable=True", "multi-token prediction is not in this version of rloom; remove the section"),
        (f"{ACTOR}.fsdp_config.mixed_precision.param_dtype=fp16", "use fsdp_config.dtype, that of the passes"),
        (f"{ACTOR}.optim.optimizer_impl=torchao.optim", "another optimizer than AdamW is not in this version"),
        (f"{ACTOR}.optim.override_optimizer_config.eps=1e-3", "other settings of the optimizer are not in this"),
        (f"{ACTOR}.rollout_n=2", "rollout_n=2: another number of answers than actor_rollout_ref.rollout.n is not in"),
        (f"{ROLLOUT}.prompt_length=7", "another length than data.max_prompt_length is not in this version of rloom"),
        ("reward_model.reward_kwargs.max_resp_len=7", "another length than data.max_response_length is not in this"),
        ("reward_model.sandbox_fusion.url=http://a", "programs run in a sandbox on the workers, reward_model.sandbox"),
    ],
)
def test_values_that_would_change_a_result_are_refused(key: str, what: str) -> None:
    assert what in refusal(key)


def test_keys_with_another_name_have_their_effect() -> None:
    lengths = ["data.max_response_length=512", "reward_model.reward_kwargs.max_resp_len=512"]
    buffer = [f"reward_model.reward_kwargs.overlong_buffer_cfg.{key}" for key in ("enable=True", "len=64", "log=False")]
    adapter = [f"{MODEL}.lora.rank=8", f"{MODEL}.lora.alpha=32", f"{MODEL}.lora.lora_A_init_method=kaiming"]
    others = [f"{ACTOR}.tau_pos=2.0", f"{ROLLOUT}.max_model_len=600"]
    config = load_config([f"+{key}" for key in (*lengths, *buffer, *adapter, *others)])
    assert config.data.max_length == 600
    overlong, model = config.reward_model.overlong_buffer, config.actor_rollout_ref.model
    assert (overlong.enable, overlong.len, model.lora_rank, model.lora_alpha) == (True, 64, 8, 32)
    assert config.actor_rollout_ref.actor.policy_loss.tau_pos == 2.0


def test_a_file_may_have_a_key_under_two_names_with_one_value(tmp_path: Path) -> None:
    tree = {"reward_model": {"reward_manager": "dapo"}, "reward_manager": {"name": "dapo", "source": "register"}}
    for written in (tree, {**tree, "reward_manager": {"name": "batch"}}):
        (tmp_path / "saved.yaml").write_text(yaml.safe_dump({"defaults": ["ppo_trainer", "_self_"], **written}))
        if written is tree:
            found = load_config(config_path=str(tmp_path), config_name="saved")
            assert found.reward_model.reward_manager == "dapo"
    with pytest.raises(ConfigError, match="written twice, in two spellings"):
        load_config(config_path=str(tmp_path), config_name="saved")


def test_dapos_rounds_have_prompts_of_their_own_number() -> None:
    filters = ["algorithm.filter_groups.enable=True", "algorithm.filter_groups.metric=acc", f"{ROLLOUT}.n=4"]
    config = load_config([*filters, "algorithm.adv_estimator=grpo", "data.gen_batch_size=96"])
    assert (config.data.train_batch_size, config.prompts_per_round) == (64, 96)
    assert load_config(filters).prompts_per_round == 64
    assert "a step generates data.train_batch_size prompts" in refusal("data.gen_batch_size=96")
    assert "use score, which has none, or acc" in refusal(*filters, "algorithm.filter_groups.metric=seq_reward")


def test_the_defaults_of_a_file_that_verl_wrote_are_not_given(tmp_path: Path) -> None:
    """Sections of verl have the name of their class; Megatron's defaults of LoRA are written beside those of FSDP."""
    actor = {"_target_": "verl.workers.config.FSDPActorConfig", "kl_loss_coef": 0.001, "clip_ratio": 0.3}
    model = {"_target_": "verl.workers.config.HFModelConfig", "lora_alpha": 16, "lora": {"rank": 0, "alpha": 32}}
    written = {"actor_rollout_ref": {"actor": actor, "model": model}, "trainer": {"save_freq": -1}}
    (tmp_path / "verl.yaml").write_text(yaml.safe_dump({"defaults": ["ppo_trainer", "_self_"], **written}))
    found = load_config(config_path=str(tmp_path), config_name="verl")
    keys = (f"{ACTOR}.clip_ratio", f"{MODEL}.lora_alpha", "trainer.save_freq")
    assert set(found.given) == set(keys)
    assert (found.actor_rollout_ref.actor.clip_ratio, found.actor_rollout_ref.model.lora_alpha) == (0.3, 32)


def test_variables_of_the_chat_template_reach_all_who_render() -> None:
    template = f"{MODEL}.custom_chat_template='{{{{ enable_thinking }}}} {{{{ messages[0].content }}}}'"
    tokenizer = policy_tokenizer(load_config(["+data.apply_chat_template_kwargs.enable_thinking=False", template]))
    assert render_chat([{"role": "user", "content": "7"}], tokenizer) == "False 7"


@pytest.mark.parametrize("folder", ["config", "./config"])
def test_verls_own_file_for_megatron_is_here_too(folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--config-path=config --config-name=ppo_megatron_trainer.yaml`, as verl's scripts have it."""
    monkeypatch.chdir(tmp_path)
    found = load_config(["data.seed=3"], config_path=folder, config_name="ppo_megatron_trainer.yaml")
    assert (found.actor_rollout_ref.actor.strategy, found.critic.strategy, found.data.seed) == ("megatron",) * 2 + (3,)
    assert load_config(config_path=folder).actor_rollout_ref.actor.strategy == "fsdp"
    (tmp_path / "config").mkdir()
    with pytest.raises(ConfigError, match=r"there is no such YAML file in .*/config"):
        load_config(config_path=folder, config_name="ppo_megatron_trainer")
