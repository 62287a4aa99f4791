"""``leadline reproduce``: runs entries and prints our numbers and claims beside the papers'."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from leadline.errors import LeadlineError, unknown_name
from leadline.machine import choose_device
from leadline.papers.shared import store
from leadline.papers.shared.entry import REPORTED, Context, Entry, claim_mark
from leadline.papers.shared.material import Material
from leadline.papers.shared.page import check_page, write_page

EMBEDDED = (
    "Run on scikit-learn's digits in place of CIFAR-10, and without RandAugment, which needs colour. The papers' "
    "numbers are not comparable."
)


@dataclass(frozen=True)
class Options:
    """Options of a run of entries.

    Args:
        data: A local copy of CIFAR-10; None for the hub's.
        text: A file or folder of text, for entries that train on text.
        embedded: Whether scikit-learn's digits replace CIFAR-10.
        seed: Seed of every random draw.
        device: ``"cpu"`` or ``"cuda"``; None for a GPU if there is one.
        budget: ``"short"`` or ``"full"``, for entries that train.
        jobs: Number of training runs at a time, each in its own process.
        minutes: Time after which no further training run starts; None for no limit.
        force: Whether to run finished entries again.
        page: A Markdown file to write the results to, with pictures beside it; None for no page.
        console: Where to print; None for the standard output.
    """

    data: str | os.PathLike[str] | None = None
    text: str | os.PathLike[str] | None = None
    embedded: bool = False
    seed: int = 0
    device: str | None = None
    budget: str = "short"
    jobs: int = 1
    minutes: float | None = None
    force: bool = False
    page: str | os.PathLike[str] | None = None
    console: Console | None = None

    def as_arguments(self) -> str:
        """Return the options of the command that repeats the results; folders of this machine are not named."""
        arguments = {
            "--data FOLDER": self.data is not None and not self.embedded,
            "--embedded": self.embedded,
            f"--seed {self.seed}": self.seed != 0,
            f"--device {self.device}": self.device is not None,
            "--text FOLDER": self.text is not None,
        }
        return "".join(f" {argument}" for argument, used in arguments.items() if used)


def run_entries(
    ids: str | Sequence[str], out: str | os.PathLike[str], entries: Sequence[Entry], options: Options
) -> bool:
    """Run entries, each into its own folder.

    An entry that is finished with the same setting is not run again unless ``options.force``. Entries whose images or
    text are missing are left out, and raise an error after the others have run.

    Args:
        ids: Ids or groups of entries, or "all".
        out: Folder of the folders of entries, and of training runs.
        entries: The entries to choose from.
        options: How to run them.

    Returns:
        Whether every shape claim holds.

    Raises:
        LeadlineError: If an id or an option is wrong, or images or text are missing.
    """
    if options.jobs < 1:
        raise LeadlineError(f"jobs is {options.jobs}; it must be at least 1")
    until = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    chosen = [entry.with_budget(options.budget) for entry in choose(ids, entries)]
    device = choose_device(options.device)
    if options.page is not None:
        check_page(options.page)
    images, text = (None if path is None else Path(path) for path in (options.data, options.text))
    material = Material(images, options.embedded, text)
    if any(entry.needs for entry in chosen):
        material.check(chosen)
    console = options.console or Console()
    summaries: list[dict[str, Any]] = []
    missing: list[LeadlineError] = []
    for entry in chosen:
        error = material.lacks(entry) if entry.needs else None
        if error is not None:
            console.print(f"{_heading(entry)}  [yellow]left out, it needs {entry.needs}[/]")
            missing.append(error)
            continue
        context = Context(
            entry.setting,
            options.seed,
            device,
            material.folder_of(entry.image_set) if entry.images else None,
            options.embedded,
            out=Path(out),
            jobs=options.jobs,
            until=until,
            text=material.text,
            data_id=material.id_of(entry) if entry.needs else "",
        )
        summary = _summary_of(entry, context, options.force, console)
        _show(summary, console)
        console.print(f"  saved in {escape(str(context.out / entry.id))}")
        summaries.append(summary)
    holds = _conclude(summaries, console)
    if options.page is not None:
        trained = [entry.id for entry in chosen if entry.group != "init"]
        init = [entry.id for entry in entries if entry.group == "init"]
        write_page(out, options.page, trained or init, bool(trained), options.as_arguments())
    if missing:
        raise missing[0]
    return holds


def choose(ids: str | Sequence[str], entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries that are named by id, by group ("init", "trained", "language"), or by "all"."""
    groups = {entry.group for entry in entries}
    chosen: dict[str, Entry] = {}
    for name in [ids] if isinstance(ids, str) else ids:
        named = {entry.id: entry for entry in entries if name in ("all", entry.group, entry.id)}
        if not named:
            raise unknown_name("entry", name, [*(entry.id for entry in entries), *groups, "all"])
        chosen |= named
    return list(chosen.values())


def _heading(entry: Entry) -> str:
    return f"\n[bold]{entry.id}[/]  {escape(entry.title)}"


def _summary_of(entry: Entry, context: Context, force: bool, console: Console) -> dict[str, Any]:
    """Return the summary of an entry: the stored one if it is finished with this setting, or that of a new run."""
    setting = entry.full_setting(context.seed, context.device, context.embedded, context.data_id)
    folder = context.out / entry.id
    summary = None if force else store.finished(entry, setting, folder)
    console.print(_heading(entry) + ("" if summary is None else "  [dim]finished before[/]"))
    if entry.images and context.embedded:
        console.print(f"  [yellow]{EMBEDDED}[/]")
    if summary is not None:
        return summary
    store.fresh(folder)
    try:
        return _run(entry, setting, folder, context, console)
    except KeyboardInterrupt:
        console.print("Interrupted. Finished entries and runs are stored; the same command goes on with the rest.")
        raise


def _run(entry: Entry, setting: Mapping[str, Any], folder: Path, context: Context, console: Console) -> dict[str, Any]:
    """Run an entry with a progress bar, and store its result."""
    started = time.perf_counter()
    columns = (TextColumn("  "), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bars, torch.no_grad():
        task = bars.add_task("", total=None)
        context.progress = lambda done, total: bars.update(task, completed=done, total=total)
        context.say = lambda line: bars.console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
        result = entry.run(context)
    if entry.images and context.embedded:
        result.notes.insert(0, EMBEDDED)
    try:
        return store.store(entry, result, setting, time.perf_counter() - started, folder)
    except OSError as error:
        raise LeadlineError(
            f"{folder} cannot be written ({error.strerror}); make room and run the same command again"
        ) from error


def _show(summary: dict[str, Any], console: Console) -> None:
    """Print the claims and the notes of a summary."""
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading, justify in (("claim", "left"), ("kind", "left"), ("ours", "right"), ("paper", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("tolerance")
    table.add_column("holds")
    for claim in summary["claims"]:
        holds, numbers = claim_mark(claim), [number(claim[which]) for which in ("ours", "paper")]
        if holds == "no" and claim["kind"] == "shape":
            holds = "[bold red]no[/]"
        table.add_row(escape(claim["name"]), claim["kind"], *numbers, claim["tolerance"], holds)
    console.print(table)
    for note in summary["notes"]:
        if note != EMBEDDED:  # printed under the heading
            console.print(f"  {escape(note)}", highlight=False)
    console.print(f"  [dim]{summary['seconds']:.1f} s[/]")


def number(value: float | None) -> str:
    """Format a number with four digits; a dash for None."""
    return "-" if value is None else f"{value:.4g}"


def _conclude(summaries: list[dict[str, Any]], console: Console) -> bool:
    """Print how many claims hold and which shape claims do not; return whether all of them hold."""
    claims = [(summary["id"], claim) for summary in summaries for claim in summary["claims"]]
    shapes = [(name, claim) for name, claim in claims if claim["kind"] == "shape"]
    digits = [claim for _, claim in claims if claim["kind"] == "digits" and claim["tolerance"] != REPORTED]
    false = [f"{name}: {claim['name']}" for name, claim in shapes if not claim["holds"]]
    seconds = sum(summary["seconds"] for summary in summaries)
    counts = []
    if shapes:
        counts.append(f"[bold]{len(shapes) - len(false)} of {len(shapes)} shape claims hold[/]")
    if digits:
        counts.append(f"{sum(claim['holds'] for claim in digits)} of {len(digits)} digits are within their tolerance")
    entries = "1 entry" if len(summaries) == 1 else f"{len(summaries)} entries"
    console.print(f"\n{'; '.join(counts)}{'. ' if counts else ''}{entries}, {seconds:.0f} s.")
    for line in false:
        console.print(f"[bold red]does not hold:[/] {escape(line)}")
    return not false
