"""Time and memory of PPO, RLOO and GRPO in the same run, each with the models that its guide gives it.

    python benchmarks/algorithms.py --shapes qwen2.5-0.5b [--algorithms PPO] [--prompts 128] [--answers 5] [key=value]

Each algorithm is one `rloom train` command: PPO with critic and reference, RLOO with a reference, GRPO with neither.
The weights are random and answers do not end early, so that all three generate the same number of tokens; the first
step compiles and is left out.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import torch
from measuring import machine, note, pick_device, table
from shapes import SHAPES

from rloom.runs.records import METRICS_FILE, read_metrics

TOKENIZER = Path(__file__).parents[1] / "rloom" / "assets" / "embedded" / "model"
KL = ["algorithm.use_kl_in_reward=True", "algorithm.kl_ctrl.kl_coef=0.001"]
ALGORITHMS = {
    "PPO": ["algorithm.adv_estimator=gae", *KL],
    "RLOO": ["algorithm.adv_estimator=rloo", *KL],
    "GRPO": ["algorithm.adv_estimator=grpo"],
}
STAGES = ("gen", "old_log_prob", "ref", "values", "update_critic", "update_actor", "step")


def write_model(shape: str, folder: Path) -> Path:
    """A Hugging Face folder with random weights of this shape and the embedded tokenizer."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(TOKENIZER, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    (folder / "config.json").write_text(json.dumps(SHAPES[shape].config()))
    with torch.device(pick_device()[0]):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def train(name: str, model: Path, run: Path, given: argparse.Namespace, overrides: list[str]) -> dict[str, float]:
    """Medians of the steps after the first."""
    keys = [
        *ALGORITHMS[name],
        f"actor_rollout_ref.model.path={model}",
        f"data.train_batch_size={given.prompts}",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={given.prompts // 4}",
        f"actor_rollout_ref.rollout.n={given.answers}",
        f"data.max_response_length={given.new_tokens}",
        "actor_rollout_ref.rollout.ignore_eos=True",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={given.steps}",
        "trainer.val_before_train=False",
        "trainer.log_rollouts=False",
        "trainer.diagnose=False",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",  # the last step is saved: a short wait
        f"trainer.default_local_dir={run}",
    ]
    with run.with_suffix(".log").open("w") as log:
        command = [sys.executable, "-m", "rloom.trainer.main_ppo", *keys, *overrides]
        ended = subprocess.run(command, stdout=log, stderr=log)
    if ended.returncode:
        raise SystemExit(f"{name} ended with {ended.returncode}:\n{run.with_suffix('.log').read_text()[-3000:]}")
    steps = [record for record in read_metrics(run / METRICS_FILE) if "timing_s/step" in record][1:]
    shutil.rmtree(run)  # the last step's checkpoint
    return {key: median(step.get(key, 0.0) for step in steps) for key in steps[-1]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=["qwen2.5-0.5b"], choices=sorted(SHAPES))
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS), choices=ALGORITHMS)
    parser.add_argument("--prompts", type=int, default=128)
    parser.add_argument("--answers", type=int, default=5)
    parser.add_argument("--new_tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=3, help="with the first, which is left out (%(default)s)")
    given, overrides = parser.parse_known_args()
    print(machine(pick_device()[0]))
    for shape in given.shapes:
        rows, base = [], dict[str, float]()
        with tempfile.TemporaryDirectory() as scratch:
            model = write_model(shape, Path(scratch) / "model")
            for name in given.algorithms:
                found = train(name, model, Path(scratch) / name, given, overrides)
                seconds = [found.get(f"timing_s/{stage}", 0.0) for stage in STAGES]
                memory = found.get("perf/max_memory_allocated_gb", 0.0)
                base = base or {"step": seconds[-1], "memory": memory}
                rows.append(
                    [
                        name,
                        *(f"{value:.2f}" for value in seconds),
                        f"{seconds[-1] / base['step']:.0%}",
                        f"{memory:.1f}",
                        f"{memory / base['memory']:.0%}" if base["memory"] else "",
                    ]
                )
                note(f"{shape} {' · '.join(rows[-1])}")
        print(f"\n{shape}, {given.prompts} prompts × {given.answers} answers × {given.new_tokens} tokens, seconds:\n")
        share = f"of {given.algorithms[0]}'s"
        print(table(["", *STAGES, share, "GB", share], rows), flush=True)


if __name__ == "__main__":
    main()
