"""An update of the optimizer: a gradient above the limit is scaled to it, one below is applied as it is."""

import pytest
import torch

from rloom.engines.base import AdamW
from rloom.engines.optim import clip_and_step, make_optimizer


@pytest.mark.parametrize(("limit", "applied"), [(10.0, [3.0, 4.0]), (2.5, [1.5, 2.0])])
def test_only_a_gradient_above_the_limit_is_scaled(limit: float, applied: list[float]) -> None:
    """The first moment of AdamW is a tenth of the gradient that it got. The weights do not tell: their first step does
    not depend on the size of the gradient."""
    settings = AdamW(weight_decay=0.0, betas=(0.9, 0.95), grad_clip=limit)
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = make_optimizer([weight], settings)
    weight.grad = torch.tensor([3.0, 4.0])
    assert float(clip_and_step(optimizer, [weight], settings, 0.01)) == 5.0
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], torch.tensor(applied) / 10)
