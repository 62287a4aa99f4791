"""Triton kernels of the fused path: tiles of the carried scores, stored once and never as probabilities.

The state of a layer is a row of T x T tiles per head, each contiguous, so that every load is aligned whatever the
number of tokens; a causal state holds the lower tiles only. h is kept in float16, or in float32 for such inputs, and
everything after it is computed from the stored value, so that forward and backward see the same scores.

    forward   h = alpha' h_before + (1 - alpha') scale Q K^T       read h_before, write h
              out = softmax(h) V                                   online, with its log-sum-exp
    backward  dP = dO V^T,  G = P (dP - delta) + dh                read h and dh (from the layer after), write G
              dV = P^T dO,  dK = (1 - alpha') scale G^T Q          one program a column of tiles
              dQ = (1 - alpha') scale G K                          one program a row of tiles, reads G
              the gradient of h_before is alpha' G
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LARGEST = tl.constexpr(60000.0)  # scores are cut here: float16 ends at 65504


@triton.jit
def _tile(i, j, columns, CAUSAL: tl.constexpr):
    """Number of the tile in row i and column j: all of them, or the lower ones only."""
    if CAUSAL:
        return i * (i + 1) // 2 + j
    return i * columns + j


@triton.jit
def _keep(SEED, bh, offsets, DROPOUT: tl.constexpr):
    """1 / (1 - p) where an attention weight is kept, 0 where it is dropped."""
    return tl.where(tl.rand(tl.load(SEED) + bh, offsets) >= DROPOUT, 1.0 / (1.0 - DROPOUT), 0.0)


@triton.jit
def forward_kernel(
    Q, K, V, STRENGTH, BEFORE, STATE, OUT, LSE, MASK, SEED, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    H, GROUP, N, tiles,
    FIRST: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a row of tiles. STRENGTH (H,) holds alpha'; FIRST: no state yet; WHOLE: then h = S."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    columns = tl.cdiv(N, T)
    alpha = tl.load(STRENGTH + h)
    new = scale if FIRST and WHOLE else (1.0 - alpha) * scale

    rows, d = i * T + tl.arange(0, T), tl.arange(0, BLOCK_D)
    inside, wide = rows < N, d < D
    at_d = wide[None, :] if BLOCK_D != D else tl.full((1, BLOCK_D), 1, tl.int1)
    q = tl.load(Q + b * q_b + h * q_h + rows[:, None] * q_n + d[None, :], mask=inside[:, None] & at_d, other=0.0)
    k_at = K + b * k_b + (h // GROUP) * k_h
    v_at = V + b * v_b + (h // GROUP) * v_h
    in_tile = tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]
    base = bh.to(tl.int64) * tiles * T * T

    peak = tl.full((T,), float("-inf"), tl.float32)
    total = tl.zeros((T,), tl.float32)
    acc = tl.zeros((T, BLOCK_D), tl.float32)
    last = i + 1 if CAUSAL else columns
    for j in range(last):
        cols = j * T + tl.arange(0, T)
        there = cols < N
        if EXACT:
            k = tl.load(k_at + cols[:, None] * k_n + d[None, :])
            v = tl.load(v_at + cols[:, None] * v_n + d[None, :])
        else:
            k = tl.load(k_at + cols[:, None] * k_n + d[None, :], mask=there[:, None] & at_d, other=0.0)
            v = tl.load(v_at + cols[:, None] * v_n + d[None, :], mask=there[:, None] & at_d, other=0.0)
        hidden = new * tl.dot(q, tl.trans(k), input_precision=PRECISION)
        spot = base + _tile(i, j, columns, CAUSAL) * T * T + in_tile
        valid = inside[:, None] & there[None, :]
        if not FIRST:
            if EXACT:
                hidden += alpha * tl.load(BEFORE + spot).to(tl.float32)
            else:
                hidden += alpha * tl.load(BEFORE + spot, mask=valid, other=0.0).to(tl.float32)
        hidden = tl.minimum(tl.maximum(hidden, -LARGEST), LARGEST)
        stored = hidden.to(STATE.dtype.element_ty)
        if EXACT:
            tl.store(STATE + spot, stored)
        else:
            tl.store(STATE + spot, stored, mask=valid)
        hidden = stored.to(tl.float32) * LOG2E
        if CAUSAL:
            hidden = tl.where(rows[:, None] >= cols[None, :], hidden, float("-inf"))
        if not EXACT:
            hidden = tl.where(there[None, :], hidden, float("-inf"))
        if MASKED:
            real = tl.load(MASK + b * N + cols, mask=there, other=0)
            hidden = tl.where(real[None, :] != 0, hidden, float("-inf"))
        top = tl.maximum(peak, tl.max(hidden, 1))
        safe = tl.where(top == float("-inf"), 0.0, top) if MASKED else top
        p = tl.exp2(hidden - safe[:, None])
        shrink = tl.exp2(peak - safe)
        total = total * shrink + tl.sum(p, 1)
        if DROPOUT > 0:
            p *= _keep(SEED, bh, rows[:, None] * N + cols[None, :], DROPOUT)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = top
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))  # inf: weights 0 in backward
    tl.store(LSE + bh * N + rows, lse, mask=inside)
    spots = OUT + b * o_b + h * o_h + rows[:, None] * o_n + d[None, :]
    tl.store(spots, acc.to(OUT.dtype.element_ty), mask=inside[:, None] & at_d)


@triton.jit
def delta_kernel(
    OUT, GRAD, DELTA, o_b, o_h, o_n, g_b, g_h, g_n, H, N, D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr
):
    """delta = sum over the channels of out * dout, per query."""
    rows, bh, d = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1), tl.arange(0, BLOCK_D)
    b, h = bh // H, bh % H
    valid = (rows < N)[:, None] & (d < D)[None, :]
    out = tl.load(OUT + b * o_b + h * o_h + rows[:, None] * o_n + d[None, :], mask=valid, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + b * g_b + h * g_h + rows[:, None] * g_n + d[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(DELTA + bh * N + rows, tl.sum(out * grad, 1), mask=rows < N)


@triton.jit
def column_kernel(
    Q, V, STRENGTH, STATE, BEFORE, DSTATE, DOUT, LSE, DELTA, MASK, G, DK, DV, DALPHA, SEED, scale,
    q_b, q_h, q_n, v_b, v_h, v_n, g_b, g_h, g_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    H, GROUP, N, tiles,
    CARRIED: tl.constexpr, FIRST: tl.constexpr, WHOLE: tl.constexpr, LEARNED: tl.constexpr, SCALED: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a column of tiles: dK, dV and G, which is stored times alpha' if SCALED.

    Tiles are worked on transposed, (keys, queries), so that no product needs its left factor turned.
    CARRIED: a gradient of the state has come from the layer after. LEARNED: sum G (h_before - h) per program.
    """
    j = tl.program_id(0)
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    columns = tl.cdiv(N, T)
    alpha = tl.load(STRENGTH + h)
    new = scale if FIRST and WHOLE else (1.0 - alpha) * scale

    cols, d = j * T + tl.arange(0, T), tl.arange(0, BLOCK_D)
    there = cols < N
    at_d = (d < D)[None, :] if BLOCK_D != D else tl.full((1, BLOCK_D), 1, tl.int1)
    v_spots = V + b * v_b + (h // GROUP) * v_h + cols[:, None] * v_n + d[None, :]
    v = tl.load(v_spots, mask=there[:, None] & at_d, other=0.0)
    q_at = Q + b * q_b + h * q_h
    g_at = DOUT + b * g_b + h * g_h
    in_tile = tl.arange(0, T)[None, :] * T + tl.arange(0, T)[:, None]  # transposed: (column, row)
    base = bh.to(tl.int64) * tiles * T * T
    if MASKED:
        real = tl.load(MASK + b * N + cols, mask=there, other=0) != 0

    dk = tl.zeros((T, BLOCK_D), tl.float32)
    dv = tl.zeros((T, BLOCK_D), tl.float32)
    dalpha = tl.zeros((T,), tl.float32)
    start = j if CAUSAL else 0
    for i in range(start, columns):
        rows = i * T + tl.arange(0, T)
        inside = rows < N
        spot = base + _tile(i, j, columns, CAUSAL) * T * T + in_tile
        valid = there[:, None] & inside[None, :]
        if EXACT:
            hidden = tl.load(STATE + spot)
            q = tl.load(q_at + rows[:, None] * q_n + d[None, :])
            do = tl.load(g_at + rows[:, None] * g_n + d[None, :])
            lse = tl.load(LSE + bh * N + rows)
            delta = tl.load(DELTA + bh * N + rows)
        else:
            hidden = tl.load(STATE + spot, mask=valid, other=0.0)
            q = tl.load(q_at + rows[:, None] * q_n + d[None, :], mask=inside[:, None] & at_d, other=0.0)
            do = tl.load(g_at + rows[:, None] * g_n + d[None, :], mask=inside[:, None] & at_d, other=0.0)
            lse = tl.load(LSE + bh * N + rows, mask=inside, other=float("inf"))
            delta = tl.load(DELTA + bh * N + rows, mask=inside, other=0.0)
        hidden = hidden.to(tl.float32)
        p = tl.exp2(hidden * LOG2E - lse[None, :])
        if CAUSAL:
            p = tl.where(rows[None, :] >= cols[:, None], p, 0.0)
        if not EXACT:
            p = tl.where(valid, p, 0.0)
        if MASKED:
            p = tl.where(real[:, None], p, 0.0)
        dp = tl.dot(v, tl.trans(do), input_precision=PRECISION)
        if DROPOUT > 0:
            keep = _keep(SEED, bh, rows[None, :] * N + cols[:, None], DROPOUT)
            dp *= keep
            dv = tl.dot((p * keep).to(do.dtype), do, dv, input_precision=PRECISION)
        else:
            dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
        grad = p * (dp - delta[None, :])
        if CARRIED:
            if EXACT:
                grad += tl.load(DSTATE + spot).to(tl.float32)
            else:
                grad += tl.load(DSTATE + spot, mask=valid, other=0.0).to(tl.float32)
        if LEARNED:
            change = -hidden
            if not FIRST:
                change += tl.load(BEFORE + spot, mask=valid, other=0.0).to(tl.float32)
            dalpha += tl.sum(tl.where(valid, grad * change, 0.0), 1)
        dk = tl.dot(grad.to(q.dtype), q, dk, input_precision=PRECISION)
        stored = (grad * alpha if SCALED else grad).to(G.dtype.element_ty)
        if EXACT:
            tl.store(G + spot, stored)
        else:
            tl.store(G + spot, stored, mask=valid)
    at = there[:, None] & at_d
    tl.store(DK + b * dk_b + h * dk_h + cols[:, None] * dk_n + d[None, :], (new * dk).to(DK.dtype.element_ty), mask=at)
    tl.store(DV + b * dv_b + h * dv_h + cols[:, None] * dv_n + d[None, :], dv.to(DV.dtype.element_ty), mask=at)
    if LEARNED:
        tl.store(DALPHA + bh * columns + j, tl.sum(dalpha, 0))


@triton.jit
def row_kernel(
    K, STRENGTH, G, DQ, scale, k_b, k_h, k_n, dq_b, dq_h, dq_n, H, GROUP, N, tiles,
    FIRST: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program a row of tiles: dQ = (1 - alpha') scale G K."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    columns = tl.cdiv(N, T)
    alpha = tl.load(STRENGTH + h)
    new = scale if FIRST and WHOLE else (1.0 - alpha) * scale
    new = new / alpha if SCALED else new

    rows, d = i * T + tl.arange(0, T), tl.arange(0, BLOCK_D)
    inside = rows < N
    at_d = (d < D)[None, :] if BLOCK_D != D else tl.full((1, BLOCK_D), 1, tl.int1)
    k_at = K + b * k_b + (h // GROUP) * k_h
    in_tile = tl.arange(0, T)[:, None] * T + tl.arange(0, T)[None, :]
    base = bh.to(tl.int64) * tiles * T * T
    dq = tl.zeros((T, BLOCK_D), tl.float32)
    last = i + 1 if CAUSAL else columns
    for j in range(last):
        cols = j * T + tl.arange(0, T)
        spot = base + _tile(i, j, columns, CAUSAL) * T * T + in_tile
        if EXACT:
            k = tl.load(k_at + cols[:, None] * k_n + d[None, :])
            grad = tl.load(G + spot)
        else:
            there = cols < N
            k = tl.load(k_at + cols[:, None] * k_n + d[None, :], mask=there[:, None] & at_d, other=0.0)
            grad = tl.load(G + spot, mask=inside[:, None] & there[None, :], other=0.0)
        if grad.dtype != k.dtype:
            grad = grad.to(tl.float32)
        dq = tl.dot(grad.to(k.dtype), k, dq, input_precision=PRECISION)
    at = inside[:, None] & at_d
    tl.store(DQ + b * dq_b + h * dq_h + rows[:, None] * dq_n + d[None, :], (new * dq).to(DQ.dtype.element_ty), mask=at)
