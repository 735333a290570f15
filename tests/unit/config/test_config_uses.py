"""A key that the user set and the run has no use for is named, with the switch that would give it one."""

import dataclasses
from pathlib import Path

import pytest
import torch

from rloom.algos.estimators import AdvantageSettings
from rloom.algos.needs import ESTIMATORS, LOSSES
from rloom.algos.policy_losses import LossSettings, LossTerms
from rloom.algos.registry import ALGORITHMS, POLICY_LOSSES
from rloom.config.checks import check, check_and_warn, notices_on_a_cpu
from rloom.config.derived import declared_needs
from rloom.config.effects import WithoutEffect, rules, without_effect
from rloom.config.given_keys import default_tree, put
from rloom.config.keys import all_keys
from rloom.config.load import validate
from rloom.errors import ConfigError
from rloom.launch.build import resolved_needs
from tests.algos_samples import MIXED
from tests.helpers import configured

ALGORITHM, ACTOR, ROLLOUT = "algorithm", "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
REF, MODEL = "actor_rollout_ref.ref", "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
RLOO = f"{ALGORITHM}.adv_estimator=rloo {ROLLOUT}.n=2"
FILES = "data.train_files=a.parquet"  # of the user's own: without data.val_files no validation
TWO = "trainer.n_gpus_per_node=2"
STEP = f"{ACTOR}.ppo_mini_batch_size=1024"  # one update a step


def found_in(text: str) -> WithoutEffect:
    config = configured(*text.split())
    return without_effect(config, declared_needs(config))


# what is set, what is said of it. The last word of the first is the key without effect.
ERRORS = {
    f"{ACTOR}.kl_loss_coef=0.01": f"set {ACTOR}.use_kl_loss=True",
    f"{ACTOR}.kl_loss_type=kl": f"set {ACTOR}.use_kl_loss=True",
    f"{ALGORITHM}.kl_penalty=abs": f"set {ALGORITHM}.use_kl_in_reward=True",
    f"{ALGORITHM}.kl_ctrl.target_kl=0.2": f"set {ALGORITHM}.kl_ctrl.type=adaptive",
    f"{ALGORITHM}.kl_ctrl.horizon=9": f"set {ALGORITHM}.kl_ctrl.type=adaptive",
    f"{RLOO} {ALGORITHM}.gamma=0.9": f"{ALGORITHM}.adv_estimator=rloo does not discount",
    f"{RLOO} {ALGORITHM}.norm_adv_by_std_in_grpo=False": "grpo and grpo_passk do",
    f"{ACTOR}.policy_loss.tau_pos=2.0": "loss_mode=vanilla does not read it; sapo does",
    f"{ACTOR}.policy_loss.clip_cov_lb=2.0": "loss_mode=vanilla does not read it; clip_cov does",
    f"{ACTOR}.policy_loss.ppo_kl_coef=1.0": "loss_mode=vanilla does not read it; kl_cov does",
    f"{ALGORITHM}.filter_groups.max_num_gen_batches=3": f"set {ALGORITHM}.filter_groups.enable=True",
    "reward_model.overlong_buffer.len=64": "set reward_model.overlong_buffer.enable=True",
    f"{CORRECTION}.rollout_is_threshold=3": f"set {CORRECTION}.rollout_is=token or sequence",
    f"{CORRECTION}.rollout_rs_threshold=3": f"set {CORRECTION}.rollout_rs=token, sequence or geometric",
    f"{MODEL}.lora_alpha=32": f"set {MODEL}.lora_rank",
    f"{MODEL}.target_modules=q_proj": f"set {MODEL}.lora_rank",
    f"{ACTOR}.optim.min_lr_ratio=0.1": "lr_scheduler_type=constant keeps the learning rate; use cosine or linear",
    f"{ROLLOUT}.val_kwargs.temperature=1": f"set {ROLLOUT}.val_kwargs.do_sample=True",
    f"{ROLLOUT}.val_kwargs.top_p=0.7": f"set {ROLLOUT}.val_kwargs.do_sample=True",
    "custom_reward_function.name=mine": "set custom_reward_function.path=FILE",
    "trainer.n_gpus_per_node=4 trainer.pools.ref=1": "would be idle",
    f"{RLOO} trainer.n_gpus_per_node=4 trainer.pools.critic=1": "trains no critic",
}
# The same where the user set the switch himself.
SWITCHED = {
    f"{ACTOR}.use_kl_loss=False {ACTOR}.kl_loss_coef=0.01": f"set {ACTOR}.use_kl_loss=True",
    f"{ALGORITHM}.use_kl_in_reward=False {ALGORITHM}.kl_ctrl.kl_coef=0.01": "there is no KL in the reward",
    f"{ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.policy_loss.kl_cov_ratio=0.1": "loss_mode=sapo does not read it",
    f"{ALGORITHM}.filter_groups.enable=False {ALGORITHM}.filter_groups.max_num_gen_batches=3": "not filtered",
    f"{MODEL}.lora_rank=0 {MODEL}.lora_alpha=32": "all weights are trained",
}
NOTICES = {
    **SWITCHED,
    f"{RLOO} critic.optim.lr=1e-2": f"{ALGORITHM}.adv_estimator=rloo trains no critic; gae does",
    f"{RLOO} critic.model.path=Qwen/NoSuch": "trains no critic",
    f"{RLOO} {ALGORITHM}.lam=0.9": "gae does",
    f"{ALGORITHM}.use_kl_in_reward=False {REF}.fsdp_config.param_offload=True": "kl_metric=True builds one",
    f"{ACTOR}.use_kl_loss=True {ALGORITHM}.kl_metric=True": "there is a KL in the reward or in the loss",
    f"{ACTOR}.use_kl_loss=True {MODEL}.lora_rank=8 {REF}.log_prob_micro_batch_size_per_gpu=4": "no reference model",
    f"{ACTOR}.policy_loss.loss_mode=gpg {ACTOR}.clip_ratio=0.1": "loss_mode=gpg does not clip; vanilla does",
    f"{ACTOR}.policy_loss.loss_mode=gspo {ACTOR}.clip_ratio_c=5": "loss_mode=gspo has no dual clip",
    f"{ACTOR}.clip_ratio_low=0.2 {ACTOR}.clip_ratio_high=0.28 {ACTOR}.clip_ratio=0.1": "both set",
    f"{ROLLOUT}.name=hf {ROLLOUT}.gpu_memory_utilization=0.3": f"{ROLLOUT}.name=native does",
    f"{ROLLOUT}.name=hf {ROLLOUT}.enforce_eager=True": f"{ROLLOUT}.name=native does",
    f"{STEP} {ROLLOUT}.log_prob_micro_batch_size_per_gpu=8": "needs no old log-probs",
    f"{FILES} {ROLLOUT}.val_kwargs.n=1": "set data.val_files",
    f"{FILES} data.val_batch_size=8": "set data.val_files",
    "data.filter_overlong_prompts=True data.truncation=left": "drops the prompts",
    f"{ACTOR}.optim.lr_warmup_steps=3 {ACTOR}.optim.lr_warmup_steps_ratio=0.1": "overrides it with a number of steps",
    f"{ACTOR}.use_dynamic_bsz=True {ACTOR}.ppo_micro_batch_size_per_gpu=4": f"{ACTOR}.use_dynamic_bsz=True fills",
    f"{ACTOR}.ppo_micro_batch_size_per_gpu=4 {ACTOR}.ppo_max_token_len_per_gpu=9999": "use_dynamic_bsz=True would",
    "trainer.device=cpu actor_rollout_ref.actor.fsdp_config.param_offload=True": "only runs on a GPU use it",
    "trainer.total_training_steps=5 trainer.total_epochs=3": "trainer.total_training_steps=5 sets the length",
    "trainer.default_local_dir=d trainer.experiment_name=e": "trainer.logger=wandb would",
    f"{ROLLOUT}.calculate_log_probs=False trainer.rollout_mismatch_warning=0.1": "compares no log-probs",
    "trainer.master_addr=10.0.0.1": "trainer.nnodes above 1 does",
    "trainer.max_restarts=1": "one worker is in the process of the loop",
    "ray_kwargs.ray_init={num_cpus:4}": "one machine needs no Ray",
    f"{MODEL}.lora_adapter_path=a {MODEL}.lora_rank=8": "defines it",
    f"{RLOO} {MODEL}.use_remove_padding=False {ACTOR}.use_prefix_grouper=True": "each sample computes its own prompt",
    f"{RLOO} {TWO} {ACTOR}.strategy=megatron {ACTOR}.use_prefix_grouper=True": "ranks share each sequence or divide",
    f"{RLOO} {TWO} {ACTOR}.ulysses_sequence_parallel_size=2 {ACTOR}.use_prefix_grouper=True": "ranks share each",
    f"{RLOO} {ACTOR}.router_replay.mode=R3 {ACTOR}.use_prefix_grouper=True": "the rollout's experts are replayed",
}


@pytest.mark.parametrize("text", ERRORS)
def test_a_key_that_must_change_the_result_and_does_not_is_an_error(text: str) -> None:
    key, found = text.split()[-1].split("=")[0], found_in(text)
    assert [line for line in found.errors if line.startswith(f"{key}=") and ERRORS[text] in line]
    assert not found.notices
    with pytest.raises(ConfigError, match="no effect in this run, because "):
        check(configured(*text.split()), declared_needs(configured(*text.split())))


@pytest.mark.parametrize("text", NOTICES)
def test_a_key_without_effect_that_no_result_hangs_on_is_a_notice(text: str) -> None:
    key, found = text.split()[-1].split("=")[0], found_in(text)
    assert found.errors == []
    [notice] = found.notices
    assert notice.startswith(f"{key}=") and NOTICES[text] in notice


@pytest.mark.parametrize(
    "text",
    [
        f"{ACTOR}.use_kl_loss=True {ACTOR}.kl_loss_coef=0.01 {ACTOR}.kl_loss_type=kl",
        f"{ACTOR}.use_kl_loss=True {REF}.fsdp_config.param_offload=True",
        f"{ALGORITHM}.kl_ctrl.kl_coef=0.01 {ALGORITHM}.kl_penalty=abs {REF}.log_prob_micro_batch_size_per_gpu=4",
        f"{ALGORITHM}.kl_ctrl.type=adaptive {ALGORITHM}.kl_ctrl.target_kl=0.2",
        f"critic.optim.lr=1e-2 {ALGORITHM}.gamma=0.9 {ALGORITHM}.lam=0.9",
        f"{ACTOR}.policy_loss.loss_mode=sapo {ACTOR}.policy_loss.tau_pos=2.0",
        f"{ROLLOUT}.gpu_memory_utilization=0.3 {ROLLOUT}.enforce_eager=True",
        f"{ROLLOUT}.val_kwargs.do_sample=True {ROLLOUT}.val_kwargs.temperature=1.0",
        f"{MODEL}.lora_rank=8 {MODEL}.lora_alpha=32",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=8",
        "trainer.n_gpus_per_node=2 trainer.max_restarts=1 trainer.balance_batch=False",
    ],
)
def test_what_has_a_use_is_passed_over_in_silence(text: str) -> None:
    assert found_in(text) == WithoutEffect()


@pytest.mark.parametrize(
    "text",
    [
        # scripts that set every key write 0 where they want none of a thing
        f"{RLOO} {ALGORITHM}.use_kl_in_reward=False {ALGORITHM}.kl_ctrl.kl_coef=0.0 {ACTOR}.kl_loss_coef=0.0",
        f"{RLOO} {ALGORITHM}.gamma=1.0",
        f"{RLOO} critic.enable=False",
        "data.filter_overlong_prompts=True data.truncation=error",
    ],
)
def test_a_value_that_asks_for_nothing_is_not_named(text: str) -> None:
    assert found_in(text) == WithoutEffect()


def test_keys_that_one_switch_leaves_without_use_share_a_line() -> None:
    found = found_in(f"{RLOO} critic.optim.lr=0.01 critic.model.path=a critic.ppo_epochs=2")
    assert found.notices == [
        "critic.model.path=a, critic.optim.lr=0.01, critic.ppo_epochs=2: no effect in this run, because "
        f"{ALGORITHM}.adv_estimator=rloo trains no critic; gae does"
    ]


def test_defaults_and_presets_are_not_the_users_keys() -> None:
    tree = default_tree()
    put(tree, f"{ALGORITHM}.adv_estimator", "rloo")
    put(tree, "critic.optim.lr", 0.5)
    config = validate(tree)
    assert without_effect(config, declared_needs(config)) == WithoutEffect()


def test_an_algorithm_of_the_users_own_is_asked_once_its_file_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from rloom.algos.registry import ALGORITHMS, Algorithm\n"
        "undiscounted = Algorithm(ALGORITHMS['rloo'].advantage, min_group=2, reads=frozenset())\n"
        "plain = ALGORITHMS['rloo'].advantage\n"
    )
    found = {}
    for name in ("undiscounted", "plain"):
        keys = (f"algorithm.adv_estimator={tmp_path}/mine.py:{name}", f"{ROLLOUT}.n=2", "algorithm.gamma=0.9")
        config = configured(*keys)
        assert without_effect(config, declared_needs(config)) == WithoutEffect()
        found[name] = without_effect(config, resolved_needs(config)).errors
    assert found["undiscounted"][0].startswith("algorithm.gamma=0.9: no effect in this run")
    assert found["plain"] == []  # which says nothing of what it reads


def test_what_only_a_gpu_uses_is_said_once_the_device_is_known() -> None:
    config = configured(f"{ROLLOUT}.gpu_memory_utilization=0.3", *RLOO.split(), "critic.optim.lr=1e-2")
    needs = declared_needs(config)
    assert len(without_effect(config, needs).notices) == 1  # the critic's
    [notice] = notices_on_a_cpu(config, needs)
    assert notice.startswith(f"{ROLLOUT}.gpu_memory_utilization=0.3: ") and "on a CPU" in notice


def test_the_table_names_real_keys_only() -> None:
    keys = all_keys()
    named = {
        name for rule in rules() for name in (*rule.keys, *rule.apart_from, *([rule.switch] if rule.switch else []))
    }
    assert sorted(named - keys.keys()) == []


class Watched:
    """Settings that remember which of them were read."""

    def __init__(self, settings: AdvantageSettings | LossSettings) -> None:
        self.settings, self.read = settings, set[str]()

    def __getattr__(self, name: str) -> object:
        self.read.add(name)
        return getattr(self.settings, name)


KEY_OF = {"norm_by_std": "norm_adv_by_std_in_grpo", "clip_low": "clip_ratio", "clip_high": "clip_ratio"} | {
    "clip_dual": "clip_ratio_c"
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_estimator_reads_the_settings_that_it_declares(name: str) -> None:
    watched = Watched(AdvantageSettings())
    inputs = dataclasses.replace(MIXED.inputs(), greedy_N=torch.zeros(len(MIXED.batch)))
    ALGORITHMS[name].advantage(inputs, watched)  # type: ignore[arg-type]
    assert {KEY_OF.get(read, read) for read in watched.read} == ESTIMATORS[name].reads == ALGORITHMS[name].reads


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_a_loss_reads_the_settings_that_it_declares(name: str) -> None:
    watched, entry, batch = Watched(LossSettings()), POLICY_LOSSES[name], MIXED.train_batch()
    chosen_T = entry.choose(batch, watched) if entry.choose is not None else None  # type: ignore[arg-type]
    logprobs_T = batch.old_logprobs_T
    assert logprobs_T is not None
    terms = LossTerms(
        logprobs_T, logprobs_T, batch.advantages_T, batch.loss_mask_T, batch.sample_T, len(batch), chosen_T
    )
    entry.loss(terms, watched)  # type: ignore[arg-type]
    assert {KEY_OF.get(read, read) for read in watched.read} == LOSSES[name].reads == entry.reads


def test_a_kl_loss_without_a_mean_gradient_is_noted(caplog: pytest.LogCaptureFixture) -> None:
    for kind, noted in {"kl": True, "k1": True, "kl+": False, "low_var_kl": False}.items():
        config = configured(f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type={kind}")
        caplog.clear()
        check_and_warn(config, declared_needs(config))
        found = f"kl_loss_type={kind}: as a loss the gradient of this estimator has mean 0" in caplog.text
        assert (found, "use low_var_kl, or kl+" in caplog.text) == (noted, noted)
