"""The attention function that cured transformers models call."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from leadline.curing.plan import KEY, Slot
from leadline.errors import LeadlineError, need

_REFUSED = {"softcap": "soft-capping of scores", "s_aux": "attention sinks", "position_bias": "a position bias"}


def register() -> None:
    """Make the function known to transformers, with its mask function: without one, padding would be ignored."""
    need("transformers", "hub").AttentionInterface.register(KEY, leadline_attention)
    masking = need("transformers.masking_utils", "hub")
    masking.AttentionMaskInterface.register(KEY, masking.sdpa_mask)


def leadline_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """query (B, H, M, D), key and value (B, Hkv, N, D) -> (B, M, H, D), as transformers' own functions.

    The mask is what ``sdpa_mask`` makes: boolean (B, 1, M, N) with padding, causality and sliding window in it,
    or None where causality says it all. Weights (B, H, M, N) come with it when the model was called with
    output_attentions=True.
    """
    slot: Slot | None = kwargs.get(KEY)
    if slot is None:
        raise LeadlineError(
            f"{type(module).__name__} runs Leadline's attention but no state reached it; load cured models with "
            "leadline.load, and let keyword arguments through any wrapper"
        )
    for name, what in _REFUSED.items():
        if kwargs.get(name) is not None:
            raise LeadlineError(f"{type(module).__name__} uses {what}; its scores cannot be carried")
    if not slot.cured and not slot.carrier.weights:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal
        )
    M = query.shape[2]
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    causal = causal and attention_mask is None and M > 1
    if causal and key.shape[2] > M:  # a static cache being filled: what follows the queries is empty
        key, value = key[:, :, :M], value[:, :, :M]
    out, weights = slot.attend(query, key, value, mask=attention_mask, causal=causal, dropout=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), weights
