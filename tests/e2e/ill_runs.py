"""The runs that `rloom doctor` is tried on: each of the ill ones has one planted fault, the healthy ones have none.

A line of the table is a `RunCase`: keys, reward, rows or model that differ from a healthy run, and what must be found.
"""

import random
from collections.abc import Mapping

from tests.e2e.run_cases import (
    ACTOR,
    CRITIC,
    MODEL,
    ROLLOUT,
    RunCase,
    by_format,
    damaged_model,
    failing,
    is_correct,
    leaking,
    memory_of_now,
    multiplications,
    nan_rewards,
    noisy,
    of_the_answer_before,
    repeated,
    rewarded,
    shuffled_truths,
    slow,
    with_prompt,
    with_template,
    with_truth,
    wrong_weights,
)

GAE = {"algorithm.adv_estimator": "gae"}
RLOO = {"algorithm.adv_estimator": "rloo"}
LR, TEMPERATURE, LONGEST = f"{ACTOR}.optim.lr", f"{ROLLOUT}.temperature", "data.max_response_length"
COLLAPSE, EQUAL, CUT, NOISE, LOW = "reward_collapse", "equal_groups", "answers_cut", "reward_noise", "low_score"
STILL = ("policy_static", "no_progress")
WEAK = ("unusual_keys", "no_progress", "reward_collapse", "reward_falls")
KL = {f"{ACTOR}.use_kl_loss": True}
RULE = {"reward": None, "reward_file": ""}  # the fix of a wrong reward function
ROWS, OWN_MODEL = {"train": None}, {"model": None}  # of wrong rows, of a damaged model
PLAIN = "{%- for m in messages -%}{{ 'Question: ' + m['content'] + '\nReply: ' }}{%- endfor -%}"
NO_TEMPLATE = "{%- for m in messages -%}{{ m['content'] }}{%- endfor -%}"
STEPS = "trainer.total_training_steps"
HANGING = """
import re, time, zlib

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if zlib.crc32(solution_str.encode()) % 40 == 0:
        time.sleep(60)
    return float(re.findall(r"-?\\d+", solution_str)[-1:] == [str(ground_truth)])
"""
SECOND_TRY = """
import re, time, zlib

class Game:
    def reset(self, reward_model, **row):
        self.truth, self.left = str(reward_model["ground_truth"]), 2

    def step(self, text):
        self.left -= 1
        FAULT
        if re.findall(r"-?\\d+", text)[-1:] == [self.truth]:
            return "", 1.0, True
        return "?", 0.0, self.left == 0
"""
RAISES = 'assert zlib.crc32(text.encode()) % 10, "no such move"'
HANGS = "time.sleep(60) if zlib.crc32(text.encode()) % 10 == 0 else None"
SHORT_STEPS = {f"{ROLLOUT}.multi_turn.tool_timeout_s": 0.5, STEPS: 10}


def second_try(fault: str = "") -> str:
    return SECOND_TRY.replace("FAULT", fault)


def right(answer: str, truth: object) -> float:
    return float(is_correct(answer, truth))


ILL: Mapping[str, RunCase] = {
    # several turns
    "an environment that raises": RunCase(
        "environment_failures", "environment", {"reward_model.max_failed_share": 1.0},
        environment_file=second_try(RAISES), fix={"environment_file": second_try()}, learns=False,
    ),
    "an environment that hangs": RunCase(
        "environment_failures", "tool_timeout_s", {"reward_model.max_failed_share": 1.0, **SHORT_STEPS},
        environment_file=second_try(HANGS), fix={"environment_file": second_try()}, learns=False,
    ),
    "episodes of at most 16 tokens": RunCase(
        "episodes_at_limit", LONGEST, {LONGEST: 16}, environment_file=second_try(), learns=False,
    ),
    # the optimizer
    "lr x100": RunCase(COLLAPSE, LR, {LR: 0.02}),
    "lr x20": RunCase(COLLAPSE, LR, {LR: 0.004}),
    "lr x10": RunCase(COLLAPSE, LR, {LR: 0.002}),
    "lr 1e-7": RunCase(STILL, LR, {LR: 1e-7}),
    "lr 1e-9": RunCase(STILL, LR, {LR: 1e-9}),
    "lr 0": RunCase("learning_rate_zero", LR, {LR: 0.0}),
    "lora, alpha x400": RunCase((COLLAPSE, "reward_falls"), "lora_alpha", {
        f"{MODEL}.lora_rank": 8, LR: 2e-3, f"{MODEL}.lora_alpha": 6400,
    }),
    "warm-up longer than the run": RunCase(STILL, "warmup", {f"{ACTOR}.optim.lr_warmup_steps": 10000}),
    "weight decay 200": RunCase(COLLAPSE, "weight_decay", {f"{ACTOR}.optim.weight_decay": 200.0}),
    "gradients clipped to 1e-9": RunCase(STILL, "grad_clip", {f"{ACTOR}.grad_clip": 1e-9}),
    "gradients clipped to 1e-6": RunCase((*STILL, "unusual_keys"), "grad_clip", {f"{ACTOR}.grad_clip": 1e-6}),
    "20 epochs a batch": RunCase(COLLAPSE, "ppo_epochs", {f"{ACTOR}.ppo_epochs": 20, LR: 5e-4}),
    "clip ratio 1e-6": RunCase("unusual_keys", "clip_ratio", {f"{ACTOR}.clip_ratio": 1e-6}),
    # sampling
    "temperature 0.01": RunCase(EQUAL, TEMPERATURE, {TEMPERATURE: 0.01}),
    "temperature 2": RunCase("sampling_random", TEMPERATURE, {TEMPERATURE: 2.0}),
    "temperature 3": RunCase("sampling_random", TEMPERATURE, {TEMPERATURE: 3.0}),
    "top_k 1": RunCase(EQUAL, "top_k", {f"{ROLLOUT}.top_k": 1}),
    "top_p 0.01": RunCase(EQUAL, "top_p", {f"{ROLLOUT}.top_p": 0.01}),
    "answers of at most 4 tokens": RunCase(CUT, LONGEST, {LONGEST: 4}),
    "answers of at most 8 tokens": RunCase(CUT, LONGEST, {LONGEST: 8}),
    "answers of at most 16 tokens": RunCase(CUT, LONGEST, {LONGEST: 16}),
    "answers that never end": RunCase(("repetition", CUT), "ignore_eos", {f"{ROLLOUT}.ignore_eos": True}),
    # terms of the loss
    "entropy bonus 1": RunCase(COLLAPSE, "entropy_coeff", {f"{ACTOR}.entropy_coeff": 1.0}),
    "entropy bonus 0.3": RunCase(WEAK, "entropy_coeff", {f"{ACTOR}.entropy_coeff": 0.3}),
    "kl loss 100": RunCase("no_progress", "kl_loss_coef", {**KL, f"{ACTOR}.kl_loss_coef": 100.0}),
    "kl loss 10": RunCase("no_progress", "kl_loss_coef", {**KL, f"{ACTOR}.kl_loss_coef": 10.0}),
    "kl in the reward 50": RunCase(("no_progress", "critic_stuck"), "kl_coef", {
        **GAE, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 50.0,
    }),
    "kl without weight, high learning rate": RunCase(COLLAPSE, LR, {**KL, f"{ACTOR}.kl_loss_coef": 0.0, LR: 2e-3}),
    # critic and credit
    "critic lr 0": RunCase("critic_stuck", "critic.optim.lr", {**GAE, f"{CRITIC}.optim.lr": 0.0}),
    "critic lr 1": RunCase(("no_progress", "critic_stuck"), "critic.optim.lr", {**GAE, f"{CRITIC}.optim.lr": 1.0}),
    "critic lr 1e-10": RunCase("critic_stuck", "critic.optim.lr", {**GAE, f"{CRITIC}.optim.lr": 1e-10}),
    "critic warm-up for the whole run": RunCase("no_progress", "critic_warmup", {**GAE, "trainer.critic_warmup": 100}),
    "lam 0.3": RunCase("credit_decay", "lam", {**GAE, "algorithm.lam": 0.3}),
    "gamma 0.5": RunCase("credit_decay", "gamma", {**GAE, "algorithm.gamma": 0.5}),
    # rewards
    "reward 0": RunCase("reward_zero", "reward function", reward=rewarded(lambda a, t: 0.0), fix=RULE),
    "reward 0.5": RunCase("reward_constant", "reward function", reward=rewarded(lambda a, t: 0.5), fix=RULE),
    "any digit pays": RunCase("reward_constant", "reward function", reward=rewarded(
        lambda a, t: float(any(c.isdigit() for c in a))
    ), fix=RULE),
    "answer in another format": RunCase("reward_zero", "reward function", reward=rewarded(
        lambda a, t: float(f"\\boxed{{{t}}}" in a)
    ), fix=RULE),
    "reward of the prompt alone": RunCase(EQUAL, "prompt alone", reward=rewarded(
        lambda a, t: float(int(t) % 2)
    ), fix=RULE),
    "sign": RunCase("reward_sign", "sign", reward=rewarded(lambda a, t: -right(a, t)), fix=RULE),
    "sign, with acc": RunCase("reward_sign", "sign", reward=rewarded(
        lambda a, t: {"score": -right(a, t), "acc": right(a, t)}
    ), fix=RULE),
    "sign, 1 - correct": RunCase("reward_sign", "sign", reward=rewarded(lambda a, t: 1 - right(a, t)), fix=RULE),
    "length pays": RunCase("length_rewarded", "length", reward=rewarded(
        lambda a, t: 0.3 * right(a, t) + 0.2 * len(a)
    ), fix=RULE),
    "length alone pays": RunCase("length_rewarded", "length", reward=rewarded(lambda a, t: 0.01 * len(a)), fix=RULE),
    "short answers pay": RunCase("length_rewarded", "length", {LR: 1e-3}, reward=rewarded(
        lambda a, t: -float(len(a))
    ), fix={**RULE, "keys": {}}),
    "noise 30 %": RunCase(NOISE, "random", reward=rewarded(
        lambda a, t: abs(right(a, t) - (random.random() < 0.3))
    ), fix=RULE),
    "random reward": RunCase(NOISE, "random", reward=rewarded(lambda a, t: random.random()), fix=RULE),
    "coin": RunCase(NOISE, "random", reward=rewarded(lambda a, t: float(random.random() < 0.5)), fix=RULE),
    "scores of other answers": RunCase(NOISE, "another answer", reward=of_the_answer_before, fix=RULE),
    "rewards of 5,000": RunCase("gradient_explosion", "normalize", RLOO, reward=rewarded(
        lambda a, t: 5000.0 * right(a, t)
    )),
    "rewards of 1e-9": RunCase(STILL, "tiny", RLOO, reward=rewarded(lambda a, t: 1e-9 * right(a, t)), fix=RULE),
    "reward reads one form of the answer": RunCase("right_not_rewarded", "built-in rule", reward=rewarded(
        lambda a, t: float(f"Answer: {t}" in a)
    ), fix=RULE),
    "one reward in five raises": RunCase("reward_failures", "exception", reward=failing, fix=RULE),
    "some answers hang": RunCase(("reward_failures", "slow_stage"), "timeout_s", {
        "reward_model.timeout_s": 2.5,
    }, reward_file=HANGING, learns=False),
    "slow reward": RunCase("slow_stage", "num_workers", reward=slow, learns=False),
    "reward keeps memory": RunCase("memory_growth", "keeps", reward=leaking, patch=memory_of_now, learns=False),
    "format pays": RunCase("reward_hacked", "format", {LR: 5e-4}, reward=rewarded(by_format), fix={**RULE, "keys": {}}),
    "rewards become NaN": RunCase("nonfinite", "NaN", patch=nan_rewards, fix={"patch": None}),
    "engine has other weights": RunCase("rollout_mismatch", "rollout_corr", patch=wrong_weights, learns=False),
    # data
    "truth + 1": RunCase(LOW, "ground_truth", train=with_truth(lambda t: str(int(t) + 1)), fix=ROWS),
    "truths shuffled": RunCase((LOW, "reward_zero"), "ground_truth", train=shuffled_truths, fix=ROWS),
    "truths as sentences": RunCase("reward_zero", "ground_truth", train=with_truth(lambda t: f"it is {t}"), fix=ROWS),
    "one row 256 times": RunCase("repeated_prompts", "1 different", train=repeated(1, 256), fix=ROWS),
    "eight rows 64 times": RunCase("repeated_prompts", "8 different", train=repeated(8, 64), fix=ROWS),
    "prompts without the question": RunCase("repeated_prompts", "question", train=with_prompt(
        lambda prompt: "Solve it."
    ), fix=ROWS),
    "prompts cut": RunCase("prompts_cut", "max_prompt_length", {
        "data.max_prompt_length": 8, "data.truncation": "right",
    }),
    "validation of another kind": RunCase(
        "validation_apart", "different problems", validation=multiplications, fix={"validation": None}
    ),
    # models
    "another chat template": RunCase(LOW, "chat", model=with_template(PLAIN), fix=OWN_MODEL),
    "no chat template": RunCase((LOW, "reward_zero"), "chat", model=with_template(NO_TEMPLATE), fix=OWN_MODEL),
    "model without attention": RunCase("repetition", "damaged", {TEMPERATURE: 0.3}, model=damaged_model(
        lambda name, weight: weight * ("self_attn.o_proj" not in name)
    ), fix={**OWN_MODEL, "keys": {}}),
    "noise in the weights": RunCase(LOW, "damaged", model=damaged_model(noisy), fix=OWN_MODEL),
    # supervised fine-tuning
    "sft lr x200": RunCase("loss_not_falling", "optim.lr", {"optim.lr": 0.1, STEPS: 24}, sft=True),
    "sft lr 0": RunCase("learning_rate_zero", "optim.lr", {"optim.lr": 0.0, STEPS: 24}, sft=True),
}  # fmt: skip

HEALTHY: Mapping[str, RunCase] = {
    "a second try": RunCase(keys={LONGEST: 96}, environment_file=second_try()),
    "grpo": RunCase(),
    "grpo with kl": RunCase(keys=KL),
    "grpo, 8 answers": RunCase(keys={f"{ROLLOUT}.n": 8}),
    "grpo, 32 prompts": RunCase(keys={"data.train_batch_size": 32, f"{ACTOR}.ppo_mini_batch_size": 16}),
    "grpo, one update": RunCase(keys={f"{ACTOR}.ppo_mini_batch_size": 16}),
    "grpo, small": RunCase(keys={"data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 4}),
    "grpo, 6 steps": RunCase(keys={STEPS: 6}),
    "grpo, 40 steps": RunCase(keys={STEPS: 40}),
    "grpo, 80 steps": RunCase(keys={STEPS: 80, "trainer.test_freq": 20}),
    "grpo, lr 3e-4": RunCase(keys={LR: 3e-4}),
    "grpo, lr 5e-5": RunCase(keys={LR: 5e-5}),
    "grpo, two epochs a batch": RunCase(keys={f"{ACTOR}.ppo_epochs": 2}),
    "grpo, temperature 0.8": RunCase(keys={TEMPERATURE: 0.8}),
    "grpo, entropy bonus": RunCase(keys={f"{ACTOR}.entropy_coeff": 0.001}),
    "gae": RunCase(keys=GAE),
    "gae, 40 steps": RunCase(keys={**GAE, STEPS: 40}),
    "gae with kl": RunCase(keys={**GAE, "algorithm.use_kl_in_reward": True}),
    "gae with warm-up": RunCase(keys={**GAE, "trainer.critic_warmup": 3}),
    "rloo": RunCase(keys=RLOO),
    "rloo with kl": RunCase(keys={**RLOO, **KL}),
    "reinforce_plus_plus": RunCase(keys={"algorithm.adv_estimator": "reinforce_plus_plus"}),
    "remax": RunCase(keys={"algorithm.adv_estimator": "remax"}),
    "dapo": RunCase(keys={
        "algorithm.filter_groups.enable": True,
        f"{ACTOR}.clip_ratio_high": 0.28,
        "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 8,
    }),
    "gspo": RunCase(keys={
        f"{ACTOR}.policy_loss.loss_mode": "gspo", f"{ACTOR}.clip_ratio_low": 3e-4, f"{ACTOR}.clip_ratio_high": 4e-4,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
    }),
    "lora": RunCase(keys={f"{MODEL}.lora_rank": 8, LR: 2e-3}),
    "lora, lr 5e-4": RunCase(keys={f"{MODEL}.lora_rank": 8, LR: 5e-4}),
    "reward with parts": RunCase(reward=rewarded(
        lambda a, t: {"score": 0.8 * right(a, t) + 0.2 * (":" in a or "：" in a), "acc": right(a, t), "format": 0.2}
    )),
    "reward from -1 to 1": RunCase(reward=rewarded(lambda a, t: 2 * right(a, t) - 1)),
    "reward from 0 to 10": RunCase(reward=rewarded(lambda a, t: 10 * right(a, t))),
    "reward by digits": RunCase(reward=rewarded(
        lambda a, t: sum(x == y for x, y in zip(a[::-1], str(t)[::-1], strict=False)) / len(str(t))
    )),
    "a judge's small noise": RunCase(reward=rewarded(lambda a, t: right(a, t) + 0.1 * random.random())),
    "length costs a little": RunCase(reward=rewarded(lambda a, t: right(a, t) - 0.002 * len(a))),
    "length pays a little": RunCase(reward=rewarded(lambda a, t: 0.3 * right(a, t) + 0.02 * len(a))),
    "own rule": RunCase(reward=rewarded(right)),
    "128 rows, two epochs": RunCase(keys={"trainer.total_epochs": 2}, train=lambda rows: rows[:128]),
    "sft": RunCase(keys={STEPS: 24}, sft=True),
    "sft, lr 1e-4": RunCase(keys={STEPS: 24, "optim.lr": 1e-4}, sft=True),
}  # fmt: skip
