"""Parts that the kernels of several operators share."""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def keep_weights(SEED, bh, rows, cols, N, DROPOUT: tl.constexpr):
    """Return the dropout factors (rows, cols): 0 where an attention weight is dropped, else 1 / (1 - DROPOUT)."""
    draws = tl.rand(tl.load(SEED) + bh, rows[:, None] * N + cols[None, :])
    return tl.where(draws >= DROPOUT, 1.0 / (1.0 - DROPOUT), 0.0)
