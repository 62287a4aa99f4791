"""Common parts of the commands: the ``--json`` option and progress bars."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables for people.")]


@contextmanager
def progress_bars(console: Console, silent: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """Show a progress bar for the task that runs, on a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the bars of transformers would break ours
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    quiet = silent or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bars:
        shown: tuple[str, int | None] | None = None

        def show(what: str, done: int, total: int | None) -> None:
            nonlocal shown
            if shown != (what, total):
                for task in bars.task_ids:
                    bars.remove_task(task)
                bars.add_task(what, total=total)
                shown = what, total
            words = f"{what}, {done} of {total} blocks" if total else f"{what}, block {done}" if done else what
            bars.update(bars.task_ids[0], completed=done, description=words)

        yield show
