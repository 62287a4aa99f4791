"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from leadline import __version__
from leadline.errors import LeadlineError

app = typer.Typer(
    help="Measure how deep a Transformer can go before its tokens become alike, and what to do about it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for machines instead of tables for people.")]


def main() -> None:
    """Run a command. Bad input is one line and exit code 2, never a traceback."""
    try:
        app()
    except LeadlineError as error:
        Console(stderr=True).print(f"[bold red]leadline:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"leadline {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog="Example: leadline models --json")
def models(as_json: Json = False) -> None:
    """List the models that can be built, with what they are."""
    from leadline.models import MODELS

    rows = {name: description for name, (_, _, description) in sorted(MODELS.items())}
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    table = Table("name", "what it is", title="leadline.create_model(name, ...)", title_justify="left")
    for name, description in rows.items():
        table.add_row(name, description)
    Console().print(table)


@app.command(epilog="Example: leadline demo --out results/demo")
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the picture and the numbers.")] = Path("results/demo"),
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    as_json: Json = False,
) -> None:
    """See tokens collapse in a 100-layer BERT and a skip-less net, and what each cure does about it.

    Uses scikit-learn's digits only; takes two to three minutes on two CPU cores.
    """
    from leadline.demo import run

    run(out, seed=seed, as_json=as_json)
