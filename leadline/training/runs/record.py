"""Records of runs: reading and writing their files, and reading the curves from a run's logs."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leadline.errors import LeadlineError
from leadline.files import read_json, whole
from leadline.probing import DepthReport
from leadline.report.layers import LayerData
from leadline.training.run_folder.logs import read_rows

_POINTS = 150  # of a curve, at most


@dataclass
class Record:
    """The result of a run.

    Attributes:
        name: The name of its job.
        figures: Everything recorded, by name; ``record["test_loss"]`` is one of them.
    """

    name: str
    figures: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.figures[name]

    @property
    def diverged(self) -> bool:
        """Return whether the run diverged."""
        return self.figures["diverged"] is not None

    @property
    def layers(self) -> list[LayerData]:
        """The probe's figures by layer; empty if there was no probe."""
        text = self.figures["report"]
        return [] if text is None else DepthReport.from_json(text).layers

    @property
    def watched(self) -> list[dict[str, float]]:
        """Token similarity by step and layer during training; empty if the recipe did not watch."""
        return self.figures.get("watched") or []

    def summary(self) -> str:
        """Describe the result in a few words."""
        if self.diverged:
            return str(self.figures["diverged"])
        figures = [f"{name} {value:.4g}" for name, value in self.figures.items() if name.startswith("test_") and value]
        return f"{', '.join(figures)}, {self.figures['seconds']:.0f} s"

    def curve(self, which: str, figure: str) -> tuple[list[float], list[float]]:
        """Return epochs and values of a figure of ``which``: "training" or "evaluation"."""
        rows = self.figures[which]
        return [row["epoch"] for row in rows], [row[figure] for row in rows]


def read(file: Path, name: str) -> Record | None:
    """Read the record of the job ``name``; None if there is none, or it is damaged."""
    try:
        return Record(name, read_json(file))
    except (OSError, ValueError):
        return None


def write(file: Path, figures: dict[str, Any]) -> None:
    """Write a record.

    Raises:
        LeadlineError: The file cannot be written.
    """
    try:
        with whole(file) as new:
            new.write_text(json.dumps(figures) + "\n")
    except OSError as error:
        raise LeadlineError(f"{file} cannot be written ({error.strerror}); make room and run it again") from error


def curve(log: Path) -> list[dict[str, float]]:
    """Read the rows of a log without non-finite values, thinned to what a picture can show; the last row stays."""
    rows = read_rows(log)
    every = math.ceil(len(rows) / _POINTS) if rows else 1
    shown = rows[(len(rows) - 1) % every :: every] if rows else []
    numbers = [{name: float(value) for name, value in row.items()} for row in shown]
    return [{name: value for name, value in row.items() if math.isfinite(value)} for row in numbers]


def similarities(log: Path) -> list[dict[str, float]]:
    """Read token similarity by step and layer from the log of the probe; empty if there is none."""
    return [
        {"step": int(row["step"]), "layer": int(row["layer"]), "similarity": float(row["similarity"])}
        for row in read_rows(log)
    ]
