"""How many directions the tokens use, and how spread attention is."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics._tokens import accumulate, drop_rows, padded_rows


def effective_rank(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """exp of the entropy of the normalised singular values (Roy and Vetterli, 2007); 0 for X = 0."""
    X = accumulate(X)
    values = torch.linalg.svdvals(drop_rows(X, padded_rows(X, mask)))
    total = values.sum(-1, keepdim=True)
    rank = torch.special.entr(values / torch.where(total > 0, total, 1)).sum(-1).exp()
    return torch.where(total[..., 0] > 0, rank, torch.zeros_like(rank))


def attention_entropy(P: Tensor, mask: Tensor | None = None) -> Tensor:
    """Entropy in nats of each query's attention, P (..., m, n) -> (..., m): 0 to log n.

    With ``mask`` (B, m) the padded queries are NaN, so that ``nanmean`` leaves them out;
    their keys carry no weight in P anyway.
    """
    P = accumulate(P, "P")
    if (P.detach() < 0).any():
        raise LeadlineError("P has negative entries; attention weights are at least 0")
    entropy = torch.special.entr(P).sum(-1)
    padded = padded_rows(P, mask)
    return entropy if padded is None else entropy.masked_fill(padded[..., 0], torch.nan)
