"""From the host to a device without waiting for what the device is doing."""

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)  # from ordinary memory the copy would wait
