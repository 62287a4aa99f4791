"""The command ``leadline train``: run a recipe, or continue a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from leadline.cli.console import Json

EXAMPLES = (
    "Examples: leadline train recipes/smoke_digits.yaml out=runs/first | "
    "leadline train recipes/smoke_digits.yaml length=5 schedule.warmup=1 | "
    "torchrun --nproc-per-node 2 -m leadline train recipes/smoke_digits.yaml"
)


def train(
    recipe: Annotated[Path, typer.Argument(help="A recipe: a YAML file such as those under recipes/.")],
    settings: Annotated[
        list[str] | None, typer.Argument(help="key=value, to change an entry: out=DIR, length=5, optimizer.lr=1e-3.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train a model by a recipe, or go on with a run that was stopped: the same command does both.

    Everything goes to the folder out (runs/NAME unless given): logs, checkpoints, summary.json. Several processes
    through `accelerate launch` or `torchrun`, with the same recipe. Exit code 1: diverged, or could not save; 128 and
    more: stopped by a signal, after a checkpoint.
    """
    from leadline.training.loop import train as run
    from leadline.training.recipe import load_recipe
    from leadline.training.run_folder.logs import Listener

    summary = run(load_recipe(recipe, settings or []), console=Listener(stderr=True))
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        print(json.dumps(summary))
        return
    figures = [f"{name} {value:.4g}" for name, value in summary.items() if name.startswith("test_")]
    print(f"{', '.join(figures)} after {summary['steps']} steps; see {summary['recipe']['out']}")
