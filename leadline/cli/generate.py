"""The command ``leadline generate``: let a trained language model write."""

from __future__ import annotations

import json
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from leadline.cli.console import Json
from leadline.errors import LeadlineError

EXAMPLES = (
    "Examples: leadline generate runs/gpt2 'The kernel' | leadline generate runs/gpt2 - --tokens 200 "
    "--temperature .8 --top-p .95 < prompt.txt"
)


def generate(
    folder: Annotated[Path, typer.Argument(help="The folder of a run or of a saved model, with its tokenizer.")],
    prompt: Annotated[str, typer.Argument(help="What the text begins with; - reads it from the standard input.")],
    tokens: Annotated[int, typer.Option(help="How many tokens to write.")] = 100,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token; above 0 samples.")] = 0.0,
    top_k: Annotated[int | None, typer.Option(help="Sample from the so many likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Sample from the likeliest tokens of this probability.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
    cache: Annotated[
        bool,
        typer.Option(help="Remember keys and values. Without, a Transformer-XL sees more than its memory."),
    ] = True,
    device: Annotated[str | None, typer.Option(help="'cpu' or 'cuda'; a GPU if there is one unless given.")] = None,
    as_json: Json = False,
) -> None:
    """Continue a text with a trained language model, word by word as it comes."""
    import torch

    from leadline.training.writing import open_language_model, write

    console = Console(stderr=True)
    if tokens < 1:
        raise LeadlineError(f"--tokens is {tokens}; it must be at least 1")
    if not -(2**63) <= seed < 2**64:
        raise LeadlineError(f"--seed is {seed}; it must fit into 64 bits")
    try:
        begin = sys.stdin.read() if prompt == "-" else prompt
        begin.encode()
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise LeadlineError(f"the prompt is not UTF-8 ({error.reason}); convert it first") from error
    with console.status("loading the model"):
        model, tokenizer = open_language_model(folder, device)
    where = next(model.parameters()).device
    generator = torch.Generator(where).manual_seed(seed)
    options = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "generator": generator}
    began, pieces = time.perf_counter(), []
    stream = write(model, tokenizer, begin, tokens, cache, **options)
    first = next(stream, "")  # an error appears before any text does
    if not as_json:
        print(begin, end="", flush=True)
    for piece in chain([first], stream):
        pieces.append(piece)
        if not as_json:
            print(piece, end="", flush=True)
    seconds = time.perf_counter() - began
    if as_json:
        text = "".join(pieces)
        print(json.dumps({"prompt": begin, "text": text, "tokens": tokens, "seconds": round(seconds, 3)}))
    else:
        print()
        console.print(f"[dim]{tokens} tokens, {tokens / seconds:.0f} a second[/]")
