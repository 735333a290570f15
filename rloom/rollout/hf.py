"""`generate()` of transformers as a rollout engine: slow, and the standard that the native engine is tested against."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from rloom.errors import ConfigError
from rloom.models.network import PolicyNetwork
from rloom.rollout.base import Completion, Request, Rollout, WeightOwner, copy_weights
from rloom.transfer import tensors_of

LOGITS_BYTES = 8 << 30  # of a batch: generate() keeps the logits of every token, in float32


class HfRollout(Rollout):
    def __init__(
        self,
        network: PolicyNetwork,
        *,
        owner: WeightOwner,
        pad_id: int,
        max_sequences: int,
        generate_kwargs: Mapping[str, Any],
        attention: str = "sdpa",  # of transformers
        pads_prompts: bool = True,  # False: a batch has prompts of one length
    ) -> None:
        self.module, self.decoder, self.model = network.module, network.decoder, network.decoder.base
        self.owner = owner
        self.device = owner.device
        self.pad_id = pad_id
        self.max_sequences = max_sequences
        self.generate_kwargs = generate_kwargs
        self.attention, self.pads_prompts = attention, pads_prompts
        self.ids, self.waiting = count(), dict[int, Request]()
        self.version = 0

    def submit(self, request: Request) -> int:
        number = next(self.ids)
        self.waiting[number] = request
        return number

    def cancel(self, request: int) -> None:
        self.waiting.pop(request, None)

    def interrupt(self, request: int) -> Completion:
        """Only requests that wait are unfinished: a call generates whole answers."""
        begun = self.waiting.pop(request).begun
        return Completion.without_tokens(request, self.version).behind(begun)

    def poll(self) -> list[Completion]:
        """One batch, from its first token to its last."""
        if not self.waiting:
            return []
        kinds = {number: self.kind(request) for number, request in self.waiting.items()}
        first = next(iter(kinds.values()))
        alike = [number for number, kind in kinds.items() if kind == first][: self.max_sequences]
        batch = alike[: self.sequences_that_fit([self.waiting[number] for number in alike])]
        completions = self.generate_batch({number: self.waiting[number] for number in batch})
        for number in batch:
            del self.waiting[number]
        return completions

    def sequences_that_fit(self, requests: Sequence[Request]) -> int:
        """Whose logits take no more than LOGITS_BYTES; one at least."""
        vocabulary: int = self.model.get_output_embeddings().weight.shape[0]
        longest = max(request.sampling.max_new_tokens for request in requests)
        return max(1, LOGITS_BYTES // (4 * vocabulary * longest))

    def kind(self, request: Request) -> tuple[Any, ...]:
        """Equal for requests that can be in one batch."""
        return request.sampling.without_limit, None if self.pads_prompts else len(request.context)

    def generate_batch(self, batch: Mapping[int, Request]) -> list[Completion]:
        requests = [request.without_begun for request in batch.values()]
        sampling, (tokens, real) = requests[0].sampling, self.pad_left(requests)
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
                max_new_tokens=max(request.sampling.max_new_tokens for request in requests),
                eos_token_id=stop_ids or None,
                pad_token_id=self.pad_id,
                return_dict_in_generate=True,
                output_logits=True,
                **choice,
            )
        written = out.sequences[:, tokens.shape[1] :]
        columns = [  # token by token: the logits of the batch are not copied
            (logits.float() / (sampling.temperature or 1.0)).log_softmax(-1).gather(-1, written[:, place, None])
            for place, logits in enumerate(out.logits)
        ]
        written, logprobs = written.cpu(), torch.cat(columns, 1).cpu()
        completions = []
        for number, request, row, logprob in zip(batch, requests, written, logprobs, strict=True):
            limit = request.sampling.max_new_tokens
            length, stopped = length_to_stop(row[:limit], stop_ids)
            answer = Completion(number, row[:length].clone(), logprob[:length].clone(), stopped, self.version)
            completions.append(answer.behind(batch[number].begun))
        return completions

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

    def load_weights(self, weights: Iterator[tuple[str, Tensor]], version: int) -> None:
        assert not self.waiting
        copy_weights(weights, self.module)
        self.version = version

    def held_weights(self) -> Mapping[str, Tensor]:
        return tensors_of(self.module)

    def sleep(self) -> None:
        """It holds no memory between calls."""

    def wake(self) -> None: ...


def length_to_stop(tokens: Tensor, stop_ids: Sequence[int]) -> tuple[int, bool]:
    """Tokens up to the first stop token, that one included, and whether there is one."""
    stops = torch.isin(tokens, torch.tensor(stop_ids, dtype=tokens.dtype)).nonzero()
    return (int(stops[0]) + 1, True) if len(stops) else (len(tokens), False)


@contextmanager
def ready_to_generate(model: Any, own_attention: str) -> Iterator[None]:
    """generate() builds its own masks and cache, so it needs transformers' attention and no checkpointing.

    The model's own generation settings (such as a repetition penalty) are not used: the trainer does not apply them.
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
