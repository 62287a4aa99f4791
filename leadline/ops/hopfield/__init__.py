"""Score-carrying attention: ``reference`` is the definition, a kernel file per fast path, one dispatch."""

from __future__ import annotations

import importlib.util
import warnings
from typing import Any

from torch import Tensor

from leadline.errors import check_choice
from leadline.ops.hopfield import reference
from leadline.ops.hopfield.reference import standard_attention

BACKENDS = ("auto", "fused", "reference")
_HAS_TRITON = importlib.util.find_spec("triton") is not None
_WARNED: set[str] = set()  # each reason is told once

__all__ = ["BACKENDS", "hopfield_attention", "standard_attention"]


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
    backend: str = "auto",
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attention whose scores are a running average over the layers (HOP 15, main scheme).

        h_n = alpha' h_{n-1} + (1 - alpha') S_n,   S_n = scale q k^T + bias,   out = softmax(h_n + mask) v

    q (B, H, M, D); k (B, Hkv, N, D) and v (B, Hkv, N, Dv) with Hkv a divisor of H (grouped queries);
    returns out (B, H, M, Dv) and the state to hand to the next layer, a tuple only the backend that made it can read.

    state        None at the first layer, then what the layer before returned.
    alpha_prime  weight of the old scores in [0, 1); a number, or a tensor () or (H,), then differentiable.
    start        h_0 = 0: h_1 = (1 - alpha') S_1 ("zero", HOP 15) or h_1 = S_1 ("scores").
    bias         part of the scores and so carried; broadcasts to (B, H, M, N).
    mask         acts at the softmax alone, never carried: boolean (True = may be attended to) or a float
                 tensor to add; broadcasts to (B, H, M, N). A query with nothing to attend to gives 0.
    causal       query i sees the keys up to i + N - M (aligned bottom right, as in decoding).
    dropout      probability of dropping an attention weight; the caller passes 0 outside training.
    scale        1 / sqrt(D) unless given.
    backend      "reference", the definition; "fused", Triton kernels on a GPU; or "auto", fused where it can be.
                 Inputs that the kernels do not take run on the reference, with one warning that says why.
    """
    check_choice("backend", backend, BACKENDS)
    options: dict[str, Any] = {
        "alpha_prime": alpha_prime,
        "start": start,
        "causal": causal,
        "dropout": dropout,
        "scale": scale,
    }
    if backend != "reference" and _fused_fits(q, k, v, state, bias, mask, causal, insist=backend == "fused"):
        from leadline.ops.hopfield import fused

        return fused.hopfield_attention(q, k, v, state, mask=mask, **options)
    return reference.hopfield_attention(q, k, v, state, bias=bias, mask=mask, **options)


def _fused_fits(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, ...] | None,
    bias: Tensor | None,
    mask: Tensor | None,
    causal: bool,
    insist: bool,
) -> bool:
    """Whether to take the fused path: it needs a GPU and Triton, and takes most inputs but not all."""
    if not (q.is_cuda or insist) or q.shape[-2:-1] != k.shape[-2:-1]:  # one query at a time is decoding
        return False
    if not _HAS_TRITON:
        reason: str | None = "Triton is not installed (pip install 'leadline[gpu]')"
    else:
        from leadline.ops.hopfield import fused

        reason = fused.unsupported(q, k, v, state, bias, mask, causal)
    if reason is None:
        return True
    if reason not in _WARNED:
        _WARNED.add(reason)
        warnings.warn(f"Hopfield attention runs on its slow reference path: {reason}", stacklevel=4)
    return False
