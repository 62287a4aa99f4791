"""The look of every figure of this room: styles, panels, violins, files.

Lines differ in colour, dash and marker, so that they read without colour.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from leadline.errors import need
from leadline.files import whole
from leadline.report.layers import LayerData

# Okabe and Ito's colours, which people with most kinds of colour blindness can distinguish
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")


def styles() -> Iterator[dict[str, Any]]:
    """Yield one style after the other, for the lines of one plot."""
    for colour, dash, marker in zip(cycle(COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False):
        yield {"color": colour, "linestyle": dash, "marker": marker, "markersize": 3.5, "linewidth": 1.4}


def panels(columns: int, rows: int = 1, width: float = 4.0, height: float = 3.1) -> tuple[Any, list[Any]]:
    """Make a figure of panels.

    Args:
        columns: Panels beside each other.
        rows: Rows of panels.
        width: Width of a panel in inches.
        height: Height of a panel in inches.

    Returns:
        The matplotlib figure, and its axes row by row.
    """
    need("matplotlib", "plot").use("Agg")
    plt: Any = need("matplotlib.pyplot", "plot")
    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def violins(
    models: Mapping[str, Sequence[LayerData]],
    draw: Callable[[Any, Sequence[LayerData]], None],
    titles: str = "{}",
    **size: Any,
) -> Any:
    """Draw one panel of violins for each model, all on one scale.

    Args:
        models: The layers of each model; none for a model that diverged, whose panel says so.
        draw: Draws the violins of a model on an axis.
        titles: Title of a panel, formatted with the name of the model.
        size: ``width`` and ``height`` of a panel.

    Returns:
        The matplotlib figure.
    """
    figure, axes = panels(1, rows=len(models), **size)
    for axis, (name, layers) in zip(axes, models.items(), strict=True):
        axis.set_title(titles.format(name), loc="left")
        if layers:
            draw(axis, layers)
        else:
            axis.text(0.5, 0.5, "diverged", transform=axis.transAxes, ha="center")
    limits = [axis.get_ylim() for axis, layers in zip(axes, models.values(), strict=True) if layers]
    if limits:
        for axis in axes:
            axis.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
    return figure


def save(figure: Any, folder: Path, name: str = "figure") -> None:
    """Save a figure as PNG and SVG, with the same bytes for the same numbers, and close it."""
    matplotlib = need("matplotlib", "plot")
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            with whole(folder / f"{name}.{kind}") as new:
                figure.savefig(new, format=kind, dpi=110, metadata=metadata)
                if kind == "png":  # a palette of 256 colours (maximum coverage) makes the file a third of the size
                    need("PIL.Image", "plot").open(new).convert("RGB").quantize(256, method=1).save(
                        new, format="png", optimize=True
                    )
    need("matplotlib.pyplot", "plot").close(figure)
