"""GRPO steps of AReno by its Trainer: rollout, group advantages, one update. It needs a CUDA GPU.

python benchmarks/peers/run_areno.py JOB.json RESULT.json      (started by compare.py)
"""

import asyncio
import time
from typing import Any

import parity
from areno.api.algorithms import grpo_loss_fn
from areno.api.config import CudaConfig
from areno.api.models import SamplingParams, TrainSequence
from areno.api.rewards import compute_group_advantages
from areno.api.trainer import Trainer
from work import (
    BETAS,
    GRAD_CLIP,
    LEARNING_RATE,
    WEIGHT_DECAY,
    Result,
    Work,
    read_work,
    versions,
    write_result,
)

GRAPHS = [1, 2, 4, 8, 16, 32, 64, 128, 256]  # sequences in a captured decode step; those of the work are added


def settings(work: Work) -> dict[str, Any]:
    return {
        "compile_model": True,
        "activation_checkpointing": False,
        "decode_graph_buckets": sorted({*GRAPHS, work.sequences}),
    }


def configure(work: Work) -> CudaConfig:
    optimizer = {
        "lr": LEARNING_RATE,
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "grad_clip_norm": GRAD_CLIP,
    }
    return CudaConfig(optimizer=optimizer, runtime=settings(work), max_running_prompts=work.sequences)


def sequences_of(prompt: list[int], answers: list[Any]) -> list[TrainSequence]:
    """The answers to one prompt, with their advantages over the group."""
    rewards = [parity.compute_score("", parity.as_text(answer.resp_tokens), "") for answer in answers]
    advantages = compute_group_advantages(rewards)
    return [
        TrainSequence(
            tokens=prompt + answer.resp_tokens,
            logprobs=[0.0] * len(prompt) + answer.resp_logprobs,
            prompt_len=len(prompt),
            scalar_advantage=advantage,
            reward=reward,
        )
        for answer, reward, advantage in zip(answers, rewards, advantages, strict=True)
    ]


async def take_step(trainer: Trainer, work: Work, step: int) -> tuple[float, float, list[int], float]:
    """Seconds of the step and of its generation, the length of each answer, and the gradient's norm."""
    prompts = work.prompt_ids(step)
    sampling = SamplingParams(max_new_tokens=work.new_tokens, temperature=1.0, ignore_eos=True)
    started = time.perf_counter()
    async with trainer.rollout_session(sampling_params=sampling, proxy=False):
        groups = trainer.rollout_token_batch(prompts, n_samples=work.answers, sampling_params=sampling)
    generation_s = time.perf_counter() - started
    pairs = list(zip(prompts, groups, strict=True))
    batch = [row for prompt, group in pairs for row in sequences_of(prompt, group.sequences)]
    stats = trainer.train(batch, grpo_loss_fn, mini_bs=work.rows)  # all micro-batches in one update
    lengths = [len(answer.resp_tokens) for group in groups for answer in group.sequences]
    return time.perf_counter() - started, generation_s, lengths, stats.get("grad_norm", float("nan"))


def main() -> None:
    work = read_work()
    trainer = Trainer(world_size=1, model_path=work.model, custom_config=configure(work))
    trainer.init()
    try:
        found = [asyncio.run(take_step(trainer, work, step)) for step in range(work.steps + 1)]
    finally:
        trainer.close()
    lengths = found[-1][2]
    result = Result(
        versions=versions("areno", "torch", "transformers", "flash-attn"),
        settings={name: str(value) for name, value in settings(work).items()},
        seconds=[step[0] for step in found[1:]],
        warm_up_s=found[0][0],
        tokens=sum(lengths),
        generation_s=[step[1] for step in found[1:]],
        grad_norm=[step[3] for step in found],
    )
    write_result(result, work, lengths)


if __name__ == "__main__":
    main()
