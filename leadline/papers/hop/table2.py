"""HOP table 2: GPT-2 with and without carried scores. At the short budget on the text that is given."""

from __future__ import annotations

from typing import Any

from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.language import (
    TEXT_SETTING,
    WATCH,
    Found,
    budget_note,
    curves_figure,
    difference,
    layers_table,
    own_numbers,
    runs_table,
    said,
    seeds_of,
    table_of,
    text_recipe,
    train_all,
    watched_table,
)
from leadline.papers.shared.trained import curves_table, spread

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
    setting, seeds = context.setting, seeds_of(context)
    sizes = {name: setting[name] for name in ("depth", "dim", "heads")}
    recipes = {
        (arm, seed): {
            **text_recipe(setting, {"name": "gpt2_small", **sizes, **ARMS[arm]}, seed, setting["lr"]),
            **(WATCH if seed == context.seed else {}),
        }
        for seed in seeds  # all arms of a seed, then the next: what is cut short compares
        for arm in setting["arms"]
    }
    found = train_all(context, recipes, "gpt2")
    base = found[STANDARD]
    gap = difference(found[HOP], base) if HOP in found else None
    claims = [
        Claim(
            f"{HOP} against standard attention, validation loss",
            "shape",
            None if gap is None else gap[0],
            None,
            "below 0",
            gap is not None and gap[0] < 0,
        ),
        *own_numbers(found),
        *own_numbers(found, "test_bits_per_byte", "test bits per byte"),
    ]
    notes = [
        "Validation loss against standard attention: "
        + "; ".join(said(arm, kept, base) for arm, kept in found.items() if arm != STANDARD)
        + ".",
        _learned(found),
        "HOP reports perplexity 22.87 -> 20.70 (Small) and 20.85 -> 19.61 (Medium) on WikiText-103 after its own, "
        f"longer training; the rate {setting['lr']:g}, the widths and the context are those of its table, the batch of "
        f"{setting['batch']} and the vocabulary of {setting['vocab_size']} are not. One rate for all arms: none was "
        "tuned.",
        budget_note(context, found, setting["tokens"] * setting["batch"]),
    ]
    tables = {
        "runs": runs_table(found, seeds),
        "curves": curves_table(found, seeds),
        "watched": watched_table(found),
        "layers": layers_table(found),
        "strengths": _strengths(found),
    }
    return Result(claims, tables, lambda: curves_figure(found), notes, shown=table_of(context, found, STANDARD))


def _strengths(found: Found) -> list[dict[str, Any]]:
    return [
        {"seed": seed, "parameter": name, "mean": spread(values)[0], "least": min(values), "most": max(values)}
        for seed, record in enumerate(found.get("alpha' learned", []))
        for name, values in record.figures.get("strengths", {}).items()
    ]


def _learned(found: Found) -> str:
    rows = [row for row in _strengths(found) if not row["parameter"].startswith("blocks.0.")]
    if not rows:
        return "Where learned alpha' goes is not known."
    means = [row["mean"] for row in rows if row["seed"] == rows[0]["seed"]]
    return (
        "Learned, one number a head from .5 on and with start from scores, alpha' ended at a mean of "
        f"{spread([row['mean'] for row in rows])[0]:.2f} without the first block, where it has no effect (layer means "
        f"from {min(means):.2f} to {max(means):.2f} in one seed; heads of all from "
        f"{min(row['least'] for row in rows):.2f} to {max(row['most'] for row in rows):.2f})."
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
