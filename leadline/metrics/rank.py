"""Effective rank of tokens, and entropy of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics._tokens import accumulate, drop_rows, padded_rows


def effective_rank(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute exp of the entropy of the normalised singular values (Roy and Vetterli, 2007).

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (B, n), True = a real token.

    Returns:
        The effective rank (...), between 1 and min(n, d); 0 for X = 0.
    """
    X = accumulate(X)
    values = torch.linalg.svdvals(drop_rows(X, padded_rows(X, mask)))
    total = values.sum(-1, keepdim=True)
    rank = torch.special.entr(values / torch.where(total > 0, total, 1)).sum(-1).exp()
    return torch.where(total[..., 0] > 0, rank, torch.zeros_like(rank))


def attention_entropy(P: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the entropy of each query's attention weights, in nats.

    Args:
        P: Attention matrices (..., m, n).
        mask: Boolean (B, m), True = a real token. Padded keys have no weight in P.

    Returns:
        The entropy (..., m), between 0 and log n; NaN for padded queries, so that ``nanmean`` ignores them.

    Raises:
        LeadlineError: P has negative entries.
    """
    P = accumulate(P, "P")
    if (P.detach() < 0).any():
        raise LeadlineError("P has negative entries; attention weights are at least 0")
    entropy = torch.special.entr(P).sum(-1)
    padded = padded_rows(P, mask)
    return entropy if padded is None else entropy.masked_fill(padded[..., 0], torch.nan)
