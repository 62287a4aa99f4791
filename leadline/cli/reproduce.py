"""The command ``leadline reproduce``: the papers' tables and figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from leadline.cli.console import Json

EXAMPLES = (
    "Examples: leadline reproduce list | leadline reproduce tse-fig2 | leadline reproduce init --data DIR | "
    "leadline reproduce hop-skipless --budget short --jobs 6"
)


def reproduce(
    ids: Annotated[list[str], typer.Argument(help="'list', ids, or 'init', 'trained', 'language', 'all'.")],
    out: Annotated[Path, typer.Option(help="Folder for data and figures, one folder an entry.")] = Path("results"),
    data: Annotated[
        Path | None,
        typer.Option(help="A local copy of CIFAR-10, CIFAR-100 or both."),
    ] = None,
    text: Annotated[Path | None, typer.Option(help="Text to train on, a file or folder, for 'language'.")] = None,
    embedded: Annotated[bool, typer.Option(help="scikit-learn's digits in place of CIFAR-10, with a note.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    device: Annotated[str | None, typer.Option(help="'cpu' or 'cuda'; a GPU if there is one unless given.")] = None,
    force: Annotated[bool, typer.Option(help="Run again what is finished.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write a Markdown page of the results, pictures beside it.")] = None,
    budget: Annotated[str, typer.Option(help="Of what trains: 'short' (minutes on a GPU) or 'full'.")] = "short",
    jobs: Annotated[int, typer.Option(help="Training runs at a time, each in its own process.")] = 1,
    minutes: Annotated[float | None, typer.Option(help="Begin no further training run after this time.")] = None,
    as_json: Json = False,
) -> None:
    """Regenerate the papers' tables and figures, our numbers beside theirs.

    Finished entries are not run again, and neither are finished training runs. Exit code 1: what a paper concludes did
    not come out.
    """
    from leadline.papers import ENTRIES, list_entries, run_entries, summaries

    console = Console(stderr=as_json)
    if ids == ["list"]:
        if as_json:
            print(json.dumps(dict(list_entries()), indent=2))
            return
        table = Table("id", "group", "needs", "what it is")
        for entry in ENTRIES:
            needs = "--text" if entry.text else "images" if entry.images else ""
            table.add_row(entry.id, entry.group, needs, entry.title)
        console.print(table)
        return
    holds = run_entries(
        ids,
        out,
        data=data,
        seed=seed,
        device=device,
        embedded=embedded,
        force=force,
        console=console,
        page=page,
        budget=budget,
        jobs=jobs,
        minutes=minutes,
        text=text,
    )
    if as_json:
        print(json.dumps(summaries(ids, out)))
    if not holds:
        raise typer.Exit(1)
