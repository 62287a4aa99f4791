"""The report of a probe: figures, verdict, and how they are shown and kept."""

from __future__ import annotations

import io
import json
import math
import os
import types
import typing
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from leadline.errors import LeadlineError
from leadline.report import layers as figures
from leadline.report.layers import Figures

_KINDS = (".html", ".json", ".png", ".svg", ".pdf")
_SHOWN = 24  # rows of the table before it leaves some out


@dataclass(repr=False)
class DepthReport(Figures):
    """What ``probe`` hands back. ``print(report)`` shows the verdict and a table."""

    def table(self, every_layer: bool = False, brief: bool = False) -> Table:
        """A row per layer, for ``rich``; of a deep model some of them unless ``every_layer``.

        ``brief`` keeps the columns that fit a narrow terminal.
        """
        table = Table(title=f"{self.model}, layer by layer", title_justify="left")
        columns: dict[str, Callable[[figures.LayerFigures], float | None]] = {
            "similarity": lambda x: x.similarity,
            "patches": lambda x: x.similarity_patches,
            "diversity": lambda x: x.diversity,
            "cosine": lambda x: x.cosine,
            "norm": lambda x: x.norm,
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
            columns = {name: columns[name] for name in ("similarity", "diversity", "cosine", "rank", "rate", "entropy")}
        columns = {name: get for name, get in columns.items() if any(get(layer) is not None for layer in self.layers)}
        table.add_column("layer", justify="right")
        for name in columns:
            table.add_column(name, justify="right")
        for layer in self.layers if every_layer else self._some():
            label = "input" if layer.index == 0 else str(layer.index)
            table.add_row(label, *(_cell(get(layer)) for get in columns.values()))
        return table

    def _some(self) -> list[figures.LayerFigures]:
        if len(self.layers) <= _SHOWN:
            return self.layers
        last = len(self.layers) - 1
        return [self.layers[i] for i in sorted({round(i * last / (_SHOWN - 1)) for i in range(_SHOWN)})]

    def __str__(self) -> str:
        out = io.StringIO()
        console = Console(file=out, width=140)
        console.print(self.verdict.text, soft_wrap=True, highlight=False, markup=False)
        console.print(self.table())
        return out.getvalue()

    def __repr__(self) -> str:
        return f"DepthReport({self.model}, {len(self.layers) - 1} layers, {self.verdict.kind})"

    def to_json(self) -> str:
        """All of it. A number that is not finite becomes null."""
        return json.dumps(_plain(asdict(self)), indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> DepthReport:
        try:
            data = json.loads(text)
            return typing.cast(DepthReport, _build(cls, data))
        except (json.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
            raise LeadlineError("this is no report; give what report.to_json() wrote") from error

    def save(self, path: str | os.PathLike[str], before: Figures | None = None) -> None:
        """Write a page (.html), the data (.json) or a figure for a paper (.png, .svg, .pdf).

        ``before`` is another report to put beside this one on the page or in the figure.
        """
        file = check_target(path, before is not None)
        if file.suffix == ".html":
            from leadline.report.html.page import save_page

            save_page(self, file, before=before)
        elif file.suffix == ".json":
            from leadline.report.numbers import write_whole

            write_whole(file, (self.to_json() + "\n").encode())
        else:
            from leadline.report.paper import save_figure

            save_figure(self, file, before=before)


def check_target(path: str | os.PathLike[str], before: bool = False) -> Path:
    """Where a report can be saved, known before a long measurement: the kind of file, and its folder."""
    file = Path(path)
    if file.suffix not in _KINDS:
        raise LeadlineError(f"cannot save as {file.name}; the name must end in .html, .json, .png, .svg or .pdf")
    if before and file.suffix == ".json":
        raise LeadlineError(f"before is given and {file.name} is data; two reports side by side need a page or figure")
    if not file.parent.is_dir():
        raise LeadlineError(f"cannot save {file}: there is no folder {file.parent}; create it first")
    return file


def read_report(path: str | os.PathLike[str]) -> DepthReport:
    """A report that ``save`` wrote as .json."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise LeadlineError(f"{path} cannot be read; give a report that was saved as .json") from error
    return DepthReport.from_json(text)


def _mean(values: list[float] | None) -> float | None:
    return sum(values) / len(values) if values else None


def _cell(value: float | None) -> str:
    if value is None or not math.isfinite(value):
        return "-"
    return f"{value:.2e}" if value and (abs(value) < 1e-3 or abs(value) >= 1e4) else f"{value:.4g}"


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _build(kind: Any, value: Any) -> Any:
    """``value`` from JSON as the type ``kind``: data classes, lists, dicts, options of these."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None and type(None) in inner:
            return None
        return _build(next(option for option in inner if option is not type(None)), value)
    if is_dataclass(kind):
        hints = typing.get_type_hints(kind, vars(figures))
        known = {field.name for field in fields(kind)} & set(value)
        return typing.cast(Any, kind)(**{name: _build(hints[name], value[name]) for name in known})
    if origin is list:
        return [_build(inner[0], item) for item in value]
    if origin is dict:
        return {key: _build(inner[1], item) for key, item in value.items()}
    if kind is float:
        return math.nan if value is None else float(value)
    return value
