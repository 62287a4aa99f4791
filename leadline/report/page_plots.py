"""The curves, violins and heat maps of the page, as plain data for plotly.js."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leadline.probing.figures import Distribution, Heatmap, LayerFigures
from leadline.report.figures import _STYLES
from leadline.report.page_data import Report, mean_of, number, outline, short

_DASHES = {"-": "solid", "--": "dash", ":": "dot", "-.": "dashdot"}
_MARKERS = {"o": "circle", "s": "square", "^": "triangle-up", "D": "diamond", "v": "triangle-down"}
LAYER = "layer (0: input of the first block)"
_CELLS = 192  # a heat map has at most this many rows and columns


@dataclass
class Chart:
    """One figure of the page: its heading, a line on how to read it, and what plotly.js draws."""

    title: str
    note: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    min_width: int = 0  # pixels below which it scrolls sideways instead of shrinking
    wide: bool = False  # takes the whole width of the page

    def figure(self) -> dict[str, Any]:
        return {"data": self.traces, "layout": self.layout}


def plain(text: str) -> str:
    """``text`` as plotly.js shows it letter for letter: it reads a few HTML tags in its labels."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def style(index: int) -> dict[str, Any]:
    """Line number ``index``: colour, dash and marker, so that lines differ without colour too."""
    entry = _STYLES[index % len(_STYLES)]
    # a second round of colours meets other dashes
    shape = _STYLES[(index + index // len(_STYLES)) % len(_STYLES)]
    dash = shape["linestyle"]
    return {
        "line": {
            "color": entry["color"],
            "dash": _DASHES.get(dash, "longdashdot") if isinstance(dash, str) else "longdashdot",
            "width": 2,
        },
        "marker": {"color": entry["color"], "symbol": _MARKERS[shape["marker"]], "size": 7, "maxdisplayed": 16},
    }


def _line(name: str, x: Sequence[int], y: Sequence[float | None], index: int) -> dict[str, Any] | None:
    """A curve over layers; None when nothing was measured."""
    values = [short(v) for v in y]
    if all(v is None for v in values):
        return None
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": plain(name),
        "x": list(x),
        "y": values,
        "hovertemplate": "%{y:.5~g}",
        **style(index),
    }


def _layout(x: str, y: str, **axis: Any) -> dict[str, Any]:
    return {"xaxis": {"title": {"text": x}}, "yaxis": {"title": {"text": y}, **axis}}


def _log_ticks(values: Sequence[float]) -> dict[str, Any]:
    """Ticks at 1, 2, 5 over a few decades, else what plotly.js chooses, as powers of ten."""
    if len(values) > 1 and 8 < max(values) / min(values) < 1e3:
        return {"dtick": "D2", "tickformat": "~g"}
    return {"exponentformat": "power", "tickfont": {"size": 10}}


def curves(
    title: str, note: str, ylabel: str, lines: Sequence[tuple[str, Sequence[int], Sequence[float | None]]], **axis: Any
) -> list[Chart]:
    """One chart of named curves (name, layers, values); no chart when nothing was measured."""
    drawn = [_line(name, x, y, i) for i, (name, x, y) in enumerate(lines)]
    traces = [line for line in drawn if line is not None]
    if axis.get("type") == "log":
        axis = {**axis, **_log_ticks([v for trace in traces for v in trace["y"] if v and v > 0])}
    return [Chart(title, note, traces, _layout(LAYER, ylabel, **axis))] if traces else []


def _indices(layers: Sequence[LayerFigures]) -> list[int]:
    return [layer.index for layer in layers]


def column(report: Report, get: Callable[[LayerFigures], float | None]) -> tuple[list[int], list[float | None]]:
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
    **xaxis: Any,
) -> list[Chart]:
    """Violins (place on the x axis, what to call it, histogram) with their mode, median and mean marked."""
    x: list[float | None] = []
    y: list[float | None] = []
    kept: list[tuple[float, str, Distribution]] = []
    for place, name, distribution in places:
        shape = outline(distribution, points)
        if shape is None or distribution is None:
            continue
        values, halves = shape
        x += [short(place - width * h, 5) for h in halves] + [short(place + width * h, 5) for h in reversed(halves)]
        y += [short(v, 5) for v in values] + [short(v, 5) for v in reversed(values)]
        x.append(None)  # ends one polygon; the next begins
        y.append(None)
        kept.append((place, name, distribution))
    if not kept:
        return []
    shape_trace = {
        "type": "scatter",
        "mode": "lines",
        "name": "distribution",
        "x": x,
        "y": y,
        "fill": "toself",
        "fillcolor": "rgba(0,114,178,0.28)",
        "line": {"color": "#0072B2", "width": 0.7},
        "hoverinfo": "skip",
    }
    text = [
        f"{plain(name)}<br>mode {number(d.mode)}<br>median {number(d.median)}<br>mean {number(d.mean)}"
        for _, name, d in kept
    ]
    size = 7 if len(kept) <= 40 else 5
    marks = [("mode", "diamond-open", "#000000"), ("mean", "circle", "#D55E00"), ("median", "line-ew", "#000000")]
    traces = [shape_trace]
    for name, symbol, colour in marks:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [place for place, _, _ in kept],
                "y": [short(getattr(d, name)) for _, _, d in kept],
                "text": text,
                "hovertemplate": "%{text}<extra></extra>",
                "marker": {
                    "symbol": symbol,
                    "color": colour,
                    "size": 2 * size if name == "median" else size,
                    "line": {"width": 1.5, "color": colour},
                },
            }
        )
    layout = {
        "xaxis": {"title": {"text": xlabel}, "showgrid": False, **xaxis},
        "yaxis": {"title": {"text": ylabel}},
        "hovermode": "closest",
    }
    return [Chart(title, note, traces, layout, min_width=60 + 8 * len(kept), wide=True)]


def by_head(
    report: Report, title: str, ylabel: str, get: Callable[[LayerFigures], Sequence[float] | None]
) -> list[Chart]:
    """A heat map of one number a layer and head; nothing when there is a single head."""
    heads = max((len(get(layer) or ()) for layer in report.layers), default=0)
    layers = [layer for layer in report.layers if get(layer)]
    if heads < 2 or not layers:
        return []
    z = [[short(v) for v in get(layer) or ()] + [None] * (heads - len(get(layer) or ())) for layer in layers]
    trace = {
        "type": "heatmap",
        "x": _indices(layers),
        "y": list(range(heads)),
        "z": [list(row) for row in zip(*z, strict=True)],
        "colorscale": "Cividis",
        "hovertemplate": "layer %{x}, head %{y}: %{z:.4~g}<extra></extra>",
        "colorbar": {"thickness": 12, "outlinewidth": 0},
    }
    layout = _layout("layer", ylabel, dtick=max(1, heads // 8))
    layout["hovermode"] = "closest"
    return [Chart(title, "One cell a layer and head; brighter is larger.", [trace], layout)]


def per_head(
    report: Report, title: str, note: str, ylabel: str, get: Callable[[LayerFigures], Sequence[float] | None]
) -> list[Chart]:
    """Mean over heads as a curve, each head as a faint dot."""
    charts = curves(title, note, ylabel, [("mean over heads", *column(report, lambda f: mean_of(get(f))))])
    dots = [(f.index, short(v), h) for f in report.layers for h, v in enumerate(get(f) or ())]
    for chart in charts:
        chart.layout["hovermode"] = "closest"
        chart.traces[0]["hovertemplate"] = "layer %{x}, mean %{y:.4~g}<extra></extra>"
        chart.traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": "one head",
                "x": [layer for layer, _, _ in dots],
                "y": [value for _, value, _ in dots],
                "text": [f"head {head}" for _, _, head in dots],
                "hovertemplate": "layer %{x}, %{text}: %{y:.4~g}<extra></extra>",
                "marker": {"symbol": "circle-open", "color": "#777777", "size": 4},
            }
        )
    return charts


def _coarse(weights: Sequence[Sequence[float]]) -> tuple[list[list[float | None]], int]:
    """(rows, k): the matrix, or for a large one the means over k x k cells."""
    step = -(-max(len(weights), max(map(len, weights), default=0)) // _CELLS)
    rows: list[list[float | None]] = []
    for top in range(0, len(weights), step or 1):
        block = weights[top : top + step]
        width = max(map(len, block))
        rows.append([short(mean_of([v for row in block for v in row[i : i + step]]), 3) for i in range(0, width, step)])
    return rows, step


def attention(maps: Sequence[Heatmap]) -> list[Chart]:
    charts = []
    for found in maps:
        rows, step = _coarse(found.weights)
        if not rows:
            continue
        note = "Row: who looks; column: at whom." + (f" Each cell is a mean of {step} x {step}." if step > 1 else "")
        trace = {
            "type": "heatmap",
            "z": rows,
            "x0": 0,
            "dx": step,
            "y0": 0,
            "dy": step,
            "zmin": 0,
            "zmax": max((v for row in rows for v in row if v is not None), default=1.0),
            "colorscale": "Cividis",
            "hovertemplate": "query %{y}, key %{x}: %{z:.3~g}<extra></extra>",
            "colorbar": {"thickness": 12, "outlinewidth": 0},
        }
        layout = _layout("key", "query", autorange="reversed", scaleanchor="x", constrain="domain")
        layout["xaxis"]["constrain"] = "domain"
        layout["hovermode"] = "closest"
        charts.append(Chart(f"Layer {found.layer}, head {found.head}", note, [trace], layout))
    return charts
