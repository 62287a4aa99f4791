"""Launches Triton kernels with little overhead in Python.

Triton inspects every argument of every launch to select the compiled kernel that fits. That takes 40 microseconds for
the kernels here, longer than some of them run. The same shapes come again and again, so a launch is prepared once for
given shapes, strides and options, and then called with tensors alone. Callers cache it with ``functools.lru_cache``.
"""

# mypy: ignore-errors
from __future__ import annotations

from collections.abc import Mapping
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
        constants: Mapping[str, Any],
        halves: tuple[str, ...] = (),
        **options: Any,
    ) -> Launch:
        """Fix everything but the tensors and floats of a launch.

        Args:
            grid: Number of programs along each axis.
            ints: The integer arguments, in the kernel's order.
            constants: Values of the ``tl.constexpr`` parameters by name; names the kernel does not have are left out.
            halves: Names of the tensors that hold float16 numbers although their dtype is bfloat16.
            **options: Options of Triton, such as ``num_warps``.
        """
        names = self.jitted.arg_names
        tail = (*ints, *(constants[name] for name in names if name in constants))
        return Launch(self.jitted, grid, tail, frozenset(names.index(name) for name in halves), options)


class Launch:
    """One kernel at one grid; every call must bring tensors of the same dtypes, on the same device.

    Args:
        jitted: The ``triton.jit`` function.
        grid: Number of programs along each axis.
        tail: The arguments after tensors and floats, in the kernel's order.
        halves: Positions of the tensors that hold float16 numbers although their dtype is bfloat16.
        options: Options of Triton.
    """

    def __init__(self, jitted: Any, grid: tuple, tail: tuple, halves: frozenset[int], options: dict[str, int]):
        self.jitted, self.grid, self.tail, self.halves, self.options = jitted, grid, tail, halves, options
        self.runs: dict[int, Any] = {}  # compiled kernels by which tensors are None: Triton compiles for that

    def __call__(self, tensors: tuple[Tensor | None, ...], floats: tuple[float, ...] = ()) -> None:
        """Run the kernel on tensors and floats in the kernel's order; the first tensor must not be None."""
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
