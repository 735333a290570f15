"""The peer in the same process: `generate()` of transformers at its best, with the log-prob of every token it draws.

rloom's own `hf` engine keeps all logits of a batch, which is right for a reference and hopeless at 1,024 sequences of
a vocabulary of 151,936. Here each log-prob is taken as its token is drawn.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from measuring import note
from shapes import Shape, random_model
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from rloom.rollout.base import Completion, Request, Sampling


class BeforeTheDraw(LogitsProcessor):  # type: ignore[misc]
    """Keeps the logits, V for each of B rows, that the next token is drawn from."""

    logits_BV: Tensor

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.logits_BV = scores
        return scores


class AfterTheDraw(StoppingCriteria):  # type: ignore[misc]
    """Never stops; it is asked when the token is known, and notes its log-prob."""

    def __init__(self, before: BeforeTheDraw) -> None:
        self.before = before
        self.logprobs: list[Tensor] = []

    def __call__(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        logits_BV = self.before.logits_BV
        self.logprobs.append(logits_BV.gather(1, input_ids[:, -1:]).squeeze(1) - logits_BV.logsumexp(1))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class HfGenerate:
    """All requests at once, or in the largest halves that fit the memory."""

    def __init__(self, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        self.model = random_model(shape, device, dtype, "sdpa").eval()
        self.model.generation_config = GenerationConfig()
        self.device = device
        self.at_once: int | None = None  # None: nothing failed yet

    def generate(self, requests: Sequence[Request]) -> Iterator[tuple[int, Completion]]:
        first = 0
        while first < len(requests):
            part = requests[first : first + (self.at_once or len(requests))]
            try:
                completions = self.together(part, requests[0].sampling)
            except torch.OutOfMemoryError:
                if len(part) == 1:
                    raise
                self.at_once = len(part) // 2
                torch.cuda.empty_cache()
                note(f"hf: {len(part)} sequences at once do not fit the memory; {self.at_once} now")
                continue
            yield from enumerate(completions, start=first)
            first += len(part)

    @torch.no_grad()
    def together(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        tokens = torch.tensor([request.tokens for request in requests], device=self.device)
        before = BeforeTheDraw()
        after = AfterTheDraw(before)
        torch.manual_seed(requests[0].seed)
        written = self.model.generate(
            input_ids=tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=sampling.max_new_tokens,
            do_sample=True,
            top_k=0,
            eos_token_id=None,
            pad_token_id=0,
            logits_processor=LogitsProcessorList([before]),
            stopping_criteria=StoppingCriteriaList([after]),
        )[:, tokens.shape[1] :].cpu()
        logprobs = torch.stack(after.logprobs, 1).float().cpu()
        pairs = enumerate(zip(written, logprobs, strict=True))
        return [Completion(number, row, logprob, finished=False, version=0) for number, (row, logprob) in pairs]

    def sleep(self) -> None: ...

    def wake(self) -> None: ...
