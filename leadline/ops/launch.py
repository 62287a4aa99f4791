"""Launching a Triton kernel with little overhead.

Triton looks at every argument of every launch anew, to find the compiled kernel that fits: 40 microseconds for the
kernels here, longer than some of them run. The same shapes come again and again, so a launch is prepared once for given
shapes, strides and options (callers keep it, by ``functools.lru_cache``), and then called with tensors alone.
"""

# mypy: ignore-errors
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class Kernel:
    """A ``triton.jit`` function whose parameters are tensors, then floats, then ints, then ``tl.constexpr``."""

    def __init__(self, jitted: Any):
        self.jitted = jitted

    def prepare(
        self,
        grid: tuple[int, ...],
        ints: tuple[int, ...],
        constants: tuple[Any, ...],
        halves: tuple[int, ...] = (),
        **options: Any,
    ) -> Launch:
        """halves: numbers of the tensors that hold float16 though they call themselves bfloat16."""
        return Launch(self.jitted, grid, ints, constants, halves, options)


class Launch:
    """One kernel at one grid; every call must bring tensors of the same dtypes, on the same device."""

    def __init__(self, jitted: Any, grid: tuple, ints: tuple, constants: tuple, halves: tuple, options: dict[str, int]):
        self.jitted, self.grid, self.halves, self.options = jitted, grid, halves, options
        self.tail = (*ints, *constants)
        self.runs: dict[int, Any] = {}  # of compiled kernels, by which tensors are None: Triton compiles for that

    def __call__(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...] = ()) -> None:
        device, floats = tensors[0].device, tuple(map(float, floats))  # an int of 1 would be compiled in
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self(tensors, floats)
            return
        pointers, together, absent = [], 0, 0
        for tensor in tensors:
            pointer = None if tensor is None else tensor.data_ptr()
            pointers.append(pointer)
            together |= pointer or 0
            absent = 2 * absent + (pointer is None)
        aligned = together % 16 == 0  # Triton compiles for this too
        run = self.runs.get(absent) if aligned else None
        if run is not None:
            run(*pointers, *floats, *self.tail)
            return
        names = self.jitted.arg_names[len(tensors) + len(floats) :]
        rest = dict(zip(names, self.tail, strict=True))
        tensors = [_as_half(x) if i in self.halves else x for i, x in enumerate(tensors)]
        compiled = self.jitted[self.grid](*tensors, *floats, **rest, **self.options)
        if aligned and compiled is not None:  # Triton's interpreter returns None
            self.runs[absent] = compiled[(*self.grid, 1, 1)[:3]]


def _as_half(x: Tensor | None) -> Tensor | None:
    return x.view(torch.float16) if x is not None and x.dtype == torch.bfloat16 else x
