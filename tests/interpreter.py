"""The GPU kernels without a GPU, in Triton's interpreter."""

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from types import FunctionType
from typing import Any

import pytest
import torch

KERNELS = (
    "rloom.models.head_kernels",
    "rloom.rollout.native.kernels.attend",
    "rloom.rollout.native.kernels.sample",
)


def reduce_by_halves(reduction: Any, blocks: tuple[Any, ...]) -> list[Any]:
    """`tl.reduce` of vectors. The interpreter's own calls the combining function for one element after the other."""
    assert reduction.axis == 0 and not reduction.keep_dims
    while (length := len(blocks[0].handle.data)) > 1:
        assert length % 2 == 0
        halves = [
            reduction.to_tensor(block.handle.data[part], block.dtype)
            for part in (slice(length // 2), slice(length // 2, None))
            for block in blocks
        ]
        blocks = reduction.combine_fn.fn(*halves)
    return [reduction.to_tensor(block.handle.data.item(), block.dtype) for block in blocks]


@contextmanager
def kernels_interpreted() -> Iterator[None]:
    """Without a CUDA device the kernels run in Triton's interpreter. Triton decides on that when one is defined."""
    import triton

    if torch.cuda.is_available():
        yield
        return
    from triton.runtime import interpreter

    interpreted = cache(interpreter.InterpretedFunction)
    modules = [importlib.import_module(name) for name in KERNELS]
    with pytest.MonkeyPatch.context() as patch, triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = True
        # Triton's own functions (tl.sum) were defined when it was imported, to be compiled
        patch.setattr(triton.JITFunction, "__call__", lambda self, *args, **named: interpreted(self.fn)(*args, **named))
        patch.setattr(interpreter.ReduceOps, "generic_reduce", reduce_by_halves)
        # once, instead of at each call of a function: that is a third of the interpreter's time
        language = {"tl": triton.language, "core": triton.language.core}
        changes = interpreter._patch_lang(FunctionType((lambda: None).__code__, language))
        patch.setattr(interpreter, "_patch_lang", lambda function: interpreter._LangPatchScope())
        of_scalar, pointer = cache(interpreter._get_np_dtype), interpreter._get_np_dtype
        patch.setattr(
            interpreter,
            "_get_np_dtype",
            lambda kind: pointer(kind.scalar) if kind.scalar.is_ptr() else of_scalar(kind.scalar),
        )
        # compiled kernels have no checks of integers that overflow; here they take a quarter of the time
        builder = interpreter.interpreter_builder
        patch.setattr(builder, "options", replace(builder.options, sanitize_overflow=False))
        for module in modules:
            importlib.reload(module)
        yield
        changes.restore()
    for module in modules:
        importlib.reload(module)
