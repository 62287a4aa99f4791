"""Choice of the implementation of an operator, and the warnings where kernels cannot run."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from leadline.errors import check_choice

BACKENDS = ("auto", "fused", "linear", "reference")
GRID = 65535  # CUDA's limit for the second and third axis of a grid
HAS_TRITON = importlib.util.find_spec("triton") is not None
_warned: set[str] = set()  # messages that have been shown: each is shown once
_forced: str | None = None  # set by use_backend


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run every operator on ``backend``, whatever its argument says, while the context is open.

    This holds in all threads, since activation checkpointing recomputes in the threads of the backward pass.

    Args:
        backend: One of ``BACKENDS``.
    """
    global _forced
    check_choice("backend", backend, BACKENDS)
    before, _forced = _forced, backend
    try:
        yield
    finally:
        _forced = before


def chosen(backend: str, allowed: tuple[str, ...] = BACKENDS) -> str:
    """Check an operator's argument ``backend`` and return the backend in force: it, or that of ``use_backend``."""
    check_choice("backend", backend, allowed)
    return _forced or backend


def worth_trying(backend: str, q: Tensor) -> bool:
    """Return whether to try kernels: on a GPU or when asked for them, with Triton. Warn once if Triton is missing."""
    if backend == "reference" or not (q.is_cuda or backend in ("fused", "linear")):
        return False
    if not HAS_TRITON:
        warn_once("attention runs on its slow reference path: Triton is not installed (pip install 'leadline[gpu]')")
    if HAS_TRITON and not q.is_cuda and os.environ.get("TRITON_INTERPRET") != "1":
        warn_once(f"attention runs on its slow reference path: its inputs are on {q.device.type}, kernels need a GPU")
        return False
    return HAS_TRITON


def unsupported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Return why none of the kernels takes these inputs, or None; a kernel may have further reasons of its own."""
    D = q.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        return f"the inputs are {q.dtype}, {k.dtype}, {v.dtype}; it takes one of float16, bfloat16, float32"
    if D > 128 or v.shape[-1] != D:
        return f"the head width is {D} (values {v.shape[-1]}); it takes up to 128, the same for values"
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (q.shape[0], 1, 1, k.shape[2])):
        return f"the mask is {mask.dtype} {tuple(mask.shape)}; it takes key padding, boolean (B, 1, 1, N)"
    return None


def too_large(*tensors: Tensor, programs: int = 0) -> str | None:
    """Return why the inputs are too large for the kernels, or None.

    Kernels count offsets in 32 bits, and a grid has at most ``GRID`` programs along its second axis.

    Args:
        *tensors: Inputs of the kernel.
        programs: Number of programs along the second axis of its grid.
    """
    for x in tensors:
        span = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
        if isinstance(span, int) and span >= 2**31:  # a symbolic size of an exported program has no value yet
            return f"a tensor spans {span:,} numbers in memory; it takes up to 2^31, make the batch smaller"
    if isinstance(programs, int) and programs > GRID:
        return f"batch times heads is {programs:,}; it takes up to {GRID:,}, make the batch smaller"
    return None


def warn_once(message: str) -> None:
    """Warn with a message unless it has been shown before."""
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=4)
