"""Residuals, and the norms that measure rank collapse (HOP, appendices C to E)."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.metrics._tokens import accumulate, drop_rows, padded_rows, split


def residual(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the residual res(X) = X - 1 mean(X)^T (8).

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (B, n), True = a real token.

    Returns:
        The residual (..., n, d); padded rows are 0.
    """
    return split(accumulate(X), mask)[1]


def norm_1(A: Tensor) -> Tensor:
    """Compute ||A||_1 (2), the largest column sum of |A|: A (..., n, m) -> (...)."""
    return torch.linalg.matrix_norm(accumulate(A, "A"), ord=1)


def norm_inf(A: Tensor) -> Tensor:
    """Compute ||A||_inf (3), the largest row sum of |A|: A (..., n, m) -> (...)."""
    return torch.linalg.matrix_norm(accumulate(A, "A"), ord=torch.inf)


def mixed_norm(A: Tensor) -> Tensor:
    """Compute ||A||_{1,inf} = sqrt(||A||_1 ||A||_inf) (7): A (..., n, m) -> (...). It has no triangle inequality."""
    return norm_1(A).sqrt() * norm_inf(A).sqrt()


def normalized_residual(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute ||res(X)||_{1,inf} / ||X||_{1,inf} (44), the metric of HOP's Table 1.

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (B, n), True = a real token.

    Returns:
        The normalised residual (...); 0 for X = 0.
    """
    X = accumulate(X)
    whole = mixed_norm(drop_rows(X, padded_rows(X, mask)))
    return mixed_norm(residual(X, mask)) / torch.where(whole > 0, whole, 1)
