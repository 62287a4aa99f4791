"""Which implementation of an operator runs: what is asked for, what is there, and one warning where it does not fit."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from leadline.errors import check_choice

BACKENDS = ("auto", "fused", "linear", "reference")
GRID = 65535  # CUDA's bound of a grid's second and third axis
HAS_TRITON = importlib.util.find_spec("triton") is not None
_warned: set[str] = set()  # each reason is told once
_forced: str | None = None  # by use_backend


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Inside, every operator runs on ``backend``, whatever its argument says.

    It holds in all threads: activation checkpointing recomputes in the threads of the backward pass.
    """
    global _forced
    check_choice("backend", backend, BACKENDS)
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def chosen(backend: str, allowed: tuple[str, ...] = BACKENDS) -> str:
    """What was asked for, or what ``use_backend`` says."""
    check_choice("backend", backend, allowed)
    return _forced or backend


def worth_trying(backend: str, q: Tensor) -> bool:
    """Whether kernels come into question: a GPU or an express wish, and Triton; says once if only Triton is missing."""
    if backend == "reference" or not (q.is_cuda or backend in ("fused", "linear")):
        return False
    if not HAS_TRITON:
        warn_once("attention runs on its slow reference path: Triton is not installed (pip install 'leadline[gpu]')")
    return HAS_TRITON


def unsupported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Why none of the kernels takes these inputs, or None; a kernel may have further reasons of its own."""
    D = q.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        return f"the inputs are {q.dtype}, {k.dtype}, {v.dtype}; it takes one of float16, bfloat16, float32"
    if D > 128 or v.shape[-1] != D:
        return f"the head width is {D} (values {v.shape[-1]}); it takes up to 128, the same for values"
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (q.shape[0], 1, 1, k.shape[2])):
        return f"the mask is {mask.dtype} {tuple(mask.shape)}; it takes key padding, boolean (B, 1, 1, N)"
    return None


def too_large(*tensors: Tensor, programs: int = 0) -> str | None:
    """Why kernels that count in 32 bits, and have ``programs`` along a later axis of their grid, do not reach."""
    for x in tensors:
        span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if isinstance(span, int) and span >= 2**31:  # what is exported for any size has none yet
            return f"a tensor spans {span:,} numbers in memory; it takes up to 2^31, make the batch smaller"
    if isinstance(programs, int) and programs > GRID:
        return f"batch times heads is {programs:,}; it takes up to {GRID:,}, make the batch smaller"
    return None


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)
