"""The command ``leadline evaluate``: the figures of a checkpoint on a split of data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from leadline.cli.console import Json

EXAMPLES = (
    "Examples: leadline evaluate runs/first | leadline evaluate runs/first/step-000176 --out first | "
    "leadline evaluate cured --recipe runs/first/recipe.yaml | "
    "leadline evaluate runs/text --data wiki.valid.tokens --split valid"
)


def evaluate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run, of one of its checkpoints, or of a model.")],
    which: Annotated[str, typer.Option(help="Of a run: its 'best' or its 'last' checkpoint.")] = "best",
    split: Annotated[str, typer.Option(help="'test', 'valid' or 'train'.")] = "test",
    data: Annotated[Path | None, typer.Option(help="Other data than the run's, or where these lie now.")] = None,
    recipe: Annotated[
        Path | None,
        typer.Option(help="Of a model without its run, such as a cured one: the recipe whose data to take."),
    ] = None,
    device: Annotated[str | None, typer.Option(help="'cpu' or 'cuda'; a GPU if there is one unless given.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for figures, report and violins; FOLDER/evaluation unless given.")
    ] = None,
    context: Annotated[int | None, typer.Option(help="Text: tokens of a window, or of a segment.")] = None,
    stride: Annotated[int | None, typer.Option(help="Text: by how much the window moves.")] = None,
    memory: Annotated[int | None, typer.Option(help="Transformer-XL: tokens that it remembers.")] = None,
    lanes: Annotated[int | None, typer.Option(help="Transformer-XL: stretches read side by side.")] = None,
    as_json: Json = False,
) -> None:
    """Evaluate a checkpoint: accuracy or perplexity, the probe's report, violins of token cosine and entropy."""
    from leadline.training.evaluate import evaluate as run

    with Console(stderr=True).status("evaluating"):
        text = {"context": context, "stride": stride, "memory": memory, "lanes": lanes}
        place = out or folder / "evaluation"
        result = run(folder, which=which, split=split, data=data, recipe=recipe, device=device, out=place, **text)
    if as_json:
        print(json.dumps(result.to_dict()))
        return
    for note in result.notes:
        Console(stderr=True).print(f"[bold yellow]note:[/] {escape(note)}", soft_wrap=True, highlight=False)
    shown = {name: value if isinstance(value, int) else f"{value:.4g}" for name, value in result.figures.items()}
    figures = ", ".join(f"{name} {value}" for name, value in shown.items())
    step = f" at step {result.step}" if result.step else ""
    print(f"{split}: {figures}{step} ({result.checkpoint})")
    Console().print(result.report.table(brief=Console().width < 130))
    Console().print(f"\n{escape(result.report.verdict.text)}", highlight=False)
    print(f"saved {', '.join(str(file) for file in result.files)}")
