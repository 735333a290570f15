"""Tensors on their way to a device or an engine: copies without a synchronisation, a check of what was read, names."""

import torch
from torch import Tensor, nn


def send(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # a copy from pageable memory synchronises


def all_finite(tensor: Tensor) -> bool:
    """Without a copy of the tensor, as isfinite() makes: weights have gigabytes. NaN is the lowest and the highest."""
    if not tensor.numel() or not tensor.is_floating_point():
        return True
    if tensor.element_size() == 1:  # aminmax has no float8
        return all(bool(part.float().isfinite().all()) for part in tensor.detach().flatten().split(1 << 24))
    low, high = torch.aminmax(tensor.detach())
    return bool(torch.isfinite(low) & torch.isfinite(high))


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name, a shared one once."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
