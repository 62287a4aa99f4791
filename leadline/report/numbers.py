"""What the page and the paper figures share: number formats, the outline of a violin, safe writing of a file."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from leadline.errors import LeadlineError
from leadline.files import whole
from leadline.report.layers import Distribution, Heatmap, LayerFigures, Verdict

NONE = "–"  # stands for a number that was not measured


class Report(Protocol):
    """What is drawn: ``leadline.report.layers.Figures``, or anything with these attributes."""

    @property
    def model(self) -> str: ...
    @property
    def settings(self) -> dict[str, Any]: ...
    @property
    def layers(self) -> list[LayerFigures]: ...
    @property
    def verdict(self) -> Verdict: ...
    @property
    def heatmaps(self) -> list[Heatmap]: ...


def finite(value: float | None) -> float | None:
    """The number itself; None for None, NaN and infinity, which neither JSON nor an axis can hold."""
    return float(value) if value is not None and math.isfinite(value) else None


def mean_of(values: Sequence[float] | None) -> float | None:
    """Mean of the finite ones among ``values`` (such as one number a head); None when there is none."""
    known = [v for v in values or () if finite(v) is not None]
    return math.fsum(known) / len(known) if known else None


def number(value: float | None) -> str:
    """Four digits, in a form that a person reads: 0.4821, 17.3, 1.2e-7; a dash for what was not measured."""
    if value is None or math.isnan(value):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if 0 < 1 - value < 5e-5:  # must not read as 1
        return f"1 - {number(float(f'{1 - value:.2g}'))}"
    if 1e-3 <= abs(value) < 1e5:
        return f"{value:.4g}"
    mantissa, _, exponent = f"{value:.3g}".partition("e")
    return f"{mantissa}e{int(exponent)}" if exponent else mantissa


def short(value: float | None, digits: int = 7) -> float | None:
    """``value`` with a few significant digits, so that the file stays small; None for what is not finite."""
    known = finite(value)
    return None if known is None else float(f"{known:.{digits}g}")


def spans(numbers: Iterable[int]) -> str:
    """[3, 4, 5, 9] -> "3–5, 9"."""
    runs: list[list[int]] = []
    for value in sorted(set(numbers)):
        if runs and value == runs[-1][1] + 1:
            runs[-1][1] = value
        else:
            runs.append([value, value])
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in runs)


def said(value: object) -> str:
    """A setting of any type, as text."""
    if value is None:
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, dict):
        return ", ".join(f"{key} {said(v)}" for key, v in value.items()) or NONE
    if isinstance(value, list | tuple):
        return ", ".join(said(v) for v in value) or NONE
    return str(value)


def call(cure: dict[str, float]) -> str:
    """The line of code that applies a cure."""
    return f"leadline.cure(model, {', '.join(f'{key}={value!r}' for key, value in cure.items())})"


def outline(distribution: Distribution | None, points: int = 48) -> tuple[list[float], list[float]] | None:
    """Where a violin is how wide: (values, half-widths), the widest 1; None when the histogram is empty.

    The half-width at the middle of a bin is its density; bins are merged until there are at most ``points``. The ends
    are the outer edges of the outermost bins that hold anything, so a single full bin is a rhombus, not a line.
    """
    if distribution is None:
        return None
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


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """At most ``most`` of the items, evenly spaced, the last one always among them."""
    step = -(-len(items) // max(1, most))
    return list(items[(len(items) - 1) % step :: step]) if items else []


def write_whole(path: str | Path, content: bytes) -> Path:
    """Write a file in one go: a reader sees the old file or the new one, never half of it."""
    target = Path(path)
    if target.is_dir():
        raise LeadlineError(f"cannot write {str(target)!r}: it is a folder; give the name of a file in it")
    if not target.parent.is_dir():
        raise LeadlineError(f"cannot write {str(target)!r}: no folder {str(target.parent)!r}; create it first")
    try:
        with whole(target) as new:
            new.write_bytes(content)
    except OSError as error:
        raise LeadlineError(f"cannot write {str(target)!r}: {error.strerror}; give a path you may write to") from error
    return target
