"""rloom's side: `rloom train` on the model folder for a step, its rollout engine for a rollout.

python benchmarks/peers/run_rloom.py JOB.json RESULT.json      (started by compare.py)
"""

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import parity
from work import BETAS, GRAD_CLIP, LEARNING_RATE, WEIGHT_DECAY, Result, Work, read_work, versions, write_result

from rloom.config.load import load_config
from rloom.launch.model_sources import policy_source
from rloom.launch.models import policy_engine, policy_network, rollout_engine
from rloom.models.load import load_tokenizer
from rloom.rollout.base import Request, Rollout, Sampling
from rloom.runs.records import METRICS_FILE, read_metrics

PACKAGES = ("rloom", "torch", "transformers")
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"


def common_keys(work: Work) -> dict[str, Any]:
    return {
        "actor_rollout_ref.model.path": work.model,
        "data.max_prompt_length": work.prompt_tokens,
        "data.max_response_length": work.new_tokens,
        f"{ROLLOUT}.n": work.answers,
        f"{ROLLOUT}.ignore_eos": True,
        f"{ROLLOUT}.max_num_seqs": work.sequences,
        "algorithm.adv_estimator": "grpo",
    }


def step_keys(work: Work, folder: Path) -> dict[str, Any]:
    return common_keys(work) | {
        "data.train_files": folder / "prompts.jsonl",
        "data.train_batch_size": work.prompts,
        "data.shuffle": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{ACTOR}.ppo_mini_batch_size": work.prompts,
        f"{ACTOR}.ppo_max_token_len_per_gpu": work.rows * (work.prompt_tokens + work.new_tokens),
        f"{ACTOR}.optim.lr": LEARNING_RATE,
        f"{ACTOR}.optim.weight_decay": WEIGHT_DECAY,
        f"{ACTOR}.optim.betas": json.dumps(BETAS),
        f"{ACTOR}.grad_clip": GRAD_CLIP,
        "custom_reward_function.path": parity.__file__,
        "trainer.total_training_steps": work.steps + 1,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.default_local_dir": folder / "run",
    }


def measure_steps(work: Work) -> tuple[Result, list[int]]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rows = [{"prompt": parity.as_text(ids)} for step in range(work.steps + 1) for ids in work.prompt_ids(step)]
        lines = [json.dumps(row | {"data_source": "parity", "ground_truth": ""}) for row in rows]
        (folder / "prompts.jsonl").write_text("\n".join(lines))
        keys = [f"{key}={value}" for key, value in step_keys(work, folder).items()]
        subprocess.run([sys.executable, "-m", "rloom", "train", *keys], stdout=sys.stderr, check=True)
        records = [one for one in read_metrics(folder / "run" / METRICS_FILE) if "timing_s/step" in one]
    lengths = {int(one[f"response_length/{bound}"]) for one in records for bound in ("min", "max")}
    assert {one[f"prompt_length/{bound}"] for one in records for bound in ("min", "max")} == {work.prompt_tokens}
    warm_up, *measured = records
    result = Result(
        versions=versions(*PACKAGES),
        settings={"compile": "True", "gradient checkpointing": "False", "generation": "native"},
        seconds=[one["timing_s/step"] for one in measured],
        warm_up_s=warm_up["timing_s/step"],
        tokens=max(lengths) * work.sequences,
        generation_s=[one["timing_s/gen"] for one in measured],
        grad_norm=[one["actor/grad_norm"] for one in records],
    )
    return result, [length for length in lengths for _ in range(work.sequences)]


def generate(engine: Rollout, work: Work, step: int) -> tuple[float, list[int]]:
    """Seconds, and the length of each answer."""
    asked = [tuple(ids) for ids in work.prompt_ids(step) for _ in range(work.answers)]
    requests = [
        Request(ids, Sampling(length, ignore_eos=True), row)
        for row, (ids, length) in enumerate(zip(asked, work.lengths(), strict=True))
    ]
    started = time.perf_counter()
    lengths = [len(completion.logprobs_L) for _, completion in engine.generate(requests)]
    return time.perf_counter() - started, lengths


def measure_rollout(work: Work) -> tuple[Result, list[int]]:
    settings = {f"{ROLLOUT}.gpu_memory_utilization": 0.8, f"{ROLLOUT}.free_cache_engine": False}
    config = load_config([f"{key}={value}" for key, value in (common_keys(work) | settings).items()])
    network = policy_network(config)
    tokenizer = load_tokenizer(policy_source(config))
    engine = rollout_engine(config, network, policy_engine(config, network, trained=False), tokenizer)
    engine.wake()
    warm_up_s, _ = generate(engine, work, 0)
    found = [generate(engine, work, step) for step in range(1, work.steps + 1)]
    lengths = found[-1][1]
    result = Result(
        versions=versions(*PACKAGES),
        settings={name: str(value) for name, value in settings.items()},
        seconds=[seconds for seconds, _ in found],
        warm_up_s=warm_up_s,
        tokens=sum(lengths),
    )
    return result, lengths


def main() -> None:
    work = read_work()
    result, lengths = measure_rollout(work) if work.kind == "rollout" else measure_steps(work)
    write_result(result, work, lengths)


if __name__ == "__main__":
    main()
