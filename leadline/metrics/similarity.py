"""Token similarity, and how fast it grows from layer to layer (TSE, sections 1.1 and 2.2).

X (..., n, d) holds n tokens as rows; Pi1 = 1 1^T / n projects on their mean, Pi2 = I - Pi1 on the rest.
All results have the leading shape (...). ``mask`` (B, n) is True at real tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics._tokens import (
    accumulate,
    attention_matrix,
    check_samples,
    drop_rows,
    padded_rows,
    pair,
    scaled,
    split,
    unit_rows,
    with_heads,
)


def _energies(X: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return ||Pi1 X||^2 and ||Pi2 X||^2 of X / s, and the scale s, with which squares neither over- nor underflow."""
    X, scale = scaled(X, mask)
    mean, centred, count = split(X, mask)
    shared = (mean.square().sum(-1, keepdim=True) * count)[..., 0, 0]
    return shared, centred.square().sum((-2, -1)), scale[..., 0, 0]


def token_similarity(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute t_sim(X) = ||Pi1 X||^2 / ||X||^2 (Definition 1.1).

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (B, n), True = a real token.

    Returns:
        The similarity (...), in [0, 1]; 1 when all tokens are equal, X = 0 included.
    """
    shared, spread, _ = _energies(accumulate(X), mask)
    total = shared + spread
    return torch.where(total > 0, shared / torch.where(total > 0, total, 1), torch.ones_like(total))


def token_diversity(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute t_div(X) = ||Pi2 X||^2 / ||X||^2 = 1 - t_sim(X).

    It is computed from the centred tokens, so that it loses no digits near 0.

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (B, n), True = a real token.

    Returns:
        The diversity (...), in [0, 1].
    """
    shared, spread, _ = _energies(accumulate(X), mask)
    total = shared + spread
    return spread / torch.where(total > 0, total, 1)


def token_cosine(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute t_cos(X), the mean cosine over pairs of tokens (1), in O(nd).

    A zero row has cosine 0 with every other, as in torch's ``cosine_similarity``.

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (B, n), True = a real token.

    Returns:
        The cosine (...), in [-1, 1]; 1 for a single token.
    """
    X = accumulate(X)
    padded = padded_rows(X, mask)
    unit = unit_rows(drop_rows(X, padded))
    count = _count(X, padded)
    pairs = count * (count - 1)
    both = unit.sum(-2).square().sum(-1) - unit.square().sum((-2, -1))
    return torch.where(pairs > 0, both / pairs.clamp(min=1), torch.ones_like(both))


def sample_cosine(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the mean cosine over pairs of tokens of different samples, in O(B n d).

    Where it is as large as ``token_cosine``, the tokens share a direction that does not depend on the input.
    A zero row has cosine 0 with every other.

    Args:
        X: Tokens of B samples, (..., B, n, d).
        mask: Boolean (..., B, n), True = a real token.

    Returns:
        The cosine (...), in [-1, 1]; NaN for a single sample, which has no such pair.

    Raises:
        LeadlineError: X has no axis of samples.
    """
    X = accumulate(X)
    if X.ndim < 3:
        raise LeadlineError(f"X has shape {tuple(X.shape)}; it must be (..., samples, tokens, width)")
    padded = padded_rows(X, mask)
    sums = unit_rows(drop_rows(X, padded)).sum(-2)  # (..., B, d)
    count = _count(X, padded)  # (..., B)
    both = (sums * (sums.sum(-2, keepdim=True) - sums)).sum((-2, -1))
    pairs = (count * (count.sum(-1, keepdim=True) - count)).sum(-1)
    return both / torch.where(pairs > 0, pairs, torch.nan)


def _count(X: Tensor, padded: Tensor | None) -> Tensor:
    """Count the real tokens (...) of X (..., n, d)."""
    real = torch.ones_like(X[..., 0]) if padded is None else (~padded[..., 0]).to(X.dtype)
    return real.sum(-1)


def escalation_rate(X: Tensor, Y: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute r(X, Y) = t_div(X) / t_div(Y) (5).

    Args:
        X: Tokens (..., n, d).
        Y: Tokens (..., n, d) after a layer.
        mask: Boolean (B, n), True = a real token.

    Returns:
        The rate (...); above 1 when Y's tokens are more alike than X's.
    """
    X, Y = pair(X, Y)
    check_samples(X, Y)
    return token_diversity(X, mask) / token_diversity(Y, mask)


def energy_ratios(X: Tensor, Y: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute xi_i = ||Pi_i Y||^2 / ||Pi_i X||^2, i = 1, 2 (7).

    Args:
        X: Tokens (..., n, d).
        Y: Tokens (..., n, d) after a layer.
        mask: Boolean (B, n), True = a real token.

    Returns:
        xi_1 and xi_2, (...) each; NaN where that part of X is only rounding error.
    """
    X, Y = pair(X, Y)
    check_samples(X, Y)
    x1, x2, x_scale = _energies(X, mask)
    y1, y2, y_scale = _energies(Y, mask)
    scale = (y_scale / x_scale).clamp(max=torch.finfo(X.dtype).max)  # 0 times it is 0
    first, second = y1 / _beyond_rounding(x1, x1 + x2), y2 / _beyond_rounding(x2, x1 + x2)
    return first * scale * scale, second * scale * scale  # in turn: the square alone may overflow


def mixing_gains(X: Tensor, P: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Compute mu_i = ||Pi_i P X|| / ||Pi_i X||, i = 1, 2 (10).

    Args:
        X: Tokens (..., n, d).
        P: Attention matrices (..., n, n), or (..., h, n, n) with one axis more than X: the heads.
        mask: Boolean (B, n), True = a real token.

    Returns:
        mu_1 and mu_2, (...) or (..., h) each; NaN where that part of X is only rounding error, as mu_1 is after a
        complete de-escalation.
    """
    X, P = _with_attention(X, P, mask)
    x1, x2, x_scale = _energies(X, mask)
    y1, y2, y_scale = _energies(P @ X, mask)
    scale = y_scale / x_scale
    return (
        scale * (y1 / _beyond_rounding(x1, x1 + x2)).sqrt(),
        scale * (y2 / _beyond_rounding(x2, x1 + x2)).sqrt(),
    )


def omega(X: Tensor, P: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute omega = ||e^T P Pi2 X|| / ||e^T X|| (12): how much of the rest P moves into the mean.

    Args:
        X: Tokens (..., n, d).
        P: Attention matrices (..., n, n), or (..., h, n, n) with one axis more than X: the heads.
        mask: Boolean (B, n), True = a real token.

    Returns:
        omega, (...) or (..., h); 0 for a doubly stochastic P, NaN where the mean of X is only rounding error.
    """
    X, P = _with_attention(X, P, mask)
    x1, x2, _ = _energies(X, mask)
    mean, centred, count = split(X, mask)
    moved = torch.linalg.vector_norm((P @ centred).sum(-2, keepdim=True) / count, dim=(-2, -1))
    length = torch.linalg.vector_norm(mean, dim=(-2, -1))
    return moved / torch.where(_is_rounding(x1, x1 + x2), torch.nan, length)


def expected_energy_ratios(
    X: Tensor, P: Tensor, gain: float = 1.0, d_sigma2: float = 1.0, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute E[xi_i] = 1 + gain^2 d sigma^2 mu_i^2 over random W in Y = X + gain P X W (9).

    With heads in P the mu_i^2 are averaged over them (29), as for Y = X + gain [P_1 X W_1 ... P_h X W_h].

    Args:
        X: Tokens (..., n, d).
        P: Attention matrices (..., n, n), or (..., h, n, n) with one axis more than X: the heads.
        gain: Weight of the branch; TSE calls it alpha.
        d_sigma2: Width times the variance of the entries of W.
        mask: Boolean (B, n), True = a real token.

    Returns:
        E[xi_1] and E[xi_2], (...) each.
    """
    first, second = (mu.square() for mu in mixing_gains(X, P, mask))
    if P.ndim == X.ndim + 1:
        first, second = first.mean(-1), second.mean(-1)
    factor = gain**2 * d_sigma2
    return 1 + factor * first, 1 + factor * second


def eta(
    X: Tensor, Y: Tensor, P: Tensor, gain: float = 1.0, d_sigma2: float = 1.0, mask: Tensor | None = None
) -> Tensor:
    """Compute eta = E[xi_1]/E[xi_2] - xi_1/xi_2 (14), the deviation of one draw of W from the ratio of expectations.

    Args:
        X: Tokens (..., n, d).
        Y: Tokens (..., n, d) after a layer.
        P: Attention matrices (..., n, n), or (..., h, n, n) with one axis more than X: the heads.
        gain: Weight of the branch; TSE calls it alpha.
        d_sigma2: Width times the variance of the entries of W.
        mask: Boolean (B, n), True = a real token.

    Returns:
        eta (...).
    """
    e1, e2 = expected_energy_ratios(X, P, gain, d_sigma2, mask)
    xi1, xi2 = energy_ratios(X, Y, mask)
    return e1 / e2 - xi1 / xi2


def gamma(X: Tensor, P: Tensor, gain: float = 1.0, d_sigma2: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Compute gamma = E[xi_2]^2 / (E[xi_1] + 2 E[xi_2]) (24), the constant of eta's concentration (23).

    Args:
        X: Tokens (..., n, d).
        P: Attention matrices (..., n, n), or (..., h, n, n) with one axis more than X: the heads.
        gain: Weight of the branch; TSE calls it alpha.
        d_sigma2: Width times the variance of the entries of W.
        mask: Boolean (B, n), True = a real token.

    Returns:
        gamma (...).
    """
    e1, e2 = expected_energy_ratios(X, P, gain, d_sigma2, mask)
    return e2.square() / (e1 + 2 * e2)


def _with_attention(X: Tensor, P: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """X over a power of two, with P's head axis if it has one, and P; padded rows and columns are 0."""
    X, P = pair(X, P, ("X", "P"))
    P = attention_matrix(P, mask)
    return with_heads(scaled(X, mask)[0], P), P


def _is_rounding(part: Tensor, total: Tensor) -> Tensor:
    """Return whether a part of the energy is no more than the rounding error of the whole."""
    return part <= (8 * torch.finfo(part.dtype).eps) ** 2 * total


def _beyond_rounding(part: Tensor, total: Tensor) -> Tensor:
    return torch.where(_is_rounding(part, total), torch.nan, part)
