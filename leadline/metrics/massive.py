"""Massive tokens and channels, and a similarity that does not depend on them.

Nearly every trained language model has a massive activation (Sun et al., 2024): from some layer on, one token,
mostly the first, is a hundred times as long as the others. ``token_similarity`` weighs tokens by their energy,
so it then measures that token alone. A few channels have the same effect on ``token_cosine``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError
from leadline.metrics._tokens import accumulate, drop_rows, padded_rows, power_of_two
from leadline.metrics.similarity import token_cosine

_FEWEST = 8  # tokens of a sample for which the median length is meaningful
_ONE_IN = 20  # massive tokens are at most 5 % of a sample


def relative_length(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute each token's length divided by the median length of its sample.

    The median of an even number of tokens is the mean of the middle two. Where it is 0, the ratio of a zero row is 1
    and that of any other row infinite.

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (..., n), True = a real token.

    Returns:
        The ratios (..., n). Padded tokens do not count in the median and have 0.
    """
    X = accumulate(X)
    padded = padded_rows(X, mask)
    ratio = _over_median(_lengths(X.detach(), padded), padded)
    return ratio if padded is None else ratio.masked_fill(padded[..., 0], 0)


def massive_tokens(X: Tensor, before: Tensor | None = None, factor: float = 10.0, mask: Tensor | None = None) -> Tensor:
    """Find the massive tokens of each sample.

    A token is massive when all of these hold:

    - its sample has at least 8 real tokens;
    - it is longer than ``factor`` times the median length of them;
    - at most 5 % of the sample's real tokens are that long, or it is the only one;
    - it was not that long in ``before``, if given.

    Args:
        X: The stream after a layer, (..., n, d).
        before: The input of the first block, (..., n, any width). The layers did not make tokens that were long there,
            such as black borders of an image.
        factor: Ratio to the median length, above 0.
        mask: Boolean (..., n), True = a real token. Padded tokens are never massive.

    Returns:
        Boolean (..., n), True = a massive token.

    Raises:
        LeadlineError: ``factor`` is not above 0, or ``before`` has other tokens than X.
    """
    _check_factor(factor)
    ratio = relative_length(X, mask)
    long = ratio > factor
    padded = padded_rows(X, mask)
    real = torch.ones_like(long) if padded is None else ~padded[..., 0]
    count = real.sum(-1, keepdim=True)
    few = long.sum(-1, keepdim=True) * _ONE_IN <= count.clamp(min=_ONE_IN)
    massive = long & few & (count >= _FEWEST)
    if before is None:
        return massive
    earlier = relative_length(before, mask)
    if earlier.shape != ratio.shape:
        raise LeadlineError(f"before has tokens {tuple(earlier.shape)} and X {tuple(ratio.shape)}; they must agree")
    return massive & (earlier <= factor)


def massive_channels(X: Tensor, factor: float = 100.0, mask: Tensor | None = None) -> Tensor:
    """Find the massive channels of each sample.

    A massive channel's mean square over the tokens that are not massive (``massive_tokens`` of X alone) is above
    ``factor`` times the median of that figure over the channels. The median of an even number is the mean of the
    middle two. Where it is 0, every channel that is not 0 is massive.

    Args:
        X: The stream, (..., n, d).
        factor: Ratio to the median energy, above 0.
        mask: Boolean (..., n), True = a real token. Padded tokens do not count.

    Returns:
        Boolean (..., d), True = a massive channel.

    Raises:
        LeadlineError: ``factor`` is not above 0.
    """
    _check_factor(factor)
    X = accumulate(X).detach()
    padded = padded_rows(X, mask)
    massive = massive_tokens(X, mask=mask).unsqueeze(-1)
    rest = X.masked_fill(massive if padded is None else massive | padded, 0)
    return _over_median(_lengths(rest.mT, None, square=True), None) > factor


def massive_activations(X: Tensor, mask: Tensor | None = None, above: float = 100.0, factor: float = 1000.0) -> Tensor:
    """Find the massive entries of each sample by the usual rule for scalars (Sun et al., 2024).

    Their magnitude is above ``above`` and at least ``factor`` times the median magnitude over the sample's real tokens
    and all channels. The median of an even number is the lower of the middle two.

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (..., n), True = a real token.
        above: Least magnitude.
        factor: Ratio to the median magnitude, above 0.

    Returns:
        Boolean (..., n, d), True = a massive entry.

    Raises:
        LeadlineError: ``factor`` is not above 0.
    """
    _check_factor(factor)
    X = accumulate(X).detach()
    padded = padded_rows(X, mask)
    size = X.abs()
    known = size if padded is None else size.masked_fill(padded, torch.nan)
    median = known.flatten(-2).nanmedian(-1).values[..., None, None]
    return drop_rows((size > above) & (size / factor >= median), padded)


def robust_similarity(X: Tensor, mask: Tensor | None = None) -> Tensor:
    """Compute ``token_cosine`` with the massive channels of each sample set to 0.

    Lengths do not count in a cosine, so massive tokens have no influence either. Without massive channels, as at
    initialisation, it equals ``token_cosine`` to the last bit. A token whose massive channels are all it has counts as
    a zero row: its cosine with every other is 0.

    Args:
        X: Tokens (..., n, d).
        mask: Boolean (..., n), True = a real token.

    Returns:
        The similarity (...), in [-1, 1]; 1 for a single token.
    """
    channels = massive_channels(X, mask=mask)
    return token_cosine(X.masked_fill(channels.unsqueeze(-2), 0), mask)


def _lengths(X: Tensor, padded: Tensor | None, square: bool = False) -> Tensor:
    """Compute the lengths (..., n) of the rows of X (..., n, d), or their squares, in a unit near their median.

    With this unit, a length that overflows is far above the median and one that underflows far below, so comparisons
    with the median stay right. A row that is not zero has a length above 0.
    """
    size = power_of_two(X.abs().amax(-1))
    ratio = size / power_of_two(_middle(X.abs().amax(-1), padded)[1])
    energy = (X / size.unsqueeze(-1)).square().sum(-1)
    length = energy * ratio * ratio if square else energy.sqrt() * ratio
    return torch.where(energy > 0, length.clamp(min=torch.finfo(X.dtype).tiny), 0)


def _over_median(values: Tensor, padded: Tensor | None) -> Tensor:
    """Divide values (..., n) by their median, as ``relative_length`` defines it."""
    low, high = _middle(values, padded)
    median = (low + high) / 2
    ratio = values / torch.where(median > 0, median, 1)
    of_zero = torch.where(values > 0, torch.inf, torch.ones_like(values))
    return torch.where(median > 0, ratio, of_zero)


def _middle(values: Tensor, padded: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the middle two (..., 1) of the values (..., n) of real tokens; they are equal where the number is odd."""
    n = values.shape[-1]
    if padded is None:
        ordered = values.sort(-1).values
        return ordered[..., (n - 1) // 2, None], ordered[..., n // 2, None]
    ordered = values.masked_fill(padded[..., 0], torch.inf).sort(-1).values
    count = (~padded).sum(-2)  # (..., 1)
    return ordered.gather(-1, (count - 1) // 2), ordered.gather(-1, count // 2)


def _check_factor(factor: float) -> None:
    if not factor > 0:
        raise LeadlineError(f"factor is {factor}; it must be above 0")
