"""The spectrum of attention matrices: delta (12) and |lambda_2|, without an eigendecomposition each.

P (..., n, n) is row-stochastic: P 1 = 1. With Pi2 = I - 1 1^T / n, Pi2 P has the eigenvalues of P
with one eigenvalue 1 replaced by 0, so |lambda_2(P)| is the spectral radius of Pi2 P, and
delta = ||Pi2 P||_2 the square root of that of Pi2 P P^T Pi2.

The iterative path squares the matrix again and again: rho(A) = lim ||A^k||^(1/k) (Gelfand). It needs
no spectral gap, so it copes with complex pairs and with the disc of eigenvalues that a random
attention matrix has, where power iteration and Krylov methods crawl; it is batched matrix products only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError, check_choice
from leadline.metrics._tokens import attention_matrix, split

_METHODS = ("auto", "exact", "iterative")
_EXACT_UP_TO = 96  # "auto": tokens up to which a decomposition is as fast
_SQUARINGS = 40


def delta(P: Tensor, mask: Tensor | None = None, *, method: str = "auto", tolerance: float = 1e-4) -> Tensor:
    """delta(P) = ||Pi2 P||_2 (12): the most that attention keeps of what differs between tokens.

    ``method``: "exact" (singular values), "iterative" (relative error about ``tolerance``), or "auto".
    delta can exceed 1: P = all weight on one token for half of the rows, on another for the rest.
    """
    A = _deflated(P, mask)
    if _exact(method, A):
        return torch.linalg.matrix_norm(A, ord=2)
    return spectral_radius(A @ A.mT, tolerance, normal=True).sqrt()


def second_eigenvalue(
    P: Tensor, mask: Tensor | None = None, *, method: str = "auto", tolerance: float = 1e-4
) -> Tensor:
    """|lambda_2(P)|, the second largest modulus of an eigenvalue of P.

    A causal P is triangular: there it is the second largest diagonal entry, read off exactly
    (no iteration could: such matrices are far from normal).
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
    """The spectral radius of A (..., n, n) by repeated squaring, to a relative ``tolerance``.

    The step from A^k to A^2k gives the estimate (||A^2k|| / ||A^k||)^(1/k), whose error falls with k
    whether the leading eigenvalue is real, double or a complex pair; all of it in logarithms.
    It never stops before k = n unless A is known to be ``normal``: until then a nilpotent part
    may look like an eigenvalue.
    """
    if not tolerance > 0:
        raise LeadlineError(f"tolerance is {tolerance}; it must be positive")
    norm = torch.linalg.matrix_norm(A, keepdim=True)
    log_norm = torch.zeros_like(norm)  # log ||A^k||, relative to the scaled power kept in A
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
    """log, with log 0 = -inf and a gradient of 0 there."""
    return torch.where(norm > 0, torch.where(norm > 0, norm, 1).log(), -torch.inf)


def _deflated(P: Tensor, mask: Tensor | None) -> Tensor:
    """Pi2 P over the real tokens."""
    return split(attention_matrix(P, mask), mask)[1]


def _exact(method: str, A: Tensor) -> bool:
    check_choice("method", method, _METHODS)
    return method == "exact" or (method == "auto" and A.shape[-1] <= _EXACT_UP_TO)
