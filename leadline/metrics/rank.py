"""How many directions the tokens use, and how spread attention is."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics._tokens import accumulate, padded_rows, scaled

_ROUNDED = 2**-8  # how far from 1 rounding weights to bfloat16 may take their sum, twice


def effective_rank(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """exp of the entropy of the normalised singular values (Roy and Vetterli, 2007); 0 for X = 0."""
    values = torch.linalg.svdvals(scaled(accumulate(X), mask)[0])
    total = values.sum(-1, keepdim=True)
    rank = torch.special.entr(values / torch.where(total > 0, total, 1)).sum(-1).exp()
    return torch.where(total[..., 0] > 0, rank, torch.zeros_like(rank))


def attention_entropy(P: Tensor, mask: Tensor | None = None) -> Tensor:
    """Entropy in nats of each query's attention, P (..., m, n) -> (..., m): 0 to log n.

    Rows sum to 1, up to the rounding of bfloat16, in which P may have been stored before it was converted. A query
    with nothing to attend to, a row of zeros, has entropy 0. With ``mask`` (B, m) the padded queries are NaN, so
    that ``nanmean`` leaves them out; their keys carry no weight in P anyway.
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
