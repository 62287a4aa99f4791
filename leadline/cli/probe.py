"""The command ``leadline probe``: measure a model layer by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from leadline.cli.console import Json, progress_bars
from leadline.errors import LeadlineError

EXAMPLES = (
    "Examples: leadline probe bert --depth 100 --out depth.html | leadline probe gpt2 --pretrained ./folder | "
    "leadline probe runs/first | leadline probe timm:vit_base_patch16_224 | leadline probe my_model.py:make_model"
)


def probe(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A type of transformers, timm:NAME, file.py:FUNCTION, a folder, or one of `leadline models`."
        ),
    ] = None,
    depth: Annotated[int | None, typer.Option(help="Number of layers instead of the usual one.")] = None,
    pretrained: Annotated[
        Path | None, typer.Option(help="The folder of a checkpoint, or of a run, whose best one is taken.")
    ] = None,
    out: Annotated[
        list[Path] | None,
        typer.Option(help="Save the report as .html, .json, .csv, .png, .svg or .pdf; may be repeated."),
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="A report saved as .json, to stand beside this one in what --out saves."),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option(help="Names of the blocks, such as 'encoder.layer.*', where they are not found; may be repeated."),
    ] = None,
    parts: Annotated[
        list[str] | None,
        typer.Option(help="Parts to measure, such as encoder; by default all that run; may be repeated."),
    ] = None,
    layout: Annotated[
        str | None, typer.Option(help="Axes of the stream, such as bnd, nbd or bdhw, where they cannot be told.")
    ] = None,
    trials: Annotated[bool, typer.Option(help="Where something collapses, try the cures and measure them.")] = True,
    depth_use: Annotated[
        bool, typer.Option("--depth-use", help="Leave out each block and measure what that does to the output.")
    ] = False,
    heatmaps: Annotated[bool, typer.Option(help="Keep attention heat maps of three layers for the page.")] = False,
    as_json: Json = False,
) -> None:
    """Measure where the tokens of a model grow alike, layer by layer, and what would help."""
    from leadline.probing import open_model
    from leadline.probing import probe as run_probe
    from leadline.report import check_target, read_report

    for path in out or []:
        check_target(path, before is not None)
    earlier = None if before is None else read_report(before)
    if before is not None and not out:
        raise LeadlineError(f"before is {before}, to stand beside this report in a file; name that file by --out")
    console = Console(stderr=True)
    with progress_bars(console, silent=as_json) as progress:
        progress("building the model", 0, None)
        taken: list[str] = []
        built, inputs = open_model(model, depth=depth, pretrained=pretrained, say=taken.append)
        report = run_probe(
            built,
            inputs,
            blocks=blocks,
            parts=parts,
            layout=layout,
            depth_use=depth_use,
            trials=trials,
            heatmaps=heatmaps,
            progress=progress,
        )
    if taken:
        report.settings = {"inputs": taken[0], **report.settings}
    for path in out or []:
        report.save(path, before=earlier)
    if as_json:
        print(report.to_json())
        return
    Console().print(report.table(brief=Console().width < 130))
    Console().print(f"\n{escape(report.verdict.text)}", highlight=False)
    if taken:
        Console().print(
            f"\nMeasured on two samples of ours: {taken[0]}. For a trained model measure on your own: file.py:FUNCTION "
            "may return a model and its inputs, and `leadline evaluate` takes those of a run.",
            style="dim",
            highlight=False,
        )
    for path in out or []:
        console.print(f"saved {path}")
