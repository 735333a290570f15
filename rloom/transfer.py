"""Copy a tensor from the host to a device without synchronising with the device."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # a copy from pageable memory synchronises
