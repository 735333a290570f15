"""Histories of runs made by hand: a healthy one, and the same with one fault each."""

from collections.abc import Callable, Mapping
from typing import Any

from rloom.doctor.run.checks import diagnose
from rloom.doctor.run.history import History
from rloom.doctor.run.samples import Samples

STEPS = 20
KEYS: Mapping[str, Any] = {
    "algorithm.adv_estimator": "grpo",
    "algorithm.gamma": 1.0,
    "algorithm.lam": 0.95,
    "data.train_batch_size": 64,
    "data.max_response_length": 512,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 16,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.rollout.n": 8,
    "actor_rollout_ref.rollout.temperature": 1.0,
    "actor_rollout_ref.model.path": "Qwen/Qwen2.5-1.5B-Instruct",
    "critic.optim.lr": 1e-5,
}
Values = Mapping[str, Callable[[int], float] | float | None]  # by step; None: not measured


def of_the_step(step: int) -> dict[str, float]:
    """A healthy one. Neighbouring steps differ a little."""
    jitter = 0.01 * (-1) ** step
    return {
        "critic/score/mean": 0.3 + 0.015 * step + jitter,
        "critic/score/min": 0.0,
        "critic/score/max": 1.0,
        "critic/score/std": 0.45,
        "reward/failed": 0.0,
        "actor/entropy": 0.5 - 0.005 * step,
        "actor/pg_clipfrac": 0.02,
        "actor/ppo_kl": 0.001 + jitter / 100,
        "actor/ppo_ratio": 1.0,
        "actor/grad_norm": 0.5 + jitter,
        "actor/lr": 1e-6,
        "actor/nonfinite_updates": 0.0,
        "response_length/mean": 200 + 100 * jitter,
        "response_length/clip_ratio": 0.02,
        "rollout/repetition": 0.05,
        "rollout/equal_groups": 0.3,
        "rollout_corr/k3_kl": 1e-4,
        "timing_s/gen": 5.0,
        "timing_s/update_actor": 4.0,
        "timing_s/reward": 0.1,
        "timing_s/step": 10.0,
        "perf/max_memory_allocated_gb": 40.0,
    }


def critic_of_the_step(step: int) -> dict[str, float]:
    return {
        "critic/vf_loss": 0.3 / (1 + 0.2 * step),
        "critic/vf_explained_var": 0.02 * step,
        "critic/values/mean": 0.3 + 0.015 * step,
    }


def history(values: Values | None = None, keys: Mapping[str, Any] | None = None, steps: int = STEPS) -> History:
    """The healthy one with other values and keys."""
    config = {**KEYS, **(keys or {})}
    records = []
    for step in range(1, steps + 1):
        record = of_the_step(step) | (critic_of_the_step(step) if config["algorithm.adv_estimator"] == "gae" else {})
        for name, value in (values or {}).items():
            record.pop(name, None)
            if value is not None:
                record[name] = value(step) if callable(value) else value
        records.append({**record, "step": float(step)})
    return History(records, config)


def ended(status: str, message: str) -> History:
    known = history()
    return History(known.metrics, known.config, [{"event": "end", "status": status, "message": message}])


def flat(step: int) -> float:
    return 0.3 + 0.02 * (-1) ** step


def fallen(step: int) -> float:
    return 0.3 + 0.03 * min(step, 10) - 0.03 * max(0, step - 10)


GAE = {"algorithm.adv_estimator": "gae"}
SFT = {
    name: None for name in of_the_step(1) if name.startswith(("critic/", "actor/", "rollout", "response", "reward/"))
}
# a healthy run of several turns
EPISODES: Values = {
    "episode/turns/mean": 3.0,
    "episode/ended/done": 0.95,
    "episode/failed": 0.0,
    "episode/ended/token_limit": 0.05,
    "episode/ended/turn_limit": lambda step: 0.4 / step,
    "episode/rewritten_past": 0.0,
    "episode/branches": 1.0,
    "tool/calls": 1.5,
    "tool/errors": lambda step: 0.4 / step + 0.02 * (step % 2),
    "tool/timeouts": 0.0,
    "tool/seconds/mean": 0.1,
}
TURN_KEYS = {
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": 4,
    "actor_rollout_ref.rollout.multi_turn.tool_timeout_s": 5.0,
}
CUSTOM = {"custom_reward_function.path": "my_rewards.py"}


def answers(
    score: Callable[[int, float], float],
    *,
    prompts: int = 64,
    text: Callable[[int], str] = lambda n: f"#### {n}",
    calls: Callable[[int], int] | None = None,
    detail: Callable[[int], str | None] = lambda n: None,
) -> Samples:
    """Four answers to each of 64 prompts of one step, every second one right. `score`: (number, right) -> score."""
    rows = []
    for number in range(256):
        row, right = number // 4, float(number % 2)
        rows.append(
            {
                "group": row, "index": row, "data_source": "openai/gsm8k", "prompt": f"question {row % prompts}",
                "ground_truth": str(row % prompts), "output": text(row % prompts) if right else text(1000 + number % 4),
                "score": score(number, right), "accuracy": None, "length": 4, "prediction": None, "finished": True,
                "detail": detail(number),
                **({} if calls is None else {"calls": calls(number)}),
            }
        )  # fmt: skip
    return Samples.of_rows((1, row) for row in rows)


def with_answers(samples: Samples, values: "Values | None" = None, keys: Mapping[str, Any] | None = None) -> History:
    known = history(values, {**CUSTOM, **(keys or {})})
    return History(known.metrics, known.config, read_samples=lambda: samples)


# a healthy run that generates ahead on workers of its own: of 10 s a step, it waits 1 s and the engines 2 s
SEPARATE: Mapping[str, Any] = {
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.sampler.max_off_policy_threshold": 8,
    "trainer.pools.rollout": 2,
    "trainer.n_gpus_per_node": 8,
}
COLOCATED = {**SEPARATE, "trainer.v1.trainer_mode": "colocate_async", "trainer.pools.rollout": None}
AHEAD: Values = {
    "training/off_policy/trajectory_staleness_worst/mean": lambda step: min(step - 1, 2.0),
    "training/off_policy/trajectory_staleness_worst/max": lambda step: min(step - 1, 3.0),
    "training/off_policy/dropped_groups": lambda step: float(step == 9),
    "rollout/carried_answers": lambda step: min(100.0, 30.0 * step) + 5 * (-1) ** step,
    "rollout_corr/k3_kl": lambda step: 0.0005 + 0.006 * min(step - 1, 2),
    "rollout_corr/rollout_is_ratio_fraction_high": 0.001,
    "training/wait_s": lambda step: 5.0 if step == 1 else 1.0,
    "rollout/idle_s": 2.0,
    "timing_s/gen": 0.9,
    "timing_s/update_actor": 8.0,
}

FAULTY: Mapping[str, Callable[[], History]] = {
    "nonfinite": lambda: history({"actor/nonfinite_updates": lambda step: float(step == 7)}),
    "out_of_memory": lambda: ended("TrainingError", "the GPU ran out of memory in the actor's update: ..."),
    "run_failed": lambda: ended("WorkerError", "worker 3 died"),
    "rollout_mismatch": lambda: history({"rollout_corr/k3_kl": 0.05}),
    "prompts_cut": lambda: history(
        {"prompt_length/mean": 64.0}, {"data.max_prompt_length": 64, "data.truncation": "left"}
    ),
    "repeated_prompts": lambda: with_answers(answers(lambda number, right: right, prompts=4)),
    "sampling_random": lambda: history(
        {
            "actor/entropy": 4.0,
            "critic/score/mean": 0.01,
            "val-core/gsm8k/acc/mean@1": lambda step: 0.4 if step % 5 == 0 else float("nan"),
        },
        {"actor_rollout_ref.rollout.temperature": 2.0},
    ),
    "reward_zero": lambda: history({f"critic/score/{name}": 0.0 for name in ("mean", "max", "min", "std")}),
    "reward_constant": lambda: history({f"critic/score/{name}": 0.7 for name in ("mean", "max", "min")}),
    "reward_failures": lambda: history({"reward/failed": lambda step: 30.0 * (step % 2)}),
    "reward_sign": lambda: with_answers(answers(lambda number, right: -right)),
    "length_rewarded": lambda: with_answers(
        answers(lambda number, right: right or 0.5 * (number % 4), text=lambda n: "x" * (n % 1000) + f" #### {n}")
    ),
    "reward_noise": lambda: with_answers(answers(lambda number, right: float(number % 3), text=lambda n: "#### 1")),
    "right_not_rewarded": lambda: with_answers(answers(lambda number, right: right * (number // 4 % 2))),
    "reward_hacked": lambda: history({"reward/acc": flat, "reward/format": lambda step: 0.05 * step}),
    "learning_rate_zero": lambda: history({"actor/lr": 0.0}),
    "gradient_explosion": lambda: history({"actor/grad_norm": lambda step: 0.5 * 1.5**step}),
    "clip_high": lambda: history({"actor/pg_clipfrac": 0.45}),
    "kl_high": lambda: history({"actor/kl_loss": lambda step: 0.02 * step}),
    "reward_collapse": lambda: history({"critic/score/mean": lambda step: 0.4 if step < 5 else 0.01}),
    "low_score": lambda: history({"critic/score/mean": lambda step: 0.004 * (step % 2)}),
    "equal_groups": lambda: history({"rollout/equal_groups": 0.95, "critic/score/mean": flat}),
    "policy_static": lambda: history(
        {"actor/ppo_kl": 1e-9, "actor/pg_clipfrac": 0.0, "actor/kl_loss": 1e-8, "critic/score/mean": flat}
    ),
    "repetition": lambda: history({"rollout/repetition": lambda step: 0.05 * step}),
    "entropy_collapse": lambda: history(
        {"actor/entropy": lambda step: 0.5 / step**2, "critic/score/mean": flat}
    ),
    "entropy_explosion": lambda: history({"actor/entropy": lambda step: 0.3 * step, "critic/score/mean": flat}),
    "answers_cut": lambda: history({"response_length/clip_ratio": 0.6}),
    "validation_apart": lambda: history(
        {
            "reward/acc": lambda step: 0.3 + 0.015 * step + 0.01 * (-1) ** step,
            "val-core/gsm8k/acc/mean@1": lambda step: 0.05 + 0.001 * (step % 2),
        }
    ),
    "length_drift": lambda: history(
        {"response_length/mean": lambda step: 200.0 + 20 * step, "critic/score/mean": flat, "reward/acc": flat}
    ),
    "critic_stuck": lambda: history(
        {"critic/vf_loss": flat, "critic/vf_explained_var": 0.0, "critic/values/mean": 0.0}, GAE
    ),
    "credit_decay": lambda: history({"critic/score/mean": flat}, GAE),
    "loss_not_falling": lambda: history({**SFT, "train/loss": lambda step: 2.0 + 0.01 * step}),
    "reward_falls": lambda: history({"critic/score/mean": fallen}),
    "no_progress": lambda: history({"critic/score/mean": flat, "val-core/gsm8k/acc/mean@1": 0.3}, steps=50),
    "unusual_keys": lambda: history(keys={"actor_rollout_ref.actor.clip_ratio": 1e-6}),
    "environment_failures": lambda: history(
        {**EPISODES, "episode/failed": 0.1, "reward/failed": 51.0}
    ),
    "tool_calls_rewarded": lambda: with_answers(
        answers(lambda number, right: 0.2 * right + 0.8 * (number % 4 > 1), calls=lambda number: 2 * (number % 4 > 1)),
        EPISODES,
    ),
    "tool_timeouts": lambda: history({**EPISODES, "tool/timeouts": 0.3, "tool/errors": 0.6}, TURN_KEYS),
    "tool_errors": lambda: history({**EPISODES, "tool/errors": lambda step: 0.04 * step}),
    "tools_unused": lambda: history({**EPISODES, "tool/calls": 0.0, "tool/errors": None}),
    "episodes_at_limit": lambda: history(
        {**EPISODES, "episode/ended/turn_limit": 0.6, "response_length/clip_ratio": 0.6}, TURN_KEYS
    ),
    "past_rewritten": lambda: history(
        {**EPISODES, "episode/rewritten_past": 0.8, "episode/repeated_tokens": 300.0, "episode/branches": 2.4}
    ),
    "staleness_hurts": lambda: history(
        {**AHEAD, "rollout_corr/k3_kl": lambda step: 0.001 if step == 1 else 0.3}, SEPARATE
    ),
    "queue_grows": lambda: history({**AHEAD, "training/off_policy/dropped_groups": 6.0}, SEPARATE),
    "starving_trainer": lambda: history({**AHEAD, "training/wait_s": 6.0, "timing_s/gen": 5.9}, SEPARATE),
    "slow_stage": lambda: history({"timing_s/reward": 6.0}),
    "memory_growth": lambda: history({"perf/max_memory_allocated_gb": lambda step: 40.0 + step}),
}  # fmt: skip


def kinds(found: History) -> list[str]:
    return [finding.kind for finding in diagnose(found)]
