"""HOP's ViT-S on CIFAR-10 with the usual skips: accuracy and token cosine, four ways."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from leadline.papers.shared.attention_nets import COLUMNS
from leadline.papers.shared.entry import Context, Result, reported
from leadline.papers.shared.peaks import NEAR, Models, near_one_by_layer, peak_layers, peak_sentence
from leadline.papers.shared.plots import panels, styles
from leadline.papers.shared.trained import (
    band,
    describe_difference,
    diverged_note,
    effort,
    end_loss,
    percent,
    plus_minus,
    seeds_of,
    spread,
)
from leadline.papers.shared.vits import accuracies, layers_of, run_tables, setting_note, train, vit_entry
from leadline.training.runs import Record


def run(context: Context) -> Result:
    """Run the entry."""
    seeds = seeds_of(context)
    runs = train(context, "S", list(COLUMNS), len(seeds))
    right = accuracies(runs)
    plain, alpha, prime, both = right.values()
    models = layers_of(runs)
    claims = [reported(f"test accuracy, {arm}, %", 100 * spread(values)[0]) for arm, values in right.items()]
    differences = (
        describe_difference("alpha alone", alpha, plain),
        describe_difference("alpha' alone", prime, plain),
        describe_difference("both", both, plain),
        describe_difference("alpha' on top of alpha", both, alpha),
    )
    notes = [
        f"With the usual skips: {'; '.join(differences)}.",
        peak_sentence(models),
        *diverged_note(runs),
        setting_note(context, "S"),
        effort(runs),
    ]
    losses = {arm: [end_loss(r) for r in records if not r.diverged] for arm, records in runs.items()}
    shown = [
        {
            "way": arm,
            "test accuracy, %": percent(right[arm]),
            "training loss at the end": plus_minus(losses[arm], 3),
            f"largest share of pairs above {NEAR:g}": f"{peak_layers(models[arm])[1]:.4f}" if models[arm] else "-",
            "diverged": str(sum(r.diverged for r in records)),
        }
        for arm, records in runs.items()
    ]
    return Result(claims, run_tables(runs, seeds, models), lambda: _plot(runs, models), notes, shown)


def _plot(runs: Mapping[str, list[Record]], models: Models) -> Any:
    figure, axes = panels(3)
    for (arm, records), style in zip(runs.items(), styles(), strict=False):
        band(axes[0], records, "training", "loss", arm, style)
        layers = [f for f in models[arm] if f.index and f.cosines is not None]
        axes[1].plot([f.index for f in layers], [f.cosine for f in layers], label=arm, **style)
        axes[2].plot(*near_one_by_layer(models[arm]), label=arm, **style)
    axes[0].set(xlabel="epoch", title="training loss, ViT-S")
    axes[1].set(xlabel="layer", title="mean token cosine, trained")
    axes[2].set(xlabel="layer", title=f"share of pairs with cosine above {NEAR:g}")
    axes[0].legend(frameon=False)
    return figure


ENTRY = vit_entry("hop-vit", "HOP: ViT-S on CIFAR-10 with the usual skips, four ways", run, seeds=3)
