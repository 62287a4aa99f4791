"""A depth report as a figure for a paper, by matplotlib: text width, 8 pt type, lines that differ without colour."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from leadline.errors import LeadlineError, need
from leadline.report.demo_figure import _STYLES
from leadline.report.layers import Distribution, LayerFigures
from leadline.report.numbers import Report, evenly, finite, outline, write_whole

_SUFFIXES = (".pdf", ".png", ".svg")
_WIDTH = 6.75  # inches: the text width of most proceedings, two columns
_TYPE = {
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.labelsize": 8,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.2,
    "lines.markersize": 3.5,
    "pdf.fonttype": 42,  # letters stay letters: publishers refuse type 3 fonts
    "svg.hashsalt": "leadline",  # the same report gives the same file
}
# name, marker, face, edge, area against the others'; the median is a dash across the mean
_MARKS = (
    ("mode", "D", "none", "#000000", 1.0),
    ("mean", "o", "#D55E00", "#D55E00", 1.0),
    ("median", "_", "#000000", "#000000", 5.0),
)
_MOST_VIOLINS = 144  # in one panel; more cannot be told apart on paper


def save_figure(report: Report, path: str | Path, before: Report | None = None) -> Path:
    """Draw ``report`` into a PNG, SVG or PDF, by the suffix of ``path``; returns the path.

    Panels: similarity and diversity by layer, violins of the cosine of token pairs, violins of attention entropy (where
    they were measured). With ``before`` both reports share the curves and have violins of their own.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _SUFFIXES:
        raise LeadlineError(f"cannot draw {str(path)!r}: a figure ends in {', '.join(_SUFFIXES)}; rename the file")
    matplotlib: Any = need("matplotlib", "plot")
    canvas: Any = need("matplotlib.figure", "plot")
    shown = {"": report} if before is None else {"before": before, "after": report}
    with matplotlib.rc_context(_TYPE):
        content = io.BytesIO()
        figure = _draw(canvas.Figure, shown)
        stamp = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}.get(suffix)
        figure.savefig(content, format=suffix[1:], dpi=300, metadata=stamp)
    return write_whole(path, content.getvalue())


def _draw(new: Any, shown: dict[str, Report]) -> Any:
    cosines = {name: [f for f in r.layers if outline(f.cosines)] for name, r in shown.items()}
    entropies = {name: [f for f in r.layers if f.entropies] for name, r in shown.items()}
    rows = 1 + any(cosines.values()) + any(entropies.values())
    figure = new(figsize=(_WIDTH, 2.1 * rows + 0.1), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    letters = iter("abcdefgh")

    def panel(row: int, column: Any, name: str = "") -> Any:
        axis = figure.add_subplot(grid[row, column])
        axis.set_title(f"({next(letters)}) {name}", loc="left")
        return axis

    similarity_curves(panel(0, 0), shown)
    diversity_curves(panel(0, 1), shown)
    row = 0
    for layers, draw in ((cosines, cosine_violins), (entropies, _entropies_thinned)):
        if not any(layers.values()):
            continue
        row += 1
        drawn = []
        for i, (name, found) in enumerate(layers.items()):
            axis = panel(row, slice(None) if len(shown) == 1 else i, name)
            draw(axis, found)
            drawn += [axis] if found else []
        ends = [axis.get_ylim() for axis in drawn]
        for axis in drawn:  # to one scale
            axis.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    return figure


def _curve(
    axis: Any, name: str, layers: Sequence[LayerFigures], get: Callable[[LayerFigures], Any], index: int
) -> None:
    values = [finite(get(f)) for f in layers]
    if layers:  # the axis spans all layers, also those without a number
        axis.update_datalim([(layers[0].index - 0.3, 0.5), (layers[-1].index + 0.3, 0.5)], updatey=False)
    if any(value is not None for value in values):
        y = [math.nan if value is None else value for value in values]  # a gap where nothing was measured
        axis.plot([f.index for f in layers], y, label=name, markevery=max(1, len(y) // 12), **_STYLES[index])


def similarity_curves(axis: Any, shown: dict[str, Report]) -> None:
    """Similarity by layer: of each report, or of a single one with its cosine and its patches beside it."""
    for i, (name, report) in enumerate(shown.items()):
        _curve(axis, name or "similarity", report.layers, lambda f: f.similarity, i)
        if not name:
            _curve(axis, "mean cosine", report.layers, lambda f: f.cosine, 1)
            _curve(axis, "patches only", report.layers, lambda f: f.similarity_patches, 2)
    axis.set(ylabel="token similarity")
    _finish(axis)
    axis.set_ylim(min(0.0, axis.get_ylim()[0]), 1.04)


def diversity_curves(axis: Any, shown: dict[str, Report]) -> None:
    """Diversity by layer on a logarithmic axis; a diversity of 0 has no place there and is left out."""
    for i, (name, report) in enumerate(shown.items()):
        _curve(axis, name or "diversity", report.layers, lambda f: f.diversity if f.diversity > 0 else None, i)
    axis.set(ylabel="token diversity", yscale="log")
    _finish(axis)
    low, high = axis.get_ylim()
    if high < 8 * low:  # less than a decade: plain numbers instead of 9.5 x 10^-1
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")


def _finish(axis: Any) -> None:
    ticker: Any = need("matplotlib.ticker", "plot")
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    if len(axis.get_legend_handles_labels()[1]) > 1:
        axis.legend(frameon=False)


def _violins(axis: Any, places: Sequence[tuple[float, Distribution]], half: float) -> None:
    """Violins of half-width ``half`` at the given places, with mode, median and mean marked."""
    collections: Any = need("matplotlib.collections", "plot")
    shapes, kept = [], []
    for place, distribution in places:
        shape = outline(distribution, 64)
        if shape is None:
            continue
        right = [(place + half * width, value) for value, width in zip(*shape, strict=True)]
        shapes.append(right + [(2 * place - x, value) for x, value in reversed(right)])
        kept.append((place, distribution))
    axis.add_collection(
        collections.PolyCollection(shapes, facecolors="#0072B2", alpha=0.35, edgecolors="#0072B2", linewidths=0.4)
    )
    size = 9.0 if len(kept) <= 30 else 3.5
    for name, marker, face, edge, area in _MARKS:
        points = [(place, value) for place, d in kept if (value := finite(getattr(d, name))) is not None]
        if points:
            colours = {"color": edge} if marker == "_" else {"facecolors": face, "edgecolors": edge}
            axis.scatter(
                *zip(*points, strict=True), s=area * size, marker=marker, linewidths=0.7, label=name, **colours
            )
    axis.autoscale_view()
    axis.grid(axis="y", alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    if kept:
        axis.legend(
            frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98), handletextpad=0.1, columnspacing=0.7
        )


def cosine_violins(axis: Any, layers: Sequence[LayerFigures]) -> None:
    """Violins of the cosine of token pairs, one a layer (HOP, figures 4 to 12), from the histograms ``cosines``."""
    _violins(axis, [(f.index, f.cosines) for f in layers if f.cosines is not None], 0.42)
    axis.set(xlabel="layer", ylabel="cosine of token pairs")
    ticker: Any = need("matplotlib.ticker", "plot")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=13, steps=[1, 2, 5, 10], min_n_ticks=1))


def entropy_violins(axis: Any, layers: Sequence[LayerFigures]) -> None:
    """Violins of attention entropy, one a head, the heads of a layer side by side (HOP, figures 13 to 20)."""
    found = [f for f in layers if f.entropies]
    heads = max((len(f.entropies or ()) for f in found), default=1)
    step = 0.86 / heads
    places = [
        (slot + step * (head - (heads - 1) / 2), distribution)
        for slot, f in enumerate(found)
        for head, distribution in enumerate(f.entropies or ())
    ]
    _violins(axis, places, 0.46 * step)
    axis.set(xlabel=f"layer ({heads} heads each)" if heads > 1 else "layer", ylabel="entropy (nats)")
    ticks = evenly(range(len(found)), 26)
    axis.set_xticks(ticks, [str(found[i].index) for i in ticks])
    low, high = axis.get_ylim()
    axis.set_ylim(
        min(0.0, low), high + 0.05 * (high - min(0.0, low))
    )  # the marks of uniform attention stay below the edge


def _entropies_thinned(axis: Any, layers: Sequence[LayerFigures]) -> None:
    """As many evenly spaced layers as can be told apart; their numbers stand on the axis."""
    heads = max((len(f.entropies or ()) for f in layers), default=1)
    few = evenly(layers, _MOST_VIOLINS // heads)
    entropy_violins(axis, few)
    if len(few) < len(layers):
        axis.set_xlabel(f"layer ({heads} heads each; {len(few)} of {len(layers)} layers shown)")
