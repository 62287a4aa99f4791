"""Influence of a block: how much it changes the stream or the output of a model."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leadline.metrics._tokens import drop_rows, matched_pair, padded_rows, unit_rows


def block_influence(X: Tensor, Y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute 1 - the mean cosine of x_t and y_t over the real tokens (ShortGPT, Men et al., 2024).

    It is computed from differences of unit vectors, so a block that changes nothing has exactly 0, and small figures
    lose no digits. Where one of the two rows is zero, the cosine is 0; where both are, nothing changed and it is 1.

    Args:
        X: The stream before a block, (..., n, d).
        Y: The stream after it, (..., n, d).
        mask: Boolean (..., n), True = a real token.

    Returns:
        The influence (...), from 0 to 2.
    """
    apart, along, padded = _apart(X, Y, mask)
    apart, along = apart.square(), along.square()
    whole = apart + along  # 4 for two unit rows
    return _mean(2 * apart / torch.where(whole > 0, whole, 1), padded)


def angular_distance(X: Tensor, Y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean over the real tokens of arccos(cos(x_t, y_t)) / pi.

    It is exactly 0 for equal streams, loses no digits near 0 and near 1, and does not depend on the lengths of the
    rows. Where one of the two rows is zero, it is 1/2; where both are, 0.

    Args:
        X: The stream before a block, (..., n, d).
        Y: The stream after it, (..., n, d).
        mask: Boolean (..., n), True = a real token.

    Returns:
        The distance (...), from 0 to 1.
    """
    apart, along, padded = _apart(X, Y, mask)
    along = torch.where((apart == 0) & (along == 0), 1, along)
    return _mean(torch.atan2(apart, along) * (2 / math.pi), padded)  # Kahan: tan(angle / 2) = |u - v| / |u + v|


def kl_divergence(logits: Tensor, other: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean over the real tokens of KL(softmax(logits) || softmax(other)), in nats.

    For a logit lens, ``other`` are the logits that the model's norm and unembedding give for an earlier layer. To
    measure the removal of a block, they are the output of the model without it.

    Args:
        logits: The output of the model, (..., n, vocabulary).
        other: The logits to compare with, (..., n, vocabulary).
        mask: Boolean (..., n), True = a real token.

    Returns:
        The divergence (...).
    """
    logits, other = matched_pair(logits, other, ("logits", "other"))
    logs, others = logits.log_softmax(-1), other.log_softmax(-1)
    weights = logs.exp()
    terms = torch.where(weights > 0, weights * (logs - others), 0)
    return _mean(terms.sum(-1).clamp(min=0), padded_rows(logits, mask))


def _apart(X: Tensor, Y: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return |u - v| and |u + v| (..., n) of the unit rows u of X and v of Y, and the padded rows."""
    X, Y = matched_pair(X, Y)
    u, v = unit_rows(X), unit_rows(Y)
    length = torch.linalg.vector_norm
    return length(u - v, dim=-1), length(u + v, dim=-1), padded_rows(X, mask)


def _mean(values: Tensor, padded: Tensor | None) -> Tensor:
    """Average values (..., n) over the real tokens -> (...)."""
    if padded is None:
        return values.mean(-1)
    return drop_rows(values.unsqueeze(-1), padded).sum((-2, -1)) / (~padded).sum((-2, -1))
