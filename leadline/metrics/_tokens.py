"""Common steps of the metrics: checks of the input, masks, and an accurate mean of tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError


def accumulate(A: Tensor, name: str = "X") -> Tensor:
    """Check a (..., n, m) matrix and return it in a dtype suited to sums: half types become float32.

    Raises:
        LeadlineError: It is not a floating point tensor, has no tokens, or has entries that are not finite.
    """
    if not isinstance(A, Tensor) or not A.is_floating_point():
        given = str(A.dtype) if isinstance(A, Tensor) else type(A).__name__
        raise LeadlineError(f"{name} is {given}; it must be a floating point tensor")
    if A.ndim < 2 or 0 in A.shape[-2:]:
        raise LeadlineError(f"{name} has shape {tuple(A.shape)}; it must be (..., tokens, width) with no empty axis")
    if not torch.isfinite(A).all():
        raise LeadlineError(f"{name} has NaN or infinite entries; find the layer that makes them first")
    return A.float() if A.dtype in (torch.float16, torch.bfloat16) else A


def padded_rows(X: Tensor, mask: Tensor | None) -> Tensor | None:
    """Return the padded rows of X (..., n, m) as a boolean (..., n, 1), or None when every token is real.

    Args:
        X: Tokens or attention matrices (..., n, m).
        mask: Boolean, True = a real token; broadcasts to (..., n). When it lacks one axis in front of the tokens, that
            axis is the heads.

    Raises:
        LeadlineError: The mask is not boolean, does not fit X, or leaves a sample without a real token.
    """
    if mask is None:
        return None
    if mask.dtype != torch.bool:
        raise LeadlineError(f"mask is {mask.dtype}; it must be boolean, True = a real token")
    if mask.ndim == X.ndim - 2 and mask.ndim > 1:
        mask = mask.unsqueeze(-2)
    try:
        mask = mask.expand(X.shape[:-1])
    except RuntimeError as error:
        raise LeadlineError(
            f"mask has shape {tuple(mask.shape)}; it must broadcast to the tokens {tuple(X.shape[:-1])}"
        ) from error
    if not mask.any(-1).all():
        raise LeadlineError("mask leaves a sample without a real token; drop such samples first")
    return ~mask.unsqueeze(-1)


def drop_rows(X: Tensor, padded: Tensor | None) -> Tensor:
    """Set the padded rows of X (..., n, m) to zero; ``padded`` comes from ``padded_rows``."""
    return X if padded is None else X.masked_fill(padded, 0)


def split(X: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | int]:
    """Split tokens X (..., n, d) into their mean and the rest.

    The mean is computed twice. Near collapse, the first is only accurate to a rounding error of X, which is as large as
    the rest after subtracting it. The second is a mean of small numbers and corrects this.

    Returns:
        The mean (..., 1, d), the centred tokens (..., n, d) and the count of real tokens.
    """
    padded = padded_rows(X, mask)
    count = X.shape[-2] if padded is None else (~padded).sum(-2, keepdim=True)  # (..., 1, 1)
    mean = drop_rows(X, padded).sum(-2, keepdim=True) / count
    centred = drop_rows(X - mean, padded)
    rest = centred.sum(-2, keepdim=True) / count
    return mean + rest, drop_rows(centred - rest, padded), count


def power_of_two(size: Tensor) -> Tensor:
    """Return the largest power of two up to ``size``, 1/2 for 0. Dividing by it rounds nothing."""
    return torch.ldexp(torch.ones_like(size), torch.frexp(size).exponent - 1)


def scaled(X: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Set padded rows of X (..., n, d) to 0 and divide it by the power of two at its largest entry.

    Sums and squares then neither overflow nor underflow; the division rounds nothing.

    Returns:
        The scaled X, and the power of two (..., 1, 1).
    """
    X = drop_rows(X, padded_rows(X, mask))
    scale = power_of_two(X.detach().abs().amax((-2, -1), keepdim=True))
    return X / scale, scale


def unit_rows(X: Tensor) -> Tensor:
    """Scale the rows of X (..., n, d) to length 1. Zero rows stay zero; neither tiny nor huge rows lose digits."""
    X = X / power_of_two(X.detach().abs().amax(-1, keepdim=True))  # squares of tiny rows must not vanish
    length = torch.linalg.vector_norm(X, dim=-1, keepdim=True)
    return X / torch.where(length > 0, length, torch.ones_like(length))


def pair(X: Tensor, Y: Tensor, names: tuple[str, str] = ("X", "Y")) -> tuple[Tensor, Tensor]:
    """Check two matrices as ``accumulate`` does, and that they have one dtype."""
    X, Y = accumulate(X, names[0]), accumulate(Y, names[1])
    if X.dtype != Y.dtype:
        raise LeadlineError(f"{names[0]} is {X.dtype} and {names[1]} {Y.dtype}; convert one to the dtype of the other")
    return X, Y


def check_samples(X: Tensor, Y: Tensor, names: tuple[str, str] = ("X", "Y")) -> None:
    """Raise unless the axes before the last two of two matrices broadcast to each other."""
    try:
        torch.broadcast_shapes(X.shape[:-2], Y.shape[:-2])
    except RuntimeError as error:
        raise LeadlineError(
            f"{names[0]} has shape {tuple(X.shape)} and {names[1]} {tuple(Y.shape)}; they must have the same samples"
        ) from error


def matched_pair(X: Tensor, Y: Tensor, names: tuple[str, str] = ("X", "Y")) -> tuple[Tensor, Tensor]:
    """Check two matrices as ``pair`` does, and that they have one shape."""
    X, Y = pair(X, Y, names)
    if X.shape != Y.shape:
        raise LeadlineError(
            f"{names[0]} has shape {tuple(X.shape)} and {names[1]} {tuple(Y.shape)}; they must be the same"
        )
    return X, Y


def with_heads(X: Tensor, P: Tensor) -> Tensor:
    """Give X (..., n, d) an axis of heads where P (..., n, n) has one axis more.

    Raises:
        LeadlineError: P is not square or has another number of tokens than X.
    """
    if P.shape[-1] != P.shape[-2] or P.shape[-1] != X.shape[-2]:
        raise LeadlineError(
            f"P has shape {tuple(P.shape)} and X {tuple(X.shape)}; P must be (..., n, n) with X's n = {X.shape[-2]}"
        )
    X = X.unsqueeze(-3) if P.ndim == X.ndim + 1 else X
    check_samples(X, P, ("X", "P"))
    return X


def attention_matrix(P: Tensor, mask: Tensor | None) -> Tensor:
    """Check P (..., n, n) and set the rows and columns of padded tokens to zero.

    Raises:
        LeadlineError: P is not a square matrix of finite numbers.
    """
    P = accumulate(P, "P")
    if P.shape[-1] != P.shape[-2]:
        raise LeadlineError(f"P has shape {tuple(P.shape)}; an attention matrix is square, (..., n, n)")
    padded = padded_rows(P, mask)
    return P if padded is None else P.masked_fill(padded | padded.mT, 0)
