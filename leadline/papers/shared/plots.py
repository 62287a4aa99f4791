"""How every figure of this room looks. Lines differ in dash and marker too, so that they read without colour."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

from leadline.errors import need
from leadline.files import whole

# Okabe and Ito's colours, which most kinds of colour blindness tell apart
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#000000", "#E69F00", "#56B4E9")
_DASHES: tuple[Any, ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)))
_MARKERS = ("o", "s", "^", "D", "v", "x", "P")


def styles() -> Iterator[dict[str, Any]]:
    """One style after the other, for the lines of one plot."""
    for colour, dash, marker in zip(cycle(COLOURS), cycle(_DASHES), cycle(_MARKERS), strict=False):
        yield {"color": colour, "linestyle": dash, "marker": marker, "markersize": 3.5, "linewidth": 1.4}


def panels(columns: int, rows: int = 1, width: float = 4.0, height: float = 3.1) -> tuple[Any, list[Any]]:
    """A figure and its axes, row by row."""
    need("matplotlib", "plot").use("Agg")
    plt: Any = need("matplotlib.pyplot", "plot")
    size = (width * columns, height * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    for axis in axes.flat:
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    return figure, list(axes.flat)


def save(figure: Any, folder: Path, name: str = "figure") -> None:
    """PNG and SVG, the same bytes for the same numbers; each file is written beside its name and moved there whole."""
    matplotlib = need("matplotlib", "plot")
    with matplotlib.rc_context({"svg.hashsalt": name}):
        for kind, metadata in (("png", {"Software": None}), ("svg", {"Date": None})):
            with whole(folder / f"{name}.{kind}") as new:
                figure.savefig(new, format=kind, dpi=110, metadata=metadata)
                if kind == "png":  # a palette (of maximum coverage) makes it a third of the size
                    need("PIL.Image", "plot").open(new).convert("RGB").quantize(256, method=1).save(
                        new, format="png", optimize=True
                    )
    need("matplotlib.pyplot", "plot").close(figure)
