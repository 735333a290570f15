"""How often is the model right, greedy and sampled? Judged as rewards judge: by the number after the last marker."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from sft import prompt_text
from student import MARKERS
from transformers import Qwen2ForCausalLM, Qwen2Tokenizer

from rloom.data.prepare.arithmetic import Question

LONGEST_ANSWER = 48


@dataclass(frozen=True)
class Accuracy:
    overall: float
    hard: float
    easy: float
    mean_tokens: float

    def __str__(self) -> str:
        parts = f"with carry {self.hard:.1%}, without {self.easy:.1%}"
        return f"{self.overall:.1%} ({parts}), {self.mean_tokens:.1f} tokens an answer"


def is_right(text: str, question: Question) -> bool:
    tail = re.split("|".join(re.escape(marker.strip()) for marker in MARKERS.values()), text)[-1]
    numbers = re.findall(r"-?\d+", tail)
    return bool(numbers) and int(numbers[-1]) == question.problem.result


@torch.inference_mode()
def generate(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, questions: Sequence[Question], *, sample: bool
) -> torch.Tensor:
    """The answers' tokens, padded on the right."""
    prompts = [prompt_text(tokenizer, question) for question in questions]
    batch = tokenizer(prompts, padding=True, return_tensors="pt")
    how = {"do_sample": True, "temperature": 1.0, "top_k": 0} if sample else {"do_sample": False}
    tokens = model.generate(
        input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], max_new_tokens=LONGEST_ANSWER, **how
    )
    return tokens[:, batch["input_ids"].shape[1] :]


def accuracy(
    model: Qwen2ForCausalLM, tokenizer: Qwen2Tokenizer, questions: Sequence[Question], *, sample: bool
) -> Accuracy:
    model.eval()
    tokens = generate(model, tokenizer, questions, sample=sample)
    texts = tokenizer.batch_decode(tokens, skip_special_tokens=True)
    right = [is_right(text, question) for text, question in zip(texts, questions, strict=True)]
    hard = [ok for ok, question in zip(right, questions, strict=True) if question.problem.hard]
    easy = [ok for ok, question in zip(right, questions, strict=True) if not question.problem.hard]
    return Accuracy(
        overall=sum(right) / len(right),
        hard=sum(hard) / len(hard),
        easy=sum(easy) / len(easy),
        mean_tokens=(tokens != tokenizer.pad_token_id).sum().item() / len(questions),
    )
