"""The command line: parse, call, print; a file per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import io
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from leadline import __version__
from leadline.cli import bench, cure, demo, evaluate, generate, models, probe, reproduce, train
from leadline.errors import LeadlineError, Stopped

app = typer.Typer(
    help="Measure how deep a Transformer can go before its tokens become alike, and what to do about it.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode="rich",
)
benchmarks = typer.Typer(help="Measure speed, memory and error on this machine.", no_args_is_help=True)


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
    """Carries the options of the program itself."""


# in the order of `leadline --help`
app.command(epilog=models.EXAMPLES)(models.models)
app.command(epilog=demo.EXAMPLES)(demo.demo)
app.command(epilog=probe.EXAMPLES)(probe.probe)
app.command(epilog=cure.EXAMPLES)(cure.cure)
app.command(epilog=train.EXAMPLES)(train.train)
app.command(epilog=generate.EXAMPLES)(generate.generate)
app.command(epilog=evaluate.EXAMPLES)(evaluate.evaluate)
app.command(epilog=reproduce.EXAMPLES)(reproduce.reproduce)
app.add_typer(benchmarks, name="bench")
benchmarks.command("attention", epilog=bench.EXAMPLES)(bench.bench_attention)


def main() -> None:
    """Run a command. Bad input is one line and exit code 2, a run that ends early one line and its own code."""
    warnings.showwarning = _show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show becomes a question mark
    try:
        app()
    except LeadlineError as error:
        _print_error(error)
        sys.exit(2)
    except Stopped as stopped:
        with suppress(OSError):  # the terminal may be gone
            _print_error(stopped)
        sys.exit(stopped.code)
    except KeyboardInterrupt:
        sys.exit(130)


def _print_error(error: Exception) -> None:
    Console(stderr=True).print(f"[bold red]leadline:[/] {escape(str(error))}", soft_wrap=True, highlight=False)


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Show Leadline's own warnings as one line, others as Python words them."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        Console(stderr=True).print(f"[yellow]leadline:[/] {escape(str(message))}", soft_wrap=True, highlight=False)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
