"""The fused path of Hopfield attention: calls its kernels, and says which inputs they take."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from leadline.ops import backends
from leadline.ops.hopfield import fused_kernels as kernels
from leadline.ops.hopfield.reference import check_heads, check_start
from leadline.ops.launch import Launch
from leadline.ops.operator import operator

TILE = 64
TINY = 1e-3  # gradients are not stored times an alpha' below this and divided by it later: digits would be lost
WARPS, STAGES = 4, 3  # the best of a sweep on an H200, see docs/kernels.md; a tile is laid out for 4 warps


class Options(NamedTuple):
    """Arguments of the operator that are not tensors, in its order."""

    strength: float  # alpha', where it is a number
    whole: bool  # start "scores": the first layer has h = S
    causal: bool
    dropout: float
    scale: float
    learned: bool  # alpha' needs a gradient


class ForwardFlags(NamedTuple):
    """Compile-time parameters of the forward kernel that do not follow from the shape."""

    FIRST: bool
    WHOLE: bool
    CAUSAL: bool
    MASKED: bool
    DROPOUT: float


class BackwardFlags(NamedTuple):
    """Compile-time parameters of the backward kernels that do not follow from the shape."""

    CARRIED: bool
    FIRST: bool
    WHOLE: bool
    LEARNED: bool
    SCALED: bool
    CAUSAL: bool
    MASKED: bool
    DROPOUT: float


class BackwardStrides(NamedTuple):
    """Strides of the tensors that the backward kernels read, and that may lie in memory in any order."""

    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    d_out: tuple[int, ...]


class BackwardLaunches(NamedTuple):
    """Prepared launches of the three kernels of the backward pass, in the order in which they run."""

    delta: Launch
    column: Launch
    row: Launch


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
) -> str | None:
    """Return why these inputs cannot take the fused path, or None."""
    if bias is not None:
        return "a bias is carried"
    if state is not None and (state[0].shape != state_shape(q.shape, causal) or state[0].dtype != q.dtype):
        return "the state comes from the reference path"
    return backends.unsupported(q, k, v, mask) or backends.too_large(q, k, v, programs=q.shape[0] * q.shape[1])


def state_shape(shape: tuple[int, ...], causal: bool) -> tuple[int, int, int]:
    """Return the shape of the state, (B H, tiles, T T), for queries of shape (B, H, N, D).

    A head has the tiles of its whole score matrix, or the lower ones when causal. The reference's state has four
    axes, so the two are never confused.
    """
    side = math.ceil(shape[2] / TILE)
    return shape[0] * shape[1], side * (side + 1) // 2 if causal else side * side, TILE * TILE


def hopfield_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None = None,
    *,
    alpha_prime: float | Tensor = 0.5,
    start: str = "zero",
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute ``leadline.ops.hopfield_attention`` with the fused kernels; ``fused_kernels`` explains the state.

    The state has the dtype of the inputs, but with bfloat16 it holds float16 numbers in a tensor of dtype bfloat16:
    scores need float16's digits, their gradients bfloat16's range, and autograd requires one dtype for both.
    """
    check_start(start)
    check_heads(q, k, v, alpha_prime, dropout)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    learned = isinstance(alpha_prime, Tensor) and alpha_prime.requires_grad
    per_head, strength = None, 0.0
    if isinstance(alpha_prime, Tensor):
        per_head = alpha_prime.float().expand(q.shape[1]).contiguous()
    else:
        strength = alpha_prime
    seed = torch.randint(2**31, (1,), device=q.device) if dropout else None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    before = None if state is None else state[0]
    padding = None if mask is None else mask[:, 0, 0].contiguous()
    options = Options(
        strength=strength, whole=start == "scores", causal=causal, dropout=dropout, scale=scale, learned=learned
    )
    out, new, _ = _attention(q, k, v, per_head, before, padding, seed, *options)
    return out, (new,)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    per_head: Tensor | None,
    before: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    strength: float,
    whole: bool,
    causal: bool,
    dropout: float,
    scale: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return out, the new state and lse."""
    out, state, lse = _outputs(q, causal)
    flags = ForwardFlags(FIRST=before is None, WHOLE=whole, CAUSAL=causal, MASKED=mask is not None, DROPOUT=dropout)
    launch = _forward_launch(q.device, q.dtype, q.shape, k.shape[1], q.stride(), k.stride(), v.stride(), flags)
    launch((q, k, v, per_head, before, state, out, lse, mask, seed), (strength, scale))
    return out, state, lse


@lru_cache(maxsize=1024)
def _forward_launch(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    kv_heads: int,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    flags: ForwardFlags,
) -> Launch:
    """Prepare the forward kernel; q, k, v are strides."""
    B, H, N, _ = shape
    tiles = state_shape(shape, flags.CAUSAL)[1]
    return kernels.forward_kernel.prepare(
        (math.ceil(N / TILE), B * H),
        (*q[:3], *k[:3], *v[:3], *_packed(shape)[:3], H, H // kv_heads, N, tiles),
        {**flags._asdict(), **_constants(shape, dtype)},
        halves=("BEFORE", "STATE"), num_warps=WARPS, num_stages=2 if dtype == torch.float32 else STAGES,
    )  # fmt: skip


def _backward(
    d_out: Tensor,
    d_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    per_head: Tensor | None,
    before: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    state: Tensor,
    lse: Tensor,
    strength: float,
    whole: bool,
    causal: bool,
    dropout: float,
    scale: float,
    learned: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return dq, dk, dv, the gradient of the state before and that of alpha'."""
    B, H, N, _ = q.shape
    first = before is None
    dq, dk, dv, grad, d_strength = _gradients(q, state)
    delta = torch.empty_like(lse)
    partial = torch.empty(B, H, math.ceil(N / TILE), dtype=torch.float32, device=q.device) if learned else None
    # where alpha' is a number, G is stored times it, as the layer before needs it; a tiny alpha' would lose digits
    scaled = not first and per_head is None and strength >= TINY
    flags = BackwardFlags(
        CARRIED=d_state is not None,
        FIRST=first,
        WHOLE=whole,
        LEARNED=learned,
        SCALED=scaled,
        CAUSAL=causal,
        MASKED=mask is not None,
        DROPOUT=dropout,
    )
    strides = BackwardStrides(q.stride(), k.stride(), v.stride(), d_out.stride())
    launches = _backward_launches(q.device, q.dtype, q.shape, k.shape[1], strides, flags)
    launches.delta((out, d_out, delta))
    old = before if learned else None
    launches.column(
        (q, v, per_head, state, old, d_state, d_out, lse, delta, mask, grad, dk, dv, partial, seed), (strength, scale)
    )
    launches.row((k, per_head, grad, dq), (strength, scale))
    if learned:
        assert partial is not None
        assert per_head is not None
        # h_before - S = (h_before - h) / (1 - alpha'); with h = S at the start nothing depends on alpha'
        d_strength = partial.sum((0, 2)) / (1 - per_head)
        d_strength = torch.zeros_like(d_strength) if first and whole else d_strength
    if not first and not scaled:
        grad = grad * (strength if per_head is None else per_head.repeat(B).view(-1, 1, 1).to(grad.dtype))
    groups = k.shape[1]
    if groups != H:
        dk, dv = (
            x.transpose(1, 2).unflatten(2, (groups, -1)).float().sum(3).to(x.dtype).transpose(1, 2) for x in (dk, dv)
        )
    return dq, dk, dv, grad, d_strength


@lru_cache(maxsize=1024)
def _backward_launches(
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    kv_heads: int,
    strides: BackwardStrides,
    flags: BackwardFlags,
) -> BackwardLaunches:
    """Prepare the kernels of the backward pass."""
    B, H, N, _ = shape
    q, k, v, d_out = (x[:3] for x in strides)
    packed, constants = _packed(shape)[:3], {**flags._asdict(), **_constants(shape, dtype)}
    grid, sizes = (math.ceil(N / TILE), B * H), (H, H // kv_heads, N, state_shape(shape, flags.CAUSAL)[1])
    speed: dict[str, Any] = {"num_warps": WARPS, "num_stages": 1 if dtype == torch.float32 else STAGES}
    return BackwardLaunches(
        delta=kernels.delta_kernel.prepare(grid, (*packed, *d_out, H, N), constants, num_warps=4),
        column=kernels.column_kernel.prepare(
            grid, (*q, *v, *d_out, *packed, *packed, *sizes), constants, halves=("STATE", "BEFORE"), **speed
        ),
        row=kernels.row_kernel.prepare(grid, (*k, *packed, *sizes), constants, **speed),
    )


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    tensors = (inputs.q, inputs.k, inputs.v, inputs.per_head, inputs.before, inputs.mask, inputs.seed)
    ctx.save_for_backward(*tensors, *output)
    ctx.options = Options(*(getattr(inputs, name) for name in Options._fields))
    ctx.set_materialize_grads(False)


def _differentiate(ctx, backward, d_out, d_state, _) -> Mapping[str, Tensor | None]:  # type: ignore[no-untyped-def]
    q, k, v, per_head, before, mask, seed, out, state, lse = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    dq, dk, dv, d_before, d_strength = backward(
        d_out, d_state, q, k, v, per_head, before, mask, seed, out, state, lse, *ctx.options
    )
    return {
        "q": dq,
        "k": dk,
        "v": dv,
        "per_head": d_strength if ctx.options.learned else None,
        "before": None if before is None else d_before,
    }


def _outputs(q: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty_strided(q.shape, _packed(q.shape))
    lse = q.new_empty((*q.shape[:2], math.ceil(q.shape[2] / TILE) * TILE), dtype=torch.float32)
    return out, q.new_empty(state_shape(q.shape, causal)), lse


def _gradients(q: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (q.new_empty_strided(q.shape, _packed(q.shape)) for _ in range(3))
    return dq, dk, dv, torch.empty_like(state), q.new_empty(0, dtype=torch.float32)


def _reduced(d_out, d_state, q, k, v, per_head, before, mask, seed, out, state, lse, *options):  # type: ignore[no-untyped-def]
    """Make empty results of ``_backward``."""
    dq, dk, dv, grad, d_strength = _gradients(q, state)
    if Options(*options).learned:
        d_strength = q.new_empty(q.shape[1], dtype=torch.float32)
    if k.shape != q.shape:
        dk, dv = (q.new_empty(B, N, k.shape[1], D).transpose(1, 2) for B, _, N, D in (q.shape, q.shape))
    return dq, dk, dv, grad, d_strength


_attention = operator(
    "hopfield",
    _forward,
    _backward,
    remember=_remember,
    differentiate=_differentiate,
    outputs=lambda q, k, v, per_head, before, mask, seed, strength, whole, causal, *_: _outputs(q, causal),
    gradients=_reduced,
)


def _packed(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a (B, H, N, D) tensor stored as (B, N, H, D), as the projections around it need it."""
    _, H, N, D = shape
    return N * H * D, D, H * D, 1


def _constants(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Any]:
    """Return the compile-time parameters of the kernels that follow from the shape of the queries."""
    N, D = shape[2:]
    block = max(16, triton.next_power_of_2(D))
    return {
        "D": D,
        "BLOCK_D": block,
        "T": TILE,
        "EXACT": N % TILE == 0 and block == D,
        "PRECISION": "ieee" if dtype == torch.float32 else "tf32",
    }
