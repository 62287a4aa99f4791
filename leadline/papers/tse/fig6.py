"""TSE figure 6: a ViT of depth 80 on CIFAR-10, post-norm, pre-norm and de-escalated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from leadline.papers.shared.entry import Claim, Context, Entry, Result, below, reported
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
    plus_minus,
    seeds_of,
    spread,
    train_arms,
)
from leadline.training.runs import Job, Record

# what TSE finds better, first
PAIRS = (("de-escalated", "post-norm"), ("de-escalated", "pre-norm"), ("pre-norm", "post-norm"))
ARMS: dict[str, dict[str, Any]] = {
    "post-norm": {"norm": "post"},
    "pre-norm": {"norm": "pre"},
    "de-escalated": {"norm": "post", "de_escalation": 1.0},  # at the end of each post-norm block (21)
}


def recipe(setting: Mapping[str, Any], arm: str, seed: int) -> dict[str, Any]:
    """Return the sections of a recipe.

    The paper does not state its pooling. After tau = 1 the mean over tokens is 0, so this takes the maximum.
    """
    sizes = {name: setting[name] for name in ("depth", "dim", "ffn", "heads")}
    rate = setting["lr_post"] if arm == "post-norm" else setting["lr"]
    return {
        "model": {"name": "vit_tiny", **sizes, "patch_size": 4, "pool": "max", **ARMS[arm]},
        "data": {"name": "cifar10"},
        "length": f"{setting['epochs']} epochs",
        "batch": {"size": setting["batch"]},
        "optimizer": {"name": "adamw", "lr": rate, "betas": [0.9, 0.999], "weight_decay": 0.1},
        "schedule": {"name": "multi_step", "milestones": ["70 %", "90 %"], "factor": 0.2},
        "augment": setting["augment"],
        "precision": "bf16",
        "compile": "blocks",
        "graph": True,
        "evaluate": setting["evaluate"],
        "checkpoint": {"every": setting["checkpoint"], "keep": 1, "best": False},
        "seed": seed,
    }


def run(context: Context) -> Result:
    """Run the entry."""
    setting, seeds = context.setting, seeds_of(context)
    jobs = {
        (arm, seed): Job(f"depth{setting['depth']} {arm} {seed}", recipe(setting, arm, seed), setting["probed"])
        for seed in seeds
        for arm in ARMS
    }
    runs = train_arms(context, jobs)
    right = {arm: [accuracy(record) for record in records] for arm, records in runs.items()}
    losses = {arm: [end_loss(record) for record in records if not record.diverged] for arm, records in runs.items()}
    complete = {arm: values for arm, values in losses.items() if len(values) == len(seeds)}
    rows = [
        {
            "arm": arm,
            "test accuracy, %": percent(right[arm]),
            "training loss at the end": plus_minus(losses[arm], 3),
            "token similarity after the last layer": plus_minus(
                [record.layers[-1].similarity for record in records if record.layers], 3
            ),
            "diverged": str(sum(record.diverged for record in records)),
            "seconds a run": f"{spread([record['seconds'] or 0.0 for record in records])[0]:.0f}",
        }
        for arm, records in runs.items()
    ]
    table = [
        {"arm": arm, "seed": seed, **{name: record[name] for name in ("test_accuracy", "test_loss", "seconds")},
         "training_loss": "" if record.diverged else end_loss(record), "diverged": record["diverged"] or ""}
        for arm, records in runs.items() for seed, record in zip(seeds, records, strict=True)
    ]  # fmt: skip
    tables = {"arms": rows, "runs": table, "curves": curves_table(runs, seeds, ("loss", "accuracy"))}
    notes = _notes(context, runs, right, complete)
    return Result(_claims(right, complete), tables, lambda: _plot(runs), notes, shown=rows)


def _notes(
    context: Context,
    runs: Mapping[str, list[Record]],
    right: Mapping[str, Sequence[float]],
    losses: Mapping[str, Sequence[float]],
) -> list[str]:
    """Return the notes; ``losses`` holds only arms of which no run diverged."""
    setting = context.setting
    order = sorted(losses, key=lambda arm: spread(losses[arm])[0])
    return [
        f"Test accuracy after {setting['epochs']} epochs, {len(seeds_of(context))} seeds: "
        + "; ".join(describe_difference(f"{one} against {other}", right[one], right[other]) for one, other in PAIRS)
        + ".",
        f"Training loss over the last tenth: {'; '.join(_loss_difference(*pair, losses) for pair in PAIRS)}.",
        "The paper prints curves, not numbers. By training loss its order is de-escalated, pre-norm, post-norm. Ours "
        f"is {', '.join(order) or 'not known, since all diverged'}. Learning rates are the paper's, {setting['lr']:g} "
        f"and for post-norm {setting['lr_post']:g}; none was tuned.",
        *diverged_note(runs),
        "De-escalation with tau 1 removes the mean of the tokens: token similarity after the last layer is 0 for any "
        "weights.",
        f"{'Augmented by flips and crops only' if not setting['augment'].get('rand_augment') else 'RandAugment'}; "
        f"the head takes the maximum over tokens. {_speed(context, runs)}",
        effort(runs),
    ]


def _plot(runs: Mapping[str, list[Record]]) -> Any:
    figure, axes = panels(3)
    curves = (("training", "loss", "training loss"), ("evaluation", "loss", "test loss"),
              ("evaluation", "accuracy", "test accuracy"))  # fmt: skip
    for axis, (which, name, title) in zip(axes, curves, strict=True):
        for (arm, records), style in zip(runs.items(), styles(), strict=False):
            band(axis, records, which, name, arm, style)
        axis.set(xlabel="epoch", title=title)
    axes[0].legend(frameon=False)
    return figure


def _claims(right: Mapping[str, Sequence[float]], losses: Mapping[str, Sequence[float]]) -> list[Claim]:
    """Return the claims: on training loss, of which the paper concludes, and numbers on accuracy."""
    claims = []
    for one, other in PAIRS:
        known = one in losses and other in losses
        gap = difference(losses[one], losses[other], 1.0)[0] if known else None
        claims.append(below(f"{one} less {other}, training loss", gap, 0.0))
    for one, other in PAIRS:
        gap = difference(right[one], right[other])[0]
        claims.append(reported(f"{one} over {other}, points of test accuracy", gap))
    return claims + [reported(f"test accuracy, {arm}, %", 100 * spread(values)[0]) for arm, values in right.items()]


def _loss_difference(one: str, other: str, losses: Mapping[str, Sequence[float]]) -> str:
    what = f"{one} against {other}"
    if one not in losses or other not in losses:
        return f"{what}: a run diverged"
    return describe_difference(what, losses[one], losses[other], scale=1.0, unit="", digits=3)


def _speed(context: Context, runs: Mapping[str, list[Record]]) -> str:
    if context.jobs > 1:
        return "For steps a second see benchmarks/training.py."
    speeds = [
        record["steps_per_second"] for records in runs.values() for record in records if record["steps_per_second"]
    ]
    return f"{max(speeds, default=0.0):.0f} steps/s in the quickest run."


FLIP_CROP = {"flip": True, "crop": "pad"}
ENTRY = Entry(
    "tse-fig6",
    "TSE figure 6: ViT of depth 80 on CIFAR-10, post-norm, pre-norm and de-escalated",
    run,
    {"depth": 80, "dim": 192, "ffn": 384, "heads": 8, "batch": 128, "lr": 1e-4, "lr_post": 5e-5, "seeds": 3,
     "probed": 8},
    group="trained",
    images=True,
    budgets={
        "short": {"epochs": 10, "augment": FLIP_CROP, "evaluate": "2 epochs", "checkpoint": "100 %"},
        "full": {
            "epochs": 150,
            "augment": {**FLIP_CROP, "rand_augment": "rand-m9-mstd0.5"},
            "evaluate": "5 epochs",
            "checkpoint": "5 epochs",
        },
    },
)  # fmt: skip
