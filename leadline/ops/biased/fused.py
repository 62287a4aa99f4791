"""What calls the kernels of biased attention."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leadline.ops.biased import kernels


def unsupported(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> str | None:
    """Why these inputs cannot take the kernels, or None."""
    D = q.shape[-1]
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        return f"the inputs are {q.dtype}, {k.dtype}, {v.dtype}; it takes one of float16, bfloat16, float32"
    if D > 128 or v.shape[-1] != D:
        return f"the head width is {D} (values {v.shape[-1]}); it takes up to 128, the same for values"
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (q.shape[0], 1, 1, k.shape[2])):
        return f"the mask is {mask.dtype} {tuple(mask.shape)}; it takes key padding, boolean (B, 1, 1, N)"
    return None


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
    run = _forward_op if torch.compiler.is_compiling() else _Attention.apply  # a custom operator costs time to call
    out, _ = run(q, k, v, bias, padding, seed, causal, dropout, scale)
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
    B, H, M, _ = q.shape
    out, lse = _outputs(q)
    BM, _ = _blocks(q)
    kernels.forward_kernel(
        (math.ceil(M / BM), B * H),
        (q, k, v, bias, out, lse, mask, seed),
        (scale, *_strides(q, k, v), *_bias_strides(bias), *_strides(out), H, H // k.shape[1], M, k.shape[2]),
        (causal, dropout, *_constants(q)),
        **_options(q),
    )
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
    B, H, M, N = *q.shape[:3], k.shape[2]
    dq, dk, dv, d_bias = _gradients(q, k, bias, wanted)
    delta = (out.float() * d_out.float()).sum(-1)
    group = H // k.shape[1]
    full = wanted and bias.shape[:2] == (B, H)
    tensors = (q, k, v, bias, d_out, lse, delta, mask, seed)
    strides = (*_strides(q, k, v), *_bias_strides(bias), *_strides(d_out))
    constants, options, (BM, BN) = (causal, dropout, *_constants(q)), _options(q), _blocks(q)
    g = d_bias if full else None
    sizes = (H, group, M, N)
    kernels.column_kernel(
        (math.ceil(N / BN), B * H), (*tensors, dk, dv, g), (scale, *strides, *_strides(dk), *sizes), constants,
        **options,
    )  # fmt: skip
    kernels.row_kernel(
        (math.ceil(M / BM), B * H), (*tensors, dq, g), (scale, *strides, *_strides(dq), *sizes), constants, **options
    )
    if wanted and not full:
        owners = bias.shape[0] * bias.shape[1]
        kernels.bias_kernel(
            (math.ceil(N / BN), math.ceil(M / BM), owners),
            (*tensors, d_bias),
            (scale, *strides, B, *sizes, bias.shape[1]),
            (bias.shape[0] == 1, bias.shape[1] == 1, *constants),
            **options,
        )
    if group > 1:
        dk, dv = (x.unflatten(1, (-1, group)).float().sum(2).to(x.dtype) for x in (dk, dv))
    return dq, dk, dv, d_bias


class _Attention(torch.autograd.Function):
    """The same in eager mode."""

    @staticmethod
    def forward(ctx, *inputs):  # type: ignore[no-untyped-def]
        output = _forward(*inputs)
        _remember(ctx, inputs, output)
        return output

    @staticmethod
    def backward(ctx, d_out, _):  # type: ignore[no-untyped-def]
        return _differentiate(ctx, d_out, _backward)


def _remember(ctx, inputs, output):  # type: ignore[no-untyped-def]
    *tensors, causal, dropout, scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.options = (causal, dropout, scale)


_forward_op = torch.library.custom_op("leadline::biased_forward", _forward, mutates_args=())
_backward_op = torch.library.custom_op("leadline::biased_backward", _backward, mutates_args=())


@_forward_op.register_fake
def _(q, k, v, bias, mask, seed, causal, dropout, scale):  # type: ignore[no-untyped-def]
    return _outputs(q)


@_backward_op.register_fake
def _(d_out, q, k, v, bias, mask, seed, out, lse, causal, dropout, scale, wanted):  # type: ignore[no-untyped-def]
    dq, _, _, d_bias = _gradients(q, k, bias, wanted)
    return dq, k.new_empty(k.shape), k.new_empty(k.shape), d_bias


_forward_op.register_autograd(lambda ctx, d_out, _: _differentiate(ctx, d_out, _backward_op), setup_context=_remember)


def _differentiate(ctx, d_out, backward):  # type: ignore[no-untyped-def]
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


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    return tuple(s for x in tensors for s in x.stride()[:3])


def _bias_strides(bias: Tensor) -> tuple[int, ...]:
    """Strides of the four dimensions, 0 where one is shared."""
    return tuple(0 if size == 1 else s for size, s in zip(bias.shape, bias.stride(), strict=True))


def _blocks(q: Tensor) -> tuple[int, int]:
    """Queries and keys of a program's block of scores."""
    return 64, 64


def _constants(q: Tensor) -> tuple[object, ...]:
    """D, BLOCK_D, BM, BN, PRECISION of the kernels."""
    D = q.shape[-1]
    return D, max(16, 1 << (D - 1).bit_length()), *_blocks(q), "ieee" if q.dtype == torch.float32 else "tf32"


def _options(q: Tensor) -> dict[str, int]:
    return {"num_warps": 4, "num_stages": 1 if q.dtype == torch.float32 else 2}
