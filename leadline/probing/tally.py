"""Running means and histograms: the same memory for one batch and for a million."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from leadline.probing.figures import Distribution

COSINE_BINS = 200  # over [-1, 1]
ENTROPY_BIN = 0.05  # nats
_PAIRS_AT_A_TIME = 1 << 22


class Mean:
    """The mean of values that come in batches, shape (...) each; NaN values are left out."""

    def __init__(self) -> None:
        self.sum: Tensor | None = None
        self.count: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """values (B, ...): each of the B samples counts once."""
        values = values.detach().double()
        known = ~values.isnan()
        total, count = values.nan_to_num(0.0, torch.inf, -torch.inf).sum(0).cpu(), known.sum(0).cpu()
        self.sum = total if self.sum is None else self.sum + total
        self.count = count if self.count is None else self.count + count

    def value(self) -> float | None:
        """The mean of single numbers; None where there is none, or it is not finite."""
        if self.sum is None or self.count is None or not self.count.item():
            return None
        mean = (self.sum / self.count).item()
        return mean if math.isfinite(mean) else None

    def values(self) -> list[float] | None:
        """The means of rows of numbers, None where one of them is missing or not finite."""
        if self.sum is None or self.count is None:
            return None
        means = self.sum / self.count
        return means.tolist() if bool(torch.isfinite(means).all()) else None


class Histogram:
    """Counts in bins of one width from ``start`` on; ``rows`` of them at once. The mean is exact."""

    def __init__(self, start: float, width: float, bins: int, rows: int = 1) -> None:
        self.start, self.width = start, width
        self.counts = torch.zeros(rows, bins, dtype=torch.int64)
        self.sum = torch.zeros(rows, dtype=torch.float64)

    def add(self, values: Tensor, rows: Tensor | int = 0) -> None:
        """values (k,), to the row or rows (k,); they must not be NaN. Bins are added at the end as needed."""
        values = values.detach()
        rows = torch.as_tensor(rows, device=values.device).expand(values.shape)
        at = ((values - self.start) / self.width).floor().long().clamp(min=0)
        if self.start < 0:  # a closed interval: rounding may put a cosine of 1 beyond its end
            at = at.clamp(max=self.counts.shape[1] - 1)
        needed = int(at.max()) + 1 if at.numel() else 0
        if needed > self.counts.shape[1]:
            self.counts = torch.nn.functional.pad(self.counts, (0, needed - self.counts.shape[1]))
        height, width = self.counts.shape
        self.counts += torch.bincount(rows * width + at, minlength=height * width).view(height, width).cpu()
        self.sum += torch.zeros(height, dtype=torch.float64).index_add_(0, rows.cpu(), values.double().cpu())

    def distribution(self, row: int = 0) -> Distribution:
        counts, total = self.counts[row], int(self.counts[row].sum())
        edges = [self.start + self.width * i for i in range(len(counts) + 1)]
        if not total:
            return Distribution(edges, counts.tolist(), math.nan, math.nan, math.nan)
        running = counts.cumsum(0)
        middle = int((running * 2 >= total).nonzero()[0])
        before = int(running[middle - 1]) if middle else 0
        median = edges[middle] + self.width * (total / 2 - before) / int(counts[middle])
        mode = edges[int(counts.argmax())] + self.width / 2
        return Distribution(edges, counts.tolist(), float(self.sum[row]) / total, median, mode)


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
                self.histogram.add(pairs[later])

    def distribution(self) -> Distribution | None:
        return self.histogram.distribution() if self.histogram.counts.any() else None
