"""Calls the kernels of attention over few tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from leadline.ops.launch import Launch
from leadline.ops.operator import operator
from leadline.ops.packed import kernels


class Launches(NamedTuple):
    """Prepared launches of the two kernels."""

    forward: Launch
    backward: Launch


def packed_attention(qkv: Tensor, causal: bool) -> Tensor:
    """Compute ``leadline.ops.packed_attention`` with the kernels: qkv (B, N, 3, H, D), contiguous -> (B, N, H, D)."""
    return _attention(qkv, causal)


def _forward(qkv: Tensor, causal: bool) -> Tensor:
    out = _output(qkv)
    _launches(qkv.device, qkv.dtype, qkv.shape, causal).forward((qkv, out), (qkv.shape[-1] ** -0.5,))
    return out


def _backward(qkv: Tensor, d_out: Tensor, causal: bool) -> Tensor:
    d_qkv = torch.empty_like(qkv)
    _launches(qkv.device, qkv.dtype, qkv.shape, causal).backward((qkv, d_out, d_qkv), (qkv.shape[-1] ** -0.5,))
    return d_qkv


@lru_cache(maxsize=1024)
def _launches(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], causal: bool) -> Launches:
    B, N, _, H, D = shape
    block = max(16, triton.next_power_of_2(N))
    constants = {"CAUSAL": causal, "H": H, "D": D, "BLOCK_D": max(16, triton.next_power_of_2(D)), "BLOCK": block}
    warps = 4 if block <= 64 else 8
    return Launches(
        forward=kernels.forward_kernel.prepare((B * H,), (N,), constants, num_warps=warps),
        backward=kernels.backward_kernel.prepare((B * H,), (N,), constants, num_warps=warps),
    )


def _output(qkv: Tensor) -> Tensor:
    B, N, _, H, D = qkv.shape
    return qkv.new_empty(B, N, H, D)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    ctx.save_for_backward(inputs.qkv)
    ctx.causal = inputs.causal


def _differentiate(ctx, backward, d_out) -> Mapping[str, Tensor]:  # type: ignore[no-untyped-def]
    (qkv,) = ctx.saved_tensors
    return {"qkv": backward(qkv, d_out.contiguous(), ctx.causal)}


_attention = operator(
    "packed",
    _forward,
    _backward,
    remember=_remember,
    differentiate=_differentiate,
    outputs=lambda qkv, causal: _output(qkv),
    gradients=lambda qkv, d_out, causal: torch.empty_like(qkv),
)
