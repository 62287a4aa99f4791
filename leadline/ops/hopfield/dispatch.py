"""Hopfield attention as users call it: checks, and the choice between the reference and the kernels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.ops.backends import chosen, warn_once, worth_trying
from leadline.ops.hopfield import reference

LAYERS = 24  # "auto" takes a dense state where this many of them fit into free memory


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
    window: int | None = None,
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Compute attention whose scores are a running average over the layers (HOP 15, main scheme).

    ::

        h_n = alpha' h_{n-1} + (1 - alpha') S_n,   S_n = scale q k^T + bias,   out = softmax(h_n + mask) v

    Args:
        q: Queries (B, H, M, D).
        k: Keys (B, Hkv, N, D), with Hkv a divisor of H (grouped queries).
        v: Values (B, Hkv, N, Dv).
        state: None at the first layer, then the state that the layer before returned.
        alpha_prime: Weight of the old scores in [0, 1): a number, or a tensor () or (H,), which may need a gradient.
            A tensor on a GPU or under ``torch.compile`` is not checked, since that would wait for the device.
        start: What the first layer does. "zero": h_0 = 0, so h_1 = (1 - alpha') S_1 (HOP 15). "scores": h_1 = S_1.
        bias: Part of the scores, so it is carried; broadcasts to (B, H, M, N).
        mask: Boolean (True = may be attended to) or a float tensor to add; broadcasts to (B, H, M, N). It acts at
            the softmax alone and is never carried. A query with nothing to attend to gives 0.
        causal: Query i sees the keys up to i + N - M: aligned bottom right, as in decoding.
        dropout: Probability of dropping an attention weight; the caller passes 0 outside training.
        scale: Factor of q k^T; 1 / sqrt(D) if None.
        window: With backend "linear", carry the scores of this many layers and neglect older ones, whose weight is
            alpha'^window together. The other backends are exact at no extra cost and ignore it.
        backend: "reference" is the definition. "fused" runs Triton kernels on a GPU and keeps a dense state in two
            bytes a score. "linear" does too, but keeps queries and keys and has no N x N tensor. "auto" takes fused
            on a GPU, linear where a dense state would not fit into memory, and the reference elsewhere. Inputs that
            the kernels do not take run on the reference, with one warning that says why.

    Returns:
        The output (B, H, M, Dv), and the state for the next layer: a tuple that only the same backend can read.

    Raises:
        LeadlineError: The shapes of the inputs do not fit, or an option has a value that is not allowed.
    """
    backend = chosen(backend)
    if window is not None and window < 1:
        raise LeadlineError(f"window is {window}; it must be at least 1, or None for all layers")
    options: dict[str, Any] = {
        "alpha_prime": alpha_prime,
        "start": start,
        "mask": mask,
        "causal": causal,
        "dropout": dropout,
        "scale": scale,
    }
    decoding = q.shape[-2:-1] != k.shape[-2:-1]  # one query at a time has a row of scores: kernels gain nothing
    if not decoding and worth_trying(backend, q):
        from leadline.ops.hopfield import fused, linear

        if backend == "linear" or (backend == "auto" and _needs_linear(q, state, causal)):
            reason = linear.unsupported(q, k, v, state, alpha_prime, bias, mask)
            if reason is None:
                return linear.hopfield_attention(q, k, v, state, window=window, **options)
            warn_once(f"Hopfield attention cannot take its linear-memory path: {reason}")
        reason = fused.unsupported(q, k, v, state, bias, mask, causal)
        if reason is None:
            return fused.hopfield_attention(q, k, v, state, **options)
        warn_once(f"Hopfield attention runs on its slow reference path: {reason}")
    return reference.hopfield_attention(q, k, v, state, bias=bias, **options)


def _needs_linear(q: Tensor, state: tuple[Tensor, ...] | None, causal: bool) -> bool:
    """Return whether dense states would be too large; layers after the first follow the first."""
    from leadline.ops.hopfield import fused, linear

    if state is not None:
        return linear.is_state(state)
    size = q.element_size() * math.prod(fused.state_shape(q.shape, causal))
    if not q.is_cuda or size < 2**30:
        return False
    if torch.compiler.is_compiling():
        free = torch.cuda.get_device_properties(q.device).total_memory
    else:
        free, _ = torch.cuda.mem_get_info(q.device)
        free += torch.cuda.memory_reserved(q.device) - torch.cuda.memory_allocated(q.device)  # reusable
    return LAYERS * size > free
