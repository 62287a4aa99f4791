"""Triton kernels of the fused path, which store the carried scores in tiles.

Scores are stored once, and never as probabilities.

The state of a layer is a row of 64 x 64 tiles per head. Each tile is contiguous, so that every load is aligned whatever
the number of tokens; a causal state holds the lower tiles only. Within a tile the scores lie in the order in which
Hopper's matrix units hold an accumulator (``_unpack``). A thread then reads and writes its own scores, 16 bytes at a
time, and nothing goes through shared memory; other hardware pays a conversion and nothing else. h is stored in float16,
or in float32 for float32 inputs. Everything after it is computed from the stored value, so that forward and backward
see the same scores.

    forward   h = alpha' h_before + (1 - alpha') scale Q K^T       read h_before, write h
              out = softmax(h) V                                   online, with its log-sum-exp
    backward  dP = dO V^T,  G = P (dP - delta) + dh                read h and dh (from the layer after), write G
              dV = P^T dO,  dK = (1 - alpha') scale G^T Q          one program per column of tiles
              dQ = (1 - alpha') scale G K                          one program per row of tiles, reads G
              the gradient of h_before is alpha' G
"""

# mypy: ignore-errors
from __future__ import annotations

import triton
import triton.language as tl

from leadline.ops.launch import Kernel
from leadline.ops.parts import LOG2E, keep_weights

LARGEST = tl.constexpr(60000.0)  # scores are clamped here: the largest float16 is 65504


@triton.jit
def _tile(i, j, columns, CAUSAL: tl.constexpr):
    """Return the number of the tile in row i and column j, counting all tiles or the lower ones only."""
    if CAUSAL:
        return i * (i + 1) // 2 + j
    return i * columns + j


@triton.jit
def _unpack(x):
    """Reorder a tile from (4096,), as stored, to (64, 64).

    Thread 32 w + 4 g + t of the 128 holds, of the accumulator, the rows 16 w + 8 a + g and the columns
    16 m + 8 n + 2 t + e; a tile is stored by m, then by thread, then n, a, e: 8 scores, one load.
    """
    x = tl.permute(tl.reshape(x, (4, 4, 8, 4, 2, 2, 2)), (1, 5, 2, 0, 4, 3, 6))  # m w g t n a e -> w a g, m n t e
    return tl.reshape(x, (64, 64))


@triton.jit
def _pack(x):
    """Reorder a tile from (64, 64) to (4096,), as stored."""
    x = tl.permute(tl.reshape(x, (4, 2, 8, 4, 2, 4, 2)), (3, 0, 2, 5, 4, 1, 6))  # w a g, m n t e -> m w g t n a e
    return tl.reshape(x, (4096,))


@triton.jit
def _spots(tile, i, j, N, T: tl.constexpr):
    """Return the offsets of a tile's scores, and which of them exist, in pieces of 16 x 16."""
    spots = tl.arange(0, 4096)
    needed = (j * T + spots // 1024 * 16 < N) & (i * T + spots // 256 % 4 * 16 < N)
    return tile * T * T + spots, needed


@triton.jit
def _read(BASE, tile, i, j, N, other: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr):
    """Load the tile in row i and column j, (64, 64)."""
    spots, needed = _spots(tile, i, j, N, T)
    return _unpack(tl.load(BASE + spots) if EXACT else tl.load(BASE + spots, mask=needed, other=other))


@triton.jit
def _write(BASE, x, tile, i, j, N, T: tl.constexpr, EXACT: tl.constexpr):
    """Store the tile x (64, 64) in row i and column j."""
    spots, needed = _spots(tile, i, j, N, T)
    if EXACT:
        tl.store(BASE + spots, _pack(x))
    else:
        tl.store(BASE + spots, _pack(x), mask=needed)


@Kernel
@triton.jit
def forward_kernel(
    Q, K, V, STRENGTH, BEFORE, STATE, OUT, LSE, MASK, SEED, strength, scale,
    q_b, q_h, q_n, k_b, k_h, k_n, v_b, v_h, v_n, o_b, o_h, o_n,
    H, GROUP, N, tiles,
    FIRST: tl.constexpr, WHOLE: tl.constexpr, CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute OUT, LSE and the new STATE; one program per row of tiles.

    alpha' is ``strength``, or STRENGTH (H,) unless that is None. FIRST: there is no state yet. WHOLE: then h = S.
    """
    i = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    columns = tl.cdiv(N, T)
    alpha = strength if STRENGTH is None else tl.load(STRENGTH + h)
    new = scale if FIRST and WHOLE else (1.0 - alpha) * scale

    rows, d = i * T + tl.arange(0, T), tl.arange(0, BLOCK_D)
    inside, wide = rows < N, d < D
    at_d = wide[None, :] if BLOCK_D != D else tl.full((1, BLOCK_D), 1, tl.int1)
    q = tl.load(Q + b * q_b + h * q_h + rows[:, None] * q_n + d[None, :], mask=inside[:, None] & at_d, other=0.0)
    k_at = K + b * k_b + (h // GROUP) * k_h
    v_at = V + b * v_b + (h // GROUP) * v_h
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
        tile = _tile(i, j, columns, CAUSAL)
        if not FIRST:
            hidden += alpha * _read(BEFORE + base, tile, i, j, N, 0.0, T, EXACT).to(tl.float32)
        if not EXACT:
            hidden = tl.where(there[None, :], hidden, -LARGEST)  # so that backward need not mask
        stored = tl.minimum(tl.maximum(hidden, -LARGEST), LARGEST).to(STATE.dtype.element_ty)
        _write(STATE + base, stored, tile, i, j, N, T, EXACT)
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
            p *= keep_weights(SEED, bh, rows, cols, N, DROPOUT)
        acc = acc * shrink[:, None]
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
        peak = top
    empty = total == 0.0
    acc = acc / tl.where(empty, 1.0, total)[:, None]
    lse = tl.where(empty, float("inf"), peak + tl.log2(tl.where(empty, 1.0, total)))  # inf: weights 0 in backward
    tl.store(LSE + bh * columns * T + rows, lse if EXACT else tl.where(inside, lse, float("inf")))
    spots = OUT + b * o_b + h * o_h + rows[:, None] * o_n + d[None, :]
    tl.store(spots, acc.to(OUT.dtype.element_ty), mask=inside[:, None] & at_d)


@Kernel
@triton.jit
def delta_kernel(
    OUT, GRAD, DELTA, o_b, o_h, o_n, g_b, g_h, g_n, H, N, D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr
):
    """Compute delta, the sum of out * dout over the channels, per query; like lse it has whole tiles."""
    rows, bh, d = tl.program_id(0) * T + tl.arange(0, T), tl.program_id(1), tl.arange(0, BLOCK_D)
    b, h = bh // H, bh % H
    valid = (rows < N)[:, None] & (d < D)[None, :]
    out = tl.load(OUT + b * o_b + h * o_h + rows[:, None] * o_n + d[None, :], mask=valid, other=0.0).to(tl.float32)
    grad = tl.load(GRAD + b * g_b + h * g_h + rows[:, None] * g_n + d[None, :], mask=valid, other=0.0).to(tl.float32)
    tl.store(DELTA + bh * tl.num_programs(0) * T + rows, tl.sum(out * grad, 1))


@Kernel
@triton.jit
def column_kernel(
    Q, V, STRENGTH, STATE, BEFORE, DSTATE, DOUT, LSE, DELTA, MASK, G, DK, DV, DALPHA, SEED, strength, scale,
    q_b, q_h, q_n, v_b, v_h, v_n, g_b, g_h, g_n, dk_b, dk_h, dk_n, dv_b, dv_h, dv_n,
    H, GROUP, N, tiles,
    CARRIED: tl.constexpr, FIRST: tl.constexpr, WHOLE: tl.constexpr, LEARNED: tl.constexpr, SCALED: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, DROPOUT: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dK, dV and G, which is stored times alpha' if SCALED; one program per column of tiles.

    CARRIED: the layer after gives a gradient of the state. LEARNED: DALPHA is the sum of G (h_before - h) per program.
    """
    j = tl.program_id(0)
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    columns = tl.cdiv(N, T)
    alpha = strength if STRENGTH is None else tl.load(STRENGTH + h)
    new = scale if FIRST and WHOLE else (1.0 - alpha) * scale

    cols, d = j * T + tl.arange(0, T), tl.arange(0, BLOCK_D)
    there = cols < N
    at_d = (d < D)[None, :] if BLOCK_D != D else tl.full((1, BLOCK_D), 1, tl.int1)
    v_spots = V + b * v_b + (h // GROUP) * v_h + cols[:, None] * v_n + d[None, :]
    v = tl.load(v_spots, mask=there[:, None] & at_d, other=0.0)
    q_at = Q + b * q_b + h * q_h
    g_at = DOUT + b * g_b + h * g_h
    base = bh.to(tl.int64) * tiles * T * T
    if MASKED:
        real = tl.load(MASK + b * N + cols, mask=there, other=0) != 0

    dk = tl.zeros((BLOCK_D, T), tl.float32)  # dk and dv are transposed, so that the tile is the right factor
    dv = tl.zeros((BLOCK_D, T), tl.float32)
    dalpha = tl.zeros((T,), tl.float32)
    start = j if CAUSAL else 0
    for i in range(start, columns):
        rows = i * T + tl.arange(0, T)
        lse = tl.load(LSE + bh * columns * T + rows)
        delta = tl.load(DELTA + bh * columns * T + rows)
        tile = _tile(i, j, columns, CAUSAL)
        hidden = _read(STATE + base, tile, i, j, N, -LARGEST, T, EXACT).to(tl.float32)
        if EXACT:
            q = tl.load(q_at + rows[:, None] * q_n + d[None, :])
            do = tl.load(g_at + rows[:, None] * g_n + d[None, :])
        else:
            at = (rows < N)[:, None] & at_d
            q = tl.load(q_at + rows[:, None] * q_n + d[None, :], mask=at, other=0.0)
            do = tl.load(g_at + rows[:, None] * g_n + d[None, :], mask=at, other=0.0)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        hidden += 0.0 * dp  # without it the compiler holds p in two layouts, computed twice
        p = tl.exp2(hidden * LOG2E - lse[:, None])
        if CAUSAL:
            p = tl.where(rows[:, None] >= cols[None, :], p, 0.0)
        if MASKED:
            p = tl.where(real[None, :], p, 0.0)
        if DROPOUT > 0:
            keep = keep_weights(SEED, bh, rows, cols, N, DROPOUT)
            dp *= keep
            dv = tl.dot(tl.trans(do), (p * keep).to(do.dtype), dv, input_precision=PRECISION)
        else:
            dv = tl.dot(tl.trans(do), p.to(do.dtype), dv, input_precision=PRECISION)
        grad = p * (dp - delta[:, None])
        if CARRIED:
            grad += _read(DSTATE + base, tile, i, j, N, 0.0, T, EXACT).to(tl.float32)
        if LEARNED:
            change = -hidden
            if not FIRST:
                change += _read(BEFORE + base, tile, i, j, N, -LARGEST, T, EXACT).to(tl.float32)
            dalpha += tl.sum(tl.where(there[None, :], grad * change, 0.0), 1)
        dk = tl.dot(tl.trans(q), grad.to(q.dtype), dk, input_precision=PRECISION)
        _write(G + base, (grad * alpha if SCALED else grad).to(G.dtype.element_ty), tile, i, j, N, T, EXACT)
    at = there[:, None] & at_d
    tl.store(
        DK + b * dk_b + h * dk_h + cols[:, None] * dk_n + d[None, :],
        tl.trans(new * dk).to(DK.dtype.element_ty),
        mask=at,
    )
    tl.store(
        DV + b * dv_b + h * dv_h + cols[:, None] * dv_n + d[None, :], tl.trans(dv).to(DV.dtype.element_ty), mask=at
    )
    if LEARNED:
        tl.store(DALPHA + bh * columns + j, tl.sum(dalpha, 0))


@Kernel
@triton.jit
def row_kernel(
    K, STRENGTH, G, DQ, strength, scale, k_b, k_h, k_n, dq_b, dq_h, dq_n, H, GROUP, N, tiles,
    FIRST: tl.constexpr, WHOLE: tl.constexpr, SCALED: tl.constexpr, CAUSAL: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, T: tl.constexpr, EXACT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute dQ = (1 - alpha') scale G K; one program per row of tiles."""
    i = tl.num_programs(0) - 1 - tl.program_id(0)
    bh = tl.program_id(1)
    b, h = bh // H, bh % H
    columns = tl.cdiv(N, T)
    alpha = strength if STRENGTH is None else tl.load(STRENGTH + h)
    new = scale if FIRST and WHOLE else (1.0 - alpha) * scale
    new = new / alpha if SCALED else new

    rows, d = i * T + tl.arange(0, T), tl.arange(0, BLOCK_D)
    inside = rows < N
    at_d = (d < D)[None, :] if BLOCK_D != D else tl.full((1, BLOCK_D), 1, tl.int1)
    k_at = K + b * k_b + (h // GROUP) * k_h
    base = bh.to(tl.int64) * tiles * T * T
    dq = tl.zeros((T, BLOCK_D), tl.float32)
    last = i + 1 if CAUSAL else columns
    for j in range(last):
        cols = j * T + tl.arange(0, T)
        grad = _read(G + base, _tile(i, j, columns, CAUSAL), i, j, N, 0.0, T, EXACT)
        if EXACT:
            k = tl.load(k_at + cols[:, None] * k_n + d[None, :])
        else:
            k = tl.load(k_at + cols[:, None] * k_n + d[None, :], mask=(cols < N)[:, None] & at_d, other=0.0)
        if grad.dtype != k.dtype:
            grad = grad.to(tl.float32)
        dq = tl.dot(grad.to(k.dtype), k, dq, input_precision=PRECISION)
    at = inside[:, None] & at_d
    tl.store(DQ + b * dq_b + h * dq_h + rows[:, None] * dq_n + d[None, :], (new * dq).to(DQ.dtype.element_ty), mask=at)
