"""Attention weights from scores: softmax and the other row-stochastic formulas of TSE (section 2.1)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from leadline.errors import LeadlineError, check_choice

_SINKHORN_STEPS = 1000


def attention_weights(
    scores: Tensor, mask: Tensor | None = None, causal: bool = False, formula: str = "softmax"
) -> Tensor:
    """Compute attention weights P (B, H, M, N): rows are at least 0 and sum to 1.

    =========  ==============================================================================
    softmax    exp(s) / sum
    relu       max(s, 0) / sum; a row without a positive score attends to all keys equally
    sigmoid    sigmoid(s) / sum
    sinkhorn   exp(s), rows and columns scaled in turn until both sum to 1: doubly stochastic
    symmetric  sinkhorn for symmetric scores (queries = keys), so that P is symmetric too
    =========  ==============================================================================

    A query with nothing to attend to gets weights 0. Doubly stochastic weights need M = N and have no causal form,
    which would be the identity. Their mask covers keys, (B, 1, 1, N), and then holds for queries too.

    Args:
        scores: Scores (B, H, M, N).
        mask: Boolean (True = may be attended to) or a float tensor to add; broadcasts to the scores.
        causal: Query i sees the keys up to i + N - M.
        formula: One of ``FORMULAS``.

    Returns:
        The weights (B, H, M, N).

    Raises:
        LeadlineError: The formula does not exist or does not fit the shape, or Sinkhorn scaling does not converge.
    """
    check_choice("formula", formula, FORMULAS)
    forbidden = None if mask is None else ~mask if mask.dtype == torch.bool else torch.isneginf(mask)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    if causal:
        future = ~causal_mask(scores.shape[-2], scores.shape[-1], scores.device)
        forbidden = future if forbidden is None else forbidden | future
    if formula in ("sinkhorn", "symmetric"):
        if causal or scores.shape[-2] != scores.shape[-1]:
            raise LeadlineError(f"formula is {formula!r}; it takes as many queries as keys and no causal mask")
        forbidden = None if forbidden is None else forbidden | forbidden.mT
    weigh = FORMULAS[formula]
    if forbidden is None:
        return weigh(scores)
    weights = weigh(scores.masked_fill(forbidden, -torch.inf))
    return weights.masked_fill(forbidden, 0)  # a row of -inf only gives NaN


def causal_mask(M: int, N: int, device: torch.device) -> Tensor:
    """Make a boolean (M, N), True where query i may see key j: j <= i + N - M."""
    return torch.ones(M, N, dtype=torch.bool, device=device).tril(N - M)


def _softmax(scores: Tensor) -> Tensor:
    return scores.softmax(-1)


def _relu(scores: Tensor) -> Tensor:
    positive = scores.clamp(min=0)
    equal = (~torch.isneginf(scores)).to(scores.dtype)
    none = positive.sum(-1, keepdim=True) == 0
    positive = torch.where(none, equal, positive)
    return positive / positive.sum(-1, keepdim=True)


def _sigmoid(scores: Tensor) -> Tensor:
    # softmax is relative to the largest score: in a row of very negative ones every sigmoid(s) would be 0
    return torch.nn.functional.logsigmoid(scores).softmax(-1)


def _sinkhorn(scores: Tensor) -> Tensor:
    rows = torch.zeros_like(scores[..., :1])
    for _ in range(_SINKHORN_STEPS):
        columns = -_log_sum(scores + rows, -2)
        rows = -_log_sum(scores + columns, -1)
        weights = (scores + rows + columns).exp()
        if _settled(weights.sum(-2)):
            return weights
    raise _not_settled(weights)


def _symmetric(scores: Tensor) -> Tensor:
    half = -0.5 * _log_sum(scores, -1)  # (..., n, 1): P = exp(s_ij + half_i + half_j)
    for _ in range(_SINKHORN_STEPS):
        weights = (scores + (half + half.mT)).exp()  # the brackets make it symmetric to the last bit
        if _settled(weights.sum(-1)):
            return weights
        half = 0.5 * (half - _log_sum(scores + half.mT, -1))
    raise _not_settled(weights)


FORMULAS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": _softmax,
    "relu": _relu,
    "sigmoid": _sigmoid,
    "sinkhorn": _sinkhorn,
    "symmetric": _symmetric,
}


def _log_sum(scores: Tensor, dim: int) -> Tensor:
    """Return the logarithm of the sum of exp along ``dim``, 0 where everything is masked."""
    empty = torch.isneginf(scores).all(dim, keepdim=True)
    return scores.masked_fill(empty, 0).logsumexp(dim, keepdim=True).masked_fill(empty, 0)


def _off(sums: Tensor) -> Tensor:
    return torch.where(sums == 0, 0, (sums - 1).abs()).max()  # a padded token has sum 0


def _settled(sums: Tensor) -> bool:
    return bool(_off(sums.detach()) <= 32 * torch.finfo(sums.dtype).eps)


def _not_settled(weights: Tensor) -> LeadlineError:
    return LeadlineError(
        f"Sinkhorn scaling is off by {_off(weights.detach().sum(-2)):.1e} after {_SINKHORN_STEPS} steps; "
        "the scores are too far apart, scale them down"
    )
