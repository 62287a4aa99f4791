"""HOP table 2: GPT-2 Small on text, with and without carried scores."""

from __future__ import annotations

from typing import Any

from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.language import (
    TEXT_SETTING,
    Runs,
    budget_note,
    curves_figure,
    describe_loss_difference,
    loss_difference,
    own_numbers,
    run_tables,
    table_of,
    text_recipe,
    train_all,
    watch_first,
)
from leadline.papers.shared.trained import seeds_of, spread

ARMS: dict[str, dict[str, Any]] = {
    "alpha' 0": {},
    "alpha' .3": {"attention": "hopfield", "alpha": 0.0, "alpha_prime": 0.3},
    "alpha' .5": {"attention": "hopfield", "alpha": 0.0, "alpha_prime": 0.5},
    "alpha' .7": {"attention": "hopfield", "alpha": 0.0, "alpha_prime": 0.7},
    "alpha' .5 from scores": {"attention": "hopfield", "alpha": 0.0, "alpha_prime": 0.5, "start": "scores"},
    "alpha' learned": {
        "attention": "hopfield",
        "alpha": 0.0,
        "alpha_prime": 0.5,
        "start": "scores",
        "learnable_alpha_prime": "head",
    },
    "alpha = alpha' = .5": {"attention": "hopfield", "alpha": 0.5, "alpha_prime": 0.5},  # HOP's own
}
STANDARD, HOP = "alpha' 0", "alpha = alpha' = .5"


def run(context: Context) -> Result:
    """Run the entry."""
    setting = context.setting
    sizes = {name: setting[name] for name in ("depth", "dim", "heads")}
    recipes = {
        (arm, seed): watch_first(
            context, text_recipe(setting, {"name": "gpt2_small", **sizes, **ARMS[arm]}, seed, setting["lr"]), seed
        )
        for seed in seeds_of(context)  # all arms of a seed, then the next: runs that are cut short still compare
        for arm in setting["arms"]
    }
    runs = train_all(context, recipes, "gpt2")
    base = runs[STANDARD]
    gap = loss_difference(runs[HOP], base) if HOP in runs else None
    claims = [
        Claim(
            f"{HOP} against standard attention, validation loss",
            "shape",
            None if gap is None else gap[0],
            None,
            "below 0",
            gap is not None and gap[0] < 0,
        ),
        *own_numbers(runs),
        *own_numbers(runs, "test_bits_per_byte", "test bits per byte"),
    ]
    notes = [
        "Validation loss against standard attention: "
        + "; ".join(describe_loss_difference(arm, records, base) for arm, records in runs.items() if arm != STANDARD)
        + ".",
        _learned(runs),
        "HOP reports perplexity 22.87 -> 20.70 (Small) and 20.85 -> 19.61 (Medium) on WikiText-103, after longer "
        f"training. The learning rate {setting['lr']:g}, the widths and the context are those of its table. The batch "
        f"of {setting['batch']} and the vocabulary of {setting['vocab_size']} are not. All arms share one rate, "
        "which was not tuned.",
        budget_note(context, runs),
    ]
    tables = {**run_tables(context, runs), "strengths": _strengths(runs)}
    return Result(claims, tables, lambda: curves_figure(runs), notes, shown=table_of(context, runs, STANDARD))


def _strengths(runs: Runs) -> list[dict[str, Any]]:
    """Return the learned alpha' of each block and seed: mean, least and most over heads."""
    return [
        {"seed": seed, "parameter": name, "mean": spread(values)[0], "least": min(values), "most": max(values)}
        for seed, record in enumerate(runs.get("alpha' learned", []))
        for name, values in record.figures.get("strengths", {}).items()
    ]


def _learned(runs: Runs) -> str:
    """Describe where learned alpha' ended."""
    rows = [row for row in _strengths(runs) if not row["parameter"].startswith("blocks.0.")]
    if not rows:
        return "Where learned alpha' goes is not known."
    means = [row["mean"] for row in rows if row["seed"] == rows[0]["seed"]]
    return (
        "Learned alpha' has one number a head, initially .5, and starts from scores. It ended at a mean of "
        f"{spread([row['mean'] for row in rows])[0]:.2f} without the first block, where it has no effect. Layer means "
        f"of one seed range from {min(means):.2f} to {max(means):.2f}, heads of all seeds from "
        f"{min(row['least'] for row in rows):.2f} to {max(row['most'] for row in rows):.2f}."
    )


ENTRY = Entry(
    "hop-table2",
    "HOP table 2: GPT-2 Small on text, carried scores of several strengths, starts, and learned",
    run,
    {**TEXT_SETTING, "depth": 12, "dim": 768, "heads": 12, "tokens": 1024, "batch": 8, "lr": 6e-4, "arms": list(ARMS),
     "compile": "blocks"},
    group="language",
    text=True,
    budgets={
        "short": {"length": "2000 steps", "evaluate": "400 steps", "seeds": 2},
        "full": {"length": "100 epochs", "evaluate": "2 epochs"},
    },
)  # fmt: skip
