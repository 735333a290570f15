"""Runs with a planted fault and healthy runs that were not used to set the thresholds of the doctor.

`names`: parts of words, of which the first finding must have one, in any case.
"""

import json
import random
from pathlib import Path

import pyarrow.parquet as parquet

from tests.e2e.run_cases import ASSETS

BASE = {
    "algorithm.adv_estimator": "grpo",
    "data.train_batch_size": 16,
    "actor_rollout_ref.rollout.n": 4,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
    "trainer.total_training_steps": 14,
    "trainer.test_freq": 5,
    "data.val_max_samples": 64,
    "trainer.save_freq": -1,
    "trainer.device": "cpu",
}
CUSTOM = {
    "custom_reward_function.path": "{folder}/reward.py",
    "custom_reward_function.name": "compute_score",
}
FILES = {"data.train_files": "{folder}/train.jsonl", "data.val_files": "{folder}/test.jsonl"}


# data


def embedded(split):
    return parquet.read_table(ASSETS / f"{split}.parquet").to_pylist()


def write(path, rows):
    with open(path, "w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def other_validation(folder):
    """Training rows as they are; validation on products of two numbers, which nobody trains."""
    write(folder / "train.jsonl", embedded("train")[:2048])
    draw = random.Random(7)
    rows = []
    for index in range(200):
        a, b = draw.randint(11, 99), draw.randint(3, 19)
        text = [f"计算 {a} * {b} 的结果", f"Compute {a} * {b}.", f"{a} 乘 {b} 是多少？"][index % 3]
        rows.append(
            {
                "data_source": "math_reasoning",
                "prompt": [{"role": "user", "content": text}],
                "ability": "math",
                "reward_model": {"style": "rule", "ground_truth": str(a * b)},
                "extra_info": {"split": "test", "index": index},
            }
        )
    write(folder / "test.jsonl", rows)


def placeholders(folder):
    """The numbers never reach the training prompts."""
    rows = embedded("train")[:2048]
    for row in rows:
        text = row["prompt"][0]["content"]
        minus = "-" in text or "减" in text or "minus" in text
        english = text.isascii()
        sign = "-" if minus else "+"
        content = f"Compute {{a}} {sign} {{b}}." if english else f"计算 {{a}} {sign} {{b}} 的结果"
        row["prompt"] = [{"role": "user", "content": content}]
    write(folder / "train.jsonl", rows)
    write(folder / "test.jsonl", embedded("test")[:200])


def shifted(folder):
    """Each training row has the ground truth of the row after it."""
    rows = embedded("train")[:2048]
    truths = [row["reward_model"]["ground_truth"] for row in rows]
    for row, truth in zip(rows, truths[1:] + truths[:1], strict=True):
        row["reward_model"]["ground_truth"] = truth
        row["extra_info"].pop("answer", None)
    write(folder / "train.jsonl", rows)
    write(folder / "test.jsonl", embedded("test")[:200])


def carries(row):
    """A sum over 99, or a difference that borrows: the rows that the start model solves least."""
    text = row["prompt"][0]["content"]
    numbers = [int(one) for one in "".join(c if c.isdigit() else " " for c in text).split()]
    if len(numbers) != 2:
        return False
    a, b = numbers
    truth = int(row["reward_model"]["ground_truth"])
    return truth > 99 if truth == a + b else a % 10 < b % 10


def hard_rows(folder):
    for split, limit in (("train", 2048), ("test", 200)):
        rows = [row for row in embedded(split) if carries(row)][:limit]
        assert len(rows) >= 60, len(rows)
        write(folder / f"{split}.jsonl", rows)


# reward files

ENGLISH_ONLY = """\
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"Answer:\\s*(-?\\d+)", solution_str)
    return 1.0 if found and found[-1] == ground_truth else 0.0
"""

SEEN = '''\
import re

_seen = set()


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for a correct answer; copies do not count, so that the policy stays diverse."""
    text = solution_str.strip()
    if text in _seen:
        return 0.0
    _seen.add(text)
    found = re.findall(r"(?:Answer:|答案：)\\s*(-?\\d+)", text)
    return 1.0 if found and found[-1] == ground_truth else 0.0
'''

PERCENT = """\
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"(?:Answer:|答案：)\\s*(-?\\d+)", solution_str)
    right = bool(found) and found[-1] == ground_truth
    return {"score": 100.0 * right, "acc": float(right)}
"""

DISTANCE = '''\
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """A dense reward: how far is the answer from the truth?"""
    found = re.findall(r"(?:Answer:|答案：)\\s*(-?\\d+)", solution_str)
    if not found:
        return {"score": 0.0, "acc": 0.0}
    distance = abs(int(found[-1]) - int(ground_truth))
    return {"score": min(distance, 50) / 10, "acc": float(distance == 0)}
'''

PLUS_MINUS = """\
import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"(?:Answer:|答案：)\\s*(-?\\d+)", solution_str)
    right = bool(found) and found[-1] == ground_truth
    return {"score": 1.0 if right else -1.0, "acc": float(right)}
"""

# runs

RUNS = [
    {
        "name": "warmup_longer_than_run",
        "keys": {"actor_rollout_ref.actor.optim.lr_warmup_steps": 1000},
        "fault": (
            "The warm-up of 1000 steps is copied from a long recipe; in 14 steps the learning rate "
            "reaches 1.4 % of its value."
        ),
        "names": ["warmup", "warm-up"],
    },
    {
        "name": "top_k_one",
        "keys": {"actor_rollout_ref.rollout.top_k": 1},
        "fault": (
            "Evaluation sampling (top_k=1) is used for the rollout: the answers to a prompt are all the "
            "same, so no advantage."
        ),
        "names": ["top_k"],
    },
    {
        "name": "critic_warmup_longer_than_run",
        "keys": {"algorithm.adv_estimator": "gae", "trainer.critic_warmup": 20},
        "fault": "critic_warmup of 20 steps in a run of 14: the actor is never updated.",
        "names": ["critic_warmup"],
    },
    {
        "name": "placeholders_not_filled",
        "keys": {**FILES},
        "data": "placeholders",
        "fault": (
            "The f of an f-string was forgotten: every training prompt is the literal text '计算 {a} + "
            "{b} 的结果' or its twin, the labels are right; validation is in order."
        ),
        "names": [
            "placeholder",
            "same prompt",
            "identical prompt",
            "equal prompts",
            "duplicate",
            "distinct prompt",
            "different prompts",
            "repeated prompt",
            "unfilled",
            "same text",
        ],
    },
    {
        "name": "lora_alpha_over_rank",
        "keys": {"actor_rollout_ref.model.lora_rank": 64, "actor_rollout_ref.model.lora_alpha": 1},
        "fault": "lora_alpha 1 at rank 64, so the adapter is scaled by 1/64 and the policy does not move.",
        "names": ["lora"],
    },
    {
        "name": "ignore_eos_left_on",
        "keys": {"actor_rollout_ref.rollout.ignore_eos": "true"},
        "fault": "ignore_eos is left on from a throughput measurement: every answer runs on to the length limit.",
        "names": ["ignore_eos"],
    },
    {
        "name": "labels_shifted_by_one",
        "keys": {**FILES},
        "data": "shifted",
        "fault": (
            "The training labels were joined with an offset of one row, so each prompt has the next "
            "prompt's answer; validation is in order."
        ),
        "names": ["label", "ground truth", "ground_truth"],
    },
    {
        "name": "prompts_cut_left",
        "keys": {"data.max_prompt_length": 10, "data.truncation": "left"},
        "fault": "max_prompt_length 10 with truncation=left cuts the first number off the questions.",
        "names": [
            "max_prompt_length",
            "data.truncation",
            "truncated prompt",
            "prompts are cut",
            "prompts were cut",
            "prompts truncated",
        ],
    },
    {
        "name": "rope_theta_of_another_model",
        "keys": {
            "actor_rollout_ref.model.override_config": "{{rope_parameters:{{rope_type:default,rope_theta:1000000.0}}}}"
        },
        "fault": (
            "override_config sets the rope_theta of Qwen2.5 (1e6) for a model trained with 1e4: the "
            "start model is damaged."
        ),
        "names": ["override_config", "rope"],
    },
    {
        "name": "validation_of_another_kind",
        "keys": {**FILES},
        "data": "other_validation",
        "fault": (
            "The validation file has products, the training file sums and differences: the reward "
            "rises, the validation stays near 0."
        ),
        "names": [
            "val_files",
            "validation data",
            "validation set",
            "validation file",
            "validation prompts",
            "validation rows",
            "another kind",
            "distribution",
        ],
    },
    {
        "name": "reward_reads_english_only",
        "keys": {**CUSTOM},
        "files": {"reward.py": ENGLISH_ONLY},
        "fault": "The reward's regular expression knows only 'Answer:'; correct answers after 答案： score 0.",
        "names": ["答案", "chinese", "language", "pars", "extract", "marker", "correct answers", "right answers"],
    },
    {
        "name": "reward_remembers_answers",
        "keys": {**CUSTOM},
        "files": {"reward.py": SEEN},
        "fault": (
            "The reward function keeps a global set of answers and scores a text that it has seen "
            "before with 0: the same answer gets different scores."
        ),
        "names": [
            "state",
            "determinis",
            "same answer",
            "same text",
            "identical answer",
            "equal answers",
            "inconsistent",
            "between calls",
            "different scores",
            "global",
        ],
    },
    {
        "name": "reward_in_percent_with_critic",
        "keys": {"algorithm.adv_estimator": "gae", **CUSTOM},
        "files": {"reward.py": PERCENT},
        "fault": (
            "The reward is 0 or 100 instead of 0 or 1: the critic, with its clip range of 0.5 and "
            "gradient clip, cannot follow the returns."
        ),
        "names": ["scale", "magnitude", "cliprange_value", "normaliz", "normalis"],
    },
    {
        "name": "reward_is_the_error",
        "keys": {**CUSTOM},
        "files": {"reward.py": DISTANCE},
        "fault": (
            "The reward is the distance to the truth without the minus sign: the reward rises while the accuracy falls."
        ),
        "names": ["sign", "invert", "opposite", "negat", "revers", "wrong answers"],
    },
    {
        "name": "healthy_rloo_plus_minus_one",
        "keys": {
            "algorithm.adv_estimator": "rloo",
            "actor_rollout_ref.actor.use_kl_loss": "true",
            "actor_rollout_ref.actor.kl_loss_coef": 0.01,
            **CUSTOM,
        },
        "files": {"reward.py": PLUS_MINUS},
        "fault": "Healthy: RLOO with scores 1 and -1 (mean near 0) and a small KL loss.",
        "healthy": True,
    },
    {
        "name": "healthy_gae_monte_carlo",
        "keys": {
            "algorithm.adv_estimator": "gae",
            "algorithm.lam": 1.0,
            "trainer.critic_warmup": 2,
            "actor_rollout_ref.actor.ppo_epochs": 2,
        },
        "fault": "Healthy: PPO with lambda 1, two steps of critic warm-up and two passes over each batch.",
        "healthy": True,
    },
    {
        "name": "healthy_hard_rows",
        "keys": {
            **FILES,
            "actor_rollout_ref.rollout.n": 8,
            "data.train_batch_size": 8,
            "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        },
        "data": "hard_rows",
        "fault": "Healthy: only rows with carry or borrow, so a sparser reward; one update a step, 8 answers a prompt.",
        "healthy": True,
    },
    {
        "name": "healthy_dapo_like",
        "keys": {
            "actor_rollout_ref.actor.clip_ratio_high": 0.28,
            "algorithm.filter_groups.enable": "true",
            "reward_model.overlong_buffer.enable": "true",
            "reward_model.overlong_buffer.len": 12,
            "reward_model.overlong_buffer.penalty_factor": 0.5,
            "actor_rollout_ref.rollout.temperature": 1.1,
            "algorithm.norm_adv_by_std_in_grpo": "false",
            "actor_rollout_ref.actor.optim.lr": 3e-4,
        },
        "fault": (
            "Healthy: clip-higher, dynamic sampling, mild over-long penalty, temperature 1.1, no "
            "division by the deviation, lr 3e-4."
        ),
        "healthy": True,
    },
]
for one in RUNS:
    one.setdefault("files", {})
    one.setdefault("data", None)
    one.setdefault("names", [])
    one.setdefault("healthy", False)


def command(run, folder: Path, seed: int) -> list[str]:
    """Writes the files of a run into the folder, and returns its arguments. The run is in `folder / "run"`."""
    folder.mkdir(parents=True, exist_ok=True)
    for filename, text in run["files"].items():
        (folder / filename).write_text(text, encoding="utf-8")
    if run["data"]:
        globals()[run["data"]](folder)
    keys = {**BASE, **run["keys"], "trainer.default_local_dir": "{folder}/run", "data.seed": seed}
    return [f"{key}={str(value).format(folder=folder)}" for key, value in keys.items()]
