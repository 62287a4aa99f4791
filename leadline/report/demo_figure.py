"""Figures by matplotlib. Lines differ in dash and marker too, so that they read without colour."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from leadline.errors import need

# Okabe and Ito's colours, which most kinds of colour blindness tell apart
_STYLES: list[dict[str, Any]] = [
    {"color": "#000000", "linestyle": "-", "marker": "o"},
    {"color": "#0072B2", "linestyle": "--", "marker": "s"},
    {"color": "#D55E00", "linestyle": ":", "marker": "^"},
    {"color": "#009E73", "linestyle": "-.", "marker": "D"},
    {"color": "#CC79A7", "linestyle": (0, (5, 1, 1, 1, 1, 1)), "marker": "v"},
]


def save_demo_figure(
    file: Path, similarity: Mapping[str, Sequence[float]], losses: Mapping[str, Sequence[float]]
) -> None:
    """Token similarity by block, and training loss by step, one line an arm, side by side."""
    need("matplotlib", "plot").use("Agg")
    plt: Any = need("matplotlib.pyplot", "plot")
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), layout="constrained")
    # widest line first, so that lines which coincide show below each other
    widths = [5.0, 2.4, 1.6, 1.6, 1.6]
    for (name, curve), style, width in zip(similarity.items(), _STYLES, widths, strict=False):
        left.plot(range(len(curve)), curve, label=name, markevery=10, markersize=4, linewidth=width, **style)
    left.set(xlabel="block", ylabel="token similarity", ylim=(0, 1.03), title="BERT, 100 layers, at initialisation")
    left.legend(frameon=False, loc="center right", bbox_to_anchor=(1, 0.34))
    for (name, curve), style in zip(losses.items(), _STYLES, strict=False):
        right.plot(range(1, len(curve) + 1), curve, label=name, markersize=4, **style)
    right.set(xlabel="epoch", ylabel="training loss", yscale="log", title="8 layers without skips, digits")
    right.legend(frameon=False)
    for axis in (left, right):
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
