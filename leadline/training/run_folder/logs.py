"""The logs of a run: CSV files, TensorBoard, and a progress bar or lines on the console."""

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
from leadline.files import csv_row, open_to_append, read_text, whole
from leadline.training.run_folder.folder import EVALUATION, PROBE, TENSORBOARD, TRAINING


def cut(file: Path, step: int) -> None:
    """Drop the rows of a log after ``step``, which a killed run wrote after its last checkpoint.

    An incomplete last line is dropped too. A file that does not exist is left so.
    """
    if not file.is_file():
        return
    lines = read_text(file, errors="replace").splitlines(keepends=True)
    remaining = lines[:1]
    head = next(csv.reader(remaining), [])
    column = head.index("step") if "step" in head else 0
    for line in lines[1:]:
        cells = next(csv.reader(io.StringIO(line)), [])
        if line.endswith("\n") and len(cells) > column and cells[column].isdigit() and int(cells[column]) <= step:
            remaining.append(line)
    complete = remaining and remaining[0].endswith("\n")
    with whole(file) as new:
        new.write_text("".join(remaining) if complete else "", encoding="utf-8")


def read_rows(file: Path) -> list[dict[str, str]]:
    """Read the rows of a log by column; empty if there is no such file."""
    if not file.is_file():
        return []
    with file.open(encoding="utf-8", newline="") as stream:
        return list(csv.DictReader(stream))


class Listener(Console):
    """A console that turns quiet when its pipe or terminal is closed, so that the run continues."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, unless nobody reads any more."""
        try:
            super().print(*objects, **options)
        except OSError:
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Print nothing from here on."""
        self.quiet = True
        with suppress(OSError, ValueError):  # flushing the rest of the file's buffer must not fail at exit
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.file.fileno())


@contextmanager
def preparing(console: Console) -> Iterator[None]:
    """Show the progress of preparing data that is cached: a bar each, or a line each if there is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:
        tasks: dict[str, TaskID] = {}

        def show(what: str, done: int, total: int | None) -> None:
            if what not in tasks:
                tasks[what] = bars.add_task(what, total=total)
                if not console.is_terminal:
                    console.print(f"{what}, once", soft_wrap=True, highlight=False, markup=False)
            if done % 100 == 0:
                bars.update(tasks[what], completed=done)

        with reporting(show):
            yield


class Logs:
    """The logs of one run; only the first process writes them.

    Args:
        out: The folder of the run.
        total: The length of the run in steps.
        console: Where lines and the progress bar go.
        main: Whether this is the first process.
        tensorboard: Whether to write TensorBoard files too.
    """

    def __init__(self, out: Path, total: int, console: Console, *, main: bool, tensorboard: bool) -> None:
        self.out, self.total, self.console, self.main, self.tensorboard = out, total, console, main, tensorboard
        self.began, self.start = time.monotonic(), 0  # when the logs were opened, and how many steps were done then
        self.board: Any = None  # a SummaryWriter
        self.bar: Progress | None = None
        self.task: TaskID | None = None  # of the bar

    @contextmanager
    def opened(self, step: int) -> Iterator[None]:
        """Open the logs to continue after ``step`` steps; close them at the end."""
        self.began, self.start = time.monotonic(), step
        if self.main:
            for name in (TRAINING, EVALUATION, PROBE):
                cut(self.out / name, step or -1)  # a run that begins anew probes at step 0 again
            if self.tensorboard:
                writer = need("torch.utils.tensorboard", "train").SummaryWriter
                self.board = writer(str(self.out / TENSORBOARD), purge_step=step + 1 if step else 0)
            if self.console.is_terminal:
                self.bar = _bar(self.console)
                self.task = self.bar.add_task("training", total=self.total, completed=step, figures="")
                self.bar.start()
        try:
            yield
        finally:
            with suppress(OSError):  # the first failed write has been reported
                self._close()

    def training(self, row: dict[str, Any]) -> None:
        """Write training figures, means over the steps since the last row."""
        if not self.main:
            return
        self._write(TRAINING, row)
        figures = f"loss {row['loss']:.4g}, {row['samples_per_second']:,.0f} samples/s"
        if self.bar is not None and self.task is not None:
            self.bar.update(self.task, completed=row["step"], figures=figures)
        else:
            seconds = time.monotonic() - self.began
            left = seconds / max(row["step"] - self.start, 1) * (self.total - row["step"])
            self.say(f"step {row['step']}/{self.total}  {figures}, {_clock(left)} left")

    def evaluation(self, row: dict[str, Any], split: str) -> None:
        """Write the figures of an evaluation on a split."""
        if not self.main:
            return
        self._write(EVALUATION, row)
        figures = ", ".join(f"{name} {value:.4g}" for name, value in row.items() if name not in ("step", "epoch"))
        self.say(f"step {row['step']}/{self.total}  {split}: {figures}")

    def say(self, line: str) -> None:
        """Print a line, whether the logs are open or not."""
        if self.main:
            self.console.print(line, soft_wrap=True, highlight=False, markup=False)

    def _close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
        if self.board is not None:
            self.board.close()

    def _write(self, name: str, row: dict[str, Any]) -> None:
        file = self.out / name
        fresh = not file.is_file() or file.stat().st_size == 0
        row = csv_row(row)
        with open_to_append(file) as stream:
            writer = csv.DictWriter(stream, list(row), lineterminator="\n")
            if fresh:
                writer.writeheader()
            writer.writerow(row)
        if self.board is not None:
            for figure, value in row.items():
                if figure not in ("step", "epoch"):
                    self.board.add_scalar(f"{Path(name).stem}/{figure}", value, row["step"])


def _bar(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
    )


def _clock(seconds: float) -> str:
    """Format seconds as hours:minutes:seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
