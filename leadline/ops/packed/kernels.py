"""Triton kernels of attention over few tokens: one program per head, all its scores at once.

Only QKV itself is saved for the backward pass: a tile of scores is cheaper to compute again than to read.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from leadline.ops.launch import Kernel
from leadline.ops.parts import LOG2E


@triton.jit
def _places(N, PARTS: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr):
    """Return the offsets of this program's head in a tensor (B, N, PARTS, H, D), and which of them exist."""
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    n, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    at = (b.to(tl.int64) * N * (PARTS * H * D)) + h * D + n[:, None] * (PARTS * H * D) + d[None, :]
    return at, (n < N)[:, None] & (d < D)[None, :]


@triton.jit
def _weights(q, k, scale, N, CAUSAL: tl.constexpr, BLOCK: tl.constexpr):
    """Compute softmax(scale q k^T); rows beyond the last token attend like any other."""
    n = tl.arange(0, BLOCK)
    seen = (n < N)[None, :]
    if CAUSAL:
        seen = seen & (n[:, None] >= n[None, :])
    scores = tl.where(seen, tl.dot(q, tl.trans(k)) * (scale * LOG2E), float("-inf"))
    p = tl.exp2(scores - tl.max(scores, 1)[:, None])
    return p / tl.sum(p, 1)[:, None]


@Kernel
@triton.jit
def forward_kernel(
    QKV, OUT, scale, N,
    CAUSAL: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute OUT (B, N, H, D) from QKV (B, N, 3, H, D)."""
    at, there = _places(N, 3, H, D, BLOCK_D, BLOCK)
    q = tl.load(QKV + at, mask=there, other=0.0)
    k = tl.load(QKV + H * D + at, mask=there, other=0.0)
    v = tl.load(QKV + 2 * H * D + at, mask=there, other=0.0)
    out = tl.dot(_weights(q, k, scale, N, CAUSAL, BLOCK).to(v.dtype), v)
    at, there = _places(N, 1, H, D, BLOCK_D, BLOCK)
    tl.store(OUT + at, out.to(v.dtype), mask=there)


@Kernel
@triton.jit
def backward_kernel(
    QKV, DOUT, DQKV, scale, N,
    CAUSAL: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Compute DQKV (B, N, 3, H, D) from QKV and DOUT."""
    at, there = _places(N, 1, H, D, BLOCK_D, BLOCK)
    do = tl.load(DOUT + at, mask=there, other=0.0)  # 0 beyond the last token, so that it adds no gradient
    at, there = _places(N, 3, H, D, BLOCK_D, BLOCK)
    q = tl.load(QKV + at, mask=there, other=0.0)
    k = tl.load(QKV + H * D + at, mask=there, other=0.0)
    v = tl.load(QKV + 2 * H * D + at, mask=there, other=0.0)
    p = _weights(q, k, scale, N, CAUSAL, BLOCK)
    dp = tl.dot(do, tl.trans(v))
    g = (p * (dp - tl.sum(p * dp, 1)[:, None]) * scale).to(q.dtype)
    tl.store(DQKV + at, tl.dot(g, k).to(q.dtype), mask=there)
    tl.store(DQKV + H * D + at, tl.dot(tl.trans(g), q).to(q.dtype), mask=there)
    tl.store(DQKV + 2 * H * D + at, tl.dot(tl.trans(p.to(q.dtype)), do).to(q.dtype), mask=there)
