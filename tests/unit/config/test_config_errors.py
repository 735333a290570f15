"""What is wrong with a configuration: every error names the key, the value and the way out."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import pytest

from rloom.config.checks import check
from rloom.config.derived import declared_needs, nearest_divisors
from rloom.config.keys import nearest
from rloom.config.load import load_config
from rloom.errors import ConfigError
from rloom.launch.build import resolved_needs
from tests.helpers import configured

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
LISTED = "(`rloom config` lists them all)"
OWN_MODEL = "actor_rollout_ref.model.path=a/model"  # composed once; the embedded model is composed again for its preset
SIZES = ("data.train_batch_size=64", f"{ACTOR}.ppo_mini_batch_size=32", f"{ROLLOUT}.n=8")


def load_error(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config([OWN_MODEL, *overrides])
    return str(caught.value)


def check_error(*overrides: str, estimator: str = "gae") -> str:
    config = configured(OWN_MODEL, *SIZES, f"algorithm.adv_estimator={estimator}", *overrides)
    with pytest.raises(ConfigError) as caught:
        check(config, declared_needs(config))
    return str(caught.value)


def passes(*overrides: str, estimator: str = "gae") -> None:
    config = configured(OWN_MODEL, *SIZES, f"algorithm.adv_estimator={estimator}", *overrides)
    check(config, declared_needs(config))


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("data.train_batch_sise", "data.train_batch_size"),
        ("algorithm.adv_estimater", "algorithm.adv_estimator"),
        ("actor_rollout_ref.rollout.temprature", "actor_rollout_ref.rollout.temperature"),
        # misplaced: the right name in the wrong section
        ("rollout.n", "actor_rollout_ref.rollout.n"),
        ("actor.optim.lr", "actor_rollout_ref.actor.optim.lr"),
        ("actor_rollout_ref.actor.lr", "actor_rollout_ref.actor.optim.lr"),
        ("trainer.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("data.n_gpus_per_node", "trainer.n_gpus_per_node"),
    ],
)
def test_a_misspelt_or_misplaced_key_is_answered_with_the_nearest(unknown: str, meant: str) -> None:
    assert load_error(f"{unknown}=1") == f"{unknown}: there is no such key; did you mean {meant}? {LISTED}"


@pytest.mark.parametrize(
    ("unknown", "meant"),
    [
        ("ppo_mini_batch_size", ["actor_rollout_ref.actor.ppo_mini_batch_size", "critic.ppo_mini_batch_size"]),
        ("rollout.n", ["actor_rollout_ref.rollout.n"]),
        ("actor_rollout_ref.rolout.n", ["actor_rollout_ref.rollout.n"]),
        ("trainer.save_steps", ["trainer.save_freq"]),
        ("trainer.resume", ["trainer.resume_mode"]),
        ("composite_rewards.enable", []),  # not critic.enable
        ("rm_model", []),  # not trainer.resume_mode
        ("actor_rollout_ref.rollout.max_model_len", []),  # not rollout.n
        ("data.tokenizer", []),  # not data.seed
    ],
)
def test_a_guess_is_near_or_there_is_none(unknown: str, meant: list[str]) -> None:
    assert nearest(unknown) == meant


def test_every_part_of_an_unknown_section_is_named_with_its_own_value() -> None:
    error = load_error("+model.fsdp_config={type: a, model: m}", "+a.b.c=1")
    assert [line.partition(": ")[0] for line in error.splitlines()] == [
        "model.fsdp_config.type='a'",
        "model.fsdp_config.model='m'",
        "a.b.c",
    ]


def test_the_choices_of_a_key_are_listed_once() -> None:
    error = load_error("algorithm.kl_penalty=full")
    assert error.count("low_var_kl+") == error.count("k1|") == 1


def test_a_key_like_no_other_gets_no_guess() -> None:
    assert nearest("qqqq") == []
    assert load_error("qqqq=1") == f"qqqq: there is no such key {LISTED}"


@pytest.mark.parametrize("name", ["hydra.run.dir", "preset", "values"])
def test_the_composing_librarys_own_names_are_no_keys(name: str) -> None:
    assert load_error(f"{name}=x") == f"{name}: there is no such key {LISTED}"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("data.seed=x", ("data.seed='x'", "valid integer", "it takes int, by default 1")),
        ("data.seed=1.5", ("data.seed=1.5", "fractional part", "it takes int")),
        ("data.seed=", ("data.seed=''", "it takes int")),
        ("data.shuffle=maybe", ("data.shuffle='maybe'", "valid boolean", "it takes bool, by default True")),
        ("data.val_batch_size=many", ("data.val_batch_size='many'", "it takes int or null, by default None")),
        ("data=3", ("data=3", "it is a section of keys")),
        ("actor_rollout_ref=3", ("actor_rollout_ref=3", "it is a section of keys")),
        ("data.max_prompt_length=0", ("data.max_prompt_length=0", "greater than or equal to 1", "by default 512")),
        ("algorithm.gamma=1.5", ("algorithm.gamma=1.5", "less than or equal to 1")),
        (f"{ROLLOUT}.temperature=0", (f"{ROLLOUT}.temperature=0", "greater than 0")),
        (
            f"{ROLLOUT}.name=nativ",
            (f"{ROLLOUT}.name='nativ'", "it takes native|hf|vllm|sglang|trtllm or file.py:name, by default native"),
        ),
        (f"{ACTOR}.optim.lr=inf", (f"{ACTOR}.optim.lr=inf", "finite number")),
        (f"{ACTOR}.entropy_coeff=nan", (f"{ACTOR}.entropy_coeff=nan", "finite number")),
        (f"{ACTOR}.optim.betas=[0.9,1.0]", (f"{ACTOR}.optim.betas=1.0", "less than 1", "by default [0.9, 0.999]")),
        (f"{ACTOR}.optim.betas=[0.9]", (f"{ACTOR}.optim.betas=[0.9]", "by default [0.9, 0.999]")),
        (
            "trainer.logger=wand",
            ("trainer.logger='wand'", "it takes console|tensorboard|wandb|swanlab|mlflow|trackio|file"),
        ),
        (
            "trainer.logger=[console,wand]",
            ("trainer.logger=", "wand", "it takes console|tensorboard|wandb|swanlab|mlflow|trackio|file"),
        ),
        ("trainer.logger.x=1", ("trainer.logger.x: trainer.logger takes", "set trainer.logger itself")),
        (f"{ACTOR}.optim.betas.x=1", (f"{ACTOR}.optim.betas.x: {ACTOR}.optim.betas takes tuple",)),
        ("algorithm.kl_ctrl.type=slow", ("algorithm.kl_ctrl.type='slow'", "it takes fixed|adaptive")),
    ],
)
def test_a_wrong_value_is_named_with_what_the_key_takes(override: str, said: Sequence[str]) -> None:
    error = load_error(override)
    assert "\n" not in error
    for part in said:
        assert part in error


def test_all_faults_are_listed_at_once() -> None:
    error = load_error("rollout.n=3", "data.seed=x", "data.max_prompt_length=0")
    assert sorted(line.split(":")[0] for line in error.splitlines()) == [
        "data.max_prompt_length=0",
        "data.seed='x'",
        "rollout.n",
    ]


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train", "'train' is not a key=value pair"),
        ("=3", "'=3' is not a key=value pair"),
        ("~data.seed", "~data.seed: keys cannot be removed"),
        ("data.train_files=/a(1).parquet", "put it in quotes within quotes: \"data.train_files='/a(1).parquet'\""),
        ("data.train_files=/lr=1/a.parquet", "put it in quotes within quotes: \"data.train_files='/lr=1/a.parquet'\""),
        ("data.seed=1,2", 'one run takes one value; write a list as "data.seed=[1,2]"'),
        ("data.train_files=${nowhere}", "the configuration cannot be read: Interpolation key 'nowhere' not found"),
    ],
)
def test_what_cannot_be_read_is_said_with_how_to_write_it(override: str, said: str) -> None:
    assert said in load_error(override)


@pytest.mark.parametrize(
    ("whole", "wanted", "answer"),
    [(10, 4, "2 or 5"), (1024, 100, "64 or 128"), (7, 3, "1 or 7"), (10, 64, "10"), (1, 5, "1"), (96, 36, "32 or 48")],
)
def test_the_nearest_divisors_lie_on_either_side(whole: int, wanted: int, answer: str) -> None:
    assert nearest_divisors(whole, wanted) == answer


def test_a_mini_batch_that_does_not_divide_names_both_keys_and_what_would() -> None:
    assert check_error("data.train_batch_size=1000", f"{ACTOR}.ppo_mini_batch_size=256") == (
        f"{ACTOR}.ppo_mini_batch_size=256 (prompts) does not divide data.train_batch_size=1000 (prompts); "
        "use 250 or 500"
    )
    for size in (250, 500):
        passes("data.train_batch_size=1000", f"{ACTOR}.ppo_mini_batch_size={size}")
    assert check_error("critic.ppo_mini_batch_size=48") == (
        "critic.ppo_mini_batch_size=48 (prompts) does not divide data.train_batch_size=64 (prompts); use 32 or 64"
    )
    assert check_error(f"{ACTOR}.ppo_mini_batch_size=128", f"{ROLLOUT}.n=8").endswith(
        "use 64. It counts prompts, not the 512 samples of rollout.n=8 answers to each"
    )


def test_a_micro_batch_is_counted_in_samples() -> None:
    mini = (f"{ACTOR}.ppo_mini_batch_size=32", f"{ROLLOUT}.n=5")  # 160 samples
    assert check_error(*mini, f"{ACTOR}.ppo_micro_batch_size_per_gpu=12") == (
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=12 (samples) does not divide the mini-batch of 160 samples "
        f"({ACTOR}.ppo_mini_batch_size × {ROLLOUT}.n); use 10 or 16"
    )
    for size in (10, 16):
        passes(*mini, f"{ACTOR}.ppo_micro_batch_size_per_gpu={size}")
    passes(*mini, f"{ACTOR}.ppo_micro_batch_size_per_gpu=12", f"{ACTOR}.use_dynamic_bsz=True")  # by tokens instead


def test_the_older_micro_batch_key_is_named_by_its_own_name() -> None:
    assert check_error(f"{ACTOR}.ppo_micro_batch_size=7").startswith(f"{ACTOR}.ppo_micro_batch_size=7 (samples) ")
    assert check_error("critic.ppo_micro_batch_size=7").startswith("critic.ppo_micro_batch_size=7 (samples) ")


@pytest.mark.parametrize("role", [ACTOR, "critic"])
def test_a_micro_batch_of_all_gpus_divides_among_them(role: str) -> None:
    key = f"{role}.ppo_micro_batch_size"  # mini-batches of 32 × 8 = 256 samples
    assert check_error(f"{key}=2", "trainer.n_gpus_per_node=8") == (
        f"{key}=2 (samples of all GPUs together) does not divide among 8 GPUs; use 8, or {key}_per_gpu, the samples of "
        "one GPU"
    )
    # no multiple of 6 divides 256
    assert check_error(f"{key}=2", "trainer.n_gpus_per_node=6").endswith(
        f"does not divide among 6 GPUs; use {key}_per_gpu, the samples of one GPU"
    )
    for size in (8, 16, 256):
        passes(f"{key}={size}", "trainer.n_gpus_per_node=8")
    passes(f"{key}=2", "trainer.n_gpus_per_node=2")


@pytest.mark.parametrize("section", ["rollout", "ref"])
def test_so_does_a_scoring_batch(section: str) -> None:
    keys = ("trainer.n_gpus_per_node=4", f"{ACTOR}.use_kl_loss=True")
    error = check_error(*keys, f"actor_rollout_ref.{section}.log_prob_micro_batch_size=6")
    assert error.startswith(f"actor_rollout_ref.{section}.log_prob_micro_batch_size=6 (samples of all GPUs together) ")
    assert "among 4 GPUs; use 4 or 8, or " in error
    passes(*keys, f"actor_rollout_ref.{section}.log_prob_micro_batch_size=8")


def test_ranks_that_share_sequences_count_as_one_for_a_micro_batch() -> None:
    shared = ("trainer.n_gpus_per_node=8", f"{ACTOR}.ulysses_sequence_parallel_size=4")
    passes(*shared, f"{ACTOR}.ppo_micro_batch_size=2")
    assert "does not divide among 2 GPUs" in check_error(*shared, f"{ACTOR}.ppo_micro_batch_size=1")


def test_two_keys_for_one_micro_batch_are_too_many() -> None:
    error = check_error(f"{ACTOR}.ppo_micro_batch_size_per_gpu=4", f"{ACTOR}.ppo_micro_batch_size=8")
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu=4 and {ACTOR}.ppo_micro_batch_size=8 set the same size twice" in error


def test_no_token_budget_and_no_size_is_no_micro_batch() -> None:
    error = check_error(f"{ACTOR}.use_dynamic_bsz=False")
    assert error == f"{ACTOR}.use_dynamic_bsz=False needs a size: set {ACTOR}.ppo_micro_batch_size_per_gpu"


def test_a_token_budget_must_hold_the_longest_sample() -> None:
    long = ("data.max_prompt_length=100", "data.max_response_length=900")
    error = check_error(*long, f"{ACTOR}.ppo_max_token_len_per_gpu=999")
    assert error.startswith(f"{ACTOR}.ppo_max_token_len_per_gpu=999: one sample may have ")
    assert error.endswith("= 1000 tokens; use 1000 or more")
    passes(*long, f"{ACTOR}.ppo_max_token_len_per_gpu=1000")
    passes(*long, f"{ACTOR}.ppo_max_token_len_per_gpu=999", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1")  # not used
    passes(*long, "critic.ppo_max_token_len_per_gpu=999", estimator="rloo")  # no critic
    assert check_error(*long, "critic.ppo_max_token_len_per_gpu=999").startswith("critic.ppo_max_token_len_per_gpu=999")


@pytest.mark.parametrize("estimator", ["rloo", "grpo"])
def test_one_answer_has_no_siblings(estimator: str) -> None:
    assert check_error(f"{ROLLOUT}.n=1", estimator=estimator) == (
        f"{ROLLOUT}.n=1: {estimator} compares the answers to one prompt; use 2 or more, or algorithm.adv_estimator=gae"
    )
    passes(f"{ROLLOUT}.n=2", estimator=estimator)
    passes(f"{ROLLOUT}.n=1", estimator="gae")


def test_a_critic_is_there_when_the_algorithm_needs_one_and_only_then() -> None:
    assert check_error("critic.enable=False") == (
        "critic.enable=False: algorithm.adv_estimator=gae needs a critic; use rloo or grpo"
    )
    assert check_error("critic.enable=True", estimator="grpo") == (
        "critic.enable=True: algorithm.adv_estimator=grpo does not use a critic; use gae"
    )
    assert check_error("trainer.critic_warmup=5", estimator="rloo") == (
        "trainer.critic_warmup=5: algorithm.adv_estimator=rloo trains no critic; use 0, or gae"
    )
    passes("critic.enable=True", "trainer.critic_warmup=5", estimator="gae")
    passes("critic.enable=False", estimator="rloo")


def test_going_on_from_a_checkpoint_needs_its_path_and_a_path_its_mode() -> None:
    assert check_error("trainer.resume_mode=resume_path") == (
        "trainer.resume_mode=resume_path needs trainer.resume_from_path, a global_step_N folder"
    )
    assert check_error("trainer.resume_from_path=runs/global_step_5") == (
        "trainer.resume_from_path=runs/global_step_5 is read only with trainer.resume_mode=resume_path"
    )


@pytest.mark.parametrize("role", [ACTOR, "critic"])
def test_two_different_warm_ups_are_refused(role: str) -> None:
    assert check_error(f"{role}.optim.lr_warmup_steps=5", f"{role}.optim.warmup_steps=6") == (
        f"{role}.optim.lr_warmup_steps=5 and {role}.optim.warmup_steps=6 differ; keep one"
    )
    passes(f"{role}.optim.lr_warmup_steps=5", f"{role}.optim.warmup_steps=5")


SEVERAL = "trainer.n_gpus_per_node=4"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (["trainer.nnodes=2"], "trainer.nnodes=2 needs trainer.master_addr"),
        (["trainer.node_rank=1"], "trainer.node_rank=1: with trainer.nnodes=1 machines are numbered 0 to 0"),
        (
            [SEVERAL, f"{ROLLOUT}.tensor_model_parallel_size=2", f"{ROLLOUT}.name=native"],
            "the native engine holds a whole model in each worker",
        ),
        ([SEVERAL, f"{ACTOR}.fsdp_config.fsdp_size=3"], f"{ACTOR}.fsdp_config.fsdp_size=3 does not divide 4 workers"),
        ([f"{ACTOR}.fsdp_config.fsdp_size=2"], "fsdp_size=2 does not divide 1 worker; use 1, or -1"),
        (["trainer.pools.rollout=1"], "trainer.pools: one worker holds every role"),
        (
            [SEVERAL, "trainer.pools.ref=1", "actor_rollout_ref.model.lora_rank=8"],
            "trainer.pools.ref=1: with LoRA the reference is the actor",
        ),
        (
            [SEVERAL, "trainer.pools.ref=1", f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_type=full"],
            "needs the reference on the actor",
        ),
    ],
)
def test_workers_that_cannot_share_a_model_so_are_refused(keys: list[str], said: str) -> None:
    assert said in check_error(*keys)


def test_several_workers_and_machines_are_fine() -> None:
    passes(SEVERAL, f"{ACTOR}.fsdp_config.fsdp_size=2", "trainer.pools.rollout=2")
    passes("trainer.nnodes=2", "trainer.node_rank=1", "trainer.master_addr=10.0.0.1")
    passes("trainer.nnodes=2", "ray_kwargs.ray_init.address=10.0.0.1:6379")


def test_what_an_engine_cannot_honour_is_refused() -> None:
    kwargs = f"+{ROLLOUT}.engine_kwargs.repetition_penalty=1.1"
    assert "the native engine takes none" in check_error(kwargs)
    passes(kwargs, f"{ROLLOUT}.name=hf")


def test_ranges_and_the_length_of_prompt_and_answer_leave_something() -> None:
    for key in ("reward_model.score_range", "algorithm.filter_groups.mean_score_range"):
        filters = ("algorithm.filter_groups.enable=True", f"{ROLLOUT}.n=2")
        assert f"{key}=[1.0, 1.0]: the first is not below the second" in check_error(*filters, f"{key}=[1,1]")
        passes(*filters, f"{key}=[0,1]")
    passes("algorithm.filter_groups.enable=True", "algorithm.filter_groups.mean_score_range=[0,1]", f"{ROLLOUT}.n=1")
    assert "data.max_length=512: a prompt of data.max_prompt_length=512 tokens would leave" in check_error(
        "data.max_length=512"
    )
    passes("data.max_length=513")


def test_several_greedy_answers_would_all_be_the_same() -> None:
    validation = f"{ROLLOUT}.val_kwargs"
    assert check_error(f"{validation}.n=4").startswith(f"{validation}.n=4: greedy answers are all the same")
    assert "temperature=0 is greedy" in check_error(f"{validation}.do_sample=True")
    passes(f"{validation}.n=4", f"{validation}.do_sample=True", f"{validation}.temperature=1.0")


def test_rejection_needs_bounds_in_order() -> None:
    key = "algorithm.rollout_correction"
    assert f"{key}.rollout_rs=geometric needs {key}.rollout_rs_threshold" in check_error(f"{key}.rollout_rs=geometric")
    raised = (f"{key}.rollout_is=token", f"{key}.rollout_is_threshold_lower=3.0")
    assert f"{key}.rollout_is_threshold_lower=3.0 with {key}.rollout_is_threshold=2.0: it takes" in check_error(*raised)
    assert "it takes one upper bound" in check_error(*raised, f"{key}.rollout_is_threshold=0.5_5.0")
    passes(*raised, f"{key}.rollout_is_threshold=5.0")
    bounds = (f"{key}.rollout_rs_threshold=2.0", f"{key}.rollout_rs_threshold_lower=3.0")
    assert f"{key}.rollout_rs_threshold_lower=3.0 is above {key}.rollout_rs_threshold=2.0" in check_error(
        f"{key}.rollout_rs=token", *bounds
    )


def test_validation_that_the_user_asks_for_needs_prompts() -> None:
    files = "data.train_files=mine.parquet"
    assert check_error(files, "trainer.test_freq=5") == (
        "trainer.test_freq=5 needs validation prompts: set data.val_files=FILE"
    )
    assert check_error(files, "trainer.val_only=True").startswith("trainer.val_only=True needs validation prompts")
    passes(files, "trainer.test_freq=5", "data.val_files=other.parquet")
    passes("trainer.test_freq=5")  # the embedded data has its own
    preset = load_config([files])  # the embedded model: its preset validates every 8 steps
    assert preset.trainer.test_freq == 8
    check(preset, declared_needs(preset))


def test_rules_that_look_at_several_keys_report_together() -> None:
    error = check_error(f"{ROLLOUT}.n=1", "trainer.nnodes=2", f"{ACTOR}.ppo_mini_batch_size=48", estimator="rloo")
    assert [line.split("=")[0] for line in error.splitlines()] == [
        f"{ROLLOUT}.n",
        f"{ACTOR}.ppo_mini_batch_size",
        "trainer.nnodes",
    ]


MULTI_TURN, AGENT = f"{ROLLOUT}.multi_turn", f"{ROLLOUT}.agent"


def test_a_file_without_a_name_and_a_misspelt_environment_are_answered_with_the_nearest(tmp_path) -> None:
    file = tmp_path / "own.py"
    file.write_text("class Shop: ...\ndef _hidden(): ...\n")
    assert f"did you mean {file}:Shop?; it takes guess_number|" in load_error(f"{MULTI_TURN}.environment={file}")
    assert "; did you mean guess_number?; it takes" in load_error(f"{MULTI_TURN}.environment=guess_numbr")
    assert "not one of the values it takes; it takes" in load_error(f"{MULTI_TURN}.environment=nothing.py")


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        (
            f"+{AGENT}.custom_async_server.path=x.py",
            "a class of verl's servers is not in this version of rloom; remove",
        ),
        (f"+{AGENT}.custom_async_server.name=x", "rollout.name and rollout.server choose the engine"),
        (f"+{AGENT}.agent_loop_manager_class=a.B", "a manager of agent loops is not in this version of rloom"),
        (f"{MULTI_TURN}.format=kimi", "this form of tool calls is not in this version of rloom; use auto"),
    ],
)
def test_a_key_of_verls_agents_that_rloom_does_not_have_is_refused_with_a_sentence(setting: str, sentence: str) -> None:
    assert sentence in load_error(setting)


def test_keys_of_verls_commands_with_one_turn_are_accepted() -> None:
    passes(f"{MULTI_TURN}.format=hermes")
    passes(f"{MULTI_TURN}.enable=False", f"{MULTI_TURN}.max_assistant_turns=2", f"{MULTI_TURN}.max_parallel_calls=2")
    for without_a_part in (
        [f"{AGENT}.custom_async_server.path=null", f"{AGENT}.custom_async_server.name=null"],
        [f"{ROLLOUT}.trace.backend=mlflow", f"{ROLLOUT}.trace.token2text=True"],
    ):
        load_config([OWN_MODEL, *without_a_part])
    assert "answers have one turn" in check_error(f"{MULTI_TURN}.max_assistant_turns=2")


def test_weights_of_a_mix_that_is_not_enabled_are_an_error() -> None:
    assert check_error("+reward_model.composite.weights.rule_score=1.0") == (
        "reward_model.composite.weights={'rule_score': 1.0}: no effect in this run, because one reward alone is the "
        "score; set reward_model.composite.enable=True"
    )


SKIP = f"{ACTOR}.skip_zero_advantages"


@pytest.mark.parametrize(
    ("override", "said"),
    [
        (
            f"{ACTOR}.entropy_coeff=0.01",
            f"the entropy bonus of {ACTOR}.entropy_coeff=0.01 has a gradient at every token",
        ),
        (f"{ACTOR}.use_kl_loss=True", f"use {ACTOR}.use_kl_loss=False, or leave {SKIP} out"),
        (f"{ACTOR}.policy_loss.loss_mode=kl_cov", f"{ACTOR}.policy_loss.loss_mode=kl_cov is not known to have no"),
    ],
)
def test_answers_without_an_advantage_are_not_skipped_where_they_have_a_gradient(override: str, said: str) -> None:
    error = check_error(f"{SKIP}=True", override, estimator="grpo")
    assert error.startswith(f"{SKIP}=True: ") and said in error and "\n" not in error


def test_truncated_answers_are_not_masked_where_every_answer_is_one() -> None:
    found = check_error("algorithm.mask_truncated_answers=True", f"{ROLLOUT}.ignore_eos=True")
    assert found.endswith("which generates to the length limit; set one to False")


def test_a_loss_of_the_users_own_declares_that_it_scales_with_the_advantage(tmp_path: Path) -> None:
    file = tmp_path / "losses.py"
    file.write_text(
        "from rloom.algos.policy_losses import vanilla as plain\n"
        "from rloom.algos.registry import PolicyLossEntry\n"
        "scaled = PolicyLossEntry(plain, scales_with_advantage=True)\n"
    )
    keys = ["algorithm.adv_estimator=grpo", f"{SKIP}=True", f"{ACTOR}.policy_loss.loss_mode={file}:"]
    for name, faults in {"scaled": False, "plain": True}.items():
        config = configured(*keys[:2], f"{keys[2]}{name}")
        check(config, declared_needs(config))  # before the file is loaded
        with pytest.raises(ConfigError, match="scales_with_advantage=True") if faults else nullcontext():
            check(config, resolved_needs(config))
