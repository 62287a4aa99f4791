"""What calls the kernels of attention over few tokens."""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
from torch import Tensor

from leadline.ops.launch import Launch
from leadline.ops.packed import kernels


def packed_attention(qkv: Tensor, causal: bool) -> Tensor:
    """See ``leadline.ops.packed_attention``; qkv is contiguous."""
    run = _forward_op if torch.compiler.is_compiling() else _Attention.apply  # a custom operator costs time to call
    return run(qkv, causal)


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


class _Attention(torch.autograd.Function):
    """The same in eager mode."""

    @staticmethod
    def forward(ctx, qkv, causal):  # type: ignore[no-untyped-def]
        _remember(ctx, (qkv, causal), None)
        return _forward(qkv, causal)

    @staticmethod
    def backward(ctx, d_out):  # type: ignore[no-untyped-def]
        return _differentiate(ctx, d_out, _backward)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    qkv, ctx.causal = inputs
    ctx.save_for_backward(qkv)


def _differentiate(ctx, d_out, backward):  # type: ignore[no-untyped-def]
    (qkv,) = ctx.saved_tensors
    return backward(qkv, d_out.contiguous(), ctx.causal), None


_forward_op = torch.library.custom_op("leadline::packed_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("leadline::packed_backward", _backward, mutates_args=())
_forward_op.register_fake(lambda qkv, causal: _output(qkv))
_backward_op.register_fake(lambda qkv, d_out, causal: torch.empty_like(qkv))
_forward_op.register_autograd(lambda ctx, d_out: _differentiate(ctx, d_out, _backward_op), setup_context=_remember)
