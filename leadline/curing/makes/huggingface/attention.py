"""The attention function that cured transformers models call for carried scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from leadline.curing.carrier import Slot
from leadline.errors import LeadlineError, need

# The name of the attention function in transformers, of the one keyword argument that brings the state from module to
# module, and of the cure's entry in the configuration.
KEY = "leadline"

_UNSUPPORTED = {"softcap": "soft-capping of scores", "s_aux": "attention sinks", "position_bias": "a position bias"}


def register() -> None:
    """Register the function with transformers, and a mask function of the same name.

    Without a mask function, transformers would ignore padding.
    """
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
    """Attend with carried scores, with the signature of transformers' own attention functions.

    Args:
        module: The attention module that calls.
        query: (B, H, M, D).
        key: (B, Hkv, N, D).
        value: (B, Hkv, N, D).
        attention_mask: What ``sdpa_mask`` makes: boolean (B, 1, M, N) with padding, causality and sliding window in it,
            or None where causality alone decides.
        dropout: Probability to drop an attention weight.
        scaling: Factor of the scores; None: 1 / sqrt(D).
        is_causal: Whether to mask later keys if there is no mask; None: as the module says.
        **kwargs: The slot of the layer under "leadline"; other entries are refused or ignored.

    Returns:
        The output (B, M, H, D) and the weights (B, H, M, N), which are None unless the model was called with
        output_attentions=True.
    """
    slot: Slot | None = kwargs.get(KEY)
    if slot is None:
        raise LeadlineError(
            f"{type(module).__name__} runs Leadline's attention but no state reached it; load cured models with "
            "leadline.load, and let keyword arguments through any wrapper"
        )
    for name, what in _UNSUPPORTED.items():
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
    if causal and key.shape[2] > M:  # a static cache that is not full: the keys after the queries are empty
        key, value = key[:, :, :M], value[:, :, :M]
    out, weights = slot.attend(query, key, value, mask=attention_mask, causal=causal, dropout=dropout, scale=scaling)
    return out.transpose(1, 2).contiguous(), weights
