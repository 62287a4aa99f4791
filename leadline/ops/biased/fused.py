"""What calls the kernels of biased attention."""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import triton
from torch import Tensor

from leadline.ops.biased import kernels
from leadline.ops.operator import operator

BLOCK = 64  # queries and keys of a program's block of scores


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float | None,
) -> Tensor:
    """See ``leadline.ops.biased_attention``."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    seed = torch.randint(2**31, (1,), device=q.device) if dropout else None
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    bias = bias[(None,) * (4 - bias.ndim)].expand(-1, -1, q.shape[2], k.shape[2])
    padding = None if mask is None else mask[:, 0, 0].contiguous()
    out, _ = _attention(q, k, v, bias, padding, seed, causal, dropout, scale)
    return out


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    causal: bool,
    dropout: float,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """out and lse; bias (B or 1, H or 1, M, N)."""
    out, lse = _outputs(q)
    launch = _forward_launch(*_plan(q, k, v, bias), out.stride(), (causal, dropout))
    launch((q, k, v, bias, out, lse, mask, seed), (scale,))
    return out, lse


def _backward(
    d_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    dropout: float,
    scale: float,
    wanted: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv and the gradient of the bias, which is empty unless wanted."""
    dq, dk, dv, d_bias = _gradients(q, k, bias, wanted)
    delta = (out.float() * d_out.float()).sum(-1)
    full = wanted and bias.shape[:2] == q.shape[:2]
    column, row, shared = _backward_launches(*_plan(q, k, v, bias), d_out.stride(), (causal, dropout))
    tensors = (q, k, v, bias, d_out, lse, delta, mask, seed)
    column((*tensors, dk, dv, d_bias if full else None), (scale,))
    row((*tensors, dq, d_bias if full else None), (scale,))
    if wanted and not full:
        shared((*tensors, d_bias), (scale,))
    group = q.shape[1] // k.shape[1]
    if group > 1:
        dk, dv = (x.unflatten(1, (-1, group)).float().sum(2).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv, d_bias


def _plan(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> tuple[object, ...]:
    """All that a launch depends on, but for the options."""
    strides = (q.stride(), k.stride(), v.stride(), bias.stride())
    return q.device, q.dtype, q.shape, k.shape, (bias.dtype, bias.shape), strides


@lru_cache(maxsize=1024)
def _forward_launch(device, dtype, q_shape, k_shape, bias, strides, out, options):  # type: ignore[no-untyped-def]
    sizes, strides, grid = _arguments(q_shape, k_shape, bias, strides)
    return kernels.forward_kernel.prepare(
        grid[0], (*strides, *out[:3], *sizes), (*options, *_constants(q_shape, dtype)), **_speed(dtype)
    )


@lru_cache(maxsize=1024)
def _backward_launches(device, dtype, q_shape, k_shape, bias, strides, d_out, options):  # type: ignore[no-untyped-def]
    """Of the column, the row and the bias kernel."""
    sizes, strides, grid = _arguments(q_shape, k_shape, bias, strides)
    B, H, M, D = q_shape
    N = k_shape[2]
    strides, constants, speed = (*strides, *d_out[:3]), (*options, *_constants(q_shape, dtype)), _speed(dtype)
    to_k, to_q = (H * N * D, N * D, D), (H * M * D, M * D, D)  # gradients are contiguous
    shared = tuple(size == 1 for size in bias[1][:2])
    return (
        kernels.column_kernel.prepare(grid[1], (*strides, *to_k, *sizes), constants, **speed),
        kernels.row_kernel.prepare(grid[0], (*strides, *to_q, *sizes), constants, **speed),
        kernels.bias_kernel.prepare(grid[2], (*strides, B, *sizes, bias[1][1]), (*shared, *constants), **speed),
    )


def _arguments(q_shape, k_shape, bias, strides):  # type: ignore[no-untyped-def]
    """Sizes, strides, and the grids over queries, over keys and over the bias."""
    B, H, M, _ = q_shape
    N = k_shape[2]
    *qkv, of_bias = strides
    of_bias = [0 if size == 1 else stride for size, stride in zip(bias[1], of_bias, strict=True)]  # 0 where shared
    rows, columns = math.ceil(M / BLOCK), math.ceil(N / BLOCK)
    grid = (rows, B * H), (columns, B * H), (columns, rows, bias[1][0] * bias[1][1])
    return (H, H // k_shape[1], M, N), (*(s for x in qkv for s in x[:3]), *of_bias), grid


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, causal, dropout, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (causal, dropout, scale)


def _differentiate(ctx, backward, d_out, _):  # type: ignore[no-untyped-def]
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    wanted = ctx.needs_input_grad[3]
    dq, dk, dv, d_bias = backward(d_out, *ctx.saved_tensors, *ctx.options, wanted)
    return dq, dk, dv, d_bias if wanted else None, *[None] * 5


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    B, H, M, D = q.shape
    out = q.new_empty_strided(q.shape, (M * H * D, D, H * D, 1))  # laid out for the projection that follows
    return out, q.new_empty(B, H, M, dtype=torch.float32)


def _gradients(q: Tensor, k: Tensor, bias: Tensor, wanted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dk and dv have a head for each query head; those that share keys are added up in the end."""
    dk, dv = (k.new_empty(k.shape[0], q.shape[1], *k.shape[2:]) for _ in range(2))
    return q.new_empty(q.shape), dk, dv, bias.new_empty(bias.shape if wanted else 0)


def _reduced(d_out, q, k, v, bias, mask, seed, out, lse, causal, dropout, scale, wanted):  # type: ignore[no-untyped-def]
    """Empty results of ``_backward``."""
    dq, _, _, d_bias = _gradients(q, k, bias, wanted)
    return dq, k.new_empty(k.shape), k.new_empty(k.shape), d_bias


_attention = operator(
    "biased",
    _forward,
    _backward,
    remember=_remember,
    differentiate=_differentiate,
    outputs=lambda q, k, v, bias, mask, seed, causal, dropout, scale: _outputs(q),
    gradients=_reduced,
)


def _constants(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[object, ...]:
    """D, BLOCK_D, BM, BN, PRECISION of the kernels."""
    D = shape[-1]
    return D, max(16, triton.next_power_of_2(D)), BLOCK, BLOCK, "ieee" if dtype == torch.float32 else "tf32"


def _speed(dtype: torch.dtype) -> dict[str, int]:
    return {"num_warps": 4, "num_stages": 1 if dtype == torch.float32 else 2}
