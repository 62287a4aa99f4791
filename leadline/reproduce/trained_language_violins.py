"""HOP figure 4: violins of token cosine by layer of a trained GPT-2 Medium, standard and alpha = alpha' = .5."""

from __future__ import annotations

from typing import Any

from leadline.errors import LeadlineError
from leadline.report.depth_figures import cosine_violins
from leadline.reproduce.base import Claim, Context, Entry, Result, above, reported
from leadline.reproduce.plots import panels
from leadline.reproduce.trained_figures import NEAR, beside_one, near_one, peak_layers, peak_sentence
from leadline.reproduce.trained_language import (
    TEXT_SETTING,
    budget_note,
    curves_table,
    runs_table,
    said,
    seeds_of,
    text_recipe,
    train_all,
)

ARMS: dict[str, dict[str, Any]] = {"standard": {}, ".5": {"attention": "hopfield"}}


def run(context: Context) -> Result:
    setting, seeds = context.setting, seeds_of(context)
    sizes = {name: setting[name] for name in ("depth", "dim", "heads")}
    recipes = {
        (arm, seed): text_recipe(setting, {"name": "gpt2_medium", **sizes, **cure}, seed, setting["lr"])
        for arm, cure in ARMS.items()
        for seed in seeds
    }
    found = train_all(context, recipes, "gpt2 medium")
    models = {arm: kept[0].layers for arm, kept in found.items() if kept[0].layers}
    if len(models) < len(ARMS):
        gone = ", ".join(arm for arm in ARMS if arm not in models)
        raise LeadlineError(f"{gone} diverged, so there is no figure to draw; give a lower learning rate")
    peaks = {arm: peak_layers(layers) for arm, layers in models.items()}
    hopfield = float(len(peaks[".5"][0]))
    claims = [
        above("layers with a peak at cosine 1, standard", float(len(peaks["standard"][0])), 0.0),
        Claim("layers with a peak at cosine 1, .5", "shape", hopfield, 0.0, "none", hopfield == 0),
        *(
            reported(f"largest share of pairs with cosine above {NEAR:g}, {arm}", share)
            for arm, (_, share) in peaks.items()
        ),
    ]
    record = found["standard"][0]
    tokens = setting["tokens"] * setting["batch"]
    budget = (
        f"{record['parameters'] / 1e6:.0f} M parameters, {record['epochs']:.1f} epochs of the text, "
        f"{record['steps']} steps of {tokens} tokens"
    )
    rows = [
        {"arm": arm, "layer": f.index, "similarity": f.similarity, "cosine": f.cosine,
         "cosine_median": f.cosines.median, "cosine_mode": f.cosines.mode, "near_one": near_one(f.cosines),
         "beside_one": beside_one(f.cosines)}
        for arm, layers in models.items() for f in layers if f.cosines is not None
    ]  # fmt: skip

    def plot() -> Any:
        figure, axes = panels(1, rows=len(models), width=9.0, height=2.8)
        for axis, (arm, layers) in zip(axes, models.items(), strict=True):
            cosine_violins(axis, layers)
            axis.set_title(f"GPT-2 Medium, {arm}", loc="left")
            axis.set_ylim(-1.05, 1.05)
        figure.suptitle(f"Trained: {budget}", fontsize="medium")
        return figure

    notes = [
        peak_sentence(models),
        said("Validation loss of .5 against standard:", found[".5"], found["standard"]) + ".",
        f"HOP's models were trained on WikiText-103; the rate is {setting['lr']:g} here. "
        + budget_note(context, found, tokens),
    ]
    tables = {"layers": rows, "runs": runs_table(found, seeds), "curves": curves_table(found, seeds)}
    return Result(claims, tables, plot, notes)


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
