"""Running means and histograms: the same memory for one batch and for a million."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leadline.report.layers import Distribution

COSINE_BINS = 200  # over [-1, 1]
ENTROPY_BIN = 0.05  # nats
_PAIRS_AT_A_TIME = 1 << 22


class Mean:
    """The mean of values that come in batches; NaN values are left out.

    The sums are Python's numbers, as are the counts of ``Histogram``: small tensors that live long would lie between
    the large ones of the model, and cut the heap into pieces that no later one fits.
    """

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.counts: list[int] = []

    def add(self, values: Tensor) -> None:
        """values (B,) or (B, k): each of the B samples counts once, each of the k columns has its own mean."""
        values = values.detach().double().reshape(len(values), -1)
        sums = values.nan_to_num(0.0, torch.inf, -torch.inf).sum(0).tolist()
        counts = (~values.isnan()).sum(0).tolist()
        self.sums = [a + b for a, b in zip(self.sums or [0.0] * len(sums), sums, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts or [0] * len(counts), counts, strict=True)]

    def value(self) -> float | None:
        """The mean of single numbers; None where there is none, or it is not finite."""
        values = self.values()
        return None if values is None else values[0]

    def values(self) -> list[float] | None:
        """The means by column; None where one of them is missing or not finite."""
        if not self.counts or not all(self.counts):
            return None
        means = [total / count for total, count in zip(self.sums, self.counts, strict=True)]
        return means if all(map(math.isfinite, means)) else None


class Histogram:
    """Counts in bins of one width from ``start`` on; ``rows`` of them at once. The mean is exact."""

    def __init__(self, start: float, width: float, bins: int, rows: int = 1) -> None:
        self.start, self.width = start, width
        self.counts = [[0] * bins for _ in range(rows)]
        self.sums = [0.0] * rows

    def add(self, values: Tensor) -> None:
        """values (rows, k); they must not be NaN. Bins are added at the end as needed."""
        rows, bins = len(self.counts), len(self.counts[0])
        at = ((values.detach() - self.start) / self.width).floor().long().clamp(min=0)
        if self.start < 0:  # a closed interval: rounding may put a cosine of 1 beyond its end
            at = at.clamp(max=bins - 1)
        bins = max(bins, int(at.max()) + 1 if at.numel() else 0)
        at = at + bins * torch.arange(rows, device=at.device)[:, None]
        new = torch.bincount(at.flatten(), minlength=rows * bins).view(rows, bins).tolist()
        for row, counts in enumerate(new):
            old = self.counts[row] + [0] * (bins - len(self.counts[row]))
            self.counts[row] = [a + b for a, b in zip(old, counts, strict=True)]
        self.sums = [a + b for a, b in zip(self.sums, values.double().sum(-1).tolist(), strict=True)]

    def distribution(self, row: int = 0) -> Distribution:
        counts = self.counts[row]
        total = sum(counts)
        edges = [self.start + self.width * i for i in range(len(counts) + 1)]
        if not total:
            return Distribution(edges, list(counts), math.nan, math.nan, math.nan)
        before, middle = 0, 0
        while 2 * (before + counts[middle]) < total:
            before += counts[middle]
            middle += 1
        median = edges[middle] + self.width * (total / 2 - before) / counts[middle]
        mode = edges[counts.index(max(counts))] + self.width / 2
        return Distribution(edges, list(counts), self.sums[row] / total, median, mode)


class Cosines:
    """The distribution of the cosine over all pairs of tokens i < j, a few rows of pairs at a time.

    As in ``token_cosine`` a zero token has cosine 0 with every other.
    """

    def __init__(self) -> None:
        self.histogram = Histogram(-1.0, 2.0 / COSINE_BINS, COSINE_BINS)

    def add(self, X: Tensor, mask: Tensor | None) -> None:
        """X (B, n, d), mask (B, n)."""
        unit = torch.nn.functional.normalize(X.float() if X.dtype != torch.float64 else X, dim=-1, eps=1e-30)
        for i, tokens in enumerate(unit):
            real = tokens if mask is None else tokens[mask[i]]
            n = len(real)
            rows = max(1, _PAIRS_AT_A_TIME // max(n, 1))
            for top in range(0, n, rows):
                pairs = real[top : top + rows] @ real.T
                later = (
                    torch.arange(n, device=X.device) > torch.arange(top, min(top + rows, n), device=X.device)[:, None]
                )
                self.histogram.add(pairs[later][None])

    def distribution(self) -> Distribution | None:
        return self.histogram.distribution() if any(self.histogram.counts[0]) else None
