"""What the entries on text share: recipes, arms over seeds, differences in nats, tables and curves."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from leadline.papers.shared import trained as trained_figures
from leadline.papers.shared.entry import Claim, Context, reported
from leadline.papers.shared.plots import panels, styles
from leadline.papers.shared.trained import band, end_loss, plus_minus, spread
from leadline.training.runs import Job, Record, run_all

Found = dict[str, list[Record]]  # by arm, a record per seed

WATCH = {"watch": {"every": "10 %"}}  # of the first seed of each arm
TEXT_SETTING: dict[str, Any] = {"tokenizer": "bpe", "vocab_size": 16384, "seeds": 3, "probed": 4}


def text_recipe(setting: Mapping[str, Any], model: Mapping[str, Any], seed: int, lr: float) -> dict[str, Any]:
    """The sections of a recipe: AdamW with warm-up over a tenth, cosine to a tenth of the rate, gradients clipped."""
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


def train_all(context: Context, recipes: Mapping[tuple[str, int], Mapping[str, Any]], name: str) -> Found:
    """Train every (arm, seed); the first seed of each arm is probed."""
    first: dict[str, int] = {}
    for arm, seed in recipes:
        first.setdefault(arm, seed)
    jobs = {
        (arm, seed): Job(f"{name} {arm} {seed}", recipe, context.setting["probed"] if first[arm] == seed else 0)
        for (arm, seed), recipe in recipes.items()
    }
    records = run_all(context.training(), list(jobs.values()))
    found: Found = {}
    for (arm, _), job in jobs.items():
        found.setdefault(arm, []).append(records[job.name])
    return found


def seeds_of(context: Context) -> range:
    return range(context.seed, context.seed + context.setting["seeds"])


def figure_of(records: Sequence[Record], name: str) -> list[float]:
    """A figure of the runs that did not diverge."""
    return [record[name] for record in records if not record.diverged]


def difference(a: Sequence[Record], b: Sequence[Record], name: str = "valid_loss") -> tuple[float, float] | None:
    """Mean of a - b, pair by pair (a pair shares its seed), and its standard error; None where a run diverged."""
    if any(record.diverged for record in (*a, *b)):
        return None
    return trained_figures.difference([x[name] for x in a], [y[name] for y in b], 1.0)


def said(what: str, a: Sequence[Record], b: Sequence[Record]) -> str:
    """The difference in validation loss in words; below 0 is better."""
    if difference(a, b) is None:
        return f"{what}: a run diverged"
    return trained_figures.said(what, figure_of(a, "valid_loss"), figure_of(b, "valid_loss"), 1.0, " nats", 4)


def table_of(context: Context, found: Found, against: str) -> list[dict[str, str]]:
    """An arm a row: losses, bits per byte, similarity after the last layer; the cost of a step where runs ran alone."""
    speed = {arm: spread([r["steps_per_second"] or 0.0 for r in kept])[0] for arm, kept in found.items()}
    rows = []
    for arm, kept in found.items():
        similarity = [record.layers[-1].similarity for record in kept if record.layers]
        row = {
            "arm": arm,
            "validation loss": plus_minus(figure_of(kept, "valid_loss")),
            "test bits per byte": plus_minus(figure_of(kept, "test_bits_per_byte")),
            "training loss at the end": plus_minus([end_loss(record) for record in kept if not record.diverged]),
            "token similarity after the last layer": plus_minus(similarity[:1], 3).partition(" ")[0],
        }
        if context.jobs == 1:
            row["ms a step"] = f"{1000 / speed[arm]:.1f}" if speed[arm] else "-"
            row["cost"] = f"{speed[against] / speed[arm]:.2f}x" if speed[arm] else "-"
        rows.append({**row, "diverged": str(sum(record.diverged for record in kept))})
    return rows


def runs_table(found: Found, seeds: Sequence[int]) -> list[dict[str, Any]]:
    names = ("valid_loss", "valid_perplexity", "test_loss", "test_perplexity", "test_word_perplexity",
             "test_bits_per_byte", "steps", "seconds", "steps_per_second")  # fmt: skip
    return [
        {
            "arm": arm,
            "seed": seed,
            **{name: record.figures.get(name) for name in names},
            "diverged": record["diverged"] or "",
        }
        for arm, kept in found.items()
        for seed, record in zip(seeds, kept, strict=False)
    ]


def layers_table(found: Found) -> list[dict[str, Any]]:
    return [
        {"arm": arm, "layer": f.index, "similarity": f.similarity, "cosine": f.cosine, "norm": f.norm}
        for arm, kept in found.items()
        for f in kept[0].layers
    ]


def watched_table(found: Found) -> list[dict[str, Any]]:
    return [{"arm": arm, **row} for arm, kept in found.items() for row in kept[0].watched]


def curves_figure(found: Found) -> Any:
    """Training loss, validation loss, token similarity in the course of training, and by layer after it."""
    figure, axes = panels(4, width=4.2, height=3.6)
    for (arm, kept), style in zip(found.items(), styles(), strict=False):
        band(axes[0], kept, "training", "loss", arm, style)
        band(axes[1], kept, "evaluation", "loss", arm, style)
        during: dict[float, list[float]] = {}
        for row in kept[0].watched:
            during.setdefault(row["step"], []).append(row["similarity"])
        axes[2].plot(list(during), [statistics.fmean(some) for some in during.values()], label=arm, **style)
        layers = kept[0].layers
        if layers:
            every = {**style, "markevery": max(len(layers) // 10, 1)}
            axes[3].plot([f.index for f in layers], [f.similarity for f in layers], label=arm, **every)
    axes[0].set(xlabel="epoch", title="training loss, nats a token")
    axes[1].set(xlabel="epoch", title="validation loss, nats a token")
    axes[2].set(xlabel="step", title="token similarity, mean over layers", ylim=(-0.02, 1.02))
    axes[3].set(xlabel="layer", title="token similarity, trained", ylim=(-0.02, 1.02))
    axes[0].legend(frameon=False, fontsize="small")
    return figure


def own_numbers(found: Found, name: str = "valid_loss", what: str = "validation loss") -> list[Claim]:
    """Our numbers, which no paper prints."""
    kept = {arm: figure_of(records, name) for arm, records in found.items()}
    return [reported(f"{what}, {arm}", spread(values)[0] if values else None) for arm, values in kept.items()]


def budget(found: Found, tokens: int) -> str:
    """How long an arm was trained, in steps of so many tokens."""
    ended = [record for kept in found.values() for record in kept if not record.diverged]
    if not ended:
        return "every run diverged"
    record = ended[0]
    steps = record["steps"]
    return (
        f"{record['parameters'] / 1e6:.0f} M parameters, {steps} steps of {tokens} tokens "
        f"({steps * tokens / 1e6:.1f} M tokens, {record['epochs']:.1f} epochs of the text)"
    )


def budget_note(context: Context, found: Found, tokens: int) -> str:
    """What was spent on an arm, and where."""
    devices = {record["device"] for kept in found.values() for record in kept if not record.diverged}
    seeds = len(seeds_of(context))
    assert context.text is not None
    several = f", {context.jobs} at a time (for the cost of a step see benchmarks/language.py)" * (context.jobs > 1)
    return (
        f"Each arm: {budget(found, tokens)}, {context.text.resolve().name}, {seeds} seed{'s' * (seeds > 1)}; on "
        f"{' and '.join(sorted(devices)) or 'no device'}{several}."
    )
