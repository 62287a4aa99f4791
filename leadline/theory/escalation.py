"""Expected escalation rates: how fast attention with a skip makes tokens alike (TSE, section 2.2).

The step is Y = X + gain P X W, or Y = X + gain [P_1 X W_1 ... P_h X W_h] with heads, where the entries of W
are independent with mean 0 and variance sigma^2. Expectations are over W.

All functions take tokens X (..., n, d) and a row-stochastic P (..., n, n), or (..., h, n, n) with one axis more than X.
Then mu_i^2, (1 - omega)^2, delta^2 and lambda_2^2 are averaged over the heads before a rate is formed (Proposition
2.9). Results have X's leading shape (...). ``mask`` (B, n) is True at real tokens. ``gain`` is what TSE calls alpha.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics import delta, mixing_gains, omega, second_eigenvalue, token_similarity
from leadline.metrics._tokens import accumulate, attention_matrix, drop_rows, padded_rows, with_heads


def expected_rate(X: Tensor, P: Tensor, gain: float = 1.0, d_sigma2: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Compute E[r(X, Y)] (13, 18) without E[eta], an O(1/d) term that has no closed form.

    It is computed as t_div(X) E||Y||^2 / E||Pi2 Y||^2, which also holds where the mean of X is 0 and mu_1 is 0/0.

    Args:
        X: Tokens (..., n, d).
        P: Attention matrices (..., n, n) or (..., h, n, n).
        gain: Weight of the branch.
        d_sigma2: Width times the variance of the entries of W.
        mask: Boolean (B, n), True = a real token.

    Returns:
        The rate (...); NaN where all tokens of X are equal, since there is no rate.
    """
    factor = _positive("gain", gain) ** 2 * _positive("d_sigma2", d_sigma2)
    _, second = mixing_gains(X, P, mask)  # mu_2
    whole = _energy_ratio(X, P, mask)
    return (1 + factor * _over_heads(whole, X, P)) / (1 + factor * _over_heads(second.square(), X, P))


def rate_lower_bound(X: Tensor, P: Tensor, gain: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Compute the lower bound (16) on E[r(X, Y)] for d sigma^2 = 1; it is above 1 where ``premise_holds``.

    It is asymptotic in d: for symmetric P the expectation may lie below it by O(1/d).
    Where the mean of X is 0, so is t_sim, and the bound is 1.

    Args:
        X: Tokens (..., n, d).
        P: Attention matrices (..., n, n) or (..., h, n, n).
        gain: Weight of the branch.
        mask: Boolean (B, n), True = a real token.

    Returns:
        The bound (...).
    """
    factor = _positive("gain", gain) ** 2
    mean_gain = _over_heads((1 - omega(X, P, mask)).square(), X, P)  # <= mu_1^2 (11)
    spread = _over_heads(delta(P, mask).square(), X, P)  # >= mu_2^2 (11)
    bound = 1 + factor / (1 + factor * spread) * (mean_gain - spread) * token_similarity(X, mask)  # (16)
    return torch.where(mean_gain.isnan(), torch.ones_like(bound), bound)


def rate_estimate(X: Tensor, P: Tensor, gain: float = 1.0, mask: Tensor | None = None) -> Tensor:
    """Estimate E[r(X, Y)] from the spectral gap of P alone (17), for d sigma^2 = 1 and any gain.

    For symmetric P it is the lower bound (16). Otherwise delta may exceed |lambda_2| by far, and the estimate may
    mislead: when half of the tokens attend to the first and the rest to the second, lambda_2 is 0 and delta is
    sqrt(n/2). So read it together with ``premise_holds``.

    Args:
        X: Tokens (..., n, d).
        P: Attention matrices (..., n, n) or (..., h, n, n).
        gain: Weight of the branch.
        mask: Boolean (B, n), True = a real token.

    Returns:
        The estimate (...).
    """
    factor = _positive("gain", gain) ** 2
    squared = _over_heads(second_eigenvalue(P, mask).square(), X, P)  # |lambda_2|^2
    return 1 + factor * (1 - squared) / (1 + factor * squared) * token_similarity(X, mask)  # (17)


def premise_holds(X: Tensor, P: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return whether omega + delta < 1 for every head, the premise of Theorem 2.6: boolean (...).

    It is False where the mean of X is 0. The arguments are those of ``rate_lower_bound``.
    """
    holds = omega(X, P, mask) + delta(P, mask) < 1
    return holds.all(-1) if _has_heads(X, P) else holds


def critical_tau(gain: float = 1.0) -> float:
    """Return the de-escalation strength (21) above which diversity stays near 1: 1 - 1 / sqrt(1 + gain^2).

    Attention multiplies t_sim / t_div by up to 1 + gain^2 (Remark 2.8), de-escalation by (1 - tau)^2.
    """
    return 1 - 1 / math.sqrt(1 + _positive("gain", gain) ** 2)


def _energy_ratio(X: Tensor, P: Tensor, mask: Tensor | None) -> Tensor:
    """Return ||P X||^2 / ||X||^2 per head."""
    X, P = accumulate(X), attention_matrix(P, mask)
    X = drop_rows(X, padded_rows(X, mask))
    size = X.detach().abs().amax((-2, -1), keepdim=True)
    X = with_heads(X / torch.where(size > 0, size, 1), P)  # no overflow, no underflow in the squares
    return (P @ X).square().sum((-2, -1)) / X.square().sum((-2, -1))


def _has_heads(X: Tensor, P: Tensor) -> bool:
    return P.ndim == X.ndim + 1


def _over_heads(per_head: Tensor, X: Tensor, P: Tensor) -> Tensor:
    return per_head.mean(-1) if _has_heads(X, P) else per_head


def _positive(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise LeadlineError(f"{name} is {value}; it must be a finite number, at least 0")
    return value
