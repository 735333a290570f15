"""Attention of packed samples, forward and backward: torch's varlen kernel beside rows that are padded at the end.

    python benchmarks/attention.py [--shape qwen2.5-0.5b] [--tokens 32768] [--longest 640] [--shortest 640]

Which of them the trainer should use depends on lengths and head sizes, so this is measured apart from the model. Needs
a GPU. FLOP: two products a token pair that is seen forward, five backward.
"""

import argparse
from collections.abc import Callable

import torch
from measuring import machine, note, pick_device, table
from shapes import SHAPES, spread_lengths
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench

from rloom.models.attention import AttentionOptions, PackedAttention


def rows_of(backend: SDPBackend) -> Callable[[PackedAttention, Tensor, Tensor, Tensor, AttentionOptions], Tensor]:
    def attend(packed: PackedAttention, query: Tensor, key: Tensor, value: Tensor, options: AttentionOptions) -> Tensor:
        spread = [packed.pad_samples(part) for part in (query, key, value)]
        with sdpa_kernel(backend):
            rows = scaled_dot_product_attention(*spread, is_causal=True, scale=options.scale, enable_gqa=True)
        return rows.transpose(1, 2)[packed.row_T, packed.column_T].unsqueeze(0)

    return attend


WAYS: dict[str, Callable[[PackedAttention, Tensor, Tensor, Tensor, AttentionOptions], Tensor]] = {
    "varlen": lambda packed, query, key, value, options: packed.varlen(query, key, value, options),
    "rows, flash": rows_of(SDPBackend.FLASH_ATTENTION),
    "rows, cuDNN": rows_of(SDPBackend.CUDNN_ATTENTION),
}


def measure(name: str, packed: PackedAttention, parts: list[Tensor], options: AttentionOptions) -> tuple[float, float]:
    """Milliseconds forward, and forward with backward."""
    gradient = torch.randn_like(parts[0].transpose(1, 2))

    def forward() -> Tensor:
        return WAYS[name](packed, *parts, options)

    def both() -> None:
        torch.autograd.grad(forward(), parts, gradient)

    return do_bench(forward, return_mode="median"), do_bench(both, return_mode="median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="qwen2.5-0.5b")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--longest", type=int, default=640)
    parser.add_argument("--shortest", type=int, default=640)
    given = parser.parse_args()
    device, dtype = pick_device()
    if device.type != "cuda":
        parser.error("needs a GPU")
    shape = SHAPES[given.shape]
    size = shape.hidden // shape.heads
    count = 2 * given.tokens // (given.longest + given.shortest)
    length_N = torch.tensor(spread_lengths(count, given.shortest, given.longest, seed=0))
    packed, tokens = PackedAttention(length_N, device), int(length_N.sum())
    parts = [
        torch.randn(1, heads, tokens, size, device=device, dtype=dtype, requires_grad=True)
        for heads in (shape.heads, shape.kv_heads, shape.kv_heads)
    ]
    pairs = float((length_N * (length_N + 1) / 2).sum())
    product = 2.0 * pairs * shape.hidden  # FLOP of one
    rows = []
    for name in WAYS:
        try:
            forward, both = measure(name, packed, parts, AttentionOptions(size**-0.5))
        except RuntimeError as error:
            note(f"{name}: not here ({str(error).splitlines()[0]})")
            continue
        rates = [f"{2 * product / forward / 1e9:.0f}", f"{7 * product / both / 1e9:.0f}"]
        rows.append([name, f"{forward:.3f}", f"{both:.3f}", *rates])
    print(
        f"Attention of {count} samples of {given.shortest} to {given.longest} tokens ({tokens:,} in all), "
        f"heads of {given.shape}"
    )
    print(f"{machine(device)}\n")
    print(table(["way", "forward ms", "both ms", "forward TFLOP/s", "both TFLOP/s"], rows))


if __name__ == "__main__":
    main()
