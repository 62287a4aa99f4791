"""Spectra of attention matrices: delta (12) and |lambda_2|, without an eigendecomposition each.

P (..., n, n) is row-stochastic: P 1 = 1. With Pi2 = I - 1 1^T / n, Pi2 P has the eigenvalues of P
with one eigenvalue 1 replaced by 0, so |lambda_2(P)| is the spectral radius of Pi2 P, and
delta = ||Pi2 P||_2 the square root of that of Pi2 P P^T Pi2.

The iterative path squares the matrix repeatedly: rho(A) = lim ||A^k||^(1/k) (Gelfand). It needs no
spectral gap, so complex pairs are no problem, nor is the disc of eigenvalues of a random attention matrix,
on which power iteration and Krylov methods converge slowly. It consists of batched matrix products only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError, check_choice
from leadline.metrics._tokens import accumulate, attention_matrix, split

_METHODS = ("auto", "exact", "iterative")
_EXACT_UP_TO = 96  # "auto": tokens up to which a decomposition is as fast
_SQUARINGS = 40


def delta(P: Tensor, mask: Tensor | None = None, *, method: str = "auto", tolerance: float = 1e-4) -> Tensor:
    """Compute delta(P) = ||Pi2 P||_2 (12), the largest gain of attention on the differences between tokens.

    delta can exceed 1, for instance when half of the rows put all weight on one token and the rest on another.

    Args:
        P: Attention matrices (..., n, n).
        mask: Boolean (B, n), True = a real token.
        method: "exact" (singular values), "iterative", or "auto": exact for few tokens.
        tolerance: Relative error of the iterative method.

    Returns:
        delta (...).
    """
    A = _deflated(P, mask)
    if _exact(method, A):
        return torch.linalg.matrix_norm(A, ord=2)
    return spectral_radius(A @ A.mT, tolerance, normal=True).sqrt()


def second_eigenvalue(
    P: Tensor, mask: Tensor | None = None, *, method: str = "auto", tolerance: float = 1e-4
) -> Tensor:
    """Compute |lambda_2(P)|, the second largest modulus of an eigenvalue of P.

    For a causal P, which is triangular, it is the second largest diagonal entry and exact. Iteration would fail there,
    since such matrices are far from normal.

    Args:
        P: Attention matrices (..., n, n).
        mask: Boolean (B, n), True = a real token.
        method: "exact" (eigenvalues), "iterative", or "auto": exact for few tokens.
        tolerance: Relative error of the iterative method.

    Returns:
        |lambda_2| (...).
    """
    P = attention_matrix(P, mask)
    if P.shape[-1] == 1:
        return torch.zeros_like(P[..., 0, 0])
    if not P.detach().triu(1).any():
        return P.diagonal(dim1=-2, dim2=-1).abs().topk(2, dim=-1).values[..., 1]
    A = _deflated(P, mask)
    if _exact(method, A):
        return torch.linalg.eigvals(A).abs().amax(-1)
    return spectral_radius(A, tolerance)


def spectral_radius(A: Tensor, tolerance: float = 1e-4, *, normal: bool = False) -> Tensor:
    """Compute the spectral radius of A by repeated squaring.

    The step from A^k to A^2k gives the estimate (||A^2k|| / ||A^k||)^(1/k). Its error falls with k, whether the leading
    eigenvalue is real, double or a complex pair. Everything is computed in logarithms.

    Args:
        A: Matrices (..., n, n).
        tolerance: Relative change of the estimate at which the iteration stops.
        normal: Whether A is known to be normal. If not, the iteration does not stop before k = n, since until then a
            nilpotent part may look like an eigenvalue.

    Returns:
        The spectral radius (...).
    """
    if not tolerance > 0:
        raise LeadlineError(f"tolerance is {tolerance}; it must be positive")
    A = accumulate(A, "A")
    if A.shape[-1] != A.shape[-2]:
        raise LeadlineError(f"A has shape {tuple(A.shape)}; it must be (..., n, n)")
    norm = torch.linalg.matrix_norm(A, keepdim=True)
    log_norm = torch.zeros_like(norm)  # log ||A^k||, relative to the scaled power stored in A
    last = torch.full_like(norm, torch.inf)
    power = 1.0
    for _ in range(_SQUARINGS):
        log_norm = log_norm + _log(norm)
        A = A / torch.where(norm > 0, norm, 1)  # ||A|| = 1; the true power is exp(log_norm) A
        A = A @ A
        norm = torch.linalg.matrix_norm(A, keepdim=True)
        estimate = (log_norm + _log(norm)) / power  # log (||A^2k|| / ||A^k||) / k
        settled = (estimate - last).abs() <= tolerance
        if (normal or power >= A.shape[-1]) and bool((settled | torch.isneginf(estimate)).all()):
            break
        last, log_norm, power = estimate, 2 * log_norm, 2 * power
    return estimate.exp()[..., 0, 0]


def _log(norm: Tensor) -> Tensor:
    """Compute the logarithm, with log 0 = -inf and a gradient of 0 there."""
    return torch.where(norm > 0, torch.where(norm > 0, norm, 1).log(), -torch.inf)


def _deflated(P: Tensor, mask: Tensor | None) -> Tensor:
    """Return Pi2 P over the real tokens."""
    return split(attention_matrix(P, mask), mask)[1]


def _exact(method: str, A: Tensor) -> bool:
    check_choice("method", method, _METHODS)
    return method == "exact" or (method == "auto" and A.shape[-1] <= _EXACT_UP_TO)
