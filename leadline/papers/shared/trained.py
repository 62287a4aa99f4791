"""What the trained entries make of their records: spreads over seeds, the peak at cosine 1, curves and violins."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from leadline.papers.shared.entry import Claim, above, reported
from leadline.papers.shared.plots import panels
from leadline.report.layers import Distribution, LayerData
from leadline.report.numbers import spans
from leadline.training.runs.runs import Record

NEAR = 0.98  # cosines above it count as 1
SIDE = 0.90  # a peak at 1 stands out against the cosines between this and NEAR
LEAST = 0.01  # and holds at least this share of the pairs
STANDARD = "standard"
Models = Mapping[str, Sequence[LayerData]]  # what the probe says of trained models; nothing of one that diverged


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard deviation; that of a single value is 0."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def plus_minus(values: Sequence[float], digits: int = 4) -> str:
    """Mean and standard deviation; a dash for no values."""
    if not values:
        return "-"
    mean, deviation = spread(values)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def percent(values: Sequence[float]) -> str:
    """Accuracies in [0, 1] -> "63.1 ± 0.4"; one of them has no spread."""
    mean, deviation = spread([100 * value for value in values])
    return f"{mean:.1f} ± {deviation:.1f}" if len(values) > 1 else f"{mean:.1f}"


def accuracy(record: Record) -> float:
    """Of a run that diverged: what guessing among ten gives."""
    return 0.1 if record.diverged else record["test_accuracy"]


def end_loss(record: Record) -> float:
    """The training loss, of the readings that a record keeps, over the last tenth of a run: a single one is mostly the
    noise of its batches."""
    rows = record["training"]
    return statistics.fmean(row["loss"] for row in rows if row["epoch"] > 0.9 * rows[-1]["epoch"])


def difference(a: Sequence[float], b: Sequence[float], scale: float = 100.0) -> tuple[float, float]:
    """Mean of a - b, in points unless scaled otherwise, pair by pair (a pair shares its seed), and its standard
    error."""
    mean, deviation = spread([scale * (x - y) for x, y in zip(a, b, strict=True)])
    return mean, deviation / math.sqrt(len(a))


def said(
    what: str, a: Sequence[float], b: Sequence[float], scale: float = 100.0, unit: str = " points", digits: int = 1
) -> str:
    """The difference in words, and whether it is more than noise; of one seed that is not known."""
    mean, error = difference(a, b, scale)
    if len(a) < 2:
        return f"{what} {mean:+.{digits}f}{unit} (one seed)"
    return f"{what} {mean:+.{digits}f} ± {error:.{digits}f}{unit} ({noise(mean, error, len(a))})"


_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t for 2, 3, ... values


def noise(mean: float, error: float, seeds: int) -> str:
    """Whether a mean with this standard error differs from 0 at 95 %."""
    beyond = abs(mean) > error * _T95[min(seeds - 2, len(_T95) - 1)]
    return f"{'beyond' if beyond else 'within'} the noise of {seeds} seeds at 95 %"


def effort(found: Mapping[Any, Sequence[Record]], more: Sequence[Record] = ()) -> str:
    """How much was trained, and on what."""
    records = [record for kept in found.values() for record in kept] + list(more)
    seconds = sum(record["seconds"] or 0.0 for record in records)
    devices = sorted({record["device"] for record in records if record["device"]})
    on = " and ".join(devices) or "no device"
    if len(records) == 1:
        return f"1 run, {seconds:.0f} s of training, on {on}."
    return (
        f"{len(records)} runs, {seconds:.0f} s of training when added up, on {on}; runs that shared it took longer "
        "each than they would alone."
    )


def diverged_note(found: Mapping[Any, Sequence[Record]]) -> list[str]:
    """Which runs diverged, and why the first of each did; nothing where none did."""
    lost = {arm: [record["diverged"] for record in kept if record.diverged] for arm, kept in found.items()}
    told = [f"{arm}, {len(whys)} of {len(found[arm])} ({whys[0]})" for arm, whys in lost.items() if whys]
    return [f"Diverged, which counts as guessing: {'; '.join(told)}."] if told else []


def curves_table(
    found: Mapping[str, Sequence[Record]], seeds: Sequence[int], figures: Sequence[str] = ("loss",)
) -> list[dict[str, Any]]:
    """The curves of every run."""
    return [
        {"arm": arm, "seed": seed, "curve": which, "step": row["step"], "epoch": row["epoch"],
         **{name: row.get(name) for name in figures}}
        for arm, kept in found.items() for seed, record in zip(seeds, kept, strict=False)
        for which in ("training", "evaluation") for row in record[which]
    ]  # fmt: skip


def layers_table(models: Models) -> list[dict[str, Any]]:
    """What is drawn and said of the token pairs of every layer."""
    return [
        {"arm": arm, "layer": f.index, "similarity": f.similarity, "cosine": f.cosine,
         "cosine_median": f.cosines.median, "cosine_mode": f.cosines.mode, "near_one": near_one(f.cosines),
         "beside_one": beside_one(f.cosines)}
        for arm, layers in models.items() for f in layers if f.cosines is not None
    ]  # fmt: skip


def near_one(distribution: Distribution) -> float:
    """The share of token pairs with a cosine above NEAR."""
    return _share(distribution, NEAR, 1.0)


def beside_one(distribution: Distribution) -> float:
    """The share of token pairs with a cosine between SIDE and NEAR."""
    return _share(distribution, SIDE, NEAR)


def peaks_at_one(distribution: Distribution) -> bool:
    """Whether the histogram rises towards 1: denser above NEAR than between SIDE and NEAR, with a share that counts."""
    top, side = near_one(distribution), beside_one(distribution)
    return top >= LEAST and top / (1 - NEAR) > side / (NEAR - SIDE)


def _share(distribution: Distribution, low: float, high: float) -> float:
    edges = zip(distribution.edges, distribution.edges[1:], distribution.counts, strict=False)
    inside = sum(count for left, right, count in edges if left > low - 1e-6 and right < high + 1e-6)
    return inside / max(1, sum(distribution.counts))


def peak_layers(layers: Sequence[LayerData]) -> tuple[list[int], float]:
    """The layers whose outputs have a peak at cosine 1, and the largest share of pairs above NEAR in any layer."""
    known = [(layer.index, layer.cosines) for layer in layers if layer.index and layer.cosines is not None]
    shares = [near_one(cosines) for _, cosines in known]
    return [index for index, cosines in known if peaks_at_one(cosines)], max(shares, default=0.0)


def peak_claims(models: Models) -> list[Claim]:
    """That the peak at cosine 1 appears with standard attention, and with nothing else."""
    found = {name: peak_layers(layers) if layers else None for name, layers in models.items()}
    counts = {name: None if peak is None else float(len(peak[0])) for name, peak in found.items()}
    what = "layers with a peak at cosine 1,"
    claims = [above(f"{what} {STANDARD}", counts.pop(STANDARD), 0.0)]
    claims += [Claim(f"{what} {name}", "shape", count, 0.0, "none", count == 0) for name, count in counts.items()]
    share = f"largest share of pairs with cosine above {NEAR:g},"
    return claims + [reported(f"{share} {name}", None if peak is None else peak[1]) for name, peak in found.items()]


def peak_sentence(models: Models) -> str:
    """Whether the peak at cosine 1 appears with standard attention, and what removes it."""
    if not models[STANDARD]:
        return "Whether a peak at cosine 1 appears with standard attention is not known: its run diverged."
    found = {name: peak_layers(layers) for name, layers in models.items() if layers}
    first, others = STANDARD, [name for name in found if name != STANDARD]

    def share(name: str) -> str:
        return f"{100 * found[name][1]:.3g} %"

    if not found[first][0]:
        most = "; ".join([f"at most {share(first)} of them", *(f"{name} {share(name)}" for name in others)])
        line = (
            f"A peak at cosine 1 does not appear with {first} attention: in no layer do enough token pairs have a "
            f"cosine above {NEAR:g}, and more densely than just below it ({most})."
        )
        new = [name for name in others if found[name][0]]
        return line + (f" It appears with {_listed(new)}." if new else "")
    line = (
        f"The peak at cosine 1 appears with {first} attention in {_layers(found[first][0])} "
        f"of {len(models[first]) - 1}: up to {share(first)} of the token pairs have a cosine "
        f"above {NEAR:g}."
    )
    stays = [name for name in others if found[name][0]]
    fades = [name for name in others if not found[name][0] and found[name][1] > found[first][1] / 2]
    gone = [name for name in others if name not in stays and name not in fades]
    if gone:
        line += f" It is gone with {_listed([f'{name} (at most {share(name)})' for name in gone])}."
    if fades:
        line += (
            f" With {_listed([f'{name} (at most {share(name)})' for name in fades])} it no longer stands out in any "
            "layer, but there are nearly as many such pairs."
        )
    if stays:
        line += f" It stays with {_listed([f'{name} ({_layers(found[name][0])}, {share(name)})' for name in stays])}."
    return line


def _layers(numbers: Sequence[int]) -> str:
    return f"layer{'s' * (len(numbers) > 1)} {spans(numbers)}"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def band(axis: Any, records: Sequence[Record], which: str, figure: str, label: str, style: Mapping[str, Any]) -> None:
    """A curve by epoch: the mean over records, and what lies between the smallest and the largest."""
    curves = [record.curve(which, figure) for record in records if not record.diverged]
    if not curves:
        return
    length = min(len(x) for x, _ in curves)
    x = curves[0][0][:length]
    by_point = list(zip(*(y[:length] for _, y in curves), strict=True))
    every = {**style, "markevery": max(length // 10, 1)}
    axis.plot(x, [statistics.fmean(point) for point in by_point], label=label, **every)
    low, high = [min(point) for point in by_point], [max(point) for point in by_point]
    axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def violins(models: Models, draw: Callable[[Any, Sequence[LayerData]], None], titles: str = "{}", **size: Any) -> Any:
    """A panel of violins for each model, all to one scale; of one that diverged the panel says so."""
    figure, axes = panels(1, rows=len(models), **size)
    for axis, (name, layers) in zip(axes, models.items(), strict=True):
        axis.set_title(titles.format(name), loc="left")
        if layers:
            draw(axis, layers)
        else:
            axis.text(0.5, 0.5, "diverged", transform=axis.transAxes, ha="center")
    ends = [axis.get_ylim() for axis, layers in zip(axes, models.values(), strict=True) if layers]
    if ends:
        for axis in axes:
            axis.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    return figure
