"""The runs that `rloom doctor` is tried on: each of the ill ones has one planted fault, the healthy ones have none.

A line of the table is a `RunCase`: keys, reward, rows or model that differ from a healthy run, and what must be found.
"""

from collections.abc import Mapping

import random

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
KL = {f"{ACTOR}.use_kl_loss": True}
RULE = {"reward": None}  # the fix of a wrong reward function
PLAIN = "{%- for m in messages -%}{{ 'Question: ' + m['content'] + '\nReply: ' }}{%- endfor -%}"
STEPS = "trainer.total_training_steps"


def right(answer: str, truth: object) -> float:
    return float(is_correct(answer, truth))


ILL: Mapping[str, RunCase] = {
    # the learning rate and other values of the optimizer
    "lr x100": RunCase("reward_collapse", LR, {LR: 0.02}),
    "lr x20": RunCase("reward_collapse", LR, {LR: 0.004}),
    "lr x10": RunCase("", LR, {LR: 0.002}),
    "lr 1e-9": RunCase("", LR, {LR: 1e-9}),
    "lr 1e-7": RunCase("", LR, {LR: 1e-7}),
    "lr 0": RunCase("", LR, {LR: 0.0}),
    "warm-up longer than the run": RunCase("", "warmup", {f"{ACTOR}.optim.lr_warmup_steps": 10000}),
    "weight decay": RunCase("", "weight_decay", {f"{ACTOR}.optim.weight_decay": 200.0}),
    "grad clip": RunCase("", "grad_clip", {f"{ACTOR}.grad_clip": 1e-6}),
    "grad clip and sgd-like": RunCase("", "grad_clip", {f"{ACTOR}.grad_clip": 1e-9}),
    "many epochs": RunCase("", "ppo_epochs", {f"{ACTOR}.ppo_epochs": 20, LR: 1e-3}),
    "clip ratio tiny": RunCase("", "clip_ratio", {f"{ACTOR}.clip_ratio": 1e-6}),
    # sampling
    "temperature 0.01": RunCase("", TEMPERATURE, {TEMPERATURE: 0.01}),
    "temperature 3": RunCase("", TEMPERATURE, {TEMPERATURE: 3.0}),
    "temperature 2": RunCase("", TEMPERATURE, {TEMPERATURE: 2.0}),
    "top_k 1": RunCase("", "top_k", {f"{ROLLOUT}.top_k": 1}),
    "top_p 0.01": RunCase("", "top_p", {f"{ROLLOUT}.top_p": 0.01}),
    "answers of at most 4 tokens": RunCase("", LONGEST, {LONGEST: 4}),
    "answers of at most 8 tokens": RunCase("", LONGEST, {LONGEST: 8}),
    "answers of at most 16 tokens": RunCase("", LONGEST, {LONGEST: 16}),
    "ignore_eos": RunCase("", "ignore_eos", {f"{ROLLOUT}.ignore_eos": True}),
    # terms of the loss
    "entropy bonus 1": RunCase("", "entropy_coeff", {f"{ACTOR}.entropy_coeff": 1.0}),
    "entropy bonus 0.3": RunCase("", "entropy_coeff", {f"{ACTOR}.entropy_coeff": 0.3}),
    "entropy malus": RunCase("", "entropy_coeff", {f"{ACTOR}.entropy_coeff": -0.5}),
    "kl loss 100": RunCase("", "kl_loss_coef", {**KL, f"{ACTOR}.kl_loss_coef": 100.0}),
    "kl loss 10": RunCase("", "kl_loss_coef", {**KL, f"{ACTOR}.kl_loss_coef": 10.0}),
    "kl in reward 50": RunCase(
        "", "kl_coef", {**GAE, "algorithm.use_kl_in_reward": True, "algorithm.kl_ctrl.kl_coef": 50.0}
    ),
    "kl without weight, high learning rate": RunCase("", LR, {**KL, f"{ACTOR}.kl_loss_coef": 0.0, LR: 2e-3}),
    # critic and credit
    "critic lr 0": RunCase("", "critic.optim.lr", {**GAE, f"{CRITIC}.optim.lr": 0.0}),
    "critic lr 1": RunCase("", "critic.optim.lr", {**GAE, f"{CRITIC}.optim.lr": 1.0}),
    "critic lr 1e-10": RunCase("", "critic.optim.lr", {**GAE, f"{CRITIC}.optim.lr": 1e-10}),
    "critic warm-up longer than the run": RunCase("", "critic_warmup", {**GAE, "trainer.critic_warmup": 100}),
    "lam 0.3": RunCase("", "lam", {**GAE, "algorithm.lam": 0.3}),
    "gamma 0.5": RunCase("", "gamma", {**GAE, "algorithm.gamma": 0.5}),
    # rewards
    "reward 0": RunCase("reward_zero", "", reward=rewarded(lambda answer, truth: 0.0), fix=RULE),
    "reward 0.5": RunCase("reward_constant", "", reward=rewarded(lambda answer, truth: 0.5), fix=RULE),
    "reward of the prompt alone": RunCase(
        "equal_groups", "", reward=rewarded(lambda answer, truth: float(int(truth) % 2)), fix=RULE
    ),
    "sign, with acc": RunCase(
        "", "sign", reward=rewarded(lambda a, t: {"score": -right(a, t), "acc": right(a, t)}), fix=RULE
    ),
    "sign": RunCase("", "sign", reward=rewarded(lambda a, t: -right(a, t)), fix=RULE),
    "sign, 1 - correct": RunCase("", "sign", reward=rewarded(lambda a, t: 1 - right(a, t)), fix=RULE),
    "length pays": RunCase("", "length", reward=rewarded(lambda a, t: 0.3 * right(a, t) + 0.02 * len(a)), fix=RULE),
    "length alone pays": RunCase("", "length", reward=rewarded(lambda a, t: 0.01 * len(a)), fix=RULE),
    "short answers pay": RunCase("", "length", {LR: 1e-3}, reward=rewarded(lambda a, t: -float(len(a))), fix=RULE),
    "noise 30 %": RunCase(
        "", "noise", reward=rewarded(lambda a, t: abs(right(a, t) - (random.random() < 0.3))), fix=RULE
    ),
    "random reward": RunCase("", "noise", reward=rewarded(lambda a, t: random.random()), fix=RULE),
    "coin": RunCase("", "noise", reward=rewarded(lambda a, t: float(random.random() < 0.5)), fix=RULE),
    "scores of other answers": RunCase("", "noise", reward=of_the_answer_before, fix=RULE),
    "rewards of 5000": RunCase("", "reward", RLOO, reward=rewarded(lambda a, t: 5000.0 * right(a, t)), fix=RULE),
    "one reward in five raises": RunCase("reward_failures", "", reward=failing, fix=RULE),
    "slow reward": RunCase("slow_stage", "", reward=slow, learns=False),
    "reward keeps memory": RunCase("memory_growth", "", reward=leaking, patch=memory_of_now, learns=False),
    "format pays": RunCase("reward_hacked", "format", {LR: 1e-3}, reward=rewarded(by_format), fix=RULE),
    "any digit pays": RunCase("", "", reward=rewarded(lambda a, t: float(any(c.isdigit() for c in a))), fix=RULE),
    "answer in the wrong format": RunCase(
        "reward_zero", "", reward=rewarded(lambda a, t: float(f"\\boxed{{{t}}}" in a)), fix=RULE
    ),
    "rewards become NaN": RunCase("nonfinite", "", patch=nan_rewards, fix={"patch": None}),
    "engine has other weights": RunCase("rollout_mismatch", "", patch=wrong_weights, fix={"patch": None}),
    # data
    "truth + 1": RunCase("", "ground_truth", train=with_truth(lambda t: str(int(t) + 1)), fix={"train": None}),
    "truths shuffled": RunCase("", "ground_truth", train=shuffled_truths, fix={"train": None}),
    "truths as words": RunCase("", "ground_truth", train=with_truth(lambda t: f"the result is {t}"), fix={"train": None}),
    "one row 256 times": RunCase("", "prompts", train=repeated(1, 256), fix={"train": None}),
    "eight rows 64 times": RunCase("", "prompts", train=repeated(8, 64), fix={"train": None}),
    "prompts without the question": RunCase(
        "", "prompt", train=with_prompt(lambda p: "Solve it."), fix={"train": None}
    ),
    "prompts cut": RunCase(
        "", "prompt", {"data.max_prompt_length": 8, "data.truncation": "right"}, fix={"keys": {}}
    ),
    "validation of another kind": RunCase("", "validation", validation=multiplications, fix={"validation": None}),
    # models
    "another chat template": RunCase("", "template", model=with_template(PLAIN), fix={"model": None}),
    "no chat template": RunCase(
        "", "template", model=with_template("{%- for m in messages -%}{{ m['content'] }}{%- endfor -%}"), fix={"model": None}
    ),
    "model without attention": RunCase(
        "", "model", {TEMPERATURE: 0.3},
        model=damaged_model(lambda name, w: w * ("self_attn.o_proj" not in name)), fix={"model": None, "keys": {}},
    ),
    "damaged model": RunCase("", "model", model=damaged_model(noisy), fix={"model": None}),
    # supervised fine-tuning
    "sft lr x100": RunCase("", "optim.lr", {"optim.lr": 0.1, STEPS: 24}, sft=True, learns=False),
    "sft lr 0": RunCase("", "optim.lr", {"optim.lr": 0.0, STEPS: 24}, sft=True, learns=False),
}  # fmt: skip

HEALTHY: Mapping[str, RunCase] = {
    "grpo": RunCase(),
    "grpo with kl": RunCase(keys=KL),
    "grpo, 8 answers": RunCase(keys={f"{ROLLOUT}.n": 8}),
    "grpo, 32 prompts": RunCase(keys={"data.train_batch_size": 32, f"{ACTOR}.ppo_mini_batch_size": 16}),
    "grpo, one update": RunCase(keys={f"{ACTOR}.ppo_mini_batch_size": 16}),
    "grpo, small": RunCase(keys={"data.train_batch_size": 4, f"{ACTOR}.ppo_mini_batch_size": 4}),
    "grpo, 40 steps": RunCase(keys={STEPS: 40}),
    "grpo, 80 steps": RunCase(keys={STEPS: 80, "trainer.test_freq": 20}),
    "grpo, lr 5e-4": RunCase(keys={LR: 5e-4}),
    "grpo, lr 5e-5": RunCase(keys={LR: 5e-5}),
    "grpo, two epochs": RunCase(keys={f"{ACTOR}.ppo_epochs": 2}),
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
    "reward of 0 to 10": RunCase(reward=rewarded(lambda a, t: 10 * right(a, t))),
    "reward by nearness": RunCase(reward=rewarded(
        lambda a, t: sum(x == y for x, y in zip(a.split()[-1][::-1] if a.split() else "", str(t)[::-1], strict=False)) / len(str(t))
    )),
    "length costs a little": RunCase(reward=rewarded(lambda a, t: right(a, t) - 0.002 * len(a))),
    "own rule": RunCase(reward=rewarded(right)),
    "few rows, two epochs": RunCase(keys={"trainer.total_epochs": 2}, train=lambda rows: rows[:128]),
    "sft": RunCase(keys={STEPS: 24}, sft=True),
    "sft, lr 1e-4": RunCase(keys={STEPS: 24, "optim.lr": 1e-4}, sft=True),
}  # fmt: skip
