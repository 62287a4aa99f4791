"""The command ``leadline cure``: put a cure into a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from leadline.cli.console import Json, progress_bars

EXAMPLES = "Example: leadline cure ./checkpoint --alpha .5 --out ./cured"


def cure(
    folder: Annotated[Path, typer.Argument(help="The folder of a checkpoint, or of a run, whose best one is taken.")],
    out: Annotated[Path, typer.Option(help="Folder for the cured model: a new or an empty one.")],
    alpha: Annotated[float | None, typer.Option(help="Weight of the layer's input, in [0, 1).")] = None,
    alpha_prime: Annotated[float | None, typer.Option(help="Weight of the carried scores, in [0, 1).")] = None,
    de_escalation: Annotated[float | None, typer.Option(help="tau, the part of the token mean to take out.")] = None,
    de_escalation_at: Annotated[
        str | None,
        typer.Option(help="'block-end', 'ffn-input' or 'attention-input'; the model's own place, or the block's end."),
    ] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="Cure this layer, from 0; may be repeated; all unless given. Not for our own models."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Put a cure into a checkpoint and save it. Probe first; a trained model needs training with its cure."""
    from leadline.curing import cure_folder

    with progress_bars(Console(stderr=True), silent=as_json) as progress:
        progress("curing", 0, None)
        saved = cure_folder(
            folder,
            out,
            alpha=alpha,
            alpha_prime=alpha_prime,
            de_escalation=de_escalation,
            layers=layer,
            de_escalation_at=de_escalation_at,
        )
    if as_json:
        print(json.dumps({"folder": str(saved)}))
    else:
        print(f"saved {saved}; load it with leadline.load({str(saved)!r})")
