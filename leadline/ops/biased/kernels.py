"""Triton kernels of attention with a dense additive bias, and of the bias's gradient.

BIAS is read in place, through strides that are 0 along a broadcast dimension, and never expanded in memory.
Nothing of size M x N is saved between forward and backward: scores are computed again from Q, K and BIAS.

    forward_kernel   out and lse; one program per block of queries
    column_kernel    dK and dV; one program per block of keys. If the bias has its full size, also G, the gradient of
                     the scores: it is the bias's gradient and need not be computed twice
    row_kernel       dQ, from G or by computing G again; one program per block of queries
    bias_kernel      the gradient of a broadcast bias; one program per block of it. A program adds up the samples and
                     heads that share the block in a fixed order, so that results repeat
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from leadline.ops.launch import Kernel
from leadline.ops.parts import LOG2E, keep_weights


@triton.jit
def _rows(X, x_n, at, n, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Load a block of rows of X (n, D), with 0 beyond its end."""
    d = tl.arange(0, BLOCK_D)
    return tl.load(X + at[:, None] * x_n + d[None, :], mask=(at < n)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _scores(q, k, BIAS, MASK, rows, cols, scale, s_m, s_n, M, N, CAUSAL: tl.constexpr, PRECISION: tl.constexpr):
    """Compute scores in base 2, -inf where a query may not attend."""
    seen = (rows < M)[:, None] & (cols < N)[None, :]
    bias = tl.load(BIAS + rows.to(tl.int64)[:, None] * s_m + cols[None, :] * s_n, mask=seen, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E) + bias.to(tl.float32) * LOG2E
    if CAUSAL:
        seen = seen & (rows[:, None] + (N - M) >= cols[None, :])
    if MASK is not None:
        seen = seen & (tl.load(MASK + cols, mask=cols < N, other=0) != 0)[None, :]
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _gradient(
    q, k, v, do, BIAS, LSE, DELTA, MASK, SEED, bh, rows, cols, scale, s_m, s_n, M, N,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute the weights with dropout, and the gradient of the scores."""
    lse = tl.load(LSE + bh * M + rows, mask=rows < M, other=float("inf"))
    delta = tl.load(DELTA + bh * M + rows, mask=rows < M, other=0.0)
    p = tl.exp2(_scores(q, k, BIAS, MASK, rows, cols, scale, s_m, s_n, M, N, CAUSAL, PRECISION) - lse[:, None])
    dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
    weights = p
    if DROPOUT > 0:
        keep = keep_weights(SEED, bh, rows, cols, N, DROPOUT)
        dp *= keep
        weights = p * keep
    return weights, p * (dp - delta[:, None])


@Kernel
@triton.jit
def forward_kernel(
    Q, K, V, BIAS, OUT, LSE, MASK, SEED, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, s_b, s_h, s_m, s_n, o_b, o_h, o_n, H, GROUP, M, N,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT and LSE; one program per block of queries."""
    i, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    rows, d = i * BM + tl.arange(0, BM), tl.arange(0, BLOCK_D)
    q = _rows(Q + b * q_b + h * q_h, q_n, rows, M, D, BLOCK_D)
    mask = None if MASK is None else MASK + b * N
    peak = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, BLOCK_D), tl.float32)
    last = tl.minimum(N, (i + 1) * BM + N - M) if CAUSAL else N
    for j in range(tl.cdiv(last, BN)):
        cols = j * BN + tl.arange(0, BN)
        k = _rows(K + b * k_b + (h // GROUP) * k_h, k_n, cols, N, D, BLOCK_D)
        v = _rows(V + b * v_b + (h // GROUP) * v_h, v_n, cols, N, D, BLOCK_D)
        scores = _scores(
            q, k, BIAS + b * s_b + h * s_h, mask, rows, cols, scale, s_m, s_n, M, N, CAUSAL, PRECISION
        )  # fmt: skip
        top = tl.maximum(peak, tl.max(scores, 1))
        safe = tl.where(top == float("-inf"), 0.0, top)
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT > 0:
            p *= keep_weights(SEED, bh, rows, cols, N, DROPOUT)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        peak = top
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))  # inf: weights 0 in backward
    tl.store(LSE + bh * M + rows, lse, mask=rows < M)
    at = (rows < M)[:, None] & (d < D)[None, :]
    spots = OUT + b * o_b + h * o_h + rows[:, None] * o_n + d[None, :]
    tl.store(spots, acc.to(OUT.dtype.element_ty), mask=at)


@Kernel
@triton.jit
def column_kernel(
    Q, K, V, BIAS, DOUT, LSE, DELTA, MASK, SEED, DK, DV, G, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, s_b, s_h, s_m, s_n, g_b, g_h, g_n, dk_b, dk_h, dk_n,
    H, GROUP, M, N,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DK and DV, with H heads and the same strides, and G (B, H, M, N), contiguous, unless it is None."""
    j, bh = tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    cols, d = j * BN + tl.arange(0, BN), tl.arange(0, BLOCK_D)
    k = _rows(K + b * k_b + (h // GROUP) * k_h, k_n, cols, N, D, BLOCK_D)
    v = _rows(V + b * v_b + (h // GROUP) * v_h, v_n, cols, N, D, BLOCK_D)
    mask = None if MASK is None else MASK + b * N
    dk = tl.zeros((BN, BLOCK_D), tl.float32)
    dv = tl.zeros((BN, BLOCK_D), tl.float32)
    begin = tl.maximum(0, j * BN - (N - M)) // BM if CAUSAL else 0
    if CAUSAL and G is not None:  # above the diagonal G is 0
        for i in range(begin):
            rows = i * BM + tl.arange(0, BM)
            spots = G + (bh * M + rows.to(tl.int64))[:, None] * N + cols[None, :]
            at = (rows < M)[:, None] & (cols < N)[None, :]
            tl.store(spots, tl.zeros((BM, BN), G.dtype.element_ty), mask=at)
    for i in range(begin, tl.cdiv(M, BM)):
        rows = i * BM + tl.arange(0, BM)
        q = _rows(Q + b * q_b + h * q_h, q_n, rows, M, D, BLOCK_D)
        do = _rows(DOUT + b * g_b + h * g_h, g_n, rows, M, D, BLOCK_D)
        weights, grad = _gradient(
            q, k, v, do, BIAS + b * s_b + h * s_h, LSE, DELTA, mask, SEED, bh, rows, cols, scale, s_m, s_n, M, N,
            CAUSAL, DROPOUT, PRECISION,
        )  # fmt: skip
        dv = tl.dot(tl.trans(weights.to(do.dtype)), do, dv, input_precision=PRECISION)
        dk = tl.dot(tl.trans(grad.to(q.dtype)), q, dk, input_precision=PRECISION)
        if G is not None:
            spots = G + (bh * M + rows.to(tl.int64))[:, None] * N + cols[None, :]
            at = (rows < M)[:, None] & (cols < N)[None, :]
            tl.store(spots, grad.to(G.dtype.element_ty), mask=at)
    at = (cols < N)[:, None] & (d < D)[None, :]
    spots = b * dk_b + h * dk_h + cols[:, None] * dk_n + d[None, :]
    tl.store(DK + spots, (scale * dk).to(DK.dtype.element_ty), mask=at)
    tl.store(DV + spots, dv.to(DV.dtype.element_ty), mask=at)


@Kernel
@triton.jit
def row_kernel(
    Q, K, V, BIAS, DOUT, LSE, DELTA, MASK, SEED, DQ, G, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, s_b, s_h, s_m, s_n, g_b, g_h, g_n, dq_b, dq_h, dq_n,
    H, GROUP, M, N,
    CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ = scale G K; G (B, H, M, N) is contiguous, or None and computed here."""
    i, bh = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    b, h = bh // H, bh % H
    rows, d = i * BM + tl.arange(0, BM), tl.arange(0, BLOCK_D)
    mask = None if MASK is None else MASK + b * N
    if G is None:
        q = _rows(Q + b * q_b + h * q_h, q_n, rows, M, D, BLOCK_D)
        do = _rows(DOUT + b * g_b + h * g_h, g_n, rows, M, D, BLOCK_D)
    dq = tl.zeros((BM, BLOCK_D), tl.float32)
    last = tl.minimum(N, (i + 1) * BM + N - M) if CAUSAL else N
    for j in range(tl.cdiv(last, BN)):
        cols = j * BN + tl.arange(0, BN)
        k = _rows(K + b * k_b + (h // GROUP) * k_h, k_n, cols, N, D, BLOCK_D)
        if G is None:
            v = _rows(V + b * v_b + (h // GROUP) * v_h, v_n, cols, N, D, BLOCK_D)
            _, grad = _gradient(
                q, k, v, do, BIAS + b * s_b + h * s_h, LSE, DELTA, mask, SEED, bh, rows, cols, scale, s_m, s_n, M, N,
                CAUSAL, DROPOUT, PRECISION,
            )  # fmt: skip
        else:
            spots = G + (bh * M + rows.to(tl.int64))[:, None] * N + cols[None, :]
            grad = tl.load(spots, mask=(rows < M)[:, None] & (cols < N)[None, :], other=0.0)
        dq = tl.dot(grad.to(k.dtype), k, dq, input_precision=PRECISION)
    spots = DQ + b * dq_b + h * dq_h + rows[:, None] * dq_n + d[None, :]
    tl.store(spots, (scale * dq).to(DQ.dtype.element_ty), mask=(rows < M)[:, None] & (d < D)[None, :])


@Kernel
@triton.jit
def bias_kernel(
    Q, K, V, BIAS, DOUT, LSE, DELTA, MASK, SEED, DBIAS, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, s_b, s_h, s_m, s_n, g_b, g_h, g_n,
    B, H, GROUP, M, N, bias_h,
    BATCHES: tl.constexpr, HEADS: tl.constexpr, CAUSAL: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute DBIAS (batch or 1, heads or 1, M, N), contiguous. BATCHES, HEADS: all of them share the bias."""
    j, i, owner = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    rows, cols = i * BM + tl.arange(0, BM), j * BN + tl.arange(0, BN)
    grad = tl.zeros((BM, BN), tl.float32)
    if not CAUSAL or j * BN < (i + 1) * BM + N - M:
        shared = (B if BATCHES else 1) * (H if HEADS else 1)
        for number in range(shared):
            b = number % B if BATCHES else owner // bias_h
            h = number // (B if BATCHES else 1) if HEADS else owner % bias_h
            bh = b * H + h
            q = _rows(Q + b * q_b + h * q_h, q_n, rows, M, D, BLOCK_D)
            do = _rows(DOUT + b * g_b + h * g_h, g_n, rows, M, D, BLOCK_D)
            k = _rows(K + b * k_b + (h // GROUP) * k_h, k_n, cols, N, D, BLOCK_D)
            v = _rows(V + b * v_b + (h // GROUP) * v_h, v_n, cols, N, D, BLOCK_D)
            mask = None if MASK is None else MASK + b * N
            _, more = _gradient(
                q, k, v, do, BIAS + b * s_b + h * s_h, LSE, DELTA, mask, SEED, bh, rows, cols, scale, s_m, s_n, M, N,
                CAUSAL, DROPOUT, PRECISION,
            )  # fmt: skip
            grad += more
    spots = DBIAS + (owner * M + rows.to(tl.int64))[:, None] * N + cols[None, :]
    tl.store(spots, grad.to(DBIAS.dtype.element_ty), mask=(rows < M)[:, None] & (cols < N)[None, :])
