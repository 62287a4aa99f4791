"""The commands ``leadline bench ...``: speed, memory and error on this machine."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from leadline.cli.console import Json

EXAMPLES = "Examples: leadline bench attention --out results/bench.json | leadline bench attention --shape vit_base"


def bench_attention(
    suite: Annotated[
        list[str] | None, typer.Option(help="carried, biased or models; all unless given; may be repeated.")
    ] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Shapes to measure; all unless given.")] = None,
    method: Annotated[
        list[str] | None, typer.Option(help="flash, leadline, eager, compiled, sdpa_bias, flex; all unless given.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="cuda or cpu; a GPU is used when there is one.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the results there as JSON, and a picture beside it.")] = None,
    as_json: Json = False,
) -> None:
    """Attention with carried scores, and with a dense bias, against plain flash attention and other ways to do it."""
    from rich.progress import Progress

    from leadline.bench import METHODS, SUITES, bench_attention

    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=as_json or not console.is_terminal) as bar:
        task = bar.add_task("rows", total=None)

        def tell(kind: str, row: dict[str, object], done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            if not as_json:
                figures = [f"{key} {value:.3g}" for key, value in row.items() if isinstance(value, float)]
                names = " ".join(str(value) for value in row.values() if isinstance(value, str))
                Console().print(f"{kind:8} {names:32} {'  '.join(figures)}", soft_wrap=True, highlight=False)

        results = bench_attention(
            tuple(suite or SUITES), tuple(shape or ()), tuple(method or METHODS), device,
            command=f"leadline {' '.join(sys.argv[1:])}", out=out, on_row=tell,
        )  # fmt: skip
    if as_json:
        print(json.dumps(results))
