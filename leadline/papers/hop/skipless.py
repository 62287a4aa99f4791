"""HOP's skip-less ViT on CIFAR-10 by depth, four ways, each at its best learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from leadline.papers.shared.attention_nets import COLUMNS
from leadline.papers.shared.entry import Claim, Context, Entry, Result, above
from leadline.papers.shared.plots import panels, styles
from leadline.papers.shared.trained import (
    NEAR,
    accuracy,
    band,
    beside_one,
    curves_table,
    difference,
    diverged_note,
    effort,
    end_loss,
    near_one,
    peak_sentence,
    percent,
    said,
    spread,
)
from leadline.training.runs import Job, Record, run_all

PAPER = {  # % after HOP's full training, by depth
    "standard": {1: 55.1, 2: 63.7, 4: 57.4, 8: 48.6, 12: 10.0},
    "both": {1: 65.4, 2: 79.8, 4: 85.7, 8: 80.3, 12: 10.0},
}
Cell = tuple[str, int, str]  # initialisation, depth, column


def recipe(setting: Mapping[str, Any], cell: Cell, lr: float, seed: int, final: bool) -> dict[str, Any]:
    """Norm, attention and nothing else, no skips; warm-up and clipping for all. To choose lr, a tenth is held out."""
    init, depth, column = cell
    alpha, alpha_prime = COLUMNS[column]
    sizes = {name: setting[name] for name in ("dim", "heads")}
    cure = {"attention": "hopfield", "alpha": alpha, "alpha_prime": alpha_prime}
    return {
        "model": {"name": "vit_tiny", "depth": depth, **sizes, "patch_size": 4, "ffn": 0, "skip": False, "pool": "max",
                  "init": init, **cure},
        "data": {"name": "cifar10", "valid": 0.0 if final else 0.1},
        "length": f"{setting['epochs']} epochs",  # of a trial too: some rates that start best break down later
        "batch": {"size": setting["batch"]},
        "optimizer": {"name": "adamw", "lr": lr, "weight_decay": 0.05},
        "schedule": {"name": "cosine", "warmup": "10 %"},
        "regularise": {"clip": 1.0},
        "augment": {"flip": True, "crop": "pad"},
        "precision": "bf16",
        "compile": "blocks",
        "graph": True,
        "evaluate": "50 %" if final else "100 %",
        "checkpoint": {"every": "100 %", "keep": 1, "best": False},
        "log": {"every": 50},
        "seed": seed,
    }  # fmt: skip


def cells(setting: Mapping[str, Any]) -> list[Cell]:
    """The main initialisation at every depth, the others at some."""
    first, *others = setting["inits"]
    every = [(first, depth) for depth in setting["depths"]]
    every += [(init, depth) for init in others for depth in setting["other_depths"]]
    return [(init, depth, column) for init, depth in every for column in COLUMNS]


def name(cell: Cell, lr: float, seed: int, final: bool) -> str:
    init, depth, column = cell
    return f"skipless {'final' if final else 'trial'} {init} {depth} {column} {lr:g} {seed}"


Tried = dict[Cell, dict[float, float | None]]  # accuracy on held-out images by learning rate; None: diverged


def choose_rates(context: Context) -> tuple[dict[Cell, float], Tried, list[Record]]:
    """By cell the learning rate with the best accuracy on held-out images, one seed; what each gave; the runs."""
    setting = context.setting
    jobs = {
        (cell, lr): Job(
            name(cell, lr, context.seed, False), recipe(setting, cell, lr, context.seed, False), cost=cell[1]
        )
        for cell in cells(setting)
        for lr in setting["lrs"]
    }
    records = run_all(context.training(), list(jobs.values()))
    found: Tried = {}
    for (cell, lr), job in jobs.items():
        record = records[job.name]
        found.setdefault(cell, {})[lr] = None if record.diverged else record["valid_accuracy"]
    best = {cell: max(tried, key=lambda lr: (tried[lr] or 0.0, -lr)) for cell, tried in found.items()}
    return best, found, list(records.values())


def run(context: Context) -> Result:
    setting, seeds = context.setting, range(context.seed, context.seed + context.setting["seeds"])
    rates, tried, trial_runs = choose_rates(context)
    jobs = {
        (cell, seed): Job(
            name(cell, lr, seed, True),
            recipe(setting, cell, lr, seed, True),
            setting["probed"] if seed == context.seed else 0,
            cost=cell[1],
        )
        for cell, lr in rates.items()
        for seed in seeds
    }
    records = run_all(context.training(), list(jobs.values()))
    found = {cell: [records[jobs[cell, seed].name] for seed in seeds] for cell in rates}
    right = {cell: [accuracy(r) for r in kept] for cell, kept in found.items()}
    main = setting["inits"][0]
    claims: list[Claim] = []
    for depth in setting["depths"]:
        both, plain = right[main, depth, "both"], right[main, depth, "standard"]
        if depth < 12:  # at 12 the paper has both at chance
            what = f"both over standard, depth {depth}, points"
            paper = PAPER["both"][depth] - PAPER["standard"][depth] if depth in PAPER["both"] else None
            claims.append(above(what, difference(both, plain)[0], 0.0, paper))
        for column, numbers in PAPER.items():
            ours = 100 * spread(right[main, depth, column])[0]
            if depth in numbers:
                said_paper = f"accuracy, {column}, depth {depth}, %"
                near = abs(ours - numbers[depth]) <= 5
                claims.append(Claim(said_paper, "digits", ours, numbers[depth], "5 points", near))
    notes = [
        *(_contributions(right, init, depth) for init, depth in _places(rates)),
        _summary(right, main, setting["depths"]),
        *(
            f"{init}, depth {depth}: {peak_sentence({c: found[init, depth, c][0].layers for c in COLUMNS})}"
            for init, depth in _places(rates)
        ),
        _about(setting, found, tried, len(seeds)),
        *diverged_note({_called(cell): kept for cell, kept in found.items()}),
        *_at_the_edge(rates, setting["lrs"]),
        effort(found, trial_runs),
    ]
    shown = [
        {
            "initialisation": init,
            "depth": str(depth),
            **{c: f"{percent(right[init, depth, c])} ({rates[init, depth, c]:g})" for c in COLUMNS},
        }
        for init, depth in _places(rates)
    ]
    table = [
        {"init": cell[0], "depth": cell[1], "column": cell[2], "lr": rates[cell], "seed": seed,
         "test_accuracy": record["test_accuracy"], "diverged": record["diverged"] or "",
         "training_loss": "" if record.diverged else end_loss(record)}
        for cell, kept in found.items() for seed, record in zip(seeds, kept, strict=True)
    ]  # fmt: skip
    trials = [
        {"init": cell[0], "depth": cell[1], "column": cell[2], "lr": lr, "valid_accuracy": accuracy}
        for cell, by_rate in tried.items()
        for lr, accuracy in by_rate.items()
    ]
    layers = [
        {"init": cell[0], "depth": cell[1], "column": cell[2], "layer": f.index, "similarity": f.similarity,
         "cosine": f.cosine, "near_one": near_one(f.cosines), "beside_one": beside_one(f.cosines)}
        for cell, kept in found.items() for f in kept[0].layers if f.cosines is not None
    ]  # fmt: skip
    curves = curves_table({_called(cell): kept for cell, kept in found.items()}, seeds, ("loss", "accuracy"))
    tables = {"runs": table, "trials": trials, "curves": curves, "layers": layers}
    return Result(claims, tables, lambda: _plot(setting, found, right), notes, shown)


def _called(cell: Cell) -> str:
    init, depth, column = cell
    return f"{column} at depth {depth} ({init})"


def _places(cells: Mapping[Cell, Any]) -> list[tuple[str, int]]:
    return list(dict.fromkeys((init, depth) for init, depth, _ in cells))


def _contributions(right: Mapping[Cell, Sequence[float]], init: str, depth: int) -> str:
    plain, alpha, prime, both = (right[init, depth, column] for column in COLUMNS)
    pairs = (("alpha alone", alpha, plain), ("alpha' alone", prime, plain), ("alpha' on top of alpha", both, alpha))
    return f"Depth {depth} ({init}): {'; '.join(said(*pair) for pair in pairs)}."


def _summary(right: Mapping[Cell, Sequence[float]], init: str, depths: Sequence[int]) -> str:
    """What each is worth over all depths: each effect is the mean over the other's two values."""
    alphas, primes = [], []
    for depth in depths:
        plain, alpha, prime, both = (spread(right[init, depth, column])[0] for column in COLUMNS)
        alphas.append(50 * (alpha - plain + both - prime))
        primes.append(50 * (prime - plain + both - alpha))
    by_depth = ", ".join(f"{a:+.1f} and {p:+.1f} (depth {d})" for d, a, p in zip(depths, alphas, primes, strict=True))
    a, p = statistics.fmean(alphas), statistics.fmean(primes)
    if a > 1 and a > 3 * abs(p):
        verdict = "It is alpha that carries the skip-less result"
    elif p > 1 and p > 3 * abs(a):
        verdict = "It is alpha' that carries the skip-less result"
    elif max(abs(a), abs(p)) <= 1:
        verdict = "Neither changes much"
    else:
        verdict = "Both have a part in it"
    return f"{verdict}: alpha, and alpha', .5 instead of 0 changes the accuracy by {by_depth} points ({init})."


def _about(
    setting: Mapping[str, Any],
    found: Mapping[Cell, list[Record]],
    tried: Tried,
    seeds: int,
) -> str:
    every = [accuracy for by_rate in tried.values() for accuracy in by_rate.values()]
    lost = sum(accuracy is None for accuracy in every)
    low = sum(accuracy is not None and accuracy < 0.15 for accuracy in every)
    bad = sum(record.diverged for kept in found.values() for record in kept)
    return (
        f"Pre-norm, no MLP, no outer skips, maximum over tokens, {setting['epochs']} epochs, {seeds} seeds, warm-up "
        "over a tenth of the run and gradients clipped to norm 1. Each cell of the table is at its best of "
        f"{len(setting['lrs'])} learning rates (in brackets), chosen by one run of the same length with a tenth of the "
        f"training images held out. {lost} of {len(every)} such runs diverged and {low} more ended below 15 %; {bad} "
        f"of {sum(map(len, found.values()))} final ones diverged, which counts as 10 %."
    )


def _at_the_edge(rates: Mapping[Cell, float], lrs: Sequence[float]) -> list[str]:
    """Which ways did best at the smallest or the largest rate, so that one beyond it may do better still."""
    lines = []
    for end, said_end in ((min(lrs), "smallest"), (max(lrs), "largest")):
        by_column: dict[str, list[str]] = {}
        for (init, depth, column), rate in rates.items():
            if rate == end:
                by_column.setdefault(column, []).append(f"{depth} ({init})")
        places = "; ".join(f"{column} at depth {', '.join(at)}" for column, at in by_column.items())
        if places:
            lines.append(f"The {said_end} rate that was tried did best for {places}: one beyond it may do better.")
    return lines


def _plot(setting: Mapping[str, Any], found: Mapping[Cell, list[Record]], right: Mapping[Cell, Sequence[float]]) -> Any:
    init, depths = setting["inits"][0], setting["depths"]
    figure, axes = panels(3)
    for column, style in zip(COLUMNS, styles(), strict=False):
        values = [spread([100 * v for v in right[init, depth, column]]) for depth in depths]
        axes[0].errorbar(depths, [m for m, _ in values], [d for _, d in values], label=column, capsize=2, **style)
        deepest = found[init, depths[-1], column]
        band(axes[1], deepest, "training", "loss", column, style)
        layers = [f for f in deepest[0].layers if f.index and f.cosines is not None]
        shares = [near_one(f.cosines) for f in layers if f.cosines is not None]
        axes[2].plot([f.index for f in layers], shares, label=column, **style)
    for column, marker in (("standard", "+"), ("both", "x")):
        points = [(depth, PAPER[column][depth]) for depth in depths if depth in PAPER[column]]
        axes[0].plot(*zip(*points, strict=True), linestyle="", marker=marker, color="grey", label=f"paper, {column}")
    axes[0].set(xlabel="depth", ylabel="test accuracy, %", title=f"skip-less, {init}")
    axes[1].set(xlabel="epoch", title=f"training loss, depth {depths[-1]}")
    axes[2].set(xlabel="layer", ylim=(-0.03, 1.03), title=f"pairs with cosine above {NEAR:g}, depth {depths[-1]}")
    axes[0].legend(frameon=False, fontsize=7)
    return figure


ENTRY = Entry(
    "hop-skipless",
    "HOP: ViT without skips on CIFAR-10 by depth, four ways",
    run,
    {"dim": 192, "heads": 3, "depths": [2, 4, 8, 12], "inits": ["trunc_normal", "xavier"], "other_depths": [8],
     "lrs": [1e-4, 3e-4, 1e-3, 3e-3], "seeds": 3, "probed": 16},
    group="trained",
    images=True,
    budgets={
        "short": {"epochs": 10, "batch": 256},
        "full": {"epochs": 150, "batch": 128, "other_depths": [2, 4, 8, 12]},
    },
)  # fmt: skip
