"""Launching a Triton kernel with little overhead.

Triton looks at every argument of every launch anew, to find the compiled kernel that fits: 40 microseconds for the
kernels here, longer than some of them run. The same shapes come again and again, so that answer is kept.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Kernel:
    """A ``triton.jit`` function whose parameters are tensors first, then numbers, then ``tl.constexpr``."""

    def __init__(self, jitted: Any):
        self.jitted = jitted
        self.compiled: dict[tuple, Any] = {}

    def __call__(
        self,
        grid: tuple[int, ...],
        tensors: tuple[Tensor | None, ...],
        numbers: tuple[float, ...],
        constants: tuple[Any, ...],
        **options: int,
    ) -> None:
        pointers = [None if x is None else x.data_ptr() for x in tensors]
        key = (
            tensors[0].device.index,
            tuple(None if x is None else x.dtype for x in tensors),
            tuple(x for x in numbers if isinstance(x, int)),  # Triton looks at floats by their type alone
            constants,
            tuple(options.values()),
        )
        compiled = self.compiled.get(key)
        if compiled is None or any(x is not None and x % 16 for x in pointers):
            names = self.jitted.arg_names[len(tensors) + len(numbers) :]
            with torch.cuda.device_of(tensors[0]):
                found = self.jitted[grid](*tensors, *numbers, **dict(zip(names, constants, strict=True)), **options)
            if found is not None and all(x is None or x % 16 == 0 for x in pointers):  # None: Triton's interpreter
                self.compiled[key] = found
            return
        grid = (*grid, 1, 1)[:3]
        if tensors[0].device.index == torch.cuda.current_device():
            compiled[grid](*pointers, *numbers, *constants)
        else:
            with torch.cuda.device_of(tensors[0]):
                compiled[grid](*pointers, *numbers, *constants)
