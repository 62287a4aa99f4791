"""What a run writes while it goes: CSV files, TensorBoard, and a bar or lines for people."""

from __future__ import annotations

import csv
import io
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from leadline.data.made_once import reporting
from leadline.errors import need
from leadline.files import whole

TRAINING, EVALUATION, PROBE = "log.csv", "evaluation.csv", "probe.csv"


def cut(file: Path, step: int) -> None:
    """Drop the lines after ``step`` from a log, which a killed run wrote after its last checkpoint.

    A last line that was cut short goes too.
    """
    if not file.is_file():
        return
    lines = file.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True)
    kept = lines[:1]
    head = next(csv.reader(kept), [])
    column = head.index("step") if "step" in head else 0
    for line in lines[1:]:
        cells = next(csv.reader(io.StringIO(line)), [])
        if line.endswith("\n") and len(cells) > column and cells[column].isdigit() and int(cells[column]) <= step:
            kept.append(line)
    with whole(file) as new:
        new.write_text("".join(kept) if kept and kept[0].endswith("\n") else "", encoding="utf-8")


class Listener(Console):
    """A console for a run: when whoever listened is gone, by a closed pipe or terminal, the run goes on in silence."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        self.quiet = True
        with suppress(OSError, ValueError):  # what is left in the file's buffer must not fail at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


@contextmanager
def preparing(console: Console) -> Iterator[None]:
    """Inside, what is made of the data, once, has a bar, or a line where nobody sees one."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(f"{what}, once", soft_wrap=True, highlight=False, markup=False)
            if done % 100 == 0:
                bars.update(tasks[what], completed=done)

        with reporting(tell):
            yield


class Logs:
    """The logs of one run, going on after ``step``. Only the first process has them (``main``)."""

    def __init__(self, out: Path, step: int, total: int, *, console: Console, main: bool, tensorboard: bool) -> None:
        self.out, self.total, self.console, self.main = out, total, console, main
        self.began, self.first = time.monotonic(), step
        self.board: Any = None
        self.bar: Progress | None = None
        if not main:
            return
        for name in (TRAINING, EVALUATION, PROBE):
            cut(out / name, step or -1)  # a run that begins again also probes at step 0 again
        if tensorboard:
            writer = need("torch.utils.tensorboard", "train").SummaryWriter
            self.board = writer(str(out / "tensorboard"), purge_step=step + 1 if step else 0)
        if console.is_terminal:
            self.bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                TextColumn("{task.fields[figures]}"),
                console=console,
            )
            self.task = self.bar.add_task("training", total=total, completed=step, figures="")
            self.bar.start()

    def training(self, row: dict[str, Any]) -> None:
        """Figures since the last row."""
        if not self.main:
            return
        self._write(TRAINING, row)
        figures = f"loss {row['loss']:.4g}, {row['samples_per_second']:,.0f} samples/s"
        if self.bar is not None:
            self.bar.update(self.task, completed=row["step"], figures=figures)
        else:
            spent = time.monotonic() - self.began
            left = spent / max(row["step"] - self.first, 1) * (self.total - row["step"])
            self.say(f"step {row['step']}/{self.total}  {figures}, {_clock(left)} left")

    def evaluation(self, row: dict[str, Any], split: str) -> None:
        if not self.main:
            return
        self._write(EVALUATION, row)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in ("step", "epoch"))
        self.say(f"step {row['step']}/{self.total}  {split}: {figures}")

    def say(self, line: str) -> None:
        if self.main:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()

    def _write(self, name: str, row: dict[str, Any]) -> None:
        file = self.out / name
        fresh = not file.is_file() or file.stat().st_size == 0
        with file.open("a", encoding="utf-8", newline="") as stream:
            writer = csv.DictWriter(stream, list(row), lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        if self.board is not None:
            for figure, value in row.items():
                if figure not in ("step", "epoch"):
                    self.board.add_scalar(f"{Path(name).stem}/{figure}", value, row["step"])


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
