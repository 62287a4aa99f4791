"""The command line: parse, call, print; a file per command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import io
import os
import sys
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

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
    """Run a command. Bad input is one line and exit code 2, a run that ends early one line and its own code.

    A full disk, a closed output and too little memory are one line with exit code 1. There is never a traceback.
    """
    _open_standard_streams()
    warnings.showwarning = _show_warning
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a character that the terminal cannot show becomes a question mark
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except LeadlineError as error:
        _end(str(error), 2)
    except Stopped as stopped:
        _end(str(stopped), stopped.code)
    except KeyboardInterrupt:
        sys.exit(130)
    except OSError as error:
        name = f" ({error.filename})" if error.filename else ""
        _end(f"{error.strerror or error}{name}; the command ended before its time, run it again when that is mended", 1)
    except (MemoryError, RuntimeError) as error:
        if not _out_of_memory(error):
            raise
        _end("there is not enough memory; make the model, the batch or the text of one step smaller", 1)


def _out_of_memory(error: BaseException) -> bool:
    """Return whether an error says that memory could not be had, on the CPU or a GPU."""
    words = ("allocate memory", "not enough memory", "out of memory", "Storage size calculation overflowed")
    return isinstance(error, MemoryError) or any(word in str(error) for word in words)


def _end(message: str, code: int) -> NoReturn:
    """Print a line and exit, also where nobody can read it."""
    with suppress(OSError):
        Console(stderr=True).print(f"[bold red]leadline:[/] {escape(message)}", soft_wrap=True, highlight=False)
    _silence(sys.stdout)
    _silence(sys.stderr)
    sys.exit(code)


def _silence(stream: Any) -> None:
    """Drop what a stream could not write, so that Python does not complain of it at exit."""
    try:
        stream.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_standard_streams() -> None:
    """Open closed standard streams on the null device; the next file opened would take their number otherwise."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115 - open until the program ends, as the next two
    sys.stdout = sys.stdout or open(os.devnull, "w")  # noqa: SIM115
    sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115


def _show_warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Show Leadline's own warnings as one line, others as Python words them."""
    if Path(filename).is_relative_to(Path(__file__).parents[1]):
        Console(stderr=True).print(f"[yellow]leadline:[/] {escape(str(message))}", soft_wrap=True, highlight=False)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))
