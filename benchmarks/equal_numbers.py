"""Whether two versions of rloom compute the same: every metric but times, and the SHA-256 of every weight.

    git worktree add OLD COMMIT
    python benchmarks/equal_numbers.py OLD old.json && python benchmarks/equal_numbers.py . new.json
    python benchmarks/equal_numbers.py --compare old.json new.json

Three steps each of PPO, RLOO, GRPO with a KL loss, LoRA, dynamic sampling, a mix with a judge, and SFT, with one and
two workers, on the embedded model. The judge is a local server (tests/judge_server.py) whose score depends on the text.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

COMMON = [
    "data.train_batch_size=8",
    "trainer.total_training_steps=3",
    "trainer.save_freq=3",
    "trainer.logger=[console]",
    "trainer.device=cpu",
]
RL = [*COMMON, "actor_rollout_ref.actor.ppo_mini_batch_size=4", "trainer.test_freq=3"]
GRPO = [*RL, "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.n=4"]
RUNS = {
    "gae": [*RL, "algorithm.adv_estimator=gae", "critic.ppo_mini_batch_size=4"],
    "rloo": [*RL, "algorithm.adv_estimator=rloo", "actor_rollout_ref.rollout.n=4"],
    "grpo_kl_loss": [*GRPO, "actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.01"],
    "lora": [*GRPO, "actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_alpha=8"],
    "dynamic": [*GRPO, "algorithm.filter_groups.enable=True"],
    "judge_mix": [
        *(*GRPO, "reward_model.api.enable=True", "reward_model.api.type=openai", "reward_model.api.model=j"),
        *("reward_model.composite.enable=True", "reward_model.composite.weights={rule_score: 0.5, api_score: 0.5}"),
    ],
    "sft": COMMON,
}
TIMES = ("timing_s/", "timing_per_token_ms/", "perf/")
TIME_ENDINGS = ("_s", "/s", "_seconds", "latency", "time", "cpu_memory_used_gb")


def is_time(name: str) -> bool:
    return name.startswith(TIMES) or name.endswith(TIME_ENDINGS)


def weights(folder: Path) -> dict[str, str]:
    """Name of a tensor -> the beginning of its SHA-256."""
    return {
        f"{file.parent.relative_to(folder)}/{name}": hashlib.sha256(
            tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()[:16]
        for file in sorted(folder.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def numbers(tree: Path, folder: Path, name: str, keys: list[str]) -> dict[str, Any]:
    command = [sys.executable, "-m", "rloom", "sft" if name == "sft" else "train", *keys]
    own = [f"trainer.default_local_dir={folder}", "trainer.resume_mode=disable"]
    environment = os.environ | {"PYTHONPATH": str(tree)}
    done = subprocess.run([*command, *own], cwd=tree, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{name}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    metrics = [{key: value for key, value in json.loads(line).items() if not is_time(key)} for line in lines]
    return {"metrics": metrics, "weights": weights(folder)}


def record(tree: Path, out: Path, names: list[str]) -> None:
    sys.path.insert(0, str(tree))
    from tests.judge_server import KEY, serving

    found: dict[str, Any] = {}
    os.environ["OPENAI_API_KEY"] = KEY
    with serving(say=lambda body, user: json.dumps({"reason": "-", "score": sum(user.encode()) % 11})) as judge:
        for name in names or RUNS:
            address = [f"reward_model.api.base_url={judge.base_url('openai')}"] if name == "judge_mix" else []
            for workers in (1, 2):
                folder = out.with_suffix("") / f"{name}_{workers}"
                keys = [*RUNS[name], *address, f"trainer.n_gpus_per_node={workers}"]
                found[f"{name}, {workers} workers"] = numbers(tree, folder, name, keys)
                print(f"{name}, {workers} workers: recorded", flush=True)
    out.write_text(json.dumps(found, indent=1, sort_keys=True))


def compare(first: Path, second: Path) -> int:
    old, new = json.loads(first.read_text()), json.loads(second.read_text())
    different = [name for name in old if old[name] != new.get(name)]
    for name in old:
        print(f"{name}: {'DIFFERENT' if name in different else 'equal'}, {len(old[name]['weights'])} weights")
    return 1 if different else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("paths", nargs=2, type=Path, metavar="TREE OUT.json, or two OUT.json")
    parser.add_argument("names", nargs="*", choices=[[], *RUNS], help="runs; all without")
    given = parser.parse_args()
    if given.compare:
        return compare(*given.paths)
    record(given.paths[0].resolve(), given.paths[1].resolve(), given.names)
    return 0


if __name__ == "__main__":
    sys.exit(main())
