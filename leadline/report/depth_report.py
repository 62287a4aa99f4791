"""DepthReport, the result of a probe: its table, and how it is saved and read."""

from __future__ import annotations

import importlib
import io
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from leadline.errors import LeadlineError
from leadline.files import whole
from leadline.report.html.page import render_page
from leadline.report.layers import LayerData, ReportData
from leadline.report.paper import render_figure
from leadline.report.rows import csv_text, massive_share, rows
from leadline.report.schema import parse, read_text

_SUFFIXES = (".html", ".json", ".csv", ".png", ".svg", ".pdf")
_MOST_ROWS = 24  # of the table, unless every layer is asked for


@dataclass(repr=False)
class DepthReport(ReportData):
    """The result of ``leadline.probe``. ``print(report)`` shows the verdict and a table.

    Attributes:
        model: Name of the model's class.
        settings: What was measured and how: samples, tokens, dtype, device, versions.
        layers: Metrics by layer, a ``LayerData`` each; index 0 is the input of the first block.
        verdict: What the metrics mean, in words and as data.
        heatmaps: Attention weights of a few layers, if they were asked for.
        depth_use: How much of its depth the model uses, if that was measured.
        measured: The list of blocks, the layout of its stream, where attention was seen, and what was left out.
        parts: A report for each part, such as encoder and decoder, by the name of its list of blocks; empty if there is
            one. The layers and the verdict above are then those of the worst part.
    """

    parts: Mapping[str, DepthReport] = field(default_factory=dict)

    def table(self, every_layer: bool = False, brief: bool = False) -> Table:
        """Return a table for ``rich`` with a row per layer.

        Args:
            every_layer: Show all layers; otherwise a deep model shows 24 of them.
            brief: Show only the columns that fit a narrow terminal.
        """
        table = Table(title=Text(f"{self.model}, layer by layer"), title_justify="left")
        columns: dict[str, Callable[[LayerData], float | None]] = {
            "similarity": lambda x: x.similarity,
            "robust": lambda x: x.similarity_robust,
            "patches": lambda x: x.similarity_patches,
            "diversity": lambda x: x.diversity,
            "cosine": lambda x: x.cosine,
            "norm": lambda x: x.norm,
            "massive": lambda x: massive_share(x) or None,
            "removal": lambda x: x.removal,
            "lens": lambda x: x.lens,
            "rank": lambda x: x.effective_rank,
            "rate": lambda x: x.rate,
            "attention": lambda x: x.rates.get("attention"),
            "norms": lambda x: x.rates.get("norm"),
            "mlp": lambda x: x.rates.get("mlp"),
            "entropy": lambda x: _mean(x.entropy),
            "delta": lambda x: _mean(x.delta),
            "omega": lambda x: _mean(x.omega),
            "lambda2": lambda x: _mean(x.second_eigenvalue),
            "gradient": lambda x: x.gradient_norm,
        }
        if brief:
            names = ("similarity", "robust", "diversity", "cosine", "rank", "rate", "removal", "entropy")
            columns = {name: columns[name] for name in names}
        columns = {name: get for name, get in columns.items() if any(get(layer) is not None for layer in self.layers)}
        table.add_column("layer", justify="right")
        for name in columns:
            table.add_column(name, justify="right")
        for layer in self.layers if every_layer else self._evenly_spaced_layers():
            label = "input" if layer.index == 0 else str(layer.index)
            table.add_row(label, *(_cell(get(layer)) for get in columns.values()))
        return table

    def _evenly_spaced_layers(self) -> list[LayerData]:
        if len(self.layers) <= _MOST_ROWS:
            return self.layers
        last = len(self.layers) - 1
        return [self.layers[i] for i in sorted({round(i * last / (_MOST_ROWS - 1)) for i in range(_MOST_ROWS)})]

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=150)
        console.print(self.verdict.text, soft_wrap=True, highlight=False, markup=False)
        console.print(self.table())
        return out.getvalue()

    def __repr__(self) -> str:
        return f"DepthReport({self.model}, {len(self.layers) - 1} layers, {self.verdict.kind})"

    def to_dataframe(self) -> Any:
        """Return a ``pandas.DataFrame`` with a row per layer and the columns of ``save("x.csv")``.

        Figures of heads are means over heads; ``massive`` is the share of the energy in massive tokens; what was not
        measured is NaN.

        Raises:
            LeadlineError: If pandas is not installed.
        """
        try:
            pandas = importlib.import_module("pandas")
        except ImportError as error:
            raise LeadlineError("to_dataframe needs pandas, which is not installed; run: pip install pandas") from error
        return pandas.DataFrame(rows(self))

    def to_json(self) -> str:
        """Return the whole report as JSON. A number that is not finite becomes null."""
        return json.dumps(_without_nan(asdict(self)), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> DepthReport:
        """Return the report that ``to_json`` wrote.

        Raises:
            LeadlineError: If the text is no report, or a field is missing, of a wrong type or out of range.
        """
        return parse(text, cls)

    def save(self, path: str | os.PathLike[str], before: ReportData | None = None) -> None:
        """Write a page (.html), the data (.json), a row per layer (.csv) or a figure for a paper (.png, .svg, .pdf).

        Args:
            path: The file to write; its suffix chooses the format.
            before: Another report to show beside this one on the page or in the figure.

        Raises:
            LeadlineError: If the suffix is another one, or the file cannot be written.
        """
        file = check_target(path, before is not None)
        suffix = file.suffix.lower()
        if suffix == ".html":
            content = render_page(self, before).encode()
        elif suffix == ".json":
            content = (self.to_json() + "\n").encode()
        elif suffix == ".csv":
            content = csv_text(self).encode()
        else:
            content = render_figure(self, suffix[1:], before)
        _write(file, content)


def check_target(path: str | os.PathLike[str], before: bool = False) -> Path:
    """Check that a report can be saved at ``path``; meant to be called before a long measurement.

    Args:
        path: The file to write later.
        before: Whether two reports are to be saved side by side.

    Returns:
        The path.

    Raises:
        LeadlineError: If the suffix is unknown, .json or .csv is to hold two reports, or the folder does not exist.
    """
    file = Path(path)
    if file.suffix.lower() not in _SUFFIXES:
        raise LeadlineError(f"cannot save as {file.name}; the name must end in .html, .json, .csv, .png, .svg or .pdf")
    if before and file.suffix.lower() in (".json", ".csv"):
        raise LeadlineError(f"before is given and {file.name} is data; two reports side by side need a page or figure")
    if not file.parent.is_dir():
        raise LeadlineError(f"cannot save {file}: there is no folder {file.parent}; create it first")
    return file


def read_report(path: str | os.PathLike[str]) -> DepthReport:
    """Return the report that ``DepthReport.save`` wrote as .json.

    Raises:
        LeadlineError: If the file cannot be read or holds no report.
    """
    return DepthReport.from_json(read_text(path))


def _write(file: Path, content: bytes) -> None:
    """Write a file in one go: a reader sees the old file or the new one, never half of it."""
    if file.is_dir():
        raise LeadlineError(f"cannot write {str(file)!r}: it is a folder; give the name of a file in it")
    try:
        with whole(file) as draft:
            draft.write_bytes(content)
    except OSError as error:
        raise LeadlineError(f"cannot write {str(file)!r}: {error.strerror}; give a path you may write to") from error


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _cell(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.2e}" if value and (abs(value) < 1e-3 or abs(value) >= 1e4) else f"{value:.4g}"


def _without_nan(value: Any) -> Any:
    """Replace numbers that are not finite by None."""
    if isinstance(value, dict):
        return {key: _without_nan(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
