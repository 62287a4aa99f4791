"""``leadline reproduce``: run entries, print our numbers beside the papers', say which claims hold."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
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
from leadline.papers.shared.entry import REPORTED, Context, Entry, verdict
from leadline.papers.shared.material import Material
from leadline.papers.shared.page import check_page, write_page

EMBEDDED = (
    "Run on scikit-learn's digits in place of CIFAR-10, without RandAugment, which needs colour: the papers' digits "
    "are not comparable."
)


def run_entries(
    ids: str | Sequence[str],
    out: str | os.PathLike[str] = "results",
    *,
    entries: Sequence[Entry],
    data: str | os.PathLike[str] | None = None,
    seed: int = 0,
    device: str | None = None,
    embedded: bool = False,
    force: bool = False,
    console: Console | None = None,
    page: str | os.PathLike[str] | None = None,
    budget: str = "short",
    jobs: int = 1,
    minutes: float | None = None,
    text: str | os.PathLike[str] | None = None,
) -> bool:
    """Run the entries that ``ids`` names, each into its own folder under ``out``; whether every shape claim holds.

    An entry that is finished with the same setting is not run again unless ``force``d.
    data      a local copy of CIFAR-10; without it the hub's is used.
    embedded  scikit-learn's digits in place of CIFAR-10.
    text      a file or folder of text, for the entries that train on text.
    device    "cpu" or "cuda"; None: a GPU if there is one.
    page      write what was found into this Markdown file, pictures beside it.
    budget    "short" or "full", for entries that train.
    jobs      training runs at a time, each in a process of its own; they are kept one by one under ``out``.
    minutes   begin no further training run after this time; what is finished counts the next time.

    Without CIFAR-10, or without text, the entries that need it are left out, and an error says so after the others.
    """
    console = console or Console()
    if jobs < 1:
        raise LeadlineError(f"jobs is {jobs}; it must be at least 1")
    until = None if minutes is None else time.monotonic() + 60 * minutes
    chosen = [entry.with_budget(budget) for entry in choose(ids, entries)]
    where = choose_device(device)
    if page is not None:
        check_page(page)
    summaries: list[dict[str, Any]] = []
    material = Material(data, embedded, text)
    material.check(chosen)
    missing: LeadlineError | None = None
    for entry in chosen:
        heading = f"\n[bold]{entry.id}[/]  {escape(entry.title)}"
        if (lacking := material.lacks(entry)) is not None:
            console.print(f"{heading}  [yellow]left out, it needs {'text' if entry.text else 'CIFAR-10'}[/]")
            missing = missing or lacking
            continue
        data_id = material.id_of(entry)
        setting = entry.full_setting(seed, where, embedded, data_id)
        folder = Path(out) / entry.id
        summary = None if force else store.finished(entry, setting, folder)
        if summary is not None:
            console.print(f"{heading}  [dim]finished before[/]")
        else:
            console.print(heading)
        if entry.images and embedded:
            console.print(f"  [yellow]{EMBEDDED}[/]")
        if summary is None:
            store.fresh(folder)
            context = Context(
                entry.setting,
                seed,
                where,
                material.images,
                embedded,
                out=Path(out),
                jobs=jobs,
                until=until,
                text=material.text,
                data_id=data_id,
            )
            try:
                summary = _run(entry, setting, folder, context, console)
            except KeyboardInterrupt:
                console.print("Interrupted. What is finished is kept; the same command goes on with the rest.")
                raise
        _show(summary, console)
        console.print(f"  saved in {escape(str(folder))}")
        summaries.append(summary)
    holds = _conclude(summaries, console)
    if page is not None:
        trained = [entry.id for entry in chosen if entry.group != "init"]
        init = [entry.id for entry in entries if entry.group == "init"]
        options = _options(data, embedded, seed, device, text)
        write_page(out, page, trained or init, bool(trained), options)
    if missing is not None:
        raise missing
    return holds


def choose(ids: str | Sequence[str], entries: Sequence[Entry]) -> list[Entry]:
    """The entries that are named, by id or as a group: "init" for all at initialisation, "all"."""
    groups = {entry.group for entry in entries}
    wanted: list[Entry] = []
    for name in [ids] if isinstance(ids, str) else ids:
        found = [entry for entry in entries if name in ("all", entry.group, entry.id)]
        if not found:
            raise unknown_name("entry", name, [*(entry.id for entry in entries), *groups, "all"])
        wanted += found
    return list({entry.id: entry for entry in wanted}.values())


def _run(
    entry: Entry,
    setting: dict[str, Any],
    folder: Path,
    context: Context,
    console: Console,
) -> dict[str, Any]:
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
    table = Table(box=None, padding=(0, 2), pad_edge=False)
    for heading, justify in (("claim", "left"), ("kind", "left"), ("ours", "right"), ("paper", "right")):
        table.add_column(heading, justify=justify)  # type: ignore[arg-type]
    table.add_column("tolerance")
    table.add_column("holds")
    for claim in summary["claims"]:
        holds, numbers = verdict(claim), [number(claim[which]) for which in ("ours", "paper")]
        if holds == "no" and claim["kind"] == "shape":
            holds = "[bold red]no[/]"
        table.add_row(escape(claim["name"]), claim["kind"], *numbers, claim["tolerance"], holds)
    console.print(table)
    for note in summary["notes"]:
        if note != EMBEDDED:  # said at the beginning
            console.print(f"  {escape(note)}", highlight=False)
    console.print(f"  [dim]{summary['seconds']:.1f} s[/]")


def number(value: float | None) -> str:
    """Four digits, or a dash for none."""
    return "-" if value is None else f"{value:.4g}"


def _conclude(summaries: list[dict[str, Any]], console: Console) -> bool:
    claims = [(summary["id"], claim) for summary in summaries for claim in summary["claims"]]
    shapes = [(name, claim) for name, claim in claims if claim["kind"] == "shape"]
    digits = [claim for _, claim in claims if claim["kind"] == "digits" and claim["tolerance"] != REPORTED]
    false = [f"{name}: {claim['name']}" for name, claim in shapes if not claim["holds"]]
    seconds = sum(summary["seconds"] for summary in summaries)
    said = []
    if shapes:
        said.append(f"[bold]{len(shapes) - len(false)} of {len(shapes)} shape claims hold[/]")
    if digits:
        said.append(f"{sum(claim['holds'] for claim in digits)} of {len(digits)} digits are within their tolerance")
    entries = "1 entry" if len(summaries) == 1 else f"{len(summaries)} entries"
    console.print(f"\n{'; '.join(said)}{'. ' if said else ''}{entries}, {seconds:.0f} s.")
    for line in false:
        console.print(f"[bold red]does not hold:[/] {escape(line)}")
    return not false


def _options(
    data: str | os.PathLike[str] | None,
    embedded: bool,
    seed: int,
    device: str | None,
    text: str | os.PathLike[str] | None,
) -> str:
    """The options of the command as a page gives them; a folder of this machine would say nothing to others."""
    given = {"--data FOLDER": data is not None and not embedded, "--embedded": embedded, f"--seed {seed}": seed != 0}
    given |= {f"--device {device}": device is not None, "--text FOLDER": text is not None}
    return "".join(f" {option}" for option, wanted in given.items() if wanted)
