"""HOP's ViT without skips on CIFAR-10 by depth, four ways, each at its best learning rate."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from leadline.papers.shared.attention_nets import COLUMNS
from leadline.papers.shared.entry import Claim, Context, Entry, Result, above
from leadline.papers.shared.peaks import NEAR, beside_one, near_one, near_one_by_layer, peak_sentence
from leadline.papers.shared.plots import panels, styles
from leadline.papers.shared.trained import (
    accuracy,
    band,
    curves_table,
    describe_difference,
    difference,
    diverged_note,
    effort,
    end_loss,
    percent,
    seeds_of,
    spread,
    train_arms,
)
from leadline.training.runs import Job, Record

PAPER = {  # % after HOP's full training, by depth
    "standard": {1: 55.1, 2: 63.7, 4: 57.4, 8: 48.6, 12: 10.0},
    "both": {1: 65.4, 2: 79.8, 4: 85.7, 8: 80.3, 12: 10.0},
}


class Cell(NamedTuple):
    """One net of the table."""

    init: str
    depth: int
    column: str

    def __str__(self) -> str:
        return f"{self.column} at depth {self.depth} ({self.init})"


class Trial(NamedTuple):
    """The result of one learning rate for one cell; ``accuracy``, on images held out, is None if the run diverged."""

    lr: float
    accuracy: float | None


@dataclass(frozen=True)
class Trained:
    """All runs of the entry.

    Args:
        trials: The learning rates that were tried, by cell.
        trial_runs: Their records.
        rates: The learning rate of each cell with the best accuracy.
        runs: By cell, a record per seed at that rate.
    """

    trials: dict[Cell, list[Trial]]
    trial_runs: list[Record]
    rates: dict[Cell, float]
    runs: dict[Cell, list[Record]]


def recipe(setting: Mapping[str, Any], cell: Cell, lr: float, seed: int, final: bool) -> dict[str, Any]:
    """Return the sections of a recipe: norm and attention without skips or MLP, with warm-up and clipping.

    Args:
        setting: The setting of the entry.
        cell: The net to train.
        lr: Learning rate.
        seed: Seed of initialisation and data order.
        final: Whether to train on all images; a trial that serves to choose the rate holds a tenth out.
    """
    alpha, alpha_prime = COLUMNS[cell.column]
    sizes = {name: setting[name] for name in ("dim", "heads")}
    cure = {"attention": "hopfield", "alpha": alpha, "alpha_prime": alpha_prime}
    return {
        "model": {"name": "vit_tiny", "depth": cell.depth, **sizes, "patch_size": 4, "ffn": 0, "skip": False,
                  "pool": "max", "init": cell.init, **cure},
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
    """Return all cells: the first initialisation at every depth, the others at some."""
    first, *others = setting["inits"]
    places = [(first, depth) for depth in setting["depths"]]
    places += [(init, depth) for init in others for depth in setting["other_depths"]]
    return [Cell(init, depth, column) for init, depth in places for column in COLUMNS]


def job(context: Context, cell: Cell, lr: float, seed: int, final: bool) -> Job:
    """Return a run, with a probe after it if it is the final one of the first seed."""
    setting = context.setting
    name = f"skipless {'final' if final else 'trial'} {cell.init} {cell.depth} {cell.column} {lr:g} {seed}"
    probed = setting["probed"] if final and seed == context.seed else 0
    return Job(name, recipe(setting, cell, lr, seed, final), probed, cost=cell.depth)


def train(context: Context) -> Trained:
    """Choose a learning rate for each cell with one seed and images held out, then train every seed on all images."""
    setting, first = context.setting, context.seed
    lrs = setting["lrs"]
    trial_runs = train_arms(
        context, {(cell, lr): job(context, cell, lr, first, final=False) for cell in cells(setting) for lr in lrs}
    )
    trials = {
        cell: [Trial(lr, None if r.diverged else r["valid_accuracy"]) for lr, r in zip(lrs, records, strict=True)]
        for cell, records in trial_runs.items()
    }
    rates = {
        cell: max(tried, key=lambda trial: (trial.accuracy or 0.0, -trial.lr)).lr for cell, tried in trials.items()
    }
    runs = train_arms(
        context,
        {
            (cell, seed): job(context, cell, lr, seed, final=True)
            for cell, lr in rates.items()
            for seed in seeds_of(context)
        },
    )
    return Trained(trials, [record for records in trial_runs.values() for record in records], rates, runs)


def run(context: Context) -> Result:
    """Run the entry."""
    trained = train(context)
    runs, rates = trained.runs, trained.rates
    right = {cell: [accuracy(record) for record in records] for cell, records in runs.items()}
    shown = [
        {
            "initialisation": init,
            "depth": str(depth),
            **{c: f"{percent(right[Cell(init, depth, c)])} ({rates[Cell(init, depth, c)]:g})" for c in COLUMNS},
        }
        for init, depth in _places(runs)
    ]
    return Result(
        _claims(context.setting, right),
        _tables(context, trained),
        lambda: _plot(context.setting, runs, right),
        _notes(context, trained, right),
        shown,
    )


def _claims(setting: Mapping[str, Any], right: Mapping[Cell, Sequence[float]]) -> list[Claim]:
    main = setting["inits"][0]
    claims: list[Claim] = []
    for depth in setting["depths"]:
        both, plain = right[Cell(main, depth, "both")], right[Cell(main, depth, "standard")]
        if depth < 12:  # at 12 the paper has both at chance
            what = f"both over standard, depth {depth}, points"
            paper = PAPER["both"][depth] - PAPER["standard"][depth] if depth in PAPER["both"] else None
            claims.append(above(what, difference(both, plain)[0], 0.0, paper))
        for column, numbers in PAPER.items():
            if depth in numbers:
                ours = 100 * spread(right[Cell(main, depth, column)])[0]
                near = abs(ours - numbers[depth]) <= 5
                what = f"accuracy, {column}, depth {depth}, %"
                claims.append(Claim(what, "digits", ours, numbers[depth], "5 points", near))
    return claims


def _tables(context: Context, trained: Trained) -> dict[str, list[dict[str, Any]]]:
    seeds = seeds_of(context)
    rows = [
        {"init": cell.init, "depth": cell.depth, "column": cell.column, "lr": trained.rates[cell], "seed": seed,
         "test_accuracy": record["test_accuracy"], "diverged": record["diverged"] or "",
         "training_loss": "" if record.diverged else end_loss(record)}
        for cell, records in trained.runs.items() for seed, record in zip(seeds, records, strict=True)
    ]  # fmt: skip
    trials = [
        {"init": cell.init, "depth": cell.depth, "column": cell.column, "lr": trial.lr,
         "valid_accuracy": trial.accuracy}
        for cell, tried in trained.trials.items() for trial in tried
    ]  # fmt: skip
    layers = [
        {"init": cell.init, "depth": cell.depth, "column": cell.column, "layer": f.index, "similarity": f.similarity,
         "cosine": f.cosine, "near_one": near_one(f.cosines), "beside_one": beside_one(f.cosines)}
        for cell, records in trained.runs.items() for f in records[0].layers if f.cosines is not None
    ]  # fmt: skip
    by_name = {str(cell): records for cell, records in trained.runs.items()}
    return {"runs": rows, "trials": trials, "curves": curves_table(by_name, seeds, ("loss", "accuracy")),
            "layers": layers}  # fmt: skip


def _notes(context: Context, trained: Trained, right: Mapping[Cell, Sequence[float]]) -> list[str]:
    setting, runs = context.setting, trained.runs
    return [
        *(_contributions(right, init, depth) for init, depth in _places(runs)),
        _summary(right, setting["inits"][0], setting["depths"]),
        *(
            f"{init}, depth {depth}: "
            + peak_sentence({column: runs[Cell(init, depth, column)][0].layers for column in COLUMNS})
            for init, depth in _places(runs)
        ),
        _about(context, trained),
        *diverged_note(runs),
        *_at_the_edge(trained.rates, setting["lrs"]),
        effort(runs, trained.trial_runs),
    ]


def _places(cells: Iterable[Cell]) -> list[tuple[str, int]]:
    """Return each initialisation and depth once."""
    return list(dict.fromkeys((cell.init, cell.depth) for cell in cells))


def _contributions(right: Mapping[Cell, Sequence[float]], init: str, depth: int) -> str:
    """Describe what alpha and alpha' add, alone and together."""
    plain, alpha, prime, both = (right[Cell(init, depth, column)] for column in COLUMNS)
    pairs = (("alpha alone", alpha, plain), ("alpha' alone", prime, plain), ("alpha' on top of alpha", both, alpha))
    return f"Depth {depth} ({init}): {'; '.join(describe_difference(*pair) for pair in pairs)}."


def _summary(right: Mapping[Cell, Sequence[float]], init: str, depths: Sequence[int]) -> str:
    """Describe the effect of each over all depths, as the mean over the two values of the other."""
    alphas, primes = [], []
    for depth in depths:
        plain, alpha, prime, both = (spread(right[Cell(init, depth, column)])[0] for column in COLUMNS)
        alphas.append(50 * (alpha - plain + both - prime))
        primes.append(50 * (prime - plain + both - alpha))
    by_depth = ", ".join(f"{a:+.1f} and {p:+.1f} (depth {d})" for d, a, p in zip(depths, alphas, primes, strict=True))
    a, p = statistics.fmean(alphas), statistics.fmean(primes)
    if a > 1 and a > 3 * abs(p):
        verdict = "Alpha accounts for the skip-less result"
    elif p > 1 and p > 3 * abs(a):
        verdict = "Alpha' accounts for the skip-less result"
    elif max(abs(a), abs(p)) <= 1:
        verdict = "Neither changes much"
    else:
        verdict = "Both contribute"
    return f"{verdict}. Alpha, and alpha', of .5 instead of 0 changes the accuracy by {by_depth} points ({init})."


def _about(context: Context, trained: Trained) -> str:
    """Describe how the nets were trained, and how many runs failed."""
    setting = context.setting
    every = [trial.accuracy for tried in trained.trials.values() for trial in tried]
    lost = sum(accuracy is None for accuracy in every)
    low = sum(accuracy is not None and accuracy < 0.15 for accuracy in every)
    final = [record for records in trained.runs.values() for record in records]
    return (
        f"Pre-norm, no MLP, no outer skips, maximum over tokens, {setting['epochs']} epochs, "
        f"{len(seeds_of(context))} seeds, warm-up over a tenth of the run and gradients clipped to norm 1. "
        "Each cell of the table has the best of "
        f"{len(setting['lrs'])} learning rates (in brackets). One run of the same length chose it, with a tenth of the "
        f"training images held out. {lost} of {len(every)} such runs diverged and {low} more ended below 15 %; "
        f"{sum(record.diverged for record in final)} of {len(final)} final ones diverged, which counts as 10 %."
    )


def _at_the_edge(rates: Mapping[Cell, float], lrs: Sequence[float]) -> list[str]:
    """Name the cells that did best at the smallest or the largest rate, so that one beyond it may do better."""
    lines = []
    for end, end_name in ((min(lrs), "smallest"), (max(lrs), "largest")):
        by_column: dict[str, list[str]] = {}
        for cell, rate in rates.items():
            if rate == end:
                by_column.setdefault(cell.column, []).append(f"{cell.depth} ({cell.init})")
        places = "; ".join(f"{column} at depth {', '.join(at)}" for column, at in by_column.items())
        if places:
            lines.append(f"The {end_name} rate tried was the best for {places}; a rate beyond it may be better.")
    return lines


def _plot(setting: Mapping[str, Any], runs: Mapping[Cell, list[Record]], right: Mapping[Cell, Sequence[float]]) -> Any:
    init, depths = setting["inits"][0], setting["depths"]
    figure, axes = panels(3)
    for column, style in zip(COLUMNS, styles(), strict=False):
        values = [spread([100 * v for v in right[Cell(init, depth, column)]]) for depth in depths]
        axes[0].errorbar(depths, [m for m, _ in values], [d for _, d in values], label=column, capsize=2, **style)
        deepest = runs[Cell(init, depths[-1], column)]
        band(axes[1], deepest, "training", "loss", column, style)
        axes[2].plot(*near_one_by_layer(deepest[0].layers), label=column, **style)
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
