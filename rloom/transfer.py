"""Tensors on their way to a device: copies that do not synchronise with it, and a check of what was read."""

import torch
from torch import Tensor


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
