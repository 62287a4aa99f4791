"""The fused path on a GPU: what calls the kernels, what the state looks like, and what it does not support."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from leadline.ops import backends
from leadline.ops.hopfield import fused_kernels as kernels
from leadline.ops.hopfield.reference import check_heads, check_start
from leadline.ops.launch import Launch
from leadline.ops.operator import operator

TILE = 64
TINY = 1e-3  # by an alpha' below it gradients are not multiplied and divided again: digits would be lost
WARPS, STAGES = 4, 3  # the best of a sweep on an H200, see docs/kernels.md; a tile is laid out for 4 warps


def unsupported(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
) -> str | None:
    """Why these inputs cannot take the fused path, or None."""
    if bias is not None:
        return "a bias is carried"
    if state is not None and (state[0].shape != state_shape(q.shape, causal) or state[0].dtype != q.dtype):
        return "the state comes from the reference path"
    return backends.unsupported(q, k, v, mask) or backends.too_large(q, k, v, programs=q.shape[0] * q.shape[1])


def state_shape(shape: tuple[int, ...], causal: bool) -> tuple[int, int, int]:
    """(batch x heads, tiles, T T) for queries of this shape: the tiles of each head, the lower ones when causal. The
    reference's state has four axes."""
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
    """See ``leadline.ops.hopfield_attention``; the state is opaque, see the head of ``fused_kernels``.

    The state has the dtype of the inputs, but with bfloat16 it holds float16 numbers in a tensor that calls itself
    bfloat16: scores need float16's digits, their gradients bfloat16's range, and autograd wants one dtype for both.
    """
    check_start(start)
    check_heads(q, k, v, alpha_prime, dropout)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    learned = isinstance(alpha_prime, Tensor) and alpha_prime.requires_grad
    per_head, strength = None, alpha_prime
    if isinstance(alpha_prime, Tensor):
        per_head, strength = alpha_prime.float().expand(q.shape[1]).contiguous(), 0.0
    seed = torch.randint(2**31, (1,), device=q.device) if dropout else None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    before = None if state is None else state[0]
    padding = None if mask is None else mask[:, 0, 0].contiguous()
    options = (strength, start == "scores", causal, dropout, scale, learned)
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
    """out, the new state and lse."""
    out, state, lse = _outputs(q, causal)
    options = (before is None, whole, causal, mask is not None, dropout)
    launch = _forward_launch(q.device, q.dtype, q.shape, k.shape[1], q.stride(), k.stride(), v.stride(), options)
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
    options: tuple[object, ...],
) -> Launch:
    """q, k, v: strides."""
    B, H, N, _ = shape
    tiles = state_shape(shape, bool(options[2]))[1]
    return kernels.forward_kernel.prepare(
        (math.ceil(N / TILE), B * H),
        (*q[:3], *k[:3], *v[:3], *_packed(shape)[:3], H, H // kv_heads, N, tiles),
        (*options, *_constants(shape, dtype)),
        halves=(4, 5), num_warps=WARPS, num_stages=2 if dtype == torch.float32 else STAGES,
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
    """dq, dk, dv, the gradient of the state before and that of alpha'."""
    B, H, N, _ = q.shape
    first = before is None
    dq, dk, dv, grad, d_strength = _gradients(q, state)
    delta = torch.empty_like(lse)
    partial = torch.empty(B, H, math.ceil(N / TILE), dtype=torch.float32, device=q.device) if learned else None
    # where alpha' is a number, G is stored times it, which is what the layer before gets; a tiny one would lose digits
    scaled = not first and per_head is None and strength >= TINY
    options = (d_state is not None, first, whole, learned, scaled, causal, mask is not None, dropout)
    strides = (q.stride(), k.stride(), v.stride(), d_out.stride())
    launches = _backward_launches(q.device, q.dtype, q.shape, k.shape[1], strides, options)
    launches[0]((out, d_out, delta))
    old = before if learned else None
    launches[1](
        (q, v, per_head, state, old, d_state, d_out, lse, delta, mask, grad, dk, dv, partial, seed), (strength, scale)
    )
    launches[2]((k, per_head, grad, dq), (strength, scale))
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
    strides: tuple[tuple[int, ...], ...],
    options: tuple[object, ...],
) -> tuple[Launch, Launch, Launch]:
    """strides: of q, k, v and the output's gradient."""
    B, H, N, _ = shape
    _, first, whole, _, scaled, causal, _, _ = options
    q, k, v, d_out = (x[:3] for x in strides)
    packed, constants = _packed(shape)[:3], _constants(shape, dtype)
    grid, sizes = (math.ceil(N / TILE), B * H), (H, H // kv_heads, N, state_shape(shape, bool(causal))[1])
    speed: dict[str, Any] = {"num_warps": WARPS, "num_stages": 1 if dtype == torch.float32 else STAGES}
    return (
        kernels.delta_kernel.prepare(grid, (*packed, *d_out, H, N), constants[:3], num_warps=4),
        kernels.column_kernel.prepare(
            grid, (*q, *v, *d_out, *packed, *packed, *sizes), (*options, *constants), halves=(3, 4), **speed
        ),
        kernels.row_kernel.prepare(grid, (*k, *packed, *sizes), (first, whole, scaled, causal, *constants), **speed),
    )


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    q, k, v, per_head, before, mask, seed, *options = inputs
    ctx.save_for_backward(q, k, v, per_head, before, mask, seed, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _differentiate(ctx, backward, d_out, d_state, _):  # type: ignore[no-untyped-def]
    q, k, v, per_head, before, mask, seed, out, state, lse = ctx.saved_tensors
    d_out = torch.zeros_like(out) if d_out is None else d_out
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    dq, dk, dv, d_before, d_strength = backward(
        d_out, d_state, q, k, v, per_head, before, mask, seed, out, state, lse, *ctx.options
    )
    learned = ctx.options[-1]
    return (
        dq, dk, dv, d_strength if learned else None, None if before is None else d_before, None, None,
        *(None for _ in ctx.options),
    )  # fmt: skip


def _outputs(q: Tensor, causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty_strided(q.shape, _packed(q.shape))
    lse = q.new_empty((*q.shape[:2], math.ceil(q.shape[2] / TILE) * TILE), dtype=torch.float32)
    return out, q.new_empty(state_shape(q.shape, causal)), lse


def _gradients(q: Tensor, state: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (q.new_empty_strided(q.shape, _packed(q.shape)) for _ in range(3))
    return dq, dk, dv, torch.empty_like(state), q.new_empty(0, dtype=torch.float32)


def _reduced(d_out, d_state, q, k, v, per_head, before, mask, seed, out, state, lse, *options):  # type: ignore[no-untyped-def]
    """Empty results of ``_backward``."""
    dq, dk, dv, grad, d_strength = _gradients(q, state)
    if options[-1]:  # learned
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
    """Strides of a (B, H, N, D) tensor that lies in memory as (B, N, H, D), as the projections around want it."""
    _, H, N, D = shape
    return N * H * D, D, H * D, 1


def _constants(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[object, ...]:
    """D, BLOCK_D, T, EXACT, PRECISION of the kernels."""
    N, D = shape[2:]
    block = max(16, triton.next_power_of_2(D))
    return D, block, TILE, N % TILE == 0 and block == D, "ieee" if dtype == torch.float32 else "tf32"
