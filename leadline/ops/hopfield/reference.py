"""The definition of Hopfield attention, for reading and for every other path to be compared with."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from leadline.errors import LeadlineError, check_choice


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
    """See ``leadline.ops.hopfield_attention``. The state is one tensor h (B, H, M, N), float32 for half types."""
    check_inputs(q, k, v, state, alpha_prime, start)
    k, v = expand_heads(k, q.shape[1]), expand_heads(v, q.shape[1])
    scale = q.shape[-1] ** -0.5 if scale is None else scale

    scores = scale * at_least_float32(q @ k.mT)  # S_n (B, H, M, N)
    if bias is not None:
        scores = scores + bias
    keep = alpha_prime if isinstance(alpha_prime, float | int) else alpha_prime.view(-1, 1, 1)
    if state is not None:
        hidden = keep * state[0] + (1 - keep) * scores  # h_n = alpha' h_{n-1} + (1 - alpha') S_n
    elif start == "zero":
        hidden = (1 - keep) * scores  # h_0 = 0
    else:
        hidden = scores

    weights = F.dropout(masked_softmax(hidden, mask, causal), dropout)
    return weights.to(v.dtype) @ v, (hidden,)


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
    """Attention that carries nothing, by torch's fused kernels: ``hopfield_attention`` at alpha' = 0."""
    check_inputs(q, k, v, None, 0.0, "zero")
    M, N = q.shape[-2], k.shape[-2]
    if causal and (mask is not None or M != N):  # torch aligns its own causal mask top left, and takes one mask
        visible = causal_mask(M, N, q.device)
        if mask is None:
            mask = visible
        else:
            mask = mask & visible if mask.dtype == torch.bool else mask.masked_fill(~visible, -torch.inf)
        causal = False
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )


def masked_softmax(hidden: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
    """softmax over the keys that may be attended to; a query without any gets weights 0."""
    hidden_from = None  # True where attention is forbidden
    if mask is not None and mask.dtype == torch.bool:
        hidden_from = ~mask
    elif mask is not None:
        hidden = hidden + mask
        hidden_from = torch.isneginf(mask)
    if causal:
        future = ~causal_mask(hidden.shape[-2], hidden.shape[-1], hidden.device)
        hidden_from = future if hidden_from is None else hidden_from | future
    if hidden_from is None:
        return hidden.softmax(-1)
    weights = hidden.masked_fill(hidden_from, -torch.inf).softmax(-1)
    return weights.masked_fill(hidden_from, 0)  # rows of -inf alone came out as NaN


def causal_mask(M: int, N: int, device: torch.device) -> Tensor:
    """True where query i of M may see key j of N: j <= i + N - M."""
    return torch.ones(M, N, dtype=torch.bool, device=device).tril(N - M)


def expand_heads(x: Tensor, heads: int) -> Tensor:
    """x (B, Hkv, N, D) -> (B, H, N, D): query head i reads key-value head i // (H / Hkv)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def at_least_float32(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def check_inputs(
    q: Tensor, k: Tensor, v: Tensor, state: tuple[Tensor, ...] | None, alpha_prime: float | Tensor, start: str
) -> None:
    check_choice("start", start, ("zero", "scores"))
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise LeadlineError(f"{shapes}: each must be (batch, heads, tokens, width)")
    B, H, M, D = q.shape
    if k.shape[0] != B or k.shape[-1] != D or v.shape[:3] != k.shape[:3] or H % k.shape[1]:
        raise LeadlineError(
            f"{shapes}: batch and width must agree, v must have k's tokens, and k's heads must divide q's"
        )
    N = k.shape[2]
    if M == 0 or N == 0:
        raise LeadlineError(f"{shapes}: there must be at least one query and one key")
    if isinstance(alpha_prime, Tensor):
        if alpha_prime.numel() not in (1, H):
            raise LeadlineError(f"alpha_prime has shape {tuple(alpha_prime.shape)}; it must be a number or ({H},)")
    elif not 0 <= alpha_prime < 1:
        raise LeadlineError(f"alpha_prime is {alpha_prime}; it must lie in [0, 1)")
    if state is not None and (len(state) != 1 or state[0].shape != (B, H, M, N)):
        given = [tuple(s.shape) for s in state]
        raise LeadlineError(f"state has shapes {given}; these inputs carry one of shape {(B, H, M, N)}")
