"""Supervised training of a small Qwen2 on the student's exercise book."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from student import Habits, answer
from torch.nn.functional import cross_entropy
from transformers import Qwen2Config, Qwen2ForCausalLM, Qwen2Tokenizer

from rloom.data.prepare.arithmetic import Question

IGNORED = -100  # the label that cross_entropy leaves out


@dataclass(frozen=True)
class Schedule:
    steps: int = 600
    batch: int = 128
    learning_rate: float = 2e-3
    warmup_steps: int = 50

    def learning_rate_at(self, step: int) -> float:
        """Linear warm-up, then half a cosine to zero."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.steps - self.warmup_steps)
        return self.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def new_model(tokenizer: Qwen2Tokenizer, context: int) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        tie_word_embeddings=True,
        initializer_range=0.05,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    return Qwen2ForCausalLM(config)


def prompt_text(tokenizer: Qwen2Tokenizer, question: Question) -> str:
    messages = [{"role": "user", "content": question.text}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


def train(
    model: Qwen2ForCausalLM,
    tokenizer: Qwen2Tokenizer,
    questions: Sequence[Question],
    habits: Habits,
    schedule: Schedule,
    seed: int,
) -> None:
    random = Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=schedule.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    prompts = [tokenizer(prompt_text(tokenizer, question)).input_ids for question in questions]
    started = time.monotonic()
    model.train()
    for step in range(schedule.steps):
        chosen = random.sample(range(len(questions)), schedule.batch)
        # answered anew each time: the model meets the student's habits, never a fixed answer that it could memorise
        answers = [answer(questions[i], habits, random) + tokenizer.eos_token for i in chosen]
        tokens, labels = _padded([prompts[i] for i in chosen], tokenizer(answers).input_ids, tokenizer.pad_token_id)
        logits = model(input_ids=tokens, use_cache=False).logits
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate_at(step)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % 100 == 0:
            print(f"step {step + 1:5d}  loss {loss.item():.4f}  {time.monotonic() - started:6.1f} s", flush=True)


def _padded(prompts: list[list[int]], answers: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Padding stands on the right, where causal attention never looks, so no mask is needed."""
    longest = max(len(prompt) + len(reply) for prompt, reply in zip(prompts, answers, strict=True))
    tokens = torch.full((len(prompts), longest), pad)
    labels = torch.full((len(prompts), longest), IGNORED)
    for row, (prompt, reply) in enumerate(zip(prompts, answers, strict=True)):
        end = len(prompt) + len(reply)
        tokens[row, :end] = torch.tensor(prompt + reply)
        labels[row, len(prompt) : end] = torch.tensor(reply)
    return tokens, labels
