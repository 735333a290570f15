"""Instructions compared on training problems of GSM8K, before any training: greedy answers of one model.

    python recipes/gsm8k/compare_prompts.py MODEL DATA [--problems 512] [--max_new_tokens 512]

DATA is a folder with the published train.jsonl and test.jsonl; the test problems are not used. The model is loaded
once. The rules are those of report.py; boxed: the number in the last \\boxed is right.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from report import Row, accuracies

from rloom.api.generation import open_model, sampling_of
from rloom.data.prepare import instructed
from rloom.data.prepare.math import GSM8K, GSM8K_INSTRUCTION, MATH_INSTRUCTION, gsm8k_splits
from rloom.launch.generation import TextGenerator
from rloom.rewards.rules import math

INSTRUCTIONS = (
    GSM8K_INSTRUCTION,
    MATH_INSTRUCTION,
    r"Please reason step by step, and put your final answer within \boxed{}.",
    'Think step by step. The last line is "The answer is" and the number.',
    "",  # the question alone
)
KEYS = (
    "actor_rollout_ref.rollout.name=native",
    "actor_rollout_ref.rollout.enforce_eager=False",
    "actor_rollout_ref.rollout.max_num_seqs=1024",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.5",
)


def boxed(rows: Sequence[Row]) -> float:
    scores = [math.compute_score(row["data_source"], row["output"], row["gts"])["acc"] for row in rows]
    return 100 * sum(map(float, scores)) / len(scores)


def table_row(generator: TextGenerator, problems: Sequence[Row], instruction: str, max_new_tokens: int) -> str:
    """Accuracies in percent, tokens of an answer, and the share of answers that reached the limit."""
    sampling = sampling_of(generator, max_new_tokens, temperature=0.0)
    prompts = [row["prompt"] for row in instructed(problems, instruction)]
    found = dict(generator.rollout.generate([generator.request(prompt, sampling, 0) for prompt in prompts]))
    completions = [found[index] for index in range(len(prompts))]
    tokens = [completion.tokens_L.tolist() for completion in completions]
    cut = [not completion.finished for completion in completions]
    rows = [
        {"data_source": GSM8K, "output": text, "gts": problem["reward_model"]["ground_truth"]}
        for text, problem in zip(generator.decode(tokens), problems, strict=True)
    ]
    percents = [*accuracies(rows).values(), boxed(rows)]
    length, share = sum(map(len, tokens)) / len(tokens), 100 * sum(cut) / len(cut)
    cells = [*(f"{value:.1f}" for value in percents), f"{length:.0f}", f"{share:.1f}"]
    return f"| {instruction or '(the question alone)'} | {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data", type=Path)
    parser.add_argument("--problems", type=int, default=512)
    parser.add_argument("--max_new_tokens", type=int, default=512)
    given, overrides = parser.parse_known_args()
    problems = gsm8k_splits(given.data)[0][: given.problems]
    print(f"Greedy answers to the first {len(problems)} training problems; accuracies and the share cut off in %.\n")
    names = ["flexible", "strict", "anywhere", "marked", "boxed", "tokens", "cut off"]
    print(f"| instruction | {' | '.join(names)} |\n| {' | '.join(['---'] * (len(names) + 1))} |")
    with open_model(given.model, [*KEYS, *overrides]) as generator:
        for instruction in INSTRUCTIONS:
            print(table_row(generator, problems, instruction, given.max_new_tokens), flush=True)


if __name__ == "__main__":
    main()
