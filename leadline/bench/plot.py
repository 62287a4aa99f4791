"""The picture of a bench: time and memory of each method, by shape."""

from __future__ import annotations

from pathlib import Path
from typing import Any

LOOKS = {  # colour and hatching, so that the bars differ without colour too
    "flash": ("#999999", ""),
    "leadline": ("#0072b2", ""),
    "eager": ("#e69f00", "//"),
    "compiled": ("#d55e00", "\\\\"),
    "sdpa_bias": ("#009e73", ".."),
    "flex": ("#cc79a7", "xx"),
}


def draw(results: dict[str, Any], path: Path) -> None:
    """Draw the table of ``bench_attention`` into ``path``."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        (results[key], field, title)
        for key, what in (("rows", "carried scores"), ("biased_rows", "dense bias"))
        for field, title in (
            ("ratio_to_flash", f"{what}: forward + backward,\nmultiple of plain flash"),
            ("extra_gib", f"{what}: extra memory, GiB"),
        )
        if any(row[field] for row in results[key])
    ]
    figure, axes = plt.subplots(len(panels), 1, figsize=(8, 2.7 * len(panels)), squeeze=False, layout="constrained")
    for axis, (rows, field, title) in zip(axes[:, 0], panels, strict=True):
        measured = [row[field] for row in rows if row[field]]
        axis.set_yscale("log")
        axis.set_ylim(0.8 * min(measured), 2.5 * max(measured))
        shapes = list(dict.fromkeys(row["shape"] for row in rows))
        methods = [m for m in LOOKS if any(row["method"] == m for row in rows)]
        width = 0.8 / len(methods)
        for number, method in enumerate(methods):
            color, hatch = LOOKS[method]
            values = {row["shape"]: row[field] for row in rows if row["method"] == method}
            for place, shape in enumerate(shapes):
                at = place - 0.4 + (number + 0.5) * width
                label = method if place == 0 else None
                value = values.get(shape)
                axis.bar(at, value or 0, width, color=color, hatch=hatch, edgecolor="white", label=label)
                text = "does not run" if value is None else f"{value:.1f}"
                axis.annotate(
                    text, (at, value or 0.8 * min(measured)), ha="center", va="bottom", fontsize=6, rotation=90,
                    xytext=(0, 2), textcoords="offset points",
                )  # fmt: skip
        axis.set_xticks(range(len(shapes)), shapes)
        axis.set_title(title, fontsize=9)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0, 0].legend(fontsize=7, ncols=3, frameon=False)
    figure.suptitle(f"{results['hardware']}, torch {results['versions']['torch']}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)
