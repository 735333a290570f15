"""The table in docs/plan.md, by the formulas of `rloom plan`. `python benchmarks/plan_scaling.py FILE` writes it."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from rloom.config.load import load_config
from rloom.plan.make import Plan, make_plan
from rloom.plan.memory import GIB
from rloom.plan.timing import ACTOR_UPDATE, GENERATION, OLD_LOGPROBS, THROUGH_DRIVER, TO_ENGINE

BEGIN, END = "<!-- made by benchmarks/plan_scaling.py -->", "<!-- end -->"
H200_GIB = 140
PER_NODE = 8
CASES = ((8, -1), (32, -1), (32, 8), (256, -1), (256, 8))  # (GPUs, fsdp_size)
QWEN_7B = {  # its config.json
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "tie_word_embeddings": False,
}
KEYS = (
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=1024",
    "data.max_prompt_length=512",
    "data.max_response_length=2048",
    "actor_rollout_ref.rollout.n=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=256",
)
COLUMNS = (
    "GPUs",
    "weights over",
    "generation s",
    "old log-probs s",
    "actor update s",
    "weights to engine s",
    "driver s",
    "step s",
    "tokens/s",
    "tokens/s a GPU",
    "on the wire",
    "GiB a GPU",
)


def plans() -> Iterator[Plan]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(QWEN_7B))
        for gpus, shards in CASES:
            where = [f"trainer.nnodes={gpus // PER_NODE}", f"trainer.n_gpus_per_node={PER_NODE}"]
            where += ["trainer.master_addr=10.0.0.1"] if gpus > PER_NODE else []
            where += [f"actor_rollout_ref.model.path='{folder}'"]
            where += [f"actor_rollout_ref.actor.fsdp_config.fsdp_size={shards}"]
            yield make_plan(load_config([*KEYS, *where]), H200_GIB)


def row(plan: Plan) -> list[str]:
    costs, ranks = plan.costs, plan.batches.ranks
    assert costs is not None and costs.time is not None  # the model's size is known, it fits, in bfloat16
    time, stages = costs.time, (GENERATION, OLD_LOGPROBS, ACTOR_UPDATE, TO_ENGINE, THROUGH_DRIVER)
    return [
        str(ranks),
        f"{costs.actor.shards} ranks",
        *(f"{time.of(name):.2f}" for name in stages),
        f"{time.seconds:.1f}",
        f"{time.tokens_per_s:,.0f}",
        f"{time.tokens_per_s / ranks:,.0f}",
        f"{time.wire_share:.1%}",
        f"{costs.memory.peak_bytes / GIB:.1f}",
    ]


def table() -> str:
    lines = [list(COLUMNS), ["---"] * len(COLUMNS), *(row(plan) for plan in plans())]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def renewed(page: str) -> str:
    """The page with a new table."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    file = Path(sys.argv[1])
    file.write_text(renewed(file.read_text(encoding="utf-8")), encoding="utf-8")
