"""Common parts of the entries on text: recipes, differences in nats, tables and curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from leadline.papers.shared import trained
from leadline.papers.shared.entry import Claim, Context, reported
from leadline.papers.shared.plots import panels, styles
from leadline.papers.shared.trained import band, curves_table, end_loss, plus_minus, seeds_of, spread, train_arms
from leadline.training.runs import Job, Record

Runs = dict[str, list[Record]]  # by arm, a record per seed
WATCH = {"watch": {"every": "10 %"}}  # section of the recipe of the first seed of each arm
TEXT_SETTING: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 16384, "seeds": 3, "probed": 4}


def text_recipe(setting: Mapping[str, Any], model: Mapping[str, Any], seed: int, lr: float) -> dict[str, Any]:
    """Return the sections of a recipe on text.

    AdamW with warm-up over a tenth of the run, cosine down to a tenth of the rate, gradients clipped to norm 1.

    Args:
        setting: The setting of the entry.
        model: The section of the model.
        seed: Seed of initialisation and data order.
        lr: Learning rate.
    """
    return {
        "model": dict(model),
        "data": {
            "name": "text",
            "tokenizer": setting["tokenizer"],
            "vocab_size": setting["vocab_size"],
            "tokens": setting["tokens"],
        },
        "length": setting["length"],
        "batch": {"size": setting["batch"]},
        "optimizer": {"name": "adamw", "lr": lr, "betas": [0.9, 0.95], "weight_decay": 0.1},
        "schedule": {"name": "cosine", "warmup": "10 %", "final": 0.1},
        "regularise": {"clip": 1.0},
        "precision": "bf16",
        "compile": setting["compile"],
        "graph": True,
        "evaluate": setting["evaluate"],
        "checkpoint": {"every": "100 %", "keep": 1, "best": False},
        "seed": seed,
    }


def watch_first(context: Context, recipe: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Return a recipe that watches token similarity during training if the seed is the first one."""
    return {**recipe, **(WATCH if seed == context.seed else {})}


def train_all(context: Context, recipes: Mapping[tuple[str, int], Mapping[str, Any]], name: str) -> Runs:
    """Train every (arm, seed), and probe the first seed of each arm.

    Args:
        context: The context of the entry.
        recipes: The recipes to train.
        name: Beginning of the names of the runs.

    Returns:
        By arm, a record per seed.
    """
    first: dict[str, int] = {}
    for arm, seed in recipes:
        first.setdefault(arm, seed)
    jobs = {
        (arm, seed): Job(f"{name} {arm} {seed}", recipe, context.setting["probed"] if first[arm] == seed else 0)
        for (arm, seed), recipe in recipes.items()
    }
    return train_arms(context, jobs)


def values_of(records: Sequence[Record], name: str) -> list[float]:
    """Return a number of each run that did not diverge."""
    return [record[name] for record in records if not record.diverged]


def loss_difference(a: Sequence[Record], b: Sequence[Record]) -> tuple[float, float] | None:
    """Return the mean of a - b in validation loss and its standard error, or None if a run diverged.

    Runs are compared in pairs that share a seed; below 0, a is better.
    """
    if any(record.diverged for record in (*a, *b)):
        return None
    return trained.difference(values_of(a, "valid_loss"), values_of(b, "valid_loss"), 1.0)


def describe_loss_difference(what: str, a: Sequence[Record], b: Sequence[Record]) -> str:
    """Describe the difference in validation loss; below 0, a is better."""
    if loss_difference(a, b) is None:
        return f"{what}: a run diverged"
    return trained.describe_difference(what, values_of(a, "valid_loss"), values_of(b, "valid_loss"), 1.0, " nats", 4)


def table_of(context: Context, runs: Runs, against: str) -> list[dict[str, str]]:
    """Return the table that the page shows, a row per arm.

    Args:
        context: The context of the entry.
        runs: The records by arm.
        against: The arm whose time for a step counts as 1; times are given only where runs did not share the machine.
    """
    speed = {arm: spread([r["steps_per_second"] or 0.0 for r in records])[0] for arm, records in runs.items()}
    rows = []
    for arm, records in runs.items():
        similarity = [record.layers[-1].similarity for record in records if record.layers]
        row = {
            "arm": arm,
            "validation loss": plus_minus(values_of(records, "valid_loss")),
            "test bits per byte": plus_minus(values_of(records, "test_bits_per_byte")),
            "training loss at the end": plus_minus([end_loss(record) for record in records if not record.diverged]),
            "token similarity after the last layer": plus_minus(similarity[:1], 3).partition(" ")[0],
        }
        if context.jobs == 1:
            row["ms a step"] = f"{1000 / speed[arm]:.1f}" if speed[arm] else "-"
            row["cost"] = f"{speed[against] / speed[arm]:.2f}x" if speed[arm] else "-"
        rows.append({**row, "diverged": str(sum(record.diverged for record in records))})
    return rows


def runs_table(runs: Runs, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return the final numbers of every run, a row per run."""
    names = ("valid_loss", "valid_perplexity", "test_loss", "test_perplexity", "test_word_perplexity",
             "test_bits_per_byte", "steps", "seconds", "steps_per_second")  # fmt: skip
    return [
        {
            "arm": arm,
            "seed": seed,
            **{name: record.figures.get(name) for name in names},
            "diverged": record["diverged"] or "",
        }
        for arm, records in runs.items()
        for seed, record in zip(seeds, records, strict=False)
    ]


def run_tables(context: Context, runs: Runs) -> dict[str, list[dict[str, Any]]]:
    """Return the tables "runs", "curves", "watched" and "layers"; the last two are of the first seed."""
    seeds = seeds_of(context)
    return {
        "runs": runs_table(runs, seeds),
        "curves": curves_table(runs, seeds),
        "watched": [{"arm": arm, **row} for arm, records in runs.items() for row in records[0].watched],
        "layers": [
            {"arm": arm, "layer": f.index, "similarity": f.similarity, "cosine": f.cosine, "norm": f.norm}
            for arm, records in runs.items()
            for f in records[0].layers
        ],
    }


def curves_figure(runs: Runs) -> Any:
    """Draw training loss, validation loss, token similarity during training, and by layer after it."""
    figure, axes = panels(4, width=4.2, height=3.6)
    for (arm, records), style in zip(runs.items(), styles(), strict=False):
        band(axes[0], records, "training", "loss", arm, style)
        band(axes[1], records, "evaluation", "loss", arm, style)
        during: dict[float, list[float]] = {}
        for row in records[0].watched:
            during.setdefault(row["step"], []).append(row["similarity"])
        axes[2].plot(list(during), [statistics.fmean(some) for some in during.values()], label=arm, **style)
        layers = records[0].layers
        if layers:
            every = {**style, "markevery": max(len(layers) // 10, 1)}
            axes[3].plot([f.index for f in layers], [f.similarity for f in layers], label=arm, **every)
    axes[0].set(xlabel="epoch", title="training loss, nats a token")
    axes[1].set(xlabel="epoch", title="validation loss, nats a token")
    axes[2].set(xlabel="step", title="token similarity, mean over layers", ylim=(-0.02, 1.02))
    axes[3].set(xlabel="layer", title="token similarity, trained", ylim=(-0.02, 1.02))
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def own_numbers(runs: Runs, name: str = "valid_loss", what: str = "validation loss") -> list[Claim]:
    """Return the mean of a number for each arm, as claims that no paper prints a number for."""
    by_arm = {arm: values_of(records, name) for arm, records in runs.items()}
    return [reported(f"{what}, {arm}", spread(values)[0] if values else None) for arm, values in by_arm.items()]


def describe_budget(runs: Runs, tokens: int) -> str:
    """Describe how long an arm was trained, in steps of ``tokens`` tokens."""
    ended = [record for records in runs.values() for record in records if not record.diverged]
    if not ended:
        return "every run diverged"
    record = ended[0]
    steps = record["steps"]
    return (
        f"{record['parameters'] / 1e6:.0f} M parameters, {steps} steps of {tokens} tokens "
        f"({steps * tokens / 1e6:.1f} M tokens, {record['epochs']:.1f} epochs of the text)"
    )


def budget_note(context: Context, runs: Runs) -> str:
    """Describe what each arm was trained on, for how long, and where."""
    devices = {record["device"] for records in runs.values() for record in records if not record.diverged}
    seeds = len(seeds_of(context))
    assert context.text is not None
    several = f", {context.jobs} at a time (for the cost of a step see benchmarks/language.py)" * (context.jobs > 1)
    return (
        f"Each arm: {describe_budget(runs, tokens_a_step(context))}, {context.text.resolve().name}, "
        f"{seeds} seed{'s' * (seeds > 1)}; on {' and '.join(sorted(devices)) or 'no device'}{several}."
    )


def tokens_a_step(context: Context) -> int:
    """Return the number of tokens that a training step reads."""
    return context.setting["tokens"] * context.setting["batch"]
