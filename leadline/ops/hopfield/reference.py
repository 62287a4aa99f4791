"""The definition of Hopfield attention; every other path is compared with it."""

from __future__ import annotations

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from leadline.errors import LeadlineError, check_choice
from leadline.ops.formulas import attention_weights, causal_mask


def hopfield_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None = None,
    *,
    alpha_prime: float | Tensor = 0.5,
    start: str = "zero",
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute ``leadline.ops.hopfield_attention`` as it is defined.

    The state is one tensor h (B, H, M, N), in float32 for half types.
    """
    check_inputs(q, k, v, state, alpha_prime, start, dropout)
    check_added(q, k, mask, bias)
    scores = scaled_scores(q, k, scale)  # S_n
    if bias is not None:
        scores = scores + bias
    hidden = carry(None if state is None else state[0], scores, alpha_prime, start)  # h_n
    return attend(attention_weights(hidden, mask, causal), v, dropout), (hidden,)


def scaled_scores(q: Tensor, k: Tensor, scale: float | None = None) -> Tensor:
    """Compute S = scale q k^T (B, H, M, N), in float32 for half types, also where autocast makes them."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    before = 2.0 ** min(math.frexp(scale)[1] - 1, 0)  # rounds nothing, and float16 overflows only where the scores do
    scores = (q * before) @ expand_heads(k, q.shape[1]).mT
    scores = scores.float() if scores.dtype in (torch.float16, torch.bfloat16) else scores
    return scale / before * scores


def carry(hidden: Tensor | None, scores: Tensor, alpha_prime: float | Tensor, start: str) -> Tensor:
    """Compute h_n = alpha' h_{n-1} + (1 - alpha') S_n, all (B, H, M, N).

    Without an h_{n-1}, it is 0 (``start`` "zero"), or h_n = S_n ("scores").
    """
    keep = alpha_prime.view(-1, 1, 1) if isinstance(alpha_prime, Tensor) else alpha_prime
    if hidden is not None:
        return keep * hidden + (1 - keep) * scores
    return (1 - keep) * scores if start == "zero" else scores


def attend(weights: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Apply dropout to weights (B, H, M, N) and multiply them by v (B, Hkv, N, Dv) -> (B, H, M, Dv)."""
    return F.dropout(weights, dropout).to(v.dtype) @ expand_heads(v, weights.shape[1])


def standard_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Compute attention that carries nothing, by torch's fused kernels: ``hopfield_attention`` at alpha' = 0.

    Args:
        q: Queries (B, H, M, D).
        k: Keys (B, Hkv, N, D), with Hkv a divisor of H (grouped queries).
        v: Values (B, Hkv, N, Dv).
        mask: Boolean (True = may be attended to) or a float tensor to add; broadcasts to (B, H, M, N).
        causal: Query i sees the keys up to i + N - M.
        dropout: Probability of dropping an attention weight; in [0, 1); the caller passes 0 outside training.
        scale: Factor of q k^T; 1 / sqrt(D) if None.

    Returns:
        The output (B, H, M, Dv).

    Raises:
        LeadlineError: The shapes of the inputs do not fit.
    """
    check_inputs(q, k, v, None, 0.0, "zero", dropout)
    check_added(q, k, mask)
    if v.dtype != q.dtype and not _autocasts(q.device):
        raise LeadlineError(f"q is {q.dtype} and v {v.dtype}; convert one to the dtype of the other, or use autocast")
    if mask is not None and mask.dtype != torch.bool and not _autocasts(q.device):
        mask = mask.to(q.dtype)
    M, N = q.shape[-2], k.shape[-2]
    if scale is not None and scale <= 0:  # torch multiplies the -inf of its causal mask by the scale: NaN
        q, scale = (-q, -scale) if scale else (q * 0, 1.0)
    if causal and (mask is not None or M != N):  # torch aligns its own causal mask top left, and takes one mask
        visible = causal_mask(M, N, q.device)
        if mask is None:
            mask = visible
        else:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
        causal = False
    with sdpa_kernel(_SOUND) if q.is_cuda and N % 128 == 64 else nullcontext():
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip


# At 64, 192, ... keys cuDNN's backward pass gives NaN for queries whose scores are all below -88 (torch 2.11 to 2.13)
_SOUND = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


def _autocasts(device: torch.device) -> bool:
    """Return whether autocast is on for a device; the meta device has none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """Repeat key-value heads, x (B, Hkv, N, D) -> (B, H, N, D): query head i reads head i // (H / Hkv)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def check_inputs(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None,
    alpha_prime: float | Tensor,
    start: str,
    dropout: float,
) -> None:
    """Check that the inputs of Hopfield attention fit each other."""
    check_start(start)
    check_heads(q, k, v, alpha_prime, dropout)
    expected = (*q.shape[:3], k.shape[2])
    if state is not None and (len(state) != 1 or state[0].shape != expected):
        given = [tuple(s.shape) for s in state]
        raise LeadlineError(f"state has shapes {given}; these inputs carry one of shape {expected}")


def check_added(q: Tensor, k: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> None:
    """Check that a mask and a bias have a dtype and a shape that fit the scores (B, H, M, N)."""
    full = (*q.shape[:3], k.shape[2])
    for name, added in (("mask", mask), ("bias", bias)):
        if added is None:
            continue
        boolean = name == "mask" and added.dtype == torch.bool
        if not boolean and not added.is_floating_point():
            raise LeadlineError(f"{name} is {added.dtype}; it must be floating point{' or boolean' * (name == 'mask')}")
        sizes = zip(added.shape[::-1], full[::-1], strict=False)
        if added.ndim > 4 or any(size not in (1, target) for size, target in sizes):
            raise LeadlineError(f"{name} has shape {tuple(added.shape)}; it must broadcast to {full}")


def check_start(start: str) -> None:
    """Check that ``start`` is "zero" or "scores"."""
    check_choice("start", start, ("zero", "scores"))


def check_heads(q: Tensor, k: Tensor, v: Tensor, alpha_prime: float | Tensor, dropout: float) -> None:
    """Check that q, k, v and alpha' fit each other, and that alpha' and dropout lie in [0, 1)."""
    fault = None
    if not q.ndim == k.ndim == v.ndim == 4:
        fault = "each must be (batch, heads, tokens, width)"
    elif 0 in (q.shape[1], k.shape[1], q.shape[3], v.shape[3]):
        fault = "there must be at least one head and a width of at least 1"
    elif (
        k.shape[0] != q.shape[0] or k.shape[-1] != q.shape[-1] or v.shape[:3] != k.shape[:3] or q.shape[1] % k.shape[1]
    ):
        fault = "batch and width must agree, v must have k's tokens, and k's heads must divide q's"
    elif q.shape[2] == 0 or k.shape[2] == 0:
        fault = "there must be at least one query and one key"
    if fault:
        raise LeadlineError(f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}: {fault}")
    if not (q.is_floating_point() and k.is_floating_point() and v.is_floating_point()):
        raise LeadlineError(f"q is {q.dtype}, k {k.dtype} and v {v.dtype}; they must be floating point tensors")
    if q.dtype != k.dtype and not _autocasts(q.device):
        raise LeadlineError(f"q is {q.dtype} and k {k.dtype}; convert one to the dtype of the other, or use autocast")
    if not 0 <= dropout < 1:
        raise LeadlineError(f"dropout is {dropout}; it must lie in [0, 1)")
    H = q.shape[1]
    if isinstance(alpha_prime, Tensor):
        if alpha_prime.numel() not in (1, H):
            raise LeadlineError(f"alpha_prime has shape {tuple(alpha_prime.shape)}; it must be a number or ({H},)")
        if not all(0 <= number < 1 for number in _numbers(alpha_prime)):
            raise LeadlineError(f"alpha_prime is {alpha_prime.tolist()}; it must lie in [0, 1)")
    elif not 0 <= alpha_prime < 1:
        raise LeadlineError(f"alpha_prime is {alpha_prime}; it must lie in [0, 1)")


def _numbers(x: Tensor) -> list[float]:
    """Return the numbers of a tensor on the CPU; nothing for a tensor on a GPU, to avoid a wait, or in a trace."""
    if x.device.type != "cpu" or torch.compiler.is_compiling():
        return []
    try:
        numbers = x.detach().flatten().tolist()
    except RuntimeError:  # torch.func.vmap has none
        return []
    return [number for number in numbers if isinstance(number, float)]  # fake tensors have symbols
