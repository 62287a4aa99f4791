"""The demo: tokens of a deep BERT at initialisation, and a skip-less net trained on digits.

1. Tokens of a 100-layer BERT at initialisation, block by block, plain and with each cure.
2. A net of 8 attention layers without skip connections, trained four ways on handwritten digits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from torch import Tensor

from leadline.data import load_digits
from leadline.data.images.digits import Split
from leadline.errors import LeadlineError
from leadline.files import whole
from leadline.metrics import token_similarity
from leadline.models import Bert, create_model
from leadline.report import save_demo_figure

CURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "alpha .5": {"attention": "hopfield", "alpha": 0.5, "alpha_prime": 0.0},
    "alpha' .5": {"attention": "hopfield", "alpha": 0.0, "alpha_prime": 0.5},
    "both .5": {"attention": "hopfield", "alpha": 0.5, "alpha_prime": 0.5},
    "tau .1": {"de_escalation": 0.1},
}
ARMS = {"standard": CURES["plain"], "alpha only": CURES["alpha .5"], "alpha' only": CURES["alpha' .5"]}
ARMS["both"] = CURES["both .5"]
LEVELS = (0.5, 0.9, 0.99)
DEPTH = 100
RATES = (3e-4, 2e-3)
EPOCHS, BATCH, WARM_UP = 12, 64, 50


def run(out: Path, seed: int = 0, as_json: bool = False) -> dict[str, Any]:
    """Run both experiments, print their tables, save ``demo.png`` and ``demo.json`` in ``out``."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LeadlineError(f"--out {out} cannot be made ({error.strerror}); give a folder to write to") from error
    console = Console(stderr=as_json)
    train, test = load_digits(seed)

    console.print(f"\n[bold]1. A {DEPTH}-layer BERT at initialisation.[/] Do its tokens grow alike?")
    console.print("Drawing 709 million weights takes ten seconds or so.")
    with _progress(console) as progress:
        similarity = collapse(train.images[:4], seed, progress.track)
    console.print(_collapse_table(similarity))

    console.print("\n[bold]2. Eight attention layers without skip connections,[/] trained on handwritten digits.")
    with _progress(console) as progress:
        arms = {name: train_arm(name, train, test, seed, progress.track) for name in ARMS}
    console.print(_arms_table(arms))
    conclusion = conclude({name: arm["accuracy"] for name, arm in arms.items()}, len(test.labels))
    console.print(f"\n[bold]{conclusion}[/]")

    result = {"seed": seed, "similarity": similarity, "arms": arms, "conclusion": conclusion}
    with whole(out / "demo.json") as new:
        new.write_text(json.dumps(result, indent=2) + "\n")
    with whole(out / "demo.png") as new:
        save_demo_figure(new, similarity, {name: arm["losses"] for name, arm in arms.items()})
    console.print(f"Picture: {out / 'demo.png'}   Numbers: {out / 'demo.json'}")
    if as_json:
        print(json.dumps(result))
    return result


def collapse(images: Tensor, seed: int, track: Callable[..., Iterable[Any]]) -> dict[str, list[float]]:
    """Token similarity entering the first block and leaving each block, for the plain BERT and each cure.

    An image is read as a text of 64 pixels, its grey levels the 17 words. All cures share the same weights.
    """
    ids = (images[:, 0].flatten(1) * 16).round().long()
    size = {"depth": DEPTH, "vocab_size": 17, "max_tokens": ids.shape[1]}
    torch.manual_seed(seed)
    plain = create_model("bert_base", **size)
    curves = {}
    for name, cure in CURES.items():
        with torch.device("meta"):
            model = cast(Bert, create_model("bert_base", **size, **cure))
        model.load_state_dict(plain.state_dict(), assign=True)
        model.eval()
        with torch.no_grad():
            x, _ = model.embed(ids)
            state = None
            curve = [token_similarity(x).mean().item()]
            for block in track(list(model.blocks.layers()), description=f"measuring, {name}"):
                x, state = block(x, state)
                curve.append(token_similarity(x).mean().item())
        curves[name] = curve
    return curves


def train_arm(name: str, train: Split, test: Split, seed: int, track: Callable[..., Iterable[Any]]) -> dict[str, Any]:
    """Train one arm at each learning rate; returns the run with the lower final training loss."""
    runs = [train_once(name, rate, train, test, seed, track) for rate in RATES]
    return min(runs, key=lambda run: run["losses"][-1])


def train_once(
    name: str, rate: float, train: Split, test: Split, seed: int, track: Callable[..., Iterable[Any]]
) -> dict[str, Any]:
    """AdamW with warm-up, linear decay and clipping, so that no arm is beaten by its own divergence."""
    torch.manual_seed(seed)
    model = create_model(
        "vit_tiny", depth=8, dim=96, image_size=8, patch_size=2, channels=1, num_classes=10,
        pool="max", ffn=0, skip=False, **ARMS[name],
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.05)
    batches = len(train.labels) // BATCH
    steps = EPOCHS * batches
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: min(1, (i + 1) / WARM_UP) * (1 - i / steps))
    losses = []
    for _ in track(range(EPOCHS), description=f"training, {name}, rate {rate:g}"):
        order = torch.randperm(len(train.labels))[: batches * BATCH]
        total = 0.0
        for index in order.split(BATCH):
            loss = F.cross_entropy(model(train.images[index]), train.labels[index])
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            total += loss.item()
        losses.append(total / batches)
    model.eval()
    with torch.no_grad():
        correct = (model(test.images).argmax(-1) == test.labels).float().mean().item()
    return {"rate": rate, "accuracy": 100 * correct, "losses": losses}


def conclude(accuracy: dict[str, float], test_images: int) -> str:
    """Which part of Hopfield attention did the work: its mean effect over the other's two settings."""
    standard, alpha, prime, both = (accuracy[name] for name in ARMS)
    effects = {"alpha": ((alpha - standard) + (both - prime)) / 2, "alpha'": ((prime - standard) + (both - alpha)) / 2}
    share = accuracy["standard"] / 100
    noise = 200 * (share * (1 - share) / test_images) ** 0.5  # two standard errors of one accuracy
    working = [name for name, effect in effects.items() if effect > noise]
    points = ", ".join(f"{name} {effect:+.1f}" for name, effect in effects.items())
    if not working:
        return f"Neither part helped beyond the noise of {noise:.1f} points: {points}."
    other = [name for name in effects if name not in working]
    rest = f"; {other[0]} did not beyond the noise of {noise:.1f}" if other else ""
    return f"What did the work is {' and '.join(working)} (points of accuracy: {points}{rest})."


def first_above(curve: Sequence[float], level: float) -> int | None:
    """The first block after which the similarity is above ``level``; 0 is the embedding."""
    return next((block for block, value in enumerate(curve) if value > level), None)


def _collapse_table(similarity: dict[str, list[float]]) -> Table:
    table = Table(title="Token similarity (1: all tokens are the same)", title_justify="left")
    table.add_column("BERT")
    for heading in ("at the input", *(f"above {level:g} after block" for level in LEVELS), f"after block {DEPTH}"):
        table.add_column(heading, justify="right")
    for name, curve in similarity.items():
        passed = [first_above(curve, level) for level in LEVELS]
        cells = ["never" if block is None else str(block) for block in passed]
        table.add_row(name, f"{curve[0]:.3f}", *cells, f"{curve[-1]:.4f}")
    return table


def _arms_table(arms: dict[str, dict[str, Any]]) -> Table:
    rates = " and ".join(f"{rate:g}" for rate in RATES)
    table = Table(title=f"The better of the rates {rates}", title_justify="left")
    table.add_column("attention")
    for heading in ("test accuracy", "final training loss", "rate"):
        table.add_column(heading, justify="right")
    for name, arm in arms.items():
        table.add_row(name, f"{arm['accuracy']:.1f} %", f"{arm['losses'][-1]:.4f}", f"{arm['rate']:g}")
    return table


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn(),
        console=console,
    )  # fmt: skip
