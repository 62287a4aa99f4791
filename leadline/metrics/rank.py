"""Effective rank of tokens, and entropy of attention."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics._tokens import accumulate, padded_rows, scaled

_ROUNDED = 2**-8  # how far from 1 rounding weights to bfloat16 may take their sum, twice


def effective_rank(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute exp of the entropy of the normalised singular values (Roy and Vetterli, 2007).

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (B, n), True = a real token.

    Returns:
        The effective rank (...), between 1 and min(n, d); 0 for X = 0.
    """
    values = torch.linalg.svdvals(scaled(accumulate(X), mask)[0])
    total = values.sum(-1, keepdim=True)
    rank = torch.special.entr(values / torch.where(total > 0, total, 1)).sum(-1).exp()
    return torch.where(total[..., 0] > 0, rank, torch.zeros_like(rank))


def attention_entropy(P: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the entropy of each query's attention weights, in nats.

    Args:
        P: Attention matrices (..., m, n). Rows sum to 1 up to the rounding of bfloat16, since P may have
            been stored in it.
        mask: Boolean (B, m), True = a real token. Padded keys have no weight in P.

    Returns:
        The entropy (..., m), between 0 and log n. It is 0 for a row of zeros, a query with nothing to attend to.
        It is NaN for padded queries, so that ``nanmean`` ignores them.

    Raises:
        LeadlineError: P has negative entries, or a row that does not sum to 1.
    """
    given = P
    P = accumulate(P, "P")
    if (P.detach() < 0).any():
        raise LeadlineError("P has negative entries; attention weights are at least 0")
    padded = padded_rows(P, mask)
    sums = P.detach().sum(-1)
    error = torch.where(sums == 0, 0, (sums - 1).abs())
    error = error if padded is None else error.masked_fill(padded[..., 0], 0)
    if (error > max(4 * torch.finfo(given.dtype).eps, _ROUNDED)).any():
        worst = sums.flatten()[error.argmax()].item()
        raise LeadlineError(f"P has a row that sums to {worst:.4g}; give attention weights, whose rows sum to 1")
    entropy = torch.special.entr(P).sum(-1)
    return entropy if padded is None else entropy.masked_fill(padded[..., 0], torch.nan)
