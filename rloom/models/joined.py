"""Linear modules that are given the same input, computed by one product while an engine decodes.

A step of decoding with few rows takes as long as its kernels take to start: seven products a layer are reduced to four.
The weights of such modules are laid out beside each other, so that one product reads them all without a second copy.
The modules and their parameters stay what they are: names, checkpoints and gradients do not change.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

NAMES = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # of one module, in the families of transformers
ALIGNMENT = 16  # bytes: compiled code copies an input that is not aligned, and a copy is not beside the others


class JoinedModules:
    """Modules of one parent. The first that is called with an input computes the outputs of all."""

    def __init__(self, modules: Sequence[nn.Linear]) -> None:
        self.modules = list(modules)
        self.sizes = [module.out_features for module in modules]
        self.active = False
        self.input: Tensor | None = None
        self.outputs: list[Tensor] = []
        self.left = 0  # outputs that were not asked for yet
        for place, module in enumerate(self.modules):
            module.__class__ = JoinedLinear  # one class: layers share compiled code
            module.joined, module.place = self, place  # type: ignore[assignment]

    def output(self, place: int, hidden: Tensor) -> Tensor:
        if self.input is not hidden:
            weights = [module.weight for module in self.modules]
            biases = [module.bias for module in self.modules if module.bias is not None]
            self.outputs = list(joined_product(hidden, weights, biases).split(self.sizes, -1))
            self.input, self.left = hidden, len(self.sizes)
        output = self.outputs[place]
        self.left -= 1
        if self.left == 0:
            self.input, self.outputs = None, []
        return output

    def lay_out(self) -> None:
        """Move the weights beside each other, and the biases, unless they are."""
        for parameters in ([m.weight for m in self.modules], [m.bias for m in self.modules if m.bias is not None]):
            if parameters and not are_beside(parameters):
                together = torch.cat([parameter.detach() for parameter in parameters])
                for parameter, part in zip(parameters, together.split(self.sizes), strict=True):
                    parameter.data = part


class JoinedLinear(nn.Linear):
    joined: JoinedModules
    place: int

    def forward(self, input: Tensor) -> Tensor:
        return self.joined.output(self.place, input) if self.joined.active else super().forward(input)


class JoinedProducts:
    """All joined modules of a model."""

    def __init__(self, model: nn.Module) -> None:
        found = [joinable(parent, names) for parent in model.modules() for names in NAMES]
        owners = Counter(id(module.weight) for modules in found for module in modules)
        own = [modules for modules in found if modules and all(owners[id(module.weight)] == 1 for module in modules)]
        self.groups = [JoinedModules(modules) for modules in own]  # not layers that share their weights (Zamba)

    def lay_out(self) -> None:
        """Called whenever the weights may have moved, and before their addresses are relied on."""
        for group in self.groups:
            group.lay_out()

    @contextmanager
    def active(self) -> Iterator[None]:
        """Passes within the context, which must not need gradients, compute the products together."""
        for group in self.groups:
            group.active = True
        try:
            yield
        finally:
            for group in self.groups:
                group.active, group.input, group.outputs = False, None, []


def joinable(parent: nn.Module, names: Sequence[str]) -> list[nn.Linear]:
    """The modules of these names, if one product can compute them: plain ones, not those of a LoRA adapter."""
    children = [getattr(parent, name, None) for name in names]
    plain = [child for child in children if type(child) is nn.Linear]
    kinds = {(child.in_features, child.bias is None, child.weight.dtype, child.weight.device) for child in plain}
    parts = [part for child in plain for part in (child.weight, child.bias) if part is not None]
    aligned = all(part.nbytes % ALIGNMENT == 0 for part in parts)
    return plain if len(plain) == len(names) and len(kinds) == 1 and aligned else []


def are_beside(tensors: Sequence[Tensor]) -> bool:
    return all(tensor.is_contiguous() for tensor in tensors) and all(
        first.data_ptr() + first.nbytes == second.data_ptr()
        and first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        for first, second in pairwise(tensors)
    )


def together(tensors: Sequence[Tensor]) -> Tensor:
    """One view of tensors that lie beside each other."""
    assert are_beside(tensors)  # `lay_out` comes before
    first = tensors[0]
    return first.as_strided((sum(len(tensor) for tensor in tensors), *first.shape[1:]), first.stride())


@torch.library.custom_op("rloom::joined_product", mutates_args=())
def joined_product(hidden: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return functional.linear(hidden, together(weights), together(biases) if biases else None)


@joined_product.register_fake
def _(hidden: Tensor, weights: list[Tensor], biases: list[Tensor]) -> Tensor:
    return hidden.new_empty(*hidden.shape[:-1], sum(len(weight) for weight in weights))
