"""Biased attention: a dense additive bias with a gradient."""

from __future__ import annotations

from torch import Tensor

from leadline.ops.backends import chosen, too_large, unsupported, warn_once, worth_trying
from leadline.ops.hopfield import reference

__all__ = ["biased_attention"]


def biased_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """Compute softmax(scale q k^T + bias) v, differentiable in all four. Results are the same from run to run.

    Args:
        q: Queries (B, H, M, D).
        k: Keys (B, Hkv, N, D), with Hkv a divisor of H (grouped queries).
        v: Values (B, Hkv, N, D).
        bias: Broadcasts to (B, H, M, N) and is never written out at that size; its gradient has its own shape.
        mask: Boolean (True = may be attended to) or a float tensor to add; broadcasts to (B, H, M, N).
        causal: Query i sees the keys up to i + N - M. A query with nothing to attend to gives 0.
        dropout: Probability of dropping an attention weight; the caller passes 0 outside training.
        scale: Factor of q k^T; 1 / sqrt(D) if None.
        backend: "reference", "fused" (Triton kernels on a GPU), or "auto": fused on a GPU. Inputs that the kernels do
            not take run on the reference, with one warning that says why.

    Returns:
        The output (B, H, M, D).

    Raises:
        LeadlineError: The shapes of the inputs do not fit.
    """
    backend = chosen(backend, ("auto", "fused", "reference"))
    reference.check_heads(q, k, v, 0.0, dropout)
    reference.check_added(q, k, mask, bias)
    if worth_trying(backend, q):
        reason = unsupported(q, k, v, mask) or too_large(q, k, v, bias, programs=q.shape[0] * q.shape[1])
        if reason is None:
            from leadline.ops.biased import fused

            return fused.biased_attention(q, k, v, bias, mask, causal, dropout, scale)
        warn_once(f"biased attention runs on its slow reference path: {reason}")
    return reference.hopfield_attention(
        q, k, v, alpha_prime=0.0, bias=bias, mask=mask, causal=causal, dropout=dropout, scale=scale
    )[0]
