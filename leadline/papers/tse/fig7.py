"""TSE figure 7: Transformer-XL of depth 60 on text, post-norm, pre-norm and de-escalated.

De-escalation is causal, or as the paper prints it, which leaks the future.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leadline.papers.shared.entry import Claim, Context, Entry, Result
from leadline.papers.shared.language import (
    TEXT_SETTING,
    Runs,
    budget_note,
    curves_figure,
    describe_loss_difference,
    own_numbers,
    run_tables,
    table_of,
    text_recipe,
    train_all,
    watch_first,
)
from leadline.papers.shared.trained import end_loss, seeds_of, spread

ARMS: dict[str, dict[str, Any]] = {
    "post-norm": {"norm": "post"},
    "pre-norm": {"norm": "pre"},
    "de-escalated, causal": {"norm": "post", "de_escalation": 1.0},
    "de-escalated, leaky": {"norm": "post", "de_escalation": 1.0, "de_escalation_form": "leaky"},
}
POST, PRE, CAUSAL, LEAKY = ARMS


def recipe(setting: Mapping[str, Any], arm: str, seed: int) -> dict[str, Any]:
    """Return the sections of a recipe as in TSE and Transformer-XL: Adam, cosine, no clipping, dropout or warm-up."""
    sizes = {name: setting[name] for name in ("depth", "dim", "heads", "ffn", "memory_length")}
    tree = text_recipe(setting, {"name": "transformer_xl_base", **sizes, **ARMS[arm]}, seed, setting["lr"])
    tree["optimizer"] = {"name": "adam", "lr": setting["lr"], "weight_decay": 0.0}
    tree["schedule"] = {"name": "cosine"}
    del tree["regularise"]
    return tree


def run(context: Context) -> Result:
    """Run the entry."""
    setting = context.setting
    recipes = {
        (arm, seed): watch_first(context, recipe(setting, arm, seed), seed)
        for arm in ARMS
        for seed in seeds_of(context)
    }
    runs = train_all(context, recipes, "xl")
    claims = [
        *(
            _claim(f"{arm} against post-norm, training loss at the end", runs, arm, POST, 0.0)
            for arm in (CAUSAL, LEAKY)
        ),
        _claim("de-escalated, causal, against pre-norm, training loss at the end", runs, CAUSAL, PRE, 0.1),
        *own_numbers(runs),
    ]
    notes = [
        "Validation loss: "
        + "; ".join(
            (
                describe_loss_difference("causally de-escalated against post-norm", runs[CAUSAL], runs[POST]),
                describe_loss_difference("against pre-norm", runs[CAUSAL], runs[PRE]),
                describe_loss_difference("the leaky form against the causal one", runs[LEAKY], runs[CAUSAL]),
            )
        )
        + ".",
        "The mean of the leaky form contains the tokens to be predicted, in training and in evaluation. Its loss is "
        "therefore no measure of a language model. The paper's figure shows training loss only.",
        budget_note(context, runs) + " Every seed reads the text in the same "
        "order, so that seeds differ in initialisation only.",
    ]
    table = table_of(context, runs, POST)
    return Result(claims, run_tables(context, runs), lambda: curves_figure(runs), notes, shown=table)


def _claim(name: str, runs: Runs, ours: str, other: str, slack: float) -> Claim:
    """Return the claim that the training loss of an arm is below that of another, or less than ``slack`` above it."""
    ends = []
    for arm in (ours, other):
        losses = [end_loss(record) for record in runs[arm] if not record.diverged]
        ends.append(spread(losses)[0] if losses else None)
    if ends[0] is None or ends[1] is None:  # the paper reports that post-norm diverges
        return Claim(name, "shape", ends[0], None, "finite", ends[0] is not None)
    gap = ends[0] - ends[1]
    return Claim(name, "shape", gap, None, f"below {slack:g}", gap < slack)


ENTRY = Entry(
    "tse-fig7",
    "TSE figure 7: Transformer-XL of depth 60 on text, post-norm, pre-norm and de-escalated",
    run,
    {**TEXT_SETTING, "depth": 60, "dim": 410, "heads": 10, "ffn": 820, "memory_length": 150, "tokens": 150, "batch": 40,
     "lr": 2.5e-4, "seeds": 2, "compile": "blocks"},
    group="language",
    text=True,
    budgets={
        "short": {"length": "2700 steps", "evaluate": "540 steps"},
        "full": {"length": "50000 steps", "evaluate": "2500 steps"},
    },
)  # fmt: skip
