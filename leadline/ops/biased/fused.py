"""Calls the kernels of biased attention."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from leadline.ops.biased import kernels
from leadline.ops.launch import Launch
from leadline.ops.operator import operator

BLOCK = 64  # queries and keys of a program's block of scores


class Plan(NamedTuple):
    """Everything that the launches of one call depend on, but for the strides of its output or output gradient."""

    device: torch.device
    dtype: torch.dtype
    q_shape: tuple[int, ...]
    k_shape: tuple[int, ...]
    bias_shape: tuple[int, ...]
    bias_dtype: torch.dtype
    q_strides: tuple[int, ...]
    k_strides: tuple[int, ...]
    v_strides: tuple[int, ...]
    bias_strides: tuple[int, ...]
    causal: bool
    dropout: float

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """H, GROUP, M, N of the kernels."""
        H, M = self.q_shape[1:3]
        return H, H // self.k_shape[1], M, self.k_shape[2]

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of Q, K, V and BIAS for the kernels; a bias has 0 where it is shared."""
        of_bias = (0 if size == 1 else step for size, step in zip(self.bias_shape, self.bias_strides, strict=True))
        return *self.q_strides[:3], *self.k_strides[:3], *self.v_strides[:3], *of_bias

    @property
    def blocks(self) -> tuple[int, int]:
        """Numbers of blocks of queries and of keys."""
        return math.ceil(self.q_shape[2] / BLOCK), math.ceil(self.k_shape[2] / BLOCK)

    @property
    def constants(self) -> dict[str, Any]:
        """Compile-time parameters of the kernels."""
        D = self.q_shape[-1]
        return {
            "BATCHES": self.bias_shape[0] == 1,
            "HEADS": self.bias_shape[1] == 1,
            "CAUSAL": self.causal,
            "DROPOUT": self.dropout,
            "D": D,
            "BLOCK_D": max(16, triton.next_power_of_2(D)),
            "BM": BLOCK,
            "BN": BLOCK,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }

    @property
    def speed(self) -> dict[str, Any]:
        """Triton's options of a launch."""
        return {"num_warps": 4, "num_stages": 1 if self.dtype == torch.float32 else 2}


class BackwardLaunches(NamedTuple):
    """Prepared launches of the three kernels of the backward pass."""

    column: Launch
    row: Launch
    bias: Launch


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
    """Compute ``leadline.ops.biased_attention`` with the kernels."""
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
    """Return out and lse; bias (B or 1, H or 1, M, N)."""
    out, lse = _outputs(q)
    launch = _forward_launch(_plan(q, k, v, bias, causal, dropout), out.stride())
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
    """Return dq, dk, dv and the gradient of the bias, which is empty unless ``wanted``."""
    dq, dk, dv, d_bias = _gradients(q, k, bias, wanted)
    delta = (out.float() * d_out.float()).sum(-1)
    full = wanted and bias.shape[:2] == q.shape[:2]
    launches = _backward_launches(_plan(q, k, v, bias, causal, dropout), d_out.stride())
    tensors = (q, k, v, bias, d_out, lse, delta, mask, seed)
    launches.column((*tensors, dk, dv, d_bias if full else None), (scale,))
    launches.row((*tensors, dq, d_bias if full else None), (scale,))
    if wanted and not full:
        launches.bias((*tensors, d_bias), (scale,))
    group = q.shape[1] // k.shape[1]
    if group > 1:
        dk, dv = (x.unflatten(1, (-1, group)).float().sum(2).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv, d_bias


def _plan(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, causal: bool, dropout: float) -> Plan:
    return Plan(
        q.device, q.dtype, q.shape, k.shape, bias.shape, bias.dtype,
        q.stride(), k.stride(), v.stride(), bias.stride(), causal, dropout,
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _forward_launch(plan: Plan, out: tuple[int, ...]) -> Launch:
    """Prepare the forward kernel; ``out`` are strides."""
    grid = (plan.blocks[0], plan.q_shape[0] * plan.q_shape[1])
    return kernels.forward_kernel.prepare(grid, (*plan.strides, *out[:3], *plan.sizes), plan.constants, **plan.speed)


@lru_cache(maxsize=1024)
def _backward_launches(plan: Plan, d_out: tuple[int, ...]) -> BackwardLaunches:
    """Prepare the kernels of the backward pass; ``d_out`` are strides."""
    B, H, M, D = plan.q_shape
    N = plan.k_shape[2]
    rows, columns = plan.blocks
    batches, heads = plan.bias_shape[:2]
    strides, sizes = (*plan.strides, *d_out[:3]), plan.sizes
    to_k, to_q = (H * N * D, N * D, D), (H * M * D, M * D, D)  # gradients are contiguous
    return BackwardLaunches(
        column=kernels.column_kernel.prepare((columns, B * H), (*strides, *to_k, *sizes), plan.constants, **plan.speed),
        row=kernels.row_kernel.prepare((rows, B * H), (*strides, *to_q, *sizes), plan.constants, **plan.speed),
        bias=kernels.bias_kernel.prepare(
            (columns, rows, batches * heads), (*strides, B, *sizes, heads), plan.constants, **plan.speed
        ),
    )


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs.q, inputs.k, inputs.v, inputs.bias, inputs.mask, inputs.seed, *output)
    ctx.options = {"causal": inputs.causal, "dropout": inputs.dropout, "scale": inputs.scale}


def _differentiate(ctx, backward, d_out, _) -> Mapping[str, Tensor | None]:  # type: ignore[no-untyped-def]
    d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
    wanted = ctx.needs_input_grad[3]  # of the bias
    dq, dk, dv, d_bias = backward(d_out, *ctx.saved_tensors, **ctx.options, wanted=wanted)
    return {"q": dq, "k": dk, "v": dv, "bias": d_bias if wanted else None}


def _outputs(q: Tensor) -> tuple[Tensor, Tensor]:
    B, H, M, D = q.shape
    out = q.new_empty_strided(q.shape, (M * H * D, D, H * D, 1))  # laid out for the projection that follows
    return out, q.new_empty(B, H, M, dtype=torch.float32)


def _gradients(q: Tensor, k: Tensor, bias: Tensor, wanted: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Make empty gradients. dk and dv have a head for each query head; those that share keys are added up later."""
    dk, dv = (k.new_empty(k.shape[0], q.shape[1], *k.shape[2:]) for _ in range(2))
    return q.new_empty(q.shape), dk, dv, bias.new_empty(bias.shape if wanted else 0)


def _reduced(d_out, q, k, v, bias, mask, seed, out, lse, causal, dropout, scale, wanted):  # type: ignore[no-untyped-def]
    """Make empty results of ``_backward``."""
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
