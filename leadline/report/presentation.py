"""Prepares the data of a report for people: numbers, settings and cures as text, outlines of violins."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise

from leadline.report.layers import Distribution

NONE = "–"  # stands for a number that was not measured


def finite(value: float | None) -> float | None:
    """Return the number itself; None for None, NaN and infinity, which neither JSON nor an axis can hold."""
    return float(value) if value is not None and math.isfinite(value) else None


def mean_of(values: Sequence[float] | None) -> float | None:
    """Return the mean of the finite ones among ``values`` (such as one number per head); None if there are none."""
    known = [v for v in values or () if finite(v) is not None]
    return math.fsum(known) / len(known) if known else None


def number(value: float | None) -> str:
    """Format a number with four digits for reading: 0.4821, 17.3, 1.2e-7; a dash for what was not measured."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 0 < 1 - value < 5e-5:  # must not be rounded to 1
        return f"1 - {number(float(f'{1 - value:.2g}'))}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def short(value: float | None, digits: int = 7) -> float | None:
    """Round to a few significant digits, so that the file stays small; None for what is not finite."""
    known = finite(value)
    return None if known is None else float(f"{known:.{digits}g}")


def spans(numbers: Iterable[int]) -> str:
    """Join runs of consecutive numbers: [3, 4, 5, 9] -> "3–5, 9"."""
    runs: list[list[int]] = []
    for value in sorted(set(numbers)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def as_text(value: object) -> str:
    """Format a setting of any type."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {as_text(v)}" for key, v in value.items()) or NONE
    if isinstance(value, list | tuple):
        return ", ".join(as_text(v) for v in value) or NONE
    return str(value)


def cure_call(cure: dict[str, float]) -> str:
    """Return the line of code that applies a cure."""
    return f"leadline.cure(model, {', '.join(f'{key}={value!r}' for key, value in cure.items())})"


def outline(distribution: Distribution, points: int = 48) -> tuple[list[float], list[float]] | None:
    """Return the outline of a violin plot: values and half-widths, of which the widest is 1.

    The half-width at the middle of a bin is its density. The outline begins and ends at the outer edges of the
    outermost non-empty bins, so a single full bin is a rhombus instead of a line.

    Args:
        distribution: The histogram.
        points: Largest number of bins; neighbouring bins are merged until there are no more.

    Returns:
        Values and half-widths, or None for an empty histogram.
    """
    full = [i for i, count in enumerate(distribution.counts) if count > 0]
    if not full:
        return None
    first, end = full[0], full[-1] + 1
    step = -(-(end - first) // points)
    cuts = [*range(first, end, step), end]
    edges = [distribution.edges[i] for i in cuts]
    density = [
        sum(distribution.counts[a:b]) / (high - low)
        for a, b, low, high in zip(cuts, cuts[1:], edges, edges[1:], strict=False)
    ]
    peak = max(density)
    middles = [(low + high) / 2 for low, high in pairwise(edges)]
    return [edges[0], *middles, edges[-1]], [0.0, *(d / peak for d in density), 0.0]
