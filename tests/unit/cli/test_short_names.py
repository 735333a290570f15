"""Short names of keys in Python and train.sh, lists of rewards, TRL's configurations, and what is wrong with them."""

import inspect
import json
import shutil
from dataclasses import dataclass, field, make_dataclass
from pathlib import Path
from typing import Any

import pytest

import rloom
from rloom.api.arguments import Given, with_trl
from rloom.api.config import ShortKeys
from rloom.api.rewards import ZeroScores, given_rewards, new_name
from rloom.cli import main
from rloom.config.derived import RewardKinds, reward_parts
from rloom.config.frontends import trl
from rloom.config.frontends.short_names import SHORT_NAMES
from rloom.config.frontends.train_sh import FLAGS, translate
from rloom.config.keys import all_keys
from rloom.config.load import EMBEDDED_MODEL
from rloom.config.schema import Config, SftConfig
from rloom.errors import ConfigError, RewardError, RloomError
from rloom.rewards.composite import CompositeReward, MixedPart
from rloom.types import Score
from tests.architecture.source import ROOT

LR, MINI_BATCH = "actor_rollout_ref.actor.optim.lr", "actor_rollout_ref.actor.ppo_mini_batch_size"
WEIGHTS = "reward_model.composite.weights"


def correct(completions: list[Any], answer: list[str], **columns: Any) -> list[float]:
    return [float(truth in text) for text, truth in zip(completions, answer, strict=True)]


def brief(completions: list[Any], **columns: Any) -> list[float | None]:
    return [1.0 if len(text) < 10 else None for text in completions]


# One table


def test_python_and_train_sh_have_the_short_names_of_the_table() -> None:
    parameters = inspect.signature(rloom.train).parameters
    assert list(ShortKeys.__annotations__) == list(SHORT_NAMES)
    assert set(SHORT_NAMES) < set(parameters) and "unknown" in parameters
    spellings = {*FLAGS, *(flag.other_spelling for flag in FLAGS.values())}
    assert set(SHORT_NAMES) <= spellings
    for name, short in SHORT_NAMES.items():
        assert short.key in all_keys()
        flag = next(flag for own, flag in FLAGS.items() if name in (own, flag.other_spelling))
        assert flag.key == short.key


def test_the_pages_list_every_short_name_with_its_key() -> None:
    for page in ("python.md", "python.zh.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert [name for name, short in SHORT_NAMES.items() if f"| `{name}` | `{short.key}` |" not in text] == [], page


def test_a_short_name_sets_its_key_in_python_as_in_train_sh() -> None:
    config = rloom.load_config(model="embedded", algorithm="grpo", lr=1e-5, n=4, batch=16, steps=3, kl_loss_coef=0.01)
    assert config.algorithm.adv_estimator == "grpo" and config.trainer.total_training_steps == 3
    actor = config.actor_rollout_ref.actor
    assert (actor.optim.lr, config.actor_rollout_ref.rollout.n) == (1e-5, 4)
    assert (config.data.train_batch_size, actor.ppo_mini_batch_size) == (16, 4)  # four updates
    assert (actor.use_kl_loss, actor.kl_loss_coef) == (True, 0.01)
    flags = [
        "--algorithm",
        "grpo",
        "--lr",
        "1e-5",
        "--n",
        "4",
        "--batch",
        "16",
        "--steps",
        "3",
        "--kl_loss_coef",
        "0.01",
    ]
    typed = translate(flags, {}).values
    assert typed.items() >= {LR: "1e-5", MINI_BATCH: 4, "actor_rollout_ref.actor.use_kl_loss": True}.items()


def test_keys_and_short_names_mix_and_a_given_mini_batch_stays() -> None:
    config = rloom.load_config({MINI_BATCH: 8, "data.seed": 7}, batch=16, seed=7)
    assert (config.data.train_batch_size, config.actor_rollout_ref.actor.ppo_mini_batch_size) == (16, 8)
    assert config.given == {MINI_BATCH, "data.train_batch_size", "data.seed"}
    assert rloom.load_config(config, lr=0.5).actor_rollout_ref.actor.optim.lr == 0.5
    assert rloom.load_config([f"{LR}=0.1"], lr=0.1) == rloom.load_config([f"{LR}=0.1"])


@pytest.mark.parametrize(
    "source", [{LR: 1e-3}, [f"{LR}=1e-3"], {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-3}}}}]
)
def test_a_key_with_two_values_is_an_error(source: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{LR}=0\.001 and lr=0\.0001 are both given; keep one"):
        rloom.train(source, lr=1e-4)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"modle": "embedded"}, r"rloom\.train: there is no argument modle; did you mean model\?"),
        ({"learning_rate": 1e-6}, "there is no argument learning_rate, which is TRL's name; here it is lr"),
        ({"reward_funcs": correct}, "here it is reward"),
        ({"weight_decay": 0.1}, r"here it is actor_rollout_ref\.actor\.optim\.weight_decay"),
        ({"min_p": 0.1}, "there is no argument min_p; TRL's field of that name: not in this version"),
        ({"callbacks": [5]}, "callbacks has 5, which is no function"),
        ({"callbacks": print}, r"callbacks is print; give a list: callbacks=\[print\]"),
        ({"callbacks": 5}, "callbacks is 5; give a list"),
        ({"callbacks": [lambda: True]}, "callbacks: <lambda> takes one argument, a StepReport"),
        ({"lr": "fast"}, f"{LR}='fast'"),
        ({"args": 5}, "args is int; give a GRPOConfig"),
    ],
)
def test_a_wrong_argument_is_an_error_of_rloom_with_the_way_out(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(RloomError, match=words):
        rloom.train(**arguments)


# Defaults that fit a folder


def folder_with(folder: Path, **fields: Any) -> str:
    shutil.copytree(EMBEDDED_MODEL, folder)
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return str(folder)


def test_a_folder_with_the_embedded_model_has_its_defaults(tmp_path: Path) -> None:
    config = rloom.load_config(model=folder_with(tmp_path / "copy"), algorithm="grpo")
    named = rloom.load_config(model="embedded", algorithm="grpo")
    for section in ("data", "critic", "algorithm"):
        assert getattr(config, section) == getattr(named, section)
    assert config.actor_rollout_ref.actor == named.actor_rollout_ref.actor
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.optim.lr) == (8, 2e-4)


@pytest.mark.parametrize(
    ("given", "lengths"),
    [
        ({}, (256, 256)),
        ({"max_response_length": 128}, (384, 128)),
        ({"max_prompt_length": 500}, (500, 12)),
        ({"max_prompt_length": 300, "max_response_length": 300}, (300, 300)),  # an error of the check that follows
        ({"max_prompt_length": 600}, (600, 512)),
    ],
)
def test_default_lengths_fit_the_context_of_the_model(
    tmp_path: Path, given: dict[str, int], lengths: tuple[int, int]
) -> None:
    other = folder_with(tmp_path / "other", hidden_size=256)
    config = rloom.load_config({}, model=other, algorithm="grpo", **given)  # type: ignore[arg-type]
    assert (config.data.max_prompt_length, config.data.max_response_length) == lengths
    assert (config.actor_rollout_ref.rollout.n, config.actor_rollout_ref.actor.optim.lr) == (5, 1e-6)


# Lists of rewards


def test_a_list_of_rewards_is_a_mix_by_their_names() -> None:
    found = given_rewards([correct, brief, "org/model", "gsm8k"], [1.0, 0.5, 2.0, 0.25])
    assert found.functions == {"correct": correct, "brief": brief}
    assert found.keys == {
        "custom_reward_function.path": "<python>",
        "reward_model.path": "org/model",
        "data.default_data_source": "openai/gsm8k",
        "reward_model.composite.enable": True,
        WEIGHTS: {"correct": 1.0, "brief": 0.5, "rm_score": 2.0, "rule_score": 0.25},
    }
    config = rloom.load_config(dict(found.keys))
    parts = [(part.name, part.source, part.weight, part.optional) for part in reward_parts(config)]
    assert parts == [
        ("correct", "function", 1.0, True),
        ("brief", "function", 0.5, True),
        ("rm_score", "model", 2.0, False),
        ("rule_score", "rules", 0.25, False),
    ]


def test_one_reward_has_the_keys_of_today() -> None:
    assert given_rewards(correct, None) == given_rewards([correct], None)
    assert given_rewards(correct, None).keys == {"custom_reward_function.path": "<python>"}
    assert given_rewards(correct, None).functions == {"rule_score": correct}
    assert given_rewards("org/model", None).keys == {"reward_model.path": "org/model"}
    assert given_rewards("math", None).keys == {"data.default_data_source": "math"}
    keys = {
        **given_rewards(correct, None).keys,
        "reward_model.composite": {"enable": True, "weights": {"rule_score": 1}},
    }
    assert RewardKinds.of(rloom.load_config(keys)).computing("rule_score") == "function"


def test_functions_of_one_name_are_numbered_and_do_not_take_the_name_of_a_part() -> None:
    def rule_score(completions: list[str]) -> list[float]:
        return [0.0 for _ in completions]

    assert list(given_rewards([correct, correct, lambda completions: []], None).functions) == [
        "correct",
        "correct_2",
        "lambda",
    ]
    assert new_name(rule_score, {}) == "rule_score_2"


@pytest.mark.parametrize(
    ("second", "expected"),
    [
        (Score(1.0), 1.5),
        (Score.failed("brief returned None", applies=False), 1.0),  # as TRL's nansum: the weight goes nowhere
        (Score.failed("ZeroDivisionError"), None),
    ],
)
def test_none_of_a_function_leaves_the_sum_of_the_others_and_an_error_does_not(
    second: Score, expected: float | None
) -> None:
    queue: Any = None
    mix = CompositeReward(
        [MixedPart("correct", queue, 1.0, optional=True), MixedPart("brief", queue, 0.5, optional=True)]
    )
    assert mix.combine([Score(1.0), second]).value == expected
    nothing = Score.failed("correct returned None", applies=False)
    assert mix.combine([nothing, nothing]).reason == "correct: correct returned None; brief: correct returned None"


@pytest.mark.parametrize(
    ("reward", "weights", "words"),
    [
        ([], None, "reward is an empty list"),
        (None, [1.0], "reward_weights are given without reward"),
        ([correct, brief], [1.0], "reward_weights has 1 numbers for 2 rewards"),
        ([correct], ["much"], "reward_weights has 'much'; weights are numbers"),
        ("gsm9k", None, "there is no rule, no folder and no hub name"),
        ("rewards.py:correct", None, "import the function and give it itself"),
        (["a/one", "a/other"], None, "a run takes one model as reward"),
        ([5], None, "reward is int; give a function"),
    ],
)
def test_a_wrong_reward_is_named(reward: Any, weights: Any, words: str) -> None:
    with pytest.raises(RewardError, match=words):
        rloom.train(reward=reward, reward_weights=weights)


def test_zeros_of_a_function_that_expects_text_are_explained_for_chats(caplog: pytest.LogCaptureFixture) -> None:
    chat, text = [[{"role": "assistant", "content": "2"}]], ["2"]
    for given, warned in ((chat, True), (text, False)):
        zeros = ZeroScores({"rule_score": correct})
        assert zeros.functions["rule_score"](completions=given, answer=["3"]) == [0.0]
        zeros.check({"critic/score/min": 0.0, "critic/score/max": 0.0})
        assert ("its text is completion[0]['content']" in caplog.text) is warned
        caplog.clear()
    zeros.check({"critic/score/min": 0.0, "critic/score/max": 1.0})
    assert caplog.text == ""


# TRL's configurations


@dataclass
class GRPOConfig:
    """Fields of TRL's class with its defaults; the object has all of them, whether they were given or not."""

    output_dir: str | None = "trainer_output"
    learning_rate: float = 1e-6
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    lr_scheduler_type: str = "linear"
    num_train_epochs: float = 3.0
    max_steps: int = -1
    per_device_train_batch_size: int = 8
    gradient_accumulation_steps: int = 1
    generation_batch_size: int | None = None
    steps_per_generation: int | None = None
    num_generations: int = 8
    max_completion_length: int = 512
    beta: float = 0.0
    epsilon: float = 0.2
    epsilon_high: float | None = None
    loss_type: str = "dapo"
    scale_rewards: str = "group"
    reward_weights: list[float] | None = None
    use_vllm: bool = False
    vllm_gpu_memory_utilization: float = 0.3
    min_p: float | None = None
    logging_steps: float = 10
    seed: int = 42
    accelerator_config: dict[str, Any] | None = None


class RLOOConfig(GRPOConfig):
    pass


class SFTConfig(GRPOConfig):
    pass


def test_every_key_of_the_table_exists() -> None:
    for root, table in ((Config, trl.RL), (SftConfig, trl.SFT)):
        assert [name for name, one in table.items() if one.key is not None and one.key not in all_keys(root)] == []


def test_a_grpo_config_has_the_batches_and_defaults_of_trl() -> None:
    given = GRPOConfig(gradient_accumulation_steps=4, beta=0.04, max_steps=100, accelerator_config={"any": 1})
    assert trl.translate(given, devices=2).values == {
        "algorithm.adv_estimator": "grpo",
        "data.seed": 42,
        "trainer.total_training_steps": 100,
        "actor_rollout_ref.actor.optim.weight_decay": 0.0,
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "linear",
        "actor_rollout_ref.actor.optim.betas": [0.9, 0.999],
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.actor.kl_loss_coef": 0.04,
        "data.train_batch_size": 8,  # 8 answers × 2 devices × 4 accumulated / 8 answers a prompt
        MINI_BATCH: 8,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.actor.clip_ratio_c": 1e6,  # TRL has no dual clip unless `delta` is given
    }


def test_steps_per_generation_is_several_updates_of_a_step() -> None:
    found = trl.translate(GRPOConfig(gradient_accumulation_steps=2, steps_per_generation=8), devices=1).values
    assert (found["data.train_batch_size"], found[MINI_BATCH]) == (8, 2)


def test_a_mapping_has_the_defaults_of_trl() -> None:
    found, of_object = (trl.translate(one, devices=2).values for one in ({"beta": 0.04}, GRPOConfig(beta=0.04)))
    assert found.pop("trainer.save_freq") == 500  # a field that the object above does not have
    assert found == {key: value for key, value in of_object.items() if not key.endswith("betas")}
    found = trl.translate({}, algorithm="rloo", devices=1).values
    assert (found["actor_rollout_ref.rollout.n"], found["algorithm.kl_ctrl.kl_coef"]) == (2, 0.05)
    assert trl.translate({"eval_strategy": "steps"}, devices=1).values["trainer.test_freq"] == 10


def test_steps_of_trl_are_updates() -> None:
    given = {"steps_per_generation": 8, "gradient_accumulation_steps": 2, "num_iterations": 2, "max_steps": 100}
    found = trl.translate(given | {"warmup_steps": 9}, devices=1)
    assert found.values["trainer.total_training_steps"] == 13  # 100 / (4 mini-batches × 2 epochs), rounded up
    assert (found.values["trainer.save_freq"], found.values[WARMUP]) == (63, 2)
    assert found.notices == ["a step has 8 updates, which TRL counts: max_steps, warmup_steps / 8"]
    several = {"steps_per_generation": 2, "gradient_accumulation_steps": 8}  # four generations, then one update
    found = trl.translate(several | {"max_steps": 100}, devices=1)
    assert (found.values["data.train_batch_size"], found.values[MINI_BATCH]) == (8, 8)
    assert (found.values["trainer.total_training_steps"], found.notices) == (100, [])


ACTOR, CORRECTION = "actor_rollout_ref.actor", "algorithm.rollout_correction"
LOSS_MODE = f"{ACTOR}.policy_loss.loss_mode"


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"delta": 4.0}, {f"{ACTOR}.clip_ratio_c": 4.0}),
        (
            {"loss_type": "cispo", "epsilon_high": 5.0},
            {LOSS_MODE: "cispo", f"{ACTOR}.clip_ratio_low": 1.0, f"{ACTOR}.clip_ratio_high": 4.0}
            | {f"{ACTOR}.clip_ratio_c": None, f"{ACTOR}.loss_agg_mode": "token-mean"},
        ),
        ({"loss_type": "sapo"}, {LOSS_MODE: "sapo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean"}),
        (
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
            {LOSS_MODE: "gspo", f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum"},
        ),
        ({"scale_rewards": "batch"}, {"algorithm.norm_adv_by_std_in_grpo": "batch"}),
        ({"mask_truncated_completions": True}, {"algorithm.mask_truncated_answers": True}),
        ({"reward_clip_range": (-1.0, 2.0)}, {"reward_model.score_range": [-1.0, 2.0]}),
        ({"chat_template_kwargs": {"a": 1}}, {"data.apply_chat_template_kwargs": {"a": 1}}),
        ({"use_vllm": False}, {f"{CORRECTION}.rollout_is": None}),
        (
            {"use_vllm": True},
            {f"{CORRECTION}.rollout_is": "sequence", f"{CORRECTION}.rollout_is_threshold": "1e-09_3.0"},
        ),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"},
            {f"{CORRECTION}.rollout_is": "token", f"{CORRECTION}.rollout_is_threshold": 3.0},
        ),
        ({"use_vllm": True, "vllm_importance_sampling_correction": False}, {f"{CORRECTION}.rollout_is": None}),
        (
            {"use_vllm": True, "vllm_mode": "server", "vllm_server_port": 8001},
            {"actor_rollout_ref.rollout.server.urls": ["http://0.0.0.0:8001"]},
        ),
        ({"bf16": False}, {f"{ACTOR}.fsdp_config.dtype": "float32"}),
        (
            {"lr_scheduler_type": "cosine_with_min_lr", "lr_scheduler_kwargs": {"min_lr_rate": 0.1}},
            {f"{ACTOR}.optim.lr_scheduler_type": "cosine", f"{ACTOR}.optim.min_lr_ratio": 0.1},
        ),
    ],
)
def test_fields_that_decide_the_loss_together(given: dict[str, Any], expected: dict[str, Any]) -> None:
    values = trl.translate(given, devices=1).values
    assert {key: values.get(key) for key in expected} == expected
    rloom.load_config({"actor_rollout_ref.model.path": "a/b", **values})


def test_rloo_clips_the_ratio_of_a_whole_answer() -> None:
    found = rloom.from_trl({}, algorithm="rloo", devices=1)
    assert found[LOSS_MODE] == "sequence_ratio" and f"{ACTOR}.loss_agg_mode" not in found
    assert rloom.from_trl(RLOOConfig(use_vllm=True), devices=1).get(f"{CORRECTION}.rollout_is") is None


@pytest.mark.parametrize(
    ("given", "notice"),
    [
        ({"push_to_hub": True}, "push_to_hub=True has no effect: rloom export CKPT DIR --push_to_hub NAME does it"),
        ({"model_init_kwargs": {"dtype": "bfloat16"}}, "attention and data types are chosen by rloom"),
        ({"loss_type": "bnpo"}, "the divisor is the tokens of an update"),
        ({"mask_truncated_completions": True, "loss_type": "dr_grpo"}, "in TRL by that of all answers"),
        ({"mask_truncated_completions": True}, None),
        ({"ds3_gather_for_generation": False, "bf16": True, "num_completions_to_print": 2}, None),
    ],
)
def test_fields_that_do_not_change_the_training_are_accepted(given: dict[str, Any], notice: str | None) -> None:
    found = trl.translate(given, devices=1).notices
    assert [notice in one for one in found] == [True] if notice else found == []


def test_a_config_that_was_filled_in_for_one_device_has_a_step_of_all_devices() -> None:
    filled = GRPOConfig(gradient_accumulation_steps=4, steps_per_generation=4, generation_batch_size=32)
    found = trl.translate(filled, devices=8).values
    assert (found["data.train_batch_size"], found[MINI_BATCH]) == (32, 32)  # 8 answers × 8 devices × 4 / 8 a prompt


WARMUP, RATIO = (f"actor_rollout_ref.actor.optim.lr_warmup_steps{end}" for end in ("", "_ratio"))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"warmup_steps": 0.1}, {RATIO: 0.1}),
        ({"warmup_steps": 0.1, "warmup_ratio": 0.0}, {RATIO: 0.1}),
        ({"warmup_steps": 20.0}, {WARMUP: 20}),
        ({"warmup_steps": 0, "warmup_ratio": 0.1}, {RATIO: 0.1}),
        ({"warmup_steps": 0}, {WARMUP: 0}),
    ],
)
def test_steps_of_warmup_below_1_are_a_ratio_and_0_steps_leave_it(
    fields: dict[str, float], expected: dict[str, float]
) -> None:
    kind = make_dataclass("GRPOConfig", [("warmup_steps", float, 0), ("warmup_ratio", float | None, None)])
    for given in (fields, kind(**fields)):
        found = trl.translate(given).values
        assert {key: value for key, value in found.items() if key in (WARMUP, RATIO)} == expected


@pytest.mark.parametrize(
    ("keys", "short", "devices"),
    [
        ({}, {"model": "a/b"}, 4),  # all visible
        ({"trainer.nnodes": 2}, {"model": "a/b"}, 8),
        ({"trainer.n_gpus_per_node": 2, "trainer.nnodes": 3}, {"model": "a/b"}, 6),
        (["trainer.device=cpu", "actor_rollout_ref.model.path=a/b"], {}, 1),
        ({"trainer.device": "cpu"}, {"n_gpus": 3}, 3),
        ({}, {}, 1),  # the embedded model
    ],
)
def test_answers_per_device_are_multiplied_by_the_devices_of_the_keys(
    keys: Any, short: dict[str, Any], devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trl, "visible", lambda: 4)
    found, _ = with_trl(keys, Given(args=GRPOConfig()), short)
    assert isinstance(found, dict) and found["data.train_batch_size"] == devices
    assert rloom.from_trl(GRPOConfig(), devices=devices)["data.train_batch_size"] == devices


def test_fields_that_were_set_and_are_not_known_are_named(caplog: pytest.LogCaptureFixture) -> None:
    @dataclass
    class Newer(GRPOConfig):
        beam_count: float | None = None
        logging_dir: str | None = None
        top_h: float = 0.5
        eval_args: dict[str, Any] = field(default_factory=dict)

    rloom.from_trl(Newer(), devices=1)
    assert caplog.messages == []
    rloom.from_trl(Newer(beam_count=5.0, logging_dir="logs", eval_args={"a": 1}), devices=1)
    assert caplog.messages == ["Note: fields of TRL that rloom does not know have no effect: beam_count, eval_args"]


def test_rloo_has_its_kl_in_the_reward_and_sft_its_own_keys() -> None:
    found = rloom.from_trl(RLOOConfig(beta=0.05))
    assert found["algorithm.adv_estimator"] == "rloo" and found["algorithm.kl_ctrl.kl_coef"] == 0.05
    assert "actor_rollout_ref.actor.use_kl_loss" not in found
    sft = rloom.from_trl(SFTConfig(learning_rate=2e-5, gradient_accumulation_steps=2))
    assert (sft["optim.lr"], sft["data.train_batch_size"], sft["trainer.total_epochs"]) == (2e-5, 16, 3)
    with pytest.raises(ConfigError, match="`rloom sft` trains on given answers"):
        rloom.train(args=SFTConfig())


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"learning_rat": 1}, r"learning_rat is not a field of TRL that rloom knows; did you mean learning_rate\?"),
        ({"min_p": 0.1}, "min_p=0.1: not in this version"),
        ({"loss_type": "vespo"}, "loss_type='vespo': use dapo, bnpo, grpo"),
        ({"num_train_epochs": 0.5}, "num_train_epochs=0.5: epochs are whole numbers here; use max_steps"),
        ({"loss_type": "cispo"}, "epsilon_high=0.2: with loss_type='cispo' it is the largest ratio; use 1 or more"),
        ({"loss_type": "luspo"}, "loss_type='luspo': use importance_sampling_level='sequence' with it"),
        ({"loss_type": "sapo", "importance_sampling_level": "sequence"}, "importance_sampling_level='token' with it"),
        ({"loss_type": "sapo", "delta": 4.0}, "loss_mode=sapo has no such bound; leave it out"),
        ({"loss_type": "dr_grpo", "entropy_coef": 0.01}, "in TRL it is the mean over tokens; use loss_type='dapo'"),
        ({"use_bias_correction_kl": True}, "use_bias_correction_kl=True: not in this version"),
        ({"use_vllm": True, "vllm_importance_sampling_mode": "mask"}, "use token_truncate, token_mask, sequence_t"),
        (
            {"use_vllm": True, "vllm_importance_sampling_mode": "token_truncate"}
            | {"vllm_importance_sampling_clip_min": 0.5},
            "vllm_importance_sampling_clip_min=0.5: weights are truncated at vllm_importance_sampling_clip_max alone",
        ),
        ({"per_device_train_batch_size": 6, "num_generations": 4}, "has no whole number of prompts"),
        (
            {"per_device_train_batch_size": 4, "num_generations": 4, "gradient_accumulation_steps": 2}
            | {"steps_per_generation": 3},
            "a step of 12 answers is not a whole number of updates of 8",
        ),
    ],
)
def test_a_field_that_has_no_key_is_answered_with_the_reason(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        trl.translate(given, devices=1)
    assert trl.translate({"save_strategy": "no", "save_steps": 500}).values["trainer.save_freq"] == -1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["learning_rate"], f"{LR} (float, default 1.0e-06): "),
        (["--sft", "learning_rate"], "optim.lr (float, default 1.0e-05): "),
        (["num_generations"], "actor_rollout_ref.rollout.n (int, default null): "),
        (["beta"], "beta is a field of TRL; here: with grpo actor_rollout_ref.actor.use_kl_loss=True and "),
        (["min_p"], "min_p is a field of TRL; here: not in this version; leave it out"),
    ],
)
def test_rloom_config_knows_the_fields_of_trl(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["config", *arguments]) == 0
    assert capsys.readouterr().out.startswith(said)


def test_a_field_is_answered_with_its_key_or_reason() -> None:
    assert trl.answer("learning_rate") == LR
    assert trl.answer("min_p") == "not in this version; leave it out"
    assert trl.answer("temperatur") is None
