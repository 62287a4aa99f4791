"""A report as rows, one per layer: the columns of its data frame and of its CSV files."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from typing import Any

from leadline.report.layers import LayerData, ReportData
from leadline.report.presentation import mean_of

# the first twelve come first in every file; figures of heads are means over them
COLUMNS: dict[str, Callable[[LayerData], float | None]] = {
    "similarity": lambda x: x.similarity,
    "similarity_robust": lambda x: x.similarity_robust,
    "cosine": lambda x: x.cosine,
    "diversity": lambda x: x.diversity,
    "norm": lambda x: x.norm,
    "massive": lambda x: massive_share(x),
    "influence": lambda x: x.influence,
    "removal": lambda x: x.removal,
    "lens": lambda x: x.lens,
    "entropy": lambda x: mean_of(x.entropy),
    "removal_error": lambda x: x.removal_error,
    "removal_attention": lambda x: x.removal_attention,
    "removal_mlp": lambda x: x.removal_mlp,
    "lens_agrees": lambda x: x.lens_agrees,
    "lens_first": lambda x: x.lens_first,
    "angle": lambda x: x.angle,
    "cosine_samples": lambda x: x.cosine_samples,
    "similarity_normed": lambda x: x.similarity_normed,
    "similarity_patches": lambda x: x.similarity_patches,
    "robust_patches": lambda x: x.robust_patches,
    "massive_channels": lambda x: sum(item.share * item.samples for item in x.massive_channels),
    "massive_entries": lambda x: x.massive_entries,
    "effective_rank": lambda x: x.effective_rank,
    "change": lambda x: x.change,
    "gain": lambda x: x.gain,
    "rate": lambda x: x.rate,
    "rate_attention": lambda x: x.rates.get("attention"),
    "rate_norm": lambda x: x.rates.get("norm"),
    "rate_mlp": lambda x: x.rates.get("mlp"),
    "entropy_uniform": lambda x: x.entropy_uniform,
    "delta": lambda x: mean_of(x.delta),
    "omega": lambda x: mean_of(x.omega),
    "second_eigenvalue": lambda x: mean_of(x.second_eigenvalue),
    "sink_weight": lambda x: mean_of(x.sink_weight),
    "sink_share": lambda x: x.sink_share,
    "largest_score": lambda x: max(x.largest_score) if x.largest_score else None,
    "gradient_norm": lambda x: x.gradient_norm,
    "tokens": lambda x: x.tokens,
}


def massive_share(layer: LayerData) -> float:
    """Return the share of the energy in massive tokens, mean over samples; 0 where none is massive."""
    return math.fsum(item.share * item.samples for item in layer.massive_tokens)


def rows(report: ReportData) -> list[dict[str, Any]]:
    """Return a row per layer: its number, its name and all columns, NaN where nothing was measured."""
    table = []
    for layer in report.layers:
        values = {name: get(layer) for name, get in COLUMNS.items()}
        numbers = {name: math.nan if value is None else float(value) for name, value in values.items()}
        table.append({"layer": layer.index, "name": layer.name, **numbers})
    return table


def csv_text(report: ReportData) -> str:
    """Return the rows as CSV; a number that was not measured or is not finite is an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(["layer", "name", *COLUMNS])
    for row in rows(report):
        layer, name, *numbers = row.values()
        writer.writerow([layer, name, *(repr(value) if math.isfinite(value) else "" for value in numbers)])
    return out.getvalue()
