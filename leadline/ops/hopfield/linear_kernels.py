"""Triton kernels of the linear-memory path, which rebuild scores from queries and keys.

Q and K hold, per head, the queries and keys of all L layers side by side, (heads, N, L D). C (L, 2, heads) is what each
layer does to the scores, h <- C[0] h + C[1] q k^T. If the weights of the layers differ by powers of 2, as with
alpha' = 1/2, Q already contains them, without rounding (READY), and one long product is left. Nothing here has N x N
elements.
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from leadline.ops.launch import Kernel
from leadline.ops.parts import LOG2E, keep_weights


@triton.jit
def _scores(
    Q, K, C, h, heads, rows, cols, N, L, READY: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the carried scores (BM, BN) of one head, in base 2."""
    d = tl.arange(0, BLOCK_D)
    at_q, at_k = (rows < N)[:, None] & (d < D)[None, :], (cols < N)[None, :] & (d < D)[:, None]
    q_at = Q + (h * N + rows.to(tl.int64))[:, None] * (L * D) + d[None, :]
    k_at = K + (h * N + cols.to(tl.int64))[None, :] * (L * D) + d[:, None]
    hidden = tl.zeros((BM, BN), tl.float32)
    for m in range(L):
        q = tl.load(q_at + m * D, mask=at_q, other=0.0)
        k = tl.load(k_at + m * D, mask=at_k, other=0.0)
        if READY:
            hidden = tl.dot(q, k, hidden, input_precision=PRECISION)
        else:
            keep, new = tl.load(C + 2 * m * heads + h), tl.load(C + (2 * m + 1) * heads + h)
            hidden = keep * hidden + new * tl.dot(q, k, input_precision=PRECISION)
    if READY:
        return hidden * (tl.load(C + (2 * L - 1) * heads + h) * LOG2E)
    return hidden * LOG2E


@triton.jit
def _visible(rows, cols, MASK, N, CAUSAL: tl.constexpr, MASKED: tl.constexpr):
    """Return which keys (cols) each query (rows) sees."""
    seen = (cols < N)[None, :] & (rows < N)[:, None]
    if CAUSAL:
        seen = seen & (rows[:, None] >= cols[None, :])
    if MASKED:
        seen = seen & (tl.load(MASK + cols, mask=cols < N, other=0) != 0)[None, :]
    return seen


@Kernel
@triton.jit
def forward_kernel(
    Q, K, C, V, OUT, LSE, MASK, SEED, v_h, v_n, o_h, o_n, N, L,
    READY: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out and lse (heads, N); one program per block of queries."""
    i, h, heads = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rows, d = i * BM + tl.arange(0, BM), tl.arange(0, BLOCK_D)
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BLOCK_D), tl.float32)
    last = tl.minimum(N, (i + 1) * BM) if CAUSAL else N
    for j in range(tl.cdiv(last, BN)):
        cols = j * BN + tl.arange(0, BN)
        hidden = _scores(Q, K, C, h, heads, rows, cols, N, L, READY, D, BLOCK_D, BM, BN, PRECISION)
        hidden = tl.where(_visible(rows, cols, MASK, N, CAUSAL, MASKED), hidden, float("-inf"))
        top = tl.maximum(peak, tl.max(hidden, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(hidden - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT > 0:
            p *= keep_weights(SEED, h, rows, cols, N, DROPOUT)
        v = tl.load(
            V + h * v_h + cols[:, None] * v_n + d[None, :], mask=(cols < N)[:, None] & (d < D)[None, :], other=0.0
        )
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = top
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))  # inf: weights 0 in backward
    tl.store(LSE + h * N + rows, lse, mask=rows < N)
    at = (rows < N)[:, None] & (d < D)[None, :]
    tl.store(OUT + h * o_h + rows[:, None] * o_n + d[None, :], acc.to(OUT.dtype.element_ty), mask=at)


@Kernel
@triton.jit
def gradient_kernel(
    Q, K, C, V, DOUT, LSE, DELTA, MASK, SEED, P, G, v_h, v_n, g_h, g_n, first, width, strip, N, L,
    READY: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute P (weights with dropout) and G (gradient of h) of the queries first ... first + strip.

    One program per block of scores. P and G are (heads, strip, width); keys from ``width`` on are invisible here.
    """
    j, i, h, heads = tl.program_id(0), tl.program_id(1), tl.program_id(2), tl.num_programs(2)
    inner, cols, d = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN), tl.arange(0, BLOCK_D)
    rows = first + inner
    at = (inner < strip)[:, None] & (cols < width)[None, :]
    spots = (h * strip + inner.to(tl.int64))[:, None] * width + cols[None, :]
    if CAUSAL and j * BN > first + (i + 1) * BM - 1:  # above the diagonal
        tl.store(P + spots, tl.zeros((BM, BN), P.dtype.element_ty), mask=at)
        tl.store(G + spots, tl.zeros((BM, BN), G.dtype.element_ty), mask=at)
    else:
        hidden = _scores(Q, K, C, h, heads, rows, cols, N, L, READY, D, BLOCK_D, BM, BN, PRECISION)
        inside = rows < N
        lse = tl.load(LSE + h * N + rows, mask=inside, other=float("inf"))
        delta = tl.load(DELTA + h * N + rows, mask=inside, other=0.0)
        p = tl.where(_visible(rows, cols, MASK, N, CAUSAL, MASKED), tl.exp2(hidden - lse[:, None]), 0.0)
        do = tl.load(
            DOUT + h * g_h + rows[:, None] * g_n + d[None, :], mask=inside[:, None] & (d < D)[None, :], other=0.0
        )
        v = tl.load(
            V + h * v_h + cols[None, :] * v_n + d[:, None], mask=(cols < N)[None, :] & (d < D)[:, None], other=0.0
        )
        dp = tl.dot(do, v, input_precision=PRECISION)
        weights = p
        if DROPOUT > 0:
            keep = keep_weights(SEED, h, rows, cols, N, DROPOUT)
            dp *= keep
            weights = p * keep
        tl.store(P + spots, weights.to(P.dtype.element_ty), mask=at)
        tl.store(G + spots, (p * (dp - delta[:, None])).to(G.dtype.element_ty), mask=at)


@Kernel
@triton.jit
def copy_kernel(
    X, OUT, FACTOR, x_h, x_n, o_h, o_n, N,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Compute OUT = FACTOR X, both (heads, N, D) with strides of their own; FACTOR is (heads,) or None."""
    rows, h, d = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK_D)
    at = (rows < N)[:, None] & (d < D)[None, :]
    x = tl.load(X + h * x_h + rows.to(tl.int64)[:, None] * x_n + d[None, :], mask=at, other=0.0)
    if FACTOR is not None:
        x = x.to(tl.float32) * tl.load(FACTOR + h)
    tl.store(OUT + h * o_h + rows.to(tl.int64)[:, None] * o_n + d[None, :], x.to(OUT.dtype.element_ty), mask=at)
