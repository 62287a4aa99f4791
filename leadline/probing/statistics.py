"""Running statistics of layers, attention heads and token pairs, in constant memory."""

from __future__ import annotations

import math
from collections import defaultdict

import torch
from torch import Tensor

from leadline.metrics import (
    angular_distance,
    attention_entropy,
    block_influence,
    delta,
    effective_rank,
    massive_activations,
    massive_channels,
    massive_tokens,
    omega,
    relative_length,
    robust_similarity,
    sample_cosine,
    second_eigenvalue,
    sink_weight,
    token_cosine,
    token_diversity,
    token_similarity,
)
from leadline.probing.attention_capture import CapturedAttention
from leadline.report.layers import Distribution, LayerData, Massive

_COSINE_BINS = 200  # over [-1, 1]
_ENTROPY_BIN = 0.05  # nats
_CHUNK_PAIRS = 1 << 22  # of tokens in memory at a time
_MOST_MASSIVE = 8  # tokens or channels that a layer's data names
_SINK = 0.3  # mean weight above which a key is a sink
_LARGE = 100.0  # magnitude up to which no entry is massive


_VISIBLE = 1e-30  # weight above which a key is not masked; masks of -100 leave less


class RunningMean:
    """The mean of values that come in batches; NaN values are left out.

    Sums are Python numbers, as are the counts of ``RunningHistogram``. Small tensors that live long would lie between
    the large ones of the model and fragment the heap.
    """

    def __init__(self) -> None:
        self.sums: list[float] = []
        self.counts: list[int] = []

    def add(self, values: Tensor) -> None:
        """Add values (B,) or (B, k): each of the B samples counts once, each of the k columns has its own mean."""
        values = values.detach().double().reshape(len(values), -1)
        sums = values.nan_to_num(0.0, torch.inf, -torch.inf).sum(0).tolist()
        counts = (~values.isnan()).sum(0).tolist()
        self.sums = [a + b for a, b in zip(self.sums or [0.0] * len(sums), sums, strict=True)]
        self.counts = [a + b for a, b in zip(self.counts or [0] * len(counts), counts, strict=True)]

    def value(self) -> float | None:
        """Return the mean of single numbers; None if there is none or it is not finite."""
        values = self.values()
        return None if values is None else values[0]

    def values(self) -> list[float] | None:
        """Return the means by column; None if one of them is missing or not finite."""
        if not self.counts or not all(self.counts):
            return None
        means = [total / count for total, count in zip(self.sums, self.counts, strict=True)]
        return means if all(map(math.isfinite, means)) else None


class RunningHistogram:
    """Histograms of values that come in batches; their means are exact.

    Args:
        start: Lower edge of the first bin.
        width: Width of each bin.
        bins: Number of bins to begin with.
        rows: Number of histograms.
    """

    def __init__(self, start: float, width: float, bins: int, rows: int = 1) -> None:
        self.start, self.width = start, width
        self.counts = [[0] * bins for _ in range(rows)]
        self.sums = [0.0] * rows

    def add(self, values: Tensor) -> None:
        """Add values (rows, k), none of which is NaN. Bins are added at the end as needed."""
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
        """Return one of the histograms with its mean, median and mode."""
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


class CosineHistogram:
    """The distribution of the cosine over all pairs of tokens i < j of each sample.

    As in ``token_cosine`` a zero token has cosine 0 with every other.
    """

    def __init__(self) -> None:
        self.histogram = RunningHistogram(-1.0, 2.0 / _COSINE_BINS, _COSINE_BINS)

    def add(self, X: Tensor, mask: Tensor | None) -> None:
        """Add the pairs of X (B, n, d), mask (B, n), a few rows of pairs at a time."""
        unit = torch.nn.functional.normalize(X.float() if X.dtype != torch.float64 else X, dim=-1, eps=1e-30)
        for i, tokens in enumerate(unit):
            real = tokens if mask is None else tokens[mask[i]]
            n = len(real)
            rows = max(1, _CHUNK_PAIRS // max(n, 1))
            for top in range(0, n, rows):
                pairs = real[top : top + rows] @ real.T
                later = (
                    torch.arange(n, device=X.device) > torch.arange(top, min(top + rows, n), device=X.device)[:, None]
                )
                self.histogram.add(pairs[later][None])

    def distribution(self) -> Distribution | None:
        """Return the distribution; None if there was no pair."""
        return self.histogram.distribution() if any(self.histogram.counts[0]) else None


class AttentionStatistics:
    """Metrics of the attention heads of one layer, measured per sample and head, then averaged over samples."""

    def __init__(self) -> None:
        self.entropy, self.delta, self.omega, self.second_eigenvalue = (RunningMean() for _ in range(4))
        self.uniform = RunningMean()  # entropy of uniform attention
        self.sink, self.sinks = RunningMean(), RunningMean()  # weight on the most attended key; share of heads
        self.entropies: RunningHistogram | None = None

    def add(self, attention: CapturedAttention, X: Tensor, mask: Tensor | None) -> None:
        """Add the attention of one batch.

        Args:
            attention: The captured weights.
            X: (B, n, d), the tokens that entered the attention.
            mask: (B, n), True = a real token.
        """
        self.entropies = self.entropies or RunningHistogram(0.0, _ENTROPY_BIN, 1, attention.heads)
        rows: dict[str, list[Tensor]] = defaultdict(list)
        for sample, head, P in attention.chunks(X.shape[-1]):
            real = None if mask is None else mask[sample : sample + 1]
            P = P.float() if P.dtype in (torch.float16, torch.bfloat16) else P
            P = P if real is None else P.masked_fill(~real[:, None, :, None], 0)
            entropy = attention_entropy(P)[0]  # (h, n)
            rows["queries"].append(entropy if real is None else entropy[:, real[0]])
            rows["delta"].append(delta(P, real, tolerance=1e-6)[0])
            rows["second"].append(second_eigenvalue(P, real, tolerance=1e-6)[0])
            rows["omega"].append(omega(X[sample : sample + 1].to(P), P, real)[0])
            rows["sink"].append(sink_weight(P, real)[0])
            if head + len(entropy) == attention.heads:  # the last heads of this sample
                whole = {name: torch.cat(parts)[None] for name, parts in rows.items()}  # (1, H) or (1, H, n)
                self.uniform.add(_uniform_entropy(P, real))
                self.entropies.add(whole["queries"][0])
                self.entropy.add(whole["queries"].mean(-1))
                self.delta.add(whole["delta"])
                self.second_eigenvalue.add(whole["second"])
                self.omega.add(whole["omega"])
                self.sink.add(whole["sink"])
                self.sinks.add((whole["sink"] > _SINK).double().mean(-1))
                rows.clear()

    def add_entropy(self, attention: CapturedAttention) -> None:
        """Add the entropy alone of attention within windows, or to fewer keys than tokens.

        Args:
            attention: The weights, a row of the batch for each window: (B windows, H, n, keys).
        """
        self.entropies = self.entropies or RunningHistogram(0.0, _ENTROPY_BIN, 1, attention.heads)
        queries: list[Tensor] = []
        for _, head, P in attention.chunks(1):
            P = P.float() if P.dtype in (torch.float16, torch.bfloat16) else P
            queries.append(attention_entropy(P)[0])  # (h, n)
            if head + len(queries[-1]) == attention.heads:  # the last heads of this window
                whole = torch.cat(queries)
                self.uniform.add((P[0, 0] > _VISIBLE).sum(-1).double().log().mean()[None])
                self.entropies.add(whole)
                self.entropy.add(whole.mean(-1)[None])
                queries.clear()

    def distributions(self) -> list[Distribution] | None:
        """Return the distribution of entropy over queries, per head; None if no attention was captured."""
        if self.entropies is None:
            return None
        return [self.entropies.distribution(row) for row in range(len(self.entropies.counts))]


class MassiveCount:
    """Which tokens or channels are massive in which share of the samples, and how large they are."""

    def __init__(self) -> None:
        self.sums: dict[int, tuple[int, float, float]] = {}  # by index: samples, share of energy, ratio
        self.samples = 0

    def add(self, massive: Tensor, share: Tensor, ratio: Tensor, places: Tensor) -> None:
        """Add the samples of a batch.

        Args:
            massive: (B, k), True = massive.
            share: (B, k), share of the sample's energy.
            ratio: (B, k), size over the median.
            places: (B, k), the index that each is counted under.
        """
        self.samples += len(massive)
        if not massive.any():
            return
        for place, *values in zip(*(t[massive].tolist() for t in (places, share, ratio)), strict=True):
            count, *sums = self.sums.get(place, (0, 0.0, 0.0))
            self.sums[place] = (count + 1, sums[0] + values[0], sums[1] + values[1])

    def data(self) -> list[Massive]:
        """Return those with the largest share of the energy over all samples, at most 8."""
        order = sorted(self.sums, key=lambda place: (-self.sums[place][1], place))[:_MOST_MASSIVE]
        rows = [(place, *self.sums[place]) for place in order]
        return [Massive(place, share / n, ratio / n, n / self.samples) for place, n, share, ratio in rows]


class RobustStatistics:
    """Massive tokens and channels of one layer, and the similarities that they do not move."""

    def __init__(self) -> None:
        self.similarity, self.patches, self.between, self.normed, self.entries = (RunningMean() for _ in range(5))
        self.tokens = RunningMean()
        self.massive_tokens, self.massive_channels = MassiveCount(), MassiveCount()

    def add(self, X: Tensor, mask: Tensor | None, prefix: int, before: Tensor | None) -> None:
        """Add the tokens that leave the layer on one batch.

        Args:
            X: (B, n, d), with padding set to 0.
            mask: (B, n), True = a real token.
            prefix: How many class and register tokens come before the patches.
            before: (B, n, any width), the first input with these tokens: what was long there was not made by a layer.
        """
        batch, n, width = X.shape
        X = X.float() if X.dtype in (torch.float16, torch.bfloat16) else X
        real = torch.ones(batch, n, dtype=torch.bool, device=X.device) if mask is None else mask
        self.tokens.add(real.sum(-1))
        self.similarity.add(robust_similarity(X, mask))
        if 0 < prefix < n:
            self.patches.add(robust_similarity(X[:, prefix:], None if mask is None else mask[:, prefix:]))
        if batch > 1:
            self.between.add(sample_cosine(X, mask).expand(batch))
        energy = X.double().square()  # (B, n, d)
        total = energy.sum((1, 2), keepdim=True).clamp(min=torch.finfo(torch.float64).tiny)
        long = massive_tokens(X, before, mask=mask)
        share = (energy / total).sum(-1)
        self.massive_tokens.add(long, share, relative_length(X, mask), real.cumsum(-1) - 1)
        wide = massive_channels(X, mask=mask)
        rest = energy.masked_fill(massive_tokens(X, mask=mask)[..., None], 0).sum(1)  # (B, d)
        middle = rest.sort(-1).values[:, [(width - 1) // 2, width // 2]].mean(-1, keepdim=True)
        ratio = rest / middle.clamp(min=torch.finfo(torch.float64).tiny)
        channels = torch.arange(width, device=X.device).expand(batch, width)
        self.massive_channels.add(wide, (energy / total).sum(1), ratio, channels)
        entries = massive_activations(X, mask).sum((1, 2)) if X.abs().amax() > _LARGE else torch.zeros(batch)
        self.entries.add(entries)


class LayerStatistics:
    """Metrics of one layer over the batches so far."""

    def __init__(self, index: int, name: str) -> None:
        self.index, self.name = index, name
        self.similarity, self.diversity, self.cosine, self.norm, self.rank = (RunningMean() for _ in range(5))
        self.patches, self.rate, self.change, self.gain, self.gradient = (RunningMean() for _ in range(5))
        self.rates: dict[str, RunningMean] = {}
        self.influence, self.angle = RunningMean(), RunningMean()
        self.cosines = CosineHistogram()
        self.attention = AttentionStatistics()
        self.robust = RobustStatistics()

    def add_tokens(self, X: Tensor, mask: Tensor | None, prefix: int, before: Tensor | None = None) -> None:
        """Add the tokens that leave the layer on one batch.

        Args:
            X: (B, n, d), with padding set to 0.
            mask: (B, n), True = a real token.
            prefix: How many class and register tokens come before the patches.
            before: (B, n, any width), the first input with these tokens; by default X itself.
        """
        self.robust.add(X, mask, prefix, X if before is None else before)
        self.similarity.add(token_similarity(X, mask))
        self.diversity.add(token_diversity(X, mask))
        self.cosine.add(token_cosine(X, mask))
        self.rank.add(effective_rank(X, mask))
        lengths = torch.linalg.vector_norm(X.double(), dim=-1)  # (B, n)
        real = torch.ones_like(lengths) if mask is None else mask.double()
        self.norm.add((lengths * real).sum(-1) / real.sum(-1))
        self.cosines.add(X, mask)
        if 0 < prefix < X.shape[1]:
            self.patches.add(token_similarity(X[:, prefix:], None if mask is None else mask[:, prefix:]))

    def add_change(
        self, x: Tensor, y: Tensor, mask: Tensor | None, rates: dict[str, Tensor], gain: Tensor | None
    ) -> None:
        """Add what a block changed on one batch.

        Args:
            x: (B, n, d), its input, with padding set to 0.
            y: (B, n, d), its output.
            mask: (B, n), True = a real token.
            rates: The rate of escalation (B,) of each part of the block.
            gain: The gain (B,) of its attention, if known.
        """
        self.rate.add(token_diversity(x, mask) / token_diversity(y, mask))
        self.change.add(_length(y - x) / _length(x))
        self.influence.add(block_influence(x, y, mask))
        self.angle.add(angular_distance(x, y, mask))
        for part, rate in rates.items():
            self.rates.setdefault(part, RunningMean()).add(rate)
        if gain is not None:
            self.gain.add(gain)

    def layer_data(self) -> LayerData:
        """Return the averages over all samples."""

        def value_or_nan(mean: RunningMean) -> float:
            value = mean.value()
            return float("nan") if value is None else value

        rates = {part: self.rates[part].value() for part in ("attention", "norm", "mlp") if part in self.rates}
        heads = self.attention
        return LayerData(
            index=self.index,
            name=self.name,
            similarity=value_or_nan(self.similarity),
            diversity=value_or_nan(self.diversity),
            cosine=value_or_nan(self.cosine),
            norm=value_or_nan(self.norm),
            effective_rank=value_or_nan(self.rank),
            similarity_patches=self.patches.value(),
            cosines=self.cosines.distribution(),
            rate=self.rate.value(),
            rates={part: rate for part, rate in rates.items() if rate is not None},
            entropy=heads.entropy.values(),
            entropies=heads.distributions(),
            delta=heads.delta.values(),
            omega=heads.omega.values(),
            second_eigenvalue=heads.second_eigenvalue.values(),
            gradient_norm=self.gradient.value(),
            change=self.change.value(),
            gain=self.gain.value(),
            entropy_uniform=heads.uniform.value(),
            tokens=self.robust.tokens.value(),
            similarity_robust=self.robust.similarity.value(),
            robust_patches=self.robust.patches.value(),
            cosine_samples=self.robust.between.value(),
            similarity_normed=self.robust.normed.value(),
            massive_tokens=self.robust.massive_tokens.data(),
            massive_channels=self.robust.massive_channels.data(),
            massive_entries=self.robust.entries.value(),
            influence=self.influence.value(),
            angle=self.angle.value(),
            sink_weight=heads.sink.values(),
            sink_share=heads.sinks.value(),
        )


def _uniform_entropy(P: Tensor, real: Tensor | None) -> Tensor:
    """Return the entropy (1,) of uniform attention: the mean over queries of log(visible keys).

    Weights with nothing above the diagonal are taken to be causal.
    """
    n = P.shape[-1]
    real = torch.ones(1, n, dtype=torch.bool, device=P.device) if real is None else real
    if P.triu(1).any():
        return real.sum(-1).double().log()
    return real.cumsum(-1)[real].double().log().mean()[None]


def _length(x: Tensor) -> Tensor:
    """Return the norm (B,) of all tokens of a sample together."""
    return torch.linalg.vector_norm(x.double(), dim=(-2, -1))
