"""Sinks for the rows of a watched training run: CSV, JSON lines, TensorBoard, W&B, functions."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol, TextIO

from leadline.errors import LeadlineError, need
from leadline.files import csv_row, open_to_append, whole

Row = dict[str, Any]  # step, layer, name, and a number for each metric
Write = Callable[[list[Row]], None]


class Sink(Protocol):
    """A destination of rows."""

    def write(self, rows: list[Row]) -> None:
        """Write the rows of one step, one per layer."""

    def close(self) -> None:
        """Close files and connections."""


Target = str | os.PathLike[str] | Write | Sink


def open_sinks(to: Target | Iterable[Target] | None) -> list[Sink]:
    """Open the sinks named by ``to``.

    Args:
        to: A file .csv or .jsonl, "tensorboard:FOLDER", "wandb", a function of the rows, or several of these.

    Raises:
        LeadlineError: If it is none of them, or what it needs is not installed.
    """
    if to is None:
        return []
    if isinstance(to, (str, os.PathLike)) or callable(to) or hasattr(to, "write"):
        return [_open(to)]
    return [_open(target) for target in to]


def _open(target: Any) -> Sink:
    if callable(target):
        return _Function(target)
    if hasattr(target, "write"):
        return target
    text = os.fspath(target)
    if text == "wandb":
        return _WandB()
    if text.startswith("tensorboard:"):
        return _TensorBoard(text.removeprefix("tensorboard:"))
    kinds: dict[str, Callable[[Path], Sink]] = {".csv": _Csv, ".jsonl": _JsonLines}
    file = Path(text)
    if file.suffix not in kinds:
        raise LeadlineError(
            f"to is {text!r}; give a file that ends in .csv or .jsonl, 'tensorboard:FOLDER', 'wandb' or a function"
        )
    return kinds[file.suffix](file)


class _Function:
    def __init__(self, function: Write) -> None:
        self.function = function

    def write(self, rows: list[Row]) -> None:
        self.function(rows)

    def close(self) -> None:
        pass


def _append_to(file: Path) -> TextIO:
    file.parent.mkdir(parents=True, exist_ok=True)
    return open_to_append(file)


class _Csv:
    """Appends a line per layer and step. An existing file keeps its columns, and gets those that it lacks."""

    def __init__(self, file: Path) -> None:
        self.path = file
        self.file = _append_to(file)
        with file.open(encoding="utf-8", newline="") as before:
            self.columns = next(csv.reader(before), [])

    def write(self, rows: list[Row]) -> None:
        if new := [name for name in rows[0] if name not in self.columns]:
            self._widen(new)
        csv.DictWriter(self.file, self.columns, lineterminator="\n").writerows(map(csv_row, rows))
        self.file.flush()

    def _widen(self, new: list[str]) -> None:
        """Rewrite the file with more columns, empty in the existing rows."""
        self.columns += new
        self.file.close()
        with self.path.open(encoding="utf-8", newline="") as stream:
            before = list(csv.DictReader(stream))
        with whole(self.path) as draft, draft.open("w", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, self.columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(before)
        self.file = _append_to(self.path)

    def close(self) -> None:
        self.file.close()


class _JsonLines:
    def __init__(self, file: Path) -> None:
        self.file = _append_to(file)

    def write(self, rows: list[Row]) -> None:
        for row in rows:
            finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()}
            self.file.write(json.dumps(finite) + "\n")
        self.file.flush()

    def close(self) -> None:
        self.file.close()


class _TensorBoard:
    def __init__(self, folder: str) -> None:
        self.writer = need("torch.utils.tensorboard", "train").SummaryWriter(folder)

    def write(self, rows: list[Row]) -> None:
        for name, value, step in _scalars(rows):
            self.writer.add_scalar(name, value, step)
        self.writer.flush()

    def close(self) -> None:
        self.writer.close()


class _WandB:
    """Logs to the active run of Weights & Biases."""

    def __init__(self) -> None:
        try:
            self.wandb: Any = importlib.import_module("wandb")
        except ImportError as error:
            raise LeadlineError("to is 'wandb', which is not installed; run: pip install wandb") from error
        if self.wandb.run is None:
            raise LeadlineError("to is 'wandb' and no run is active; call wandb.init() first")

    def write(self, rows: list[Row]) -> None:
        # an axis of its own: the training loop logs steps too, and W&B accepts each step once
        values = {name: value for name, value, _ in _scalars(rows)}
        self.wandb.log({**values, "depth/step": rows[0]["step"]})

    def close(self) -> None:
        pass


def _scalars(rows: list[Row]) -> Iterable[tuple[str, float, int]]:
    """Yield each metric as a name such as depth/similarity/layer_003, its value and the step."""
    for row in rows:
        for metric, value in row.items():
            if metric not in ("step", "layer", "name") and value is not None:
                yield f"depth/{metric}/layer_{row['layer']:03d}", value, row["step"]
