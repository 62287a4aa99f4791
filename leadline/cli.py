"""The command line: parse, call, print. Heavy imports wait until a command needs them."""

from __future__ import annotations

import io
import json
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

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
    warnings.showwarning = _warn
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # what a terminal cannot show is a question mark
    try:
        app()
    except LeadlineError as error:
        Console(stderr=True).print(f"[bold red]leadline:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: Any = None, line: Any = None
) -> None:
    """Our own warnings as one line, others as Python words them."""
    if Path(filename).is_relative_to(Path(__file__).parent):
        Console(stderr=True).print(f"[yellow]leadline:[/] {escape(str(message))}", soft_wrap=True, highlight=False)
    else:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))


@contextmanager
def _may_stop(console: Console) -> Iterator[None]:
    """A run that ends before its time is one line, and has its exit code."""
    from leadline.errors import Stopped

    try:
        yield
    except Stopped as stopped:
        console.print(f"[bold red]leadline:[/] {escape(str(stopped))}", soft_wrap=True, highlight=False)
        raise typer.Exit(stopped.code) from None


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
        list[Path] | None, typer.Option(help="Save the report: .html, .json, .png, .svg or .pdf; may be repeated.")
    ] = None,
    before: Annotated[
        Path | None,
        typer.Option(help="A report saved as .json, to stand beside this one in what --out saves."),
    ] = None,
    blocks: Annotated[
        list[str] | None,
        typer.Option(help="Names of the blocks, such as 'encoder.layer.*', where they are not found; may be repeated."),
    ] = None,
    trials: Annotated[bool, typer.Option(help="Where something collapses, try the cures and measure them.")] = True,
    heatmaps: Annotated[bool, typer.Option(help="Keep attention heat maps of three layers for the page.")] = False,
    as_json: Json = False,
) -> None:
    """Measure where the tokens of a model grow alike, layer by layer, and what would help."""
    from leadline.probing import check_target, open_model, read_report
    from leadline.probing import probe as run_probe

    for path in out or []:
        check_target(path, before is not None)
    earlier = None if before is None else read_report(before)
    if before is not None and not out:
        raise LeadlineError(f"before is {before}, to stand beside this report in a file; name that file by --out")
    console = Console(stderr=True)
    with _bars(console, silent=as_json) as progress:
        progress("building the model", 0, None)
        taken: list[str] = []
        built, inputs = open_model(model, depth=depth, pretrained=pretrained, say=taken.append)
        report = run_probe(built, inputs, blocks=blocks, trials=trials, heatmaps=heatmaps, progress=progress)
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


@contextmanager
def _bars(console: Console, silent: bool) -> Iterator[Callable[[str, int, int | None], None]]:
    """A progress bar for the task that runs, on a terminal; nothing elsewhere."""
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers has bars of its own, at any time
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    quiet = silent or not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=quiet) as bars:
        shown: tuple[str, int | None] | None = None

        def show(what: str, done: int, total: int | None) -> None:
            nonlocal shown
            if shown != (what, total):
                for task in bars.task_ids:
                    bars.remove_task(task)
                bars.add_task(what, total=total)
                shown = what, total
            words = f"{what}, {done} of {total} blocks" if total else f"{what}, block {done}" if done else what
            bars.update(bars.task_ids[0], completed=done, description=words)

        yield show


bench = typer.Typer(help="Measure speed, memory and error on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


@bench.command(
    "attention",
    epilog="Examples: leadline bench attention --out results/bench.json | leadline bench attention --shape vit_base",
)
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


@app.command(epilog="Example: leadline cure ./checkpoint --alpha .5 --out ./cured")
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

    with _bars(Console(stderr=True), silent=as_json) as progress:
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


@app.command(
    epilog="Examples: leadline train recipes/smoke_digits.yaml out=runs/first | "
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
    from leadline.training import load_recipe
    from leadline.training import train as run
    from leadline.training.run_folder.logs import Listener

    console = Listener(stderr=True)
    with _may_stop(console):
        summary = run(load_recipe(recipe, settings or []), console=console)
    if int(os.environ.get("RANK", "0")):
        return
    if as_json:
        print(json.dumps(summary))
        return
    figures = [f"{name} {value:.4g}" for name, value in summary.items() if name.startswith("test_")]
    print(f"{', '.join(figures)} after {summary['steps']} steps; see {summary['recipe']['out']}")


@app.command(
    epilog="Examples: leadline generate runs/gpt2 'The kernel' | leadline generate runs/gpt2 - --tokens 200 "
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
    import time
    from itertools import chain

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
    first = next(stream, "")  # what cannot be done is said before anything is shown
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


@app.command(
    epilog="Examples: leadline evaluate runs/first | leadline evaluate runs/first/step-000176 --out first | "
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
        found = run(folder, which=which, split=split, data=data, recipe=recipe, device=device, out=place, **text)
    if as_json:
        print(json.dumps(found.to_dict()))
        return
    for note in found.notes:
        Console(stderr=True).print(f"[bold yellow]note:[/] {escape(note)}", soft_wrap=True, highlight=False)
    shown = {name: value if isinstance(value, int) else f"{value:.4g}" for name, value in found.figures.items()}
    figures = ", ".join(f"{name} {value}" for name, value in shown.items())
    step = f" at step {found.step}" if found.step else ""
    print(f"{split}: {figures}{step} ({found.checkpoint})")
    Console().print(found.report.table(brief=Console().width < 130))
    Console().print(f"\n{escape(found.report.verdict.text)}", highlight=False)
    print(f"saved {', '.join(str(file) for file in found.files)}")


@app.command(
    epilog="Examples: leadline reproduce list | leadline reproduce tse-fig2 | leadline reproduce init --data DIR | "
    "leadline reproduce hop-skipless --budget short --jobs 6"
)
def reproduce(
    ids: Annotated[list[str], typer.Argument(help="'list', ids, or 'init', 'trained', 'language', 'all'.")],
    out: Annotated[Path, typer.Option(help="Folder for data and figures, one folder an entry.")] = Path("results"),
    data: Annotated[Path | None, typer.Option(help="A local copy of CIFAR-10 in the hub's parquet layout.")] = None,
    text: Annotated[Path | None, typer.Option(help="Text to train on, a file or folder, for 'language'.")] = None,
    embedded: Annotated[bool, typer.Option(help="scikit-learn's digits in place of CIFAR-10, with a note.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of every random draw.")] = 0,
    device: Annotated[str | None, typer.Option(help="'cpu' or 'cuda'; a GPU if there is one unless given.")] = None,
    force: Annotated[bool, typer.Option(help="Run again what is finished.")] = False,
    page: Annotated[Path | None, typer.Option(help="Write a Markdown page of the results, pictures beside it.")] = None,
    budget: Annotated[str, typer.Option(help="Of what trains: 'short' (minutes on a GPU) or 'full'.")] = "short",
    jobs: Annotated[int, typer.Option(help="Training runs at a time, each in its own process.")] = 1,
    minutes: Annotated[float | None, typer.Option(help="Begin no further training run after this time.")] = None,
    as_json: Json = False,
) -> None:
    """Regenerate the papers' tables and figures, our numbers beside theirs.

    Finished entries are not run again, and neither are finished training runs. Exit code 1: what a paper concludes did
    not come out.
    """
    from leadline.papers import ENTRIES, list_entries, run_entries, summaries

    console = Console(stderr=as_json)
    if ids == ["list"]:
        if as_json:
            print(json.dumps(dict(list_entries()), indent=2))
            return
        table = Table("id", "group", "needs", "what it is")
        for entry in ENTRIES:
            needs = "--text" if entry.text else "images" if entry.images else ""
            table.add_row(entry.id, entry.group, needs, entry.title)
        console.print(table)
        return
    with _may_stop(Console(stderr=True)):
        holds = run_entries(
            ids,
            out,
            data=data,
            seed=seed,
            device=device,
            embedded=embedded,
            force=force,
            console=console,
            page=page,
            budget=budget,
            jobs=jobs,
            minutes=minutes,
            text=text,
        )
    if as_json:
        print(json.dumps(summaries(ids, out)))
    if not holds:
        raise typer.Exit(1)
