"""Score-carrying attention: ``reference`` is the definition, a kernel file per fast path, one dispatch."""

from __future__ import annotations

from torch import Tensor

from leadline.errors import check_choice
from leadline.ops.hopfield import reference
from leadline.ops.hopfield.reference import standard_attention

BACKENDS = {"reference": reference.hopfield_attention}

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
    returns out (B, H, M, Dv) and the state to hand to the next layer.

    state        None at the first layer, then what the layer before returned.
    alpha_prime  weight of the old scores in [0, 1); a number, or a tensor () or (H,), then differentiable.
    start        h_0 = 0: h_1 = (1 - alpha') S_1 ("zero", HOP 15) or h_1 = S_1 ("scores").
    bias         part of the scores and so carried; broadcasts to (B, H, M, N).
    mask         acts at the softmax alone, never carried: boolean (True = may be attended to) or a float
                 tensor to add; broadcasts to (B, H, M, N). A query with nothing to attend to gives 0.
    causal       query i sees the keys up to i + N - M (aligned bottom right, as in decoding).
    dropout      probability of dropping an attention weight; the caller passes 0 outside training.
    scale        1 / sqrt(D) unless given.
    backend      "auto" or "reference".
    """
    check_choice("backend", backend, ("auto", *BACKENDS))
    run = BACKENDS["reference" if backend == "auto" else backend]
    return run(
        q,
        k,
        v,
        state,
        alpha_prime=alpha_prime,
        start=start,
        bias=bias,
        mask=mask,
        causal=causal,
        dropout=dropout,
        scale=scale,
    )
