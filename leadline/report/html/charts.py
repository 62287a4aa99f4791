"""The curves, violins and heat maps of the page, as plain data that ``assets/chart.js`` draws."""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.report.layers import Distribution, Heatmap, LayerData, ReportData
from leadline.report.paper import LINE_STYLES
from leadline.report.presentation import finite, mean_of, outline, short

_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
_MARKERS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"}
LAYER = "layer (0: input of the first block)"
_CELLS = 192  # a heat map has at most this many rows and columns
_MISSING = 65535  # a cell of a heat map that was not measured

Line = tuple[str, Sequence[int], Sequence[float | None]]  # name, layers, values


@dataclass
class Chart:
    """One chart of the page: its heading, a line on how to read it, and what ``assets/chart.js`` draws."""

    title: str
    note: str
    spec: dict[str, Any]
    min_width: int = 0  # pixels below which it scrolls sideways instead of shrinking
    wide: bool = False  # takes the whole width of the page


def style(index: int) -> dict[str, Any]:
    """Return colour, dash and symbol of line number ``index``; lines differ without colour too."""
    entry = LINE_STYLES[index % len(LINE_STYLES)]
    # from the sixth line on the colours repeat, with other dashes and with open symbols
    shape = LINE_STYLES[(index + index // len(LINE_STYLES)) % len(LINE_STYLES)]
    dash = shape["linestyle"]
    return {
        "color": entry["color"],
        "dash": _DASHES[dash] if isinstance(dash, str) else "longdash",
        "symbol": _MARKERS[shape["marker"]],
        "open": index // len(LINE_STYLES) % 2 == 1,
    }


def curves(title: str, note: str, ylabel: str, lines: Sequence[Line], **axis: Any) -> list[Chart]:
    """Return one chart of named curves, or none if nothing was measured.

    Args:
        title: Heading of the chart.
        note: A line on how to read it.
        ylabel: Label of the y axis.
        lines: The curves.
        **axis: Options of the y axis: ``log``, ``zero`` or ``range``.
    """
    drawn = []
    for i, (name, x, y) in enumerate(lines):
        values = [short(v) for v in y]
        if any(v is not None for v in values):
            drawn.append({"name": name, "x": list(x), "y": values, "look": style(i)})
    spec = {"x": {"title": LAYER}, "y": {"title": ylabel, **axis}, "lines": drawn}
    return [Chart(title, note, spec)] if drawn else []


def column(report: ReportData, get: Callable[[LayerData], float | None]) -> tuple[list[int], list[float | None]]:
    """Return the indices of all layers and one number of each."""
    return [layer.index for layer in report.layers], [get(layer) for layer in report.layers]


def violins(
    title: str,
    note: str,
    xlabel: str,
    ylabel: str,
    places: Sequence[tuple[float, str, Distribution | None]],
    *,
    width: float = 0.42,
    points: int = 48,
    ticks: Sequence[tuple[float, str]] | None = None,
) -> list[Chart]:
    """Return one chart of violins with mode, median and mean marked, or none if nothing was measured.

    Args:
        title: Heading of the chart.
        note: A line on how to read it.
        xlabel: Label of the x axis.
        ylabel: Label of the y axis.
        places: Place on the x axis, name and histogram of each violin.
        width: Half of the widest part of a violin.
        points: Largest number of bins in an outline.
        ticks: Places and labels on the x axis; numbers by default.
    """
    items = []
    for place, name, distribution in places:
        if distribution is None or (shape := outline(distribution, points)) is None:
            continue
        values, halves = shape
        marks = [short(v, 5) for v in (distribution.mode, distribution.median, distribution.mean)]
        items.append([place, name, [short(v, 4) for v in values], [round(100 * h) for h in halves], *marks])
    if not items:
        return []
    x = {"title": xlabel} if ticks is None else {"title": xlabel, "ticks": [list(tick) for tick in ticks]}
    spec = {"x": x, "y": {"title": ylabel}, "violins": {"half": width, "items": items}}
    return [Chart(title, note, spec, min_width=60 + 8 * len(items), wide=True)]


def by_head(
    report: ReportData, title: str, ylabel: str, get: Callable[[LayerData], Sequence[float] | None]
) -> list[Chart]:
    """Return a heat map with a cell per layer and head; nothing if there is a single head."""
    heads = max((len(get(layer) or ()) for layer in report.layers), default=0)
    layers = [layer for layer in report.layers if get(layer)]
    if heads < 2 or not layers:
        return []
    by_layer = [[*(get(layer) or ()), *[None] * (heads - len(get(layer) or ()))] for layer in layers]
    heat = heat_of([list(row) for row in zip(*by_layer, strict=True)], ("layer", "head"))
    heat |= {"x0": layers[0].index}
    spec = {"x": {"title": "layer"}, "y": {"title": ylabel}, "heat": heat}
    return [Chart(title, "One cell a layer and head; brighter is larger.", spec)]


def per_head(
    report: ReportData, title: str, note: str, ylabel: str, get: Callable[[LayerData], Sequence[float] | None]
) -> list[Chart]:
    """Return a chart of the mean over heads as a curve, with a faint dot for each head."""
    charts = curves(title, note, ylabel, [("mean over heads", *column(report, lambda f: mean_of(get(f))))])
    dots = [(f.index, short(v, 5), f"head {h}") for f in report.layers for h, v in enumerate(get(f) or ())]
    for chart in charts:
        x, y, labels = (list(part) for part in zip(*dots, strict=True))
        look = {"color": "#777777", "dash": "solid", "symbol": "circle", "open": True}
        chart.spec["lines"].append({"name": "one head", "x": x, "y": y, "labels": labels, "look": look, "dots": True})
    return charts


def heat_of(rows: Sequence[Sequence[float | None]], names: tuple[str, str], low: float | None = None) -> dict[str, Any]:
    """Encode a matrix in 16 bits per value, from ``low`` (by default the smallest value) to the largest."""
    known = [v for row in rows for value in row if (v := finite(value)) is not None]
    low = min(known, default=0.0) if low is None else low
    top = max(known, default=1.0)
    span = top - low or 1.0
    codes = [
        _MISSING if (v := finite(value)) is None else round((_MISSING - 1) * (v - low) / span)
        for row in rows
        for value in row
    ]
    return {
        "columns": len(rows[0]),
        "rows": len(rows),
        "x0": 0,
        "dx": 1,
        "y0": 0,
        "dy": 1,
        "low": short(low),
        "top": short(low + span),
        "names": list(names),
        "values": base64.b64encode(struct.pack(f"<{len(codes)}H", *codes)).decode(),
    }


def _coarse(weights: Sequence[Sequence[float]]) -> tuple[list[list[float | None]], int]:
    """Return the matrix, or for a large one the means over k x k cells; and k."""
    width = max(map(len, weights), default=0)
    step = -(-max(len(weights), width) // _CELLS)
    rows = []
    for top in range(0, len(weights), step or 1):
        block = weights[top : top + step]
        rows.append([mean_of([v for row in block for v in row[i : i + step]]) for i in range(0, width, step)])
    return rows, step


def attention_maps(maps: Sequence[Heatmap]) -> list[Chart]:
    """Return a chart for each heat map."""
    charts = []
    for heatmap in maps:
        rows, step = _coarse(heatmap.weights)
        if not rows or not rows[0]:
            continue
        note = "Row: who looks; column: at whom." + (f" Each cell is a mean of {step} x {step}." if step > 1 else "")
        joined = (heatmap.tokens or len(heatmap.weights)) / len(heatmap.weights)
        if joined > 1:
            note += f" {joined:.3g} neighbours are joined in a cell, summed as keys and averaged as queries."
        heat = {**heat_of(rows, ("key", "query"), low=0.0), "dx": step * joined, "dy": step * joined, "square": True}
        spec = {"x": {"title": "key"}, "y": {"title": "query"}, "heat": heat}
        charts.append(Chart(f"Layer {heatmap.layer}, head {heatmap.head}", note, spec))
    return charts
