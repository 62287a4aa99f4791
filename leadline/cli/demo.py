"""The command ``leadline demo``: the product in two experiments."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from leadline.cli.console import Json

EXAMPLES = "Example: leadline demo --out results/demo"


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
