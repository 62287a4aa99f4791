"""Attention sinks: keys that most queries attend to."""

from __future__ import annotations

from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics._tokens import accumulate, drop_rows, padded_rows


def attention_received(P: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean weight that each key gets.

    The mean is over all real queries, in causal attention also those that cannot see the key. So a late key that few
    queries see is not a sink.

    Args:
        P: Attention matrices (..., m, n).
        mask: Boolean (B, m), True = a real query.

    Returns:
        The weights (..., n).
    """
    P = accumulate(P, "P")
    padded = padded_rows(P, mask)
    count = P.shape[-2] if padded is None else (~padded).sum(-2)
    return drop_rows(P, padded).sum(-2) / count


def sink_weight(P: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the largest mean weight that a key gets.

    Args:
        P: Attention matrices (..., m, n).
        mask: Boolean (B, m), True = a real query.

    Returns:
        The weight (...); 1 for a single query and key.
    """
    return attention_received(P, mask).amax(-1)


def sink_share(P: Tensor, mask: Tensor | None = None, threshold: float = 0.3) -> Tensor:
    """Compute the share of heads with an attention sink.

    In causal attention spread evenly, the first key of n gets (1 + 1/2 + ... + 1/n) / n, which is above .3 for
    fewer than 10 tokens. Measure sinks on longer texts.

    Args:
        P: Attention matrices (..., h, m, n).
        mask: Boolean (B, m), True = a real query.
        threshold: Mean weight above which a key is a sink.

    Returns:
        The share (...), from 0 to 1.

    Raises:
        LeadlineError: P has no axis of heads.
    """
    weight = sink_weight(P, mask)
    if weight.ndim == 0:
        raise LeadlineError(f"P has shape {tuple(P.shape)}; it must be (..., heads, queries, keys)")
    return (weight > threshold).to(weight.dtype).mean(-1)
