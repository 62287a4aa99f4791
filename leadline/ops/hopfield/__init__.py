"""Score-carrying attention: ``reference`` is the definition, a kernel file per fast path, one dispatch."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.ops.backends import BACKENDS, chosen, use_backend, warn_once, worth_trying
from leadline.ops.hopfield import reference
from leadline.ops.hopfield.reference import standard_attention

LAYERS = 24  # a dense state is taken for affordable if this many fit into free memory

__all__ = ["BACKENDS", "hopfield_attention", "standard_attention", "use_backend"]


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
    """Attention whose scores are a running average over the layers (HOP 15, main scheme).

        h_n = alpha' h_{n-1} + (1 - alpha') S_n,   S_n = scale q k^T + bias,   out = softmax(h_n + mask) v

    q (B, H, M, D); k (B, Hkv, N, D) and v (B, Hkv, N, Dv) with Hkv a divisor of H (grouped queries);
    returns out (B, H, M, Dv) and the state to hand to the next layer, a tuple only the backend that made it can read.

    state        None at the first layer, then what the layer before returned.
    alpha_prime  weight of the old scores in [0, 1); a number, or a tensor () or (H,), then differentiable. Other
                 numbers are refused, also in a tensor on the CPU. A tensor on a GPU is not read, since that would wait
                 for the device, nor is one under torch.compile: there the caller keeps it inside, as
                 ``nn.HopfieldAttention`` does, and a NaN makes the output NaN.
    start        h_0 = 0: h_1 = (1 - alpha') S_1 ("zero", HOP 15) or h_1 = S_1 ("scores").
    bias         part of the scores and so carried; broadcasts to (B, H, M, N).
    mask         acts at the softmax alone, never carried: boolean (True = may be attended to) or a float
                 tensor to add; broadcasts to (B, H, M, N). A query with nothing to attend to gives 0.
    causal       query i sees the keys up to i + N - M (aligned bottom right, as in decoding).
    dropout      probability of dropping an attention weight, in [0, 1); the caller passes 0 outside training.
    scale        1 / sqrt(D) unless given.
    window       with backend "linear": carry the scores of this many layers and neglect older ones, whose weight is
                 alpha'^window together. The other backends are exact at no extra cost and ignore it.
    backend      "reference", the definition; on a GPU, by Triton kernels, "fused", which keeps a dense state in two
                 bytes a score, or "linear", which keeps queries and keys instead and has no N x N tensor; or "auto":
                 on a GPU fused, linear where a dense state would not fit into memory, else the reference.
                 Inputs that the kernels do not take run on the reference, with one warning that says why.
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
    decoding = q.shape[-2:-1] != k.shape[-2:-1]  # one query at a time: a row of scores, for which nothing is gained
    if not decoding and worth_trying(backend, q):
        from leadline.ops.hopfield import fused, linear

        if backend == "linear" or (backend == "auto" and _long(q, state, causal)):
            reason = linear.unsupported(q, k, v, state, alpha_prime, bias, mask)
            if reason is None:
                return linear.hopfield_attention(q, k, v, state, window=window, **options)
            warn_once(f"Hopfield attention cannot take its linear-memory path: {reason}")
        reason = fused.unsupported(q, k, v, state, bias, mask, causal)
        if reason is None:
            return fused.hopfield_attention(q, k, v, state, **options)
        warn_once(f"Hopfield attention runs on its slow reference path: {reason}")
    return reference.hopfield_attention(q, k, v, state, bias=bias, **options)


def _long(q: Tensor, state: tuple[Tensor, ...] | None, causal: bool) -> bool:
    """Whether dense states would be too large; layers after the first follow the first."""
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
        free += torch.cuda.memory_reserved(q.device) - torch.cuda.memory_allocated(q.device)  # kept for reuse
    return LAYERS * size > free
