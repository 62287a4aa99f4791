"""Figures for paper by matplotlib: a depth report, violins, and the figure of the demo."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from leadline.errors import need
from leadline.report.layers import Distribution, LayerData, ReportData
from leadline.report.presentation import finite, outline

# Lines differ in dash and marker too, so that they can be told apart without colour. The page uses the same styles.
# The colours are Okabe and Ito's, which most kinds of colour blindness tell apart.
LINE_STYLES: list[dict[str, Any]] = [
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    {"color": "#D55E00", "linestyle": ":", "marker": "^"},
    {"color": "#009E73", "linestyle": "-.", "marker": "D"},
    {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
]
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
# name, marker, face, edge, relative area; the median is a dash across the mean
_MARKS = (
    ("mode", "D", "none", "#000000", 1.0),
    ("mean", "o", "#D55E00", "#D55E00", 1.0),
    ("median", "_", "#000000", "#000000", 5.0),
)
_MOST_VIOLINS = 144  # in one panel; more cannot be told apart on paper


def render_figure(report: ReportData, kind: str, before: ReportData | None = None) -> bytes:
    """Draw a report as a figure for a paper.

    The panels are similarity and diversity by layer, violins of the cosine of token pairs, and violins of attention
    entropy; the violins only where they were measured.

    Args:
        report: The report to draw.
        kind: Format of the file: "pdf", "png" or "svg".
        before: A second report. Both then share the curves and have violins of their own.

    Returns:
        The content of the file.
    """
    matplotlib: Any = need("matplotlib", "plot")
    canvas: Any = need("matplotlib.figure", "plot")
    reports = {"": report} if before is None else {"before": before, "after": report}
    with matplotlib.rc_context(_TYPE):
        content = io.BytesIO()
        figure = _draw(canvas.Figure, reports)
        stamp = {"pdf": {"CreationDate": None}, "svg": {"Date": None}}.get(kind)
        figure.savefig(content, format=kind, dpi=300, metadata=stamp)
    return content.getvalue()


def save_demo_figure(
    file: Path, similarity: Mapping[str, Sequence[float]], losses: Mapping[str, Sequence[float]]
) -> None:
    """Draw the figure of ``leadline demo``: similarity by block and training loss by epoch, a line per model.

    Args:
        file: The picture to write.
        similarity: Token similarity by block, for each model.
        losses: Training loss by epoch, for each model.
    """
    canvas: Any = need("matplotlib.figure", "plot")
    figure = canvas.Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    # widest line first, so that lines which coincide show below each other
    widths = [5.0, 2.4, 1.6, 1.6, 1.6]
    for (name, curve), style, width in zip(similarity.items(), LINE_STYLES, widths, strict=False):
        left.plot(range(len(curve)), curve, label=name, markevery=10, markersize=4, linewidth=width, **style)
    left.set(xlabel="block", ylabel="token similarity", ylim=(0, 1.03), title="BERT, 100 layers, at initialisation")
    left.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.34))
    for (name, curve), style in zip(losses.items(), LINE_STYLES, strict=False):
        right.plot(range(1, len(curve) + 1), curve, label=name, markersize=4, **style)
    right.set(xlabel="epoch", ylabel="training loss", yscale="log", title="8 layers without skips, digits")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150, format="png")


def _draw(new: Any, reports: dict[str, ReportData]) -> Any:
    """Draw all panels into a figure made by ``new``, a class of matplotlib."""
    cosines = {name: [f for f in r.layers if f.cosines and outline(f.cosines)] for name, r in reports.items()}
    entropies = {name: [f for f in r.layers if f.entropies] for name, r in reports.items()}
    rows = 1 + any(cosines.values()) + any(entropies.values())
    figure = new(figsize=(_WIDTH, 2.1 * rows + 0.1), layout="constrained")
    grid = figure.add_gridspec(rows, 2)
    letters = iter("abcdefgh")

    def panel(row: int, column: Any, name: str = "") -> Any:
        axis = figure.add_subplot(grid[row, column])
        axis.set_title(f"({next(letters)}) {name}", loc="left")
        return axis

    similarity_curves(panel(0, 0), reports)
    diversity_curves(panel(0, 1), reports)
    row = 0
    for layers, draw in ((cosines, cosine_violins), (entropies, _entropies_thinned)):
        if not any(layers.values()):
            continue
        row += 1
        drawn = []
        for i, (name, measured) in enumerate(layers.items()):
            axis = panel(row, slice(None) if len(reports) == 1 else i, name)
            draw(axis, measured)
            drawn += [axis] if measured else []
        ends = [axis.get_ylim() for axis in drawn]
        for axis in drawn:  # to one scale
            axis.set_ylim(min(low for low, _ in ends), max(high for _, high in ends))
    return figure


def _curve(axis: Any, name: str, layers: Sequence[LayerData], get: Callable[[LayerData], Any], index: int) -> None:
    """Draw one number by layer in line style ``index``."""
    values = [finite(get(f)) for f in layers]
    if layers:  # the axis spans all layers, also those without a number
        axis.update_datalim([(layers[0].index - 0.3, 0.5), (layers[-1].index + 0.3, 0.5)], updatey=False)
    if any(value is not None for value in values):
        y = [math.nan if value is None else value for value in values]  # a gap where nothing was measured
        axis.plot([f.index for f in layers], y, label=name, markevery=max(1, len(y) // 12), **LINE_STYLES[index])


def similarity_curves(axis: Any, reports: dict[str, ReportData]) -> None:
    """Draw similarity by layer of each report; for a single unnamed one also its mean cosine and its patches."""
    for i, (name, report) in enumerate(reports.items()):
        _curve(axis, name or "similarity", report.layers, lambda f: f.similarity, i)
        if not name:
            _curve(axis, "mean cosine", report.layers, lambda f: f.cosine, 1)
            _curve(axis, "patches only", report.layers, lambda f: f.similarity_patches, 2)
    axis.set(ylabel="token similarity")
    _finish(axis)
    axis.set_ylim(min(0.0, axis.get_ylim()[0]), 1.04)


def diversity_curves(axis: Any, reports: dict[str, ReportData]) -> None:
    """Draw diversity by layer on a logarithmic axis, which has no place for a diversity of 0."""
    for i, (name, report) in enumerate(reports.items()):
        _curve(axis, name or "diversity", report.layers, lambda f: f.diversity if f.diversity > 0 else None, i)
    axis.set(ylabel="token diversity", yscale="log")
    _finish(axis)
    low, high = axis.get_ylim()
    if high < 8 * low:  # less than a decade: plain numbers instead of 9.5 x 10^-1
        axis.yaxis.set_major_formatter("{x:g}")
        axis.yaxis.set_minor_formatter("{x:g}")


def _finish(axis: Any) -> None:
    """Label the layers, and add a grid and a legend."""
    ticker: Any = need("matplotlib.ticker", "plot")
    axis.set_xlabel("layer")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=8, steps=[1, 2, 5, 10], min_n_ticks=1))
    axis.grid(alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    if len(axis.get_legend_handles_labels()[1]) > 1:
        axis.legend(frameon=False)


def _violins(axis: Any, places: Sequence[tuple[float, Distribution]], half: float) -> None:
    """Draw violins of half-width ``half`` at the given places and mark mode, median and mean."""
    collections: Any = need("matplotlib.collections", "plot")
    shapes, drawn = [], []
    for place, distribution in places:
        shape = outline(distribution, 64)
        if shape is None:
            continue
        right = [(place + half * width, value) for value, width in zip(*shape, strict=True)]
        shapes.append(right + [(2 * place - x, value) for x, value in reversed(right)])
        drawn.append((place, distribution))
    axis.add_collection(
        collections.PolyCollection(shapes, facecolors="#0072B2", alpha=0.35, edgecolors="#0072B2", linewidths=0.4)
    )
    size = 9.0 if len(drawn) <= 30 else 3.5
    for name, marker, face, edge, area in _MARKS:
        points = [(place, value) for place, d in drawn if (value := finite(getattr(d, name))) is not None]
        if points:
            colours = {"color": edge} if marker == "_" else {"facecolors": face, "edgecolors": edge}
            axis.scatter(
                *zip(*points, strict=True), s=area * size, marker=marker, linewidths=0.7, label=name, **colours
            )
    axis.autoscale_view()
    axis.grid(axis="y", alpha=0.25, linewidth=0.5)
    axis.spines[["top", "right"]].set_visible(False)
    if drawn:
        axis.legend(
            frameon=False, ncols=3, loc="lower right", bbox_to_anchor=(1.0, 0.98), handletextpad=0.1, columnspacing=0.7
        )


def cosine_violins(axis: Any, layers: Sequence[LayerData]) -> None:
    """Draw a violin of the cosine of token pairs per layer, from the histograms ``cosines`` (HOP, figures 4 to 12)."""
    _violins(axis, [(f.index, f.cosines) for f in layers if f.cosines is not None], 0.42)
    axis.set(xlabel="layer", ylabel="cosine of token pairs")
    ticker: Any = need("matplotlib.ticker", "plot")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, nbins=13, steps=[1, 2, 5, 10], min_n_ticks=1))


def entropy_violins(axis: Any, layers: Sequence[LayerData]) -> None:
    """Draw a violin of attention entropy per head, the heads of a layer side by side (HOP, figures 13 to 20)."""
    measured = [f for f in layers if f.entropies]
    heads = max((len(f.entropies or ()) for f in measured), default=1)
    step = 0.86 / heads
    places = [
        (slot + step * (head - (heads - 1) / 2), distribution)
        for slot, f in enumerate(measured)
        for head, distribution in enumerate(f.entropies or ())
    ]
    _violins(axis, places, 0.46 * step)
    axis.set(xlabel=f"layer ({heads} heads each)" if heads > 1 else "layer", ylabel="entropy (nats)")
    ticks = evenly(range(len(measured)), 26)
    axis.set_xticks(ticks, [str(measured[i].index) for i in ticks])
    low, high = axis.get_ylim()
    low = min(0.0, low)
    axis.set_ylim(low, high + 0.05 * (high - low))  # the marks of uniform attention stay below the edge


def _entropies_thinned(axis: Any, layers: Sequence[LayerData]) -> None:
    """Draw the entropy violins of as many evenly spaced layers as can be told apart."""
    heads = max((len(f.entropies or ()) for f in layers), default=1)
    few = evenly(layers, _MOST_VIOLINS // heads)
    entropy_violins(axis, few)
    if len(few) < len(layers):
        axis.set_xlabel(f"layer ({heads} heads each; {len(few)} of {len(layers)} layers shown)")


def evenly(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most ``most`` of the items, evenly spaced, the last one always among them."""
    step = -(-len(items) // max(1, most))
    return list(items[(len(items) - 1) % step :: step]) if items else []
