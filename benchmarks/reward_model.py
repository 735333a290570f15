"""Conversations a second of a reward model: rloom's packed passes beside padded batches of transformers.

    python benchmarks/reward_model.py [--shape qwen2.5-1.5b] [--conversations 1024] [--shortest 64] [--longest 1024]

Random weights, one label. The peer is transformers' own forward with sdpa attention, in padded batches of as many
tokens as a packed pass has: once in the order in which the conversations come, once sorted by length. Tokenizing is not
timed.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch
from measuring import Stopwatch, machine, note, peak_gib, pick_device, release, table
from shapes import SHAPES, Shape, random_prompts, spread_lengths
from torch import Tensor
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel

from rloom.models.attention import NAME as RLOOM_ATTENTION
from rloom.models.classifier import Classifier, PassLayout
from rloom.models.conversations import Conversation
from rloom.packing import MicroBatching

Score = Callable[[Sequence[Conversation]], Tensor]


def random_classifier(shape: Shape, device: torch.device, dtype: torch.dtype) -> PreTrainedModel:
    left_out = ("model_type", "torch_dtype", "architectures")
    fields = {name: value for name, value in shape.config().items() if name not in left_out}
    config = AutoConfig.for_model(shape.family, **fields, pad_token_id=0, num_labels=1)
    torch.manual_seed(0)
    with torch.device(device):
        model: PreTrainedModel = AutoModelForSequenceClassification.from_config(config, dtype=dtype)
    return model.eval().requires_grad_(False)


def packed_scores(model: PreTrainedModel, device: torch.device, tokens_per_pass: int) -> Score:
    model.set_attn_implementation(RLOOM_ATTENTION)
    classifier = Classifier(model, PassLayout.PACKED)
    if device.type == "cuda" and classifier.decoder is not None:
        classifier.decoder.compile()

    def score(conversations: Sequence[Conversation]) -> Tensor:
        passes = classifier.passes(conversations, MicroBatching(tokens=tokens_per_pass))
        found = torch.empty(len(conversations), device=device)
        for rows in passes:
            found[rows] = classifier.outputs([conversations[row] for row in rows], device).squeeze(1)
        return found.cpu()

    return score


def peer_scores(model: PreTrainedModel, device: torch.device, tokens_per_pass: int, *, by_length: bool) -> Score:
    model.set_attn_implementation("sdpa")
    for module in model.modules():
        module._compiled_call_impl = None  # the packed passes compiled the layers

    @torch.no_grad()
    def score(conversations: Sequence[Conversation]) -> Tensor:
        order = list(range(len(conversations)))
        if by_length:
            order.sort(key=lambda row: -len(conversations[row].tokens))
        found = torch.empty(len(conversations), device=device)
        for rows in padded_batches(order, conversations, tokens_per_pass):
            longest = max(len(conversations[row].tokens) for row in rows)
            tokens = torch.zeros(len(rows), longest, dtype=torch.long)
            for place, row in enumerate(rows):
                tokens[place, : len(conversations[row].tokens)] = torch.tensor(conversations[row].tokens)
            tokens = tokens.to(device)
            found[rows] = model(input_ids=tokens, attention_mask=(tokens != 0).long()).logits.squeeze(1).float()
        return found.cpu()

    return score


def padded_batches(
    order: Sequence[int], conversations: Sequence[Conversation], tokens_per_pass: int
) -> list[list[int]]:
    """Consecutive rows whose padded batch has at most so many tokens."""
    found: list[list[int]] = []
    longest = 0
    for row in order:
        longest = max(longest, len(conversations[row].tokens))
        if found and (len(found[-1]) + 1) * longest <= tokens_per_pass:
            found[-1].append(row)
        else:
            found.append([row])
            longest = len(conversations[row].tokens)
    return found


def measure(score: Score, conversations: Sequence[Conversation], device: torch.device, repeat: int) -> float:
    """Median of the seconds, after one repetition that warms up."""
    seconds = []
    for _ in range(repeat + 1):
        watch = Stopwatch.on(device)
        with watch.stage("score"):
            score(conversations)
        seconds.append(watch.seconds["score"])
    return statistics.median(seconds[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--conversations", type=int, default=1024)
    parser.add_argument("--shortest", type=int, default=64, help="tokens of a conversation")
    parser.add_argument("--longest", type=int, default=1024)
    parser.add_argument("--tokens_per_pass", type=int, default=32768)
    parser.add_argument("--repeat", type=int, default=3)
    given = parser.parse_args()
    device, dtype = pick_device()
    shape = SHAPES[given.shape]
    lengths = spread_lengths(given.conversations, given.shortest, given.longest, seed=0)
    texts = random_prompts(shape, given.conversations, given.longest, seed=1)
    conversations = [Conversation(text[:length]) for text, length in zip(texts, lengths, strict=True)]
    model, limit = random_classifier(shape, device, dtype), given.tokens_per_pass
    ways: dict[str, Callable[[], Score]] = {
        "rloom, packed": lambda: packed_scores(model, device, limit),
        "transformers, padded, sorted by length": lambda: peer_scores(model, device, limit, by_length=True),
        "transformers, padded, as they come": lambda: peer_scores(model, device, limit, by_length=False),
    }
    rows, expected = [], None
    for name, make in ways.items():
        release(device)
        score = make()
        found = score(conversations)
        expected = found if expected is None else expected
        seconds = measure(score, conversations, device, given.repeat)
        apart = float((found - expected).abs().max() / expected.abs().max())
        rates = [f"{given.conversations / seconds:,.1f}", f"{sum(lengths) / seconds:,.0f}"]
        rows.append([name, f"{seconds:.2f}", *rates, f"{peak_gib(device):.1f}", f"{apart:.1e}"])
        note(f"{name}: {seconds:.2f} s")
    print(
        f"{given.conversations} conversations of {given.shortest} to {given.longest} tokens ({sum(lengths):,} in all), "
        f"{given.shape} with one label, {str(dtype).removeprefix('torch.')}, {limit:,} tokens a pass"
    )
    print(f"{machine(device)}\n")
    columns = ["way", "s", "conversations/s", "tokens/s", "peak GiB", "largest difference"]
    print(table(columns, rows))


if __name__ == "__main__":
    main()
