"""The reference engine: `generate()` of transformers. Slow, and obviously right."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rloom.errors import ConfigError
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Sampling, WeightOwner


class HfRollout:
    def __init__(
        self,
        network: PolicyNetwork,
        *,
        owner: WeightOwner,
        pad_id: int,
        max_sequences: int,
        generate_kwargs: Mapping[str, Any],
        attention: str = "sdpa",  # of transformers
        pads_prompts: bool = True,  # False: only prompts of one length are answered together
    ) -> None:
        self.decoder, self.model = network.decoder, network.decoder.base
        self.owner = owner
        self.device = owner.device
        self.pad_id = pad_id
        self.max_sequences = max_sequences
        self.generate_kwargs = generate_kwargs
        self.attention, self.pads_prompts = attention, pads_prompts

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[tuple[int, Completion]]:
        for part in self.batches(requests):
            yield from zip(part, self.generate_together([requests[i] for i in part], sampling), strict=True)

    def batches(self, requests: Sequence[Request]) -> Iterator[list[int]]:
        """Requests that are answered together."""
        alike: dict[int, list[int]] = {}
        for place, request in enumerate(requests):
            alike.setdefault(0 if self.pads_prompts else len(request.tokens), []).append(place)
        for places in alike.values():
            for first in range(0, len(places), self.max_sequences):
                yield places[first : first + self.max_sequences]

    def generate_together(self, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
        tokens, real = self.pad_left(requests)
        greedy = sampling.temperature == 0
        choice = (
            {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
            if greedy
            else {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": max(sampling.top_k, 0),
            }
        )
        stop_ids = [] if sampling.ignore_eos else list(sampling.stop_ids)
        with (
            torch.no_grad(),
            self.owner.on_device(),
            self.decoder.uncompiled_layers(),
            ready_to_generate(self.model, self.attention),
            torch.random.fork_rng(devices=[self.device] if self.device.type == "cuda" else []),
        ):
            torch.manual_seed(requests[0].seed)
            out = self.call_generate(
                input_ids=tokens,
                attention_mask=real,
                max_new_tokens=sampling.max_new_tokens,
                eos_token_id=stop_ids or None,
                pad_token_id=self.pad_id,
                return_dict_in_generate=True,
                output_logits=True,
                **choice,
            )
        written = out.sequences[:, tokens.shape[1] :].cpu()
        logits = torch.stack(out.logits, 1).float().cpu() / (sampling.temperature or 1.0)
        logprobs = logits.log_softmax(-1).gather(-1, written[..., None]).squeeze(-1)
        return [
            cut_at_stop(row[: request.max_new_tokens], logprob[: request.max_new_tokens], stop_ids)
            for request, row, logprob in zip(requests, written, logprobs, strict=True)
        ]

    def call_generate(self, **arguments: Any) -> Any:
        try:
            return self.model.generate(**arguments, **self.generate_kwargs)
        except (TypeError, ValueError) as error:
            if not self.generate_kwargs:
                raise
            raise ConfigError(
                f"actor_rollout_ref.rollout.engine_kwargs={dict(self.generate_kwargs)}: generate() of transformers "
                f"refuses them: {str(error).splitlines()[0]}"
            ) from error

    def pad_left(self, requests: Sequence[Request]) -> tuple[Tensor, Tensor]:
        longest = max(len(request.tokens) for request in requests)
        tokens = torch.full((len(requests), longest), self.pad_id)
        for row, request in enumerate(requests):
            tokens[row, longest - len(request.tokens) :] = torch.tensor(request.tokens)
        real = torch.arange(longest) >= torch.tensor([[longest - len(request.tokens)] for request in requests])
        return tokens.to(self.device), real.long().to(self.device)

    def load_weights(self) -> None:
        """It generates with the actor's own weights."""

    def sleep(self) -> None:
        """It holds nothing between calls."""

    def wake(self) -> None: ...


def cut_at_stop(tokens: Tensor, logprobs: Tensor, stop_ids: Sequence[int]) -> Completion:
    stops = torch.isin(tokens, torch.tensor(stop_ids, dtype=tokens.dtype)).nonzero()
    length = int(stops[0]) + 1 if len(stops) else len(tokens)
    return Completion(tokens[:length].clone(), logprobs[:length].clone(), finished=len(stops) > 0)


@contextmanager
def ready_to_generate(model: Any, own_attention: str) -> Iterator[None]:
    """generate() builds its own masks and cache, so it needs transformers' attention and no checkpointing.

    The model's own generation settings (a repetition penalty, say) are put away: the trainer knows nothing of them.
    """
    attention, training, settings = model.config._attn_implementation, model.training, model.generation_config
    model.set_attn_implementation(own_attention)
    model.generation_config = GenerationConfig()
    model.eval()
    try:
        yield
    finally:
        model.set_attn_implementation(attention)
        model.generation_config = settings
        model.train(training)
