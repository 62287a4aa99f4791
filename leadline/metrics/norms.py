"""Residuals, and the norms that measure rank collapse (HOP, appendices C to E)."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.metrics._tokens import accumulate, scaled, split


def residual(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute the residual res(X) = X - 1 mean(X)^T (8).

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (B, n), True = a real token.

    Returns:
        The residual (..., n, d); padded rows are 0.
    """
    X, scale = scaled(accumulate(X), mask)
    return split(X, mask)[1] * scale


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
    X, _ = scaled(accumulate(X), mask)
    whole = mixed_norm(X)
    return mixed_norm(split(X, mask)[1]) / torch.where(whole > 0, whole, 1)
