"""What calls the kernels of attention over few tokens."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from leadline.ops.launch import Launch
from leadline.ops.operator import operator
from leadline.ops.packed import kernels


def packed_attention(qkv: Tensor, causal: bool) -> Tensor:
    """See ``leadline.ops.packed_attention``; qkv is contiguous."""
    return _attention(qkv, causal)


def _forward(qkv: Tensor, causal: bool) -> Tensor:
    out = _output(qkv)
    _launches(qkv.device, qkv.dtype, qkv.shape, causal)[0]((qkv, out), (qkv.shape[-1] ** -0.5,))
    return out


def _backward(qkv: Tensor, d_out: Tensor, causal: bool) -> Tensor:
    d_qkv = torch.empty_like(qkv)
    _launches(qkv.device, qkv.dtype, qkv.shape, causal)[1]((qkv, d_out, d_qkv), (qkv.shape[-1] ** -0.5,))
    return d_qkv


@lru_cache(maxsize=1024)
def _launches(device: torch.device, dtype: torch.dtype, shape: tuple[int, ...], causal: bool) -> tuple[Launch, Launch]:
    B, N, _, H, D = shape
    block = max(16, triton.next_power_of_2(N))
    constants = (causal, H, D, max(16, triton.next_power_of_2(D)), block)
    warps = 4 if block <= 64 else 8
    return (
        kernels.forward_kernel.prepare((B * H,), (N,), constants, num_warps=warps),
        kernels.backward_kernel.prepare((B * H,), (N,), constants, num_warps=warps),
    )


def _output(qkv: Tensor) -> Tensor:
    B, N, _, H, D = qkv.shape
    return qkv.new_empty(B, N, H, D)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    qkv, ctx.causal = inputs
    ctx.save_for_backward(qkv)


def _differentiate(ctx, backward, d_out):  # type: ignore[no-untyped-def]
    (qkv,) = ctx.saved_tensors
    return backward(qkv, d_out.contiguous(), ctx.causal), None


_attention = operator(
    "packed",
    _forward,
    _backward,
    remember=_remember,
    differentiate=_differentiate,
    outputs=lambda qkv, causal: _output(qkv),
    gradients=lambda qkv, d_out, causal: torch.empty_like(qkv),
)
