"""HOP figure 4: violins of token cosine by layer of a trained GPT-2 Medium, standard and .5."""

from __future__ import annotations

from typing import Any

from leadline.papers.shared.entry import Context, Entry, Result
from leadline.papers.shared.language import (
    TEXT_SETTING,
    budget_note,
    describe_budget,
    describe_loss_difference,
    runs_table,
    text_recipe,
    tokens_a_step,
    train_all,
)
from leadline.papers.shared.peaks import cosines_table, peak_claims, peak_sentence
from leadline.papers.shared.plots import violins
from leadline.papers.shared.trained import curves_table, seeds_of
from leadline.report.paper import cosine_violins

ARMS: dict[str, dict[str, Any]] = {"standard": {}, ".5": {"attention": "hopfield"}}


def run(context: Context) -> Result:
    """Run the entry."""
    setting, seeds = context.setting, seeds_of(context)
    sizes = {name: setting[name] for name in ("depth", "dim", "heads")}
    recipes = {
        (arm, seed): text_recipe(setting, {"name": "gpt2_medium", **sizes, **cure}, seed, setting["lr"])
        for arm, cure in ARMS.items()
        for seed in seeds
    }
    runs = train_all(context, recipes, "gpt2 medium")
    models = {arm: records[0].layers for arm, records in runs.items()}

    def plot() -> Any:
        figure = violins(models, cosine_violins, "GPT-2 Medium, {}", width=9.0, height=2.8)
        figure.suptitle(f"Trained: {describe_budget(runs, tokens_a_step(context))}", fontsize="medium")
        return figure

    notes = [
        peak_sentence(models),
        describe_loss_difference("Validation loss of .5 against standard:", runs[".5"], runs["standard"]) + ".",
        f"HOP's models were trained on WikiText-103. The learning rate is {setting['lr']:g} here. "
        + budget_note(context, runs),
    ]
    tables = {"layers": cosines_table(models), "runs": runs_table(runs, seeds), "curves": curves_table(runs, seeds)}
    return Result(peak_claims(models), tables, plot, notes)


ENTRY = Entry(
    "hop-fig4",
    "HOP figure 4: token cosine by layer of GPT-2 Medium trained on text, standard and .5",
    run,
    {**TEXT_SETTING, "depth": 24, "dim": 1024, "heads": 16, "tokens": 1024, "batch": 8, "lr": 3e-4, "seeds": 1,
     "compile": "blocks"},
    group="language",
    text=True,
    budgets={
        "short": {"length": "3 epochs", "evaluate": "50 %"},
        "full": {"length": "100 epochs", "evaluate": "5 epochs"},
    },
)  # fmt: skip
