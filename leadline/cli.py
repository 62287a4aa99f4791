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


@app.command(
    epilog="Examples: leadline probe bert --depth 100 --out depth.html | leadline probe gpt2 --pretrained ./folder | "
    "leadline probe timm:vit_base_patch16_224 | leadline probe my_model.py:make_model"
)
def probe(
    model: Annotated[
        str | None,
        typer.Argument(help="A model type of transformers, timm:NAME, file.py:FUNCTION, or one of `leadline models`."),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Number of layers instead of the usual one.")] = None,
    pretrained: Annotated[Path | None, typer.Option(help="A folder with the weights of a checkpoint.")] = None,
    out: Annotated[
        list[Path] | None, typer.Option(help="Save the report: .html, .json, .png, .svg or .pdf; may be repeated.")
    ] = None,
    trials: Annotated[bool, typer.Option(help="Where something collapses, try the cures and measure them.")] = True,
    heatmaps: Annotated[bool, typer.Option(help="Keep attention heat maps of three layers for the page.")] = False,
    as_json: Json = False,
) -> None:
    """Measure where the tokens of a model grow alike, layer by layer, and what would help."""
    from leadline.probing import open_model
    from leadline.probing import probe as run_probe

    console = Console(stderr=True)
    with console.status("building the model"):
        built, inputs = open_model(model, depth=depth, pretrained=pretrained)
    with console.status("measuring"):
        report = run_probe(built, inputs, trials=trials, heatmaps=heatmaps)
    for path in out or []:
        report.save(path)
    if as_json:
        print(report.to_json())
        return
    Console().print(report.table(brief=Console().width < 130))
    Console().print(f"\n{escape(report.verdict.text)}", highlight=False)
    for path in out or []:
        console.print(f"saved {path}")


@app.command(epilog="Example: leadline cure ./checkpoint --alpha .5 --out ./cured")
def cure(
    folder: Annotated[Path, typer.Argument(help="A checkpoint of transformers, or one that model.save wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for the cured model: a new or an empty one.")],
    alpha: Annotated[float | None, typer.Option(help="Weight of the layer's input, in [0, 1).")] = None,
    alpha_prime: Annotated[float | None, typer.Option(help="Weight of the carried scores, in [0, 1).")] = None,
    de_escalation: Annotated[float | None, typer.Option(help="tau, the part of the token mean to take out.")] = None,
    as_json: Json = False,
) -> None:
    """Put a cure into a checkpoint and save it. Probe first: where nothing collapses a cure costs quality."""
    from leadline.surgery import cure_folder

    with Console(stderr=True).status("curing"):
        saved = cure_folder(folder, out, alpha=alpha, alpha_prime=alpha_prime, de_escalation=de_escalation)
    if as_json:
        print(json.dumps({"folder": str(saved)}))
    else:
        print(f"saved {saved}; load it with leadline.load({str(saved)!r})")


@app.command(
    epilog="Examples: leadline reproduce list | leadline reproduce tse-fig2 | leadline reproduce init --data DIR"
)
def reproduce(
    ids: Annotated[list[str], typer.Argument(help="'list', ids of figures and tables, 'init' or 'all'.")],
    out: Annotated[Path, typer.Option(help="Folder for data and figures, one folder an entry.")] = Path("results"),
    data: Annotated[Path | None, typer.Option(help="A local copy of CIFAR-10 in the hub's parquet layout.")] = None,
    embedded: Annotated[bool, typer.Option(help="scikit-learn's digits in place of CIFAR-10, with a note.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    device: Annotated[str | None, typer.Option(help="'cpu' or 'cuda'; a GPU if there is one unless given.")] = None,
    force: Annotated[bool, typer.Option(help="Run again what is finished.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write a Markdown page of the results, pictures beside it.")] = None,
    as_json: Json = False,
) -> None:
    """Regenerate the papers' tables and figures at initialisation, our numbers beside theirs.

    Finished entries are not run again. Exit code 1: what a paper concludes did not come out.
    """
    from leadline.reproduce import list_entries, run_entries, summaries

    console = Console(stderr=as_json)
    if ids == ["list"]:
        if as_json:
            print(json.dumps(dict(list_entries()), indent=2))
            return
        table = Table("id", "what it is")
        for name, title in list_entries():
            table.add_row(name, title)
        console.print(table)
        return
    holds = run_entries(
        ids, out, data=data, seed=seed, device=device, embedded=embedded, force=force, console=console, page=page
    )
    if as_json:
        print(json.dumps(summaries(ids, out)))
    if not holds:
        raise typer.Exit(1)
