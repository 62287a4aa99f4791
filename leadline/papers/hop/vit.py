"""HOP's ViTs on CIFAR-10 with the usual skips: accuracy four ways, violins of token cosine and of attention entropy."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from leadline.papers.shared.attention_nets import COLUMNS
from leadline.papers.shared.entry import Claim, Context, Entry, Result, reported
from leadline.papers.shared.plots import panels, styles
from leadline.papers.shared.trained import (
    NEAR,
    STANDARD,
    Models,
    accuracy,
    band,
    curves_table,
    diverged_note,
    effort,
    end_loss,
    layers_table,
    near_one,
    peak_claims,
    peak_layers,
    peak_sentence,
    percent,
    plus_minus,
    said,
    spread,
    violins,
)
from leadline.report.layers import LayerData
from leadline.report.paper import cosine_violins, entropy_violins
from leadline.training.runs.runs import Job, Record, run_all

T = TypeVar("T")
ARMS = {**COLUMNS, ".7": (0.7, 0.7)}  # what the papers call .5 is "both"
MODELS = {
    "T": {"name": "vit_tiny"},
    "S": {"name": "vit_small"},
    "B": {"name": "vit_base"},
    "L": {"name": "vit_large"},
}
DROP_PATH = {"T": 0.1, "S": 0.2, "B": 0.2, "L": 0.3}  # HOP table 3, as the next ones
BATCH = {"T": 256, "S": 256, "B": 128, "L": 32}
RATE = 6.25e-5  # base learning rate
AUGMENT = {
    "flip": True,
    "crop": "resized",
    "rand_augment": "rand-m9-mstd0.5",
    "erase": 0.25,
    "mixup": 0.8,
    "cutmix": 1.0,
}


def recipe(setting: Mapping[str, Any], size: str, arm: str, seed: int) -> dict[str, Any]:
    """Short: 32 x 32 pixels in patches of 4, flips and crops. Full: HOP table 3."""
    alpha, alpha_prime = ARMS[arm]
    cure = {"attention": "hopfield", "alpha": alpha, "alpha_prime": alpha_prime}
    common: dict[str, Any] = {
        "model": {**setting["models"][size], "patch_size": 4, **cure},
        "data": {"name": "cifar10"},
        "precision": "bf16",
        "compile": "blocks",
        "graph": True,
        "checkpoint": {"every": "100 %", "keep": 1, "best": False},
        "seed": seed,
    }
    if setting["budget"] == "short":
        return {
            **common,
            "length": f"{setting['epochs'][size]} epochs",
            "batch": {"size": setting["batch"]},
            "optimizer": {"name": "adamw", "lr": setting["lrs"][size], "weight_decay": 0.05},
            "schedule": {"name": "cosine", "warmup": "10 %"},
            "regularise": {"clip": 1.0},
            "augment": {"flip": True, "crop": "pad"},
            "evaluate": "50 %",
        }
    rate = timm_rate(RATE, BATCH[size])
    low = 1e-6 / rate
    return {
        **common,
        "model": {**setting["models"][size], "patch_size": 16, **cure},
        "data": {"name": "cifar10", "image_size": 224},
        "length": "310 epochs",
        "batch": {"size": BATCH[size]},
        "optimizer": {"name": "adamw", "lr": rate, "weight_decay": 0.05},
        "schedule": {"name": "cosine", "warmup": "20 epochs", "start": low, "cooldown": "10 epochs", "final": low},
        "regularise": {"drop_path": DROP_PATH[size], "smoothing": 0.1},
        "augment": AUGMENT,
        "evaluate": "10 epochs",
        "checkpoint": {"every": "5 epochs", "keep": 2},
    }


def timm_rate(base: float, batch: int) -> float:
    """timm's learning rate from its base rate (at batch 256), for Adam: by the square root of the batch size."""
    return base * math.sqrt(batch / 256)


def train(context: Context, size: str, arms: list[str], seeds: int = 1) -> dict[str, list[Record]]:
    """By arm, a record per seed. The first seed of each is probed."""
    cost = {"T": 1.0, "S": 4.0, "B": 8.0, "L": 20.0}[size]
    jobs = {
        (arm, seed): Job(
            f"vit {size} {arm} {seed}",
            recipe(context.setting, size, arm, seed),
            context.setting["probed"] if seed == context.seed else 0,
            cost,
        )
        for arm in arms
        for seed in range(context.seed, context.seed + seeds)
    }
    records = run_all(context, list(jobs.values()))
    found: dict[str, list[Record]] = {}
    for (arm, _), job in jobs.items():
        found.setdefault(arm, []).append(records[job.name])
    return found


def accuracies(found: Mapping[str, list[Record]]) -> dict[str, list[float]]:
    return {arm: [accuracy(record) for record in kept] for arm, kept in found.items()}


def probed(found: Mapping[str, list[Record]]) -> dict[str, list[LayerData]]:
    """The layers of the first seed of each arm; none where it diverged."""
    return {arm: kept[0].layers for arm, kept in found.items()}


def printed(by_arm: Mapping[str, T]) -> dict[str, T]:
    """The same under the names that the paper gives."""
    return {".5" if arm == "both" else arm: value for arm, value in by_arm.items()}


def four_ways(context: Context) -> Result:
    """ViT-S with the usual skips, standard, alpha only, alpha' only, both."""
    setting = context.setting
    found = train(context, "S", list(COLUMNS), setting["seeds"])
    right = accuracies(found)
    plain, alpha, prime, both = right.values()
    models = probed(found)
    claims = [reported(f"test accuracy, {arm}, %", 100 * spread(values)[0]) for arm, values in right.items()]
    notes = [
        "With the usual skips: "
        + "; ".join(
            (
                said("alpha alone", alpha, plain),
                said("alpha' alone", prime, plain),
                said("both", both, plain),
                said("alpha' on top of alpha", both, alpha),
            )
        )
        + ".",
        peak_sentence(models),
        *diverged_note(found),
        _setting(context, "S"),
        effort(found),
    ]
    seeds = range(context.seed, context.seed + setting["seeds"])
    losses = {arm: [end_loss(r) for r in kept if not r.diverged] for arm, kept in found.items()}
    shown = [
        {
            "way": arm,
            "test accuracy, %": percent(right[arm]),
            "training loss at the end": plus_minus(losses[arm], 3),
            f"largest share of pairs above {NEAR:g}": f"{peak_layers(models[arm])[1]:.4f}" if models[arm] else "-",
            "diverged": str(sum(r.diverged for r in kept)),
        }
        for arm, kept in found.items()
    ]

    def plot() -> Any:
        figure, axes = panels(3)
        for (arm, kept), style in zip(found.items(), styles(), strict=False):
            band(axes[0], kept, "training", "loss", arm, style)
            layers = [f for f in models[arm] if f.index and f.cosines is not None]
            shares = [near_one(f.cosines) for f in layers if f.cosines is not None]
            axes[1].plot([f.index for f in layers], [f.cosine for f in layers], label=arm, **style)
            axes[2].plot([f.index for f in layers], shares, label=arm, **style)
        axes[0].set(xlabel="epoch", title="training loss, ViT-S")
        axes[1].set(xlabel="layer", title="mean token cosine, trained")
        axes[2].set(xlabel="layer", title=f"share of pairs with cosine above {NEAR:g}")
        axes[0].legend(frameon=False)
        return figure

    return Result(claims, _tables(found, seeds, models), plot, notes, shown)


def cosines(size: str) -> Callable[[Context], Result]:
    """HOP figures 5 to 8: violins of token cosine by layer, standard, .5 and .7."""

    def run(context: Context) -> Result:
        found = train(context, size, [STANDARD, "both", ".7"])
        models = printed(probed(found))
        notes = [
            peak_sentence(models), _accuracy_note(found), *diverged_note(found), _setting(context, size), effort(found)
        ]  # fmt: skip
        tables = _tables(printed(found), [context.seed], models)
        return Result(peak_claims(models), tables, lambda: _drawn(context, size, models, cosine_violins), notes)

    return run


def entropies(size: str, arm: str) -> Callable[[Context], Result]:
    """HOP figures 13 to 16: violins of attention entropy by layer and head of one model."""

    def run(context: Context) -> Result:
        found = train(context, size, list(dict.fromkeys([STANDARD, arm])))
        models = printed(probed(found))
        name = list(models)[-1]
        lowest = {name: _lowest(layers) for name, layers in models.items()}
        what = "smallest mean entropy of a head against uniform attention"
        claims = [reported(f"{what}, {name}", value) for name, value in lowest.items()]
        notes = [_accuracy_note(found), *diverged_note(found), _setting(context, size), effort(found)]
        if name != STANDARD:
            less, plain = lowest[name], lowest[STANDARD]
            gap = None if less is None or plain is None else less - plain
            same = gap is not None and abs(gap) < 0.1
            claims.append(Claim(f"{what}, {name} less standard", "shape", gap, 0.0, "0.1", same))
            if gap is not None:
                notes.insert(
                    0,
                    f"The smallest mean entropy of a head is {plain:.2f} of uniform attention's with standard "
                    f"attention and {less:.2f} with Hopfield attention ({name}); the paper says that it does not change"
                    f"{'.' if same else ', and here it does.'}",
                )
        rows = [
            {"layer": f.index, "head": head + 1, "entropy": value}
            for f in models[name]
            for head, value in enumerate(f.entropy or [])
        ]
        shown = {name: models[name]}
        return Result(claims, {"entropy": rows}, lambda: _drawn(context, size, shown, entropy_violins), notes)

    return run


def _lowest(layers: Sequence[LayerData]) -> float | None:
    return min((min(f.entropy) / f.entropy_uniform for f in layers if f.entropy and f.entropy_uniform), default=None)


def _tables(found: Mapping[str, list[Record]], seeds: Sequence[int], models: Models) -> dict[str, list[dict[str, Any]]]:
    runs = [
        {"arm": arm, "seed": seed, "test_accuracy": r["test_accuracy"], "seconds": r["seconds"],
         "training_loss": "" if r.diverged else end_loss(r), "diverged": r["diverged"] or ""}
        for arm, kept in found.items() for seed, r in zip(seeds, kept, strict=True)
    ]  # fmt: skip
    return {"runs": runs, "curves": curves_table(found, seeds, ("loss", "accuracy")), "layers": layers_table(models)}


def _drawn(context: Context, size: str, models: Models, draw: Callable[[Any, Sequence[LayerData]], None]) -> Any:
    budget = "as HOP table 3" if context.setting["budget"] == "full" else f"{context.setting['epochs'][size]} epochs"
    images = "digits" if context.embedded else "CIFAR-10"
    return violins(models, draw, f"ViT-{size} on {images}, {budget}: {{}}", width=8.0, height=2.6)


def _accuracy_note(found: Mapping[str, list[Record]]) -> str:
    said_each = ", ".join(f"{arm} {percent(values)}" for arm, values in accuracies(found).items())
    low = [arm for arm, values in accuracies(found).items() if min(values) < 0.15]
    guessing = f" What {' and '.join(low)} gives is little more than guessing, 10: these figures are of no trained net."
    return f"Test accuracy, %, one seed: {said_each} (both: alpha = alpha' = .5).{guessing if low else ''}"


def _setting(context: Context, size: str) -> str:
    setting = context.setting
    if setting["budget"] == "full":
        return "Trained as HOP table 3 says."
    pixels = "8 x 8 pixels in patches of 1" if context.embedded else "32 x 32 pixels in patches of 4"
    augmented = "crops" if context.embedded else "flips and crops"
    return (
        f"ViT-{size} on {pixels} (65 tokens; HOP: 224 x 224 in patches of 16), "
        f"{setting['epochs'][size]} epochs (HOP: 300) at batch {setting['batch']}, {augmented} only, learning rate "
        f"{setting['lrs'][size]:g} for every way: none was tuned."
    )


_SHORT = {
    "batch": 256,
    "epochs": {"T": 6, "S": 6, "B": 3, "L": 2},
    "lrs": {"T": 1e-3, "S": 5e-4, "B": 3e-4, "L": 1e-4},
}


def _entry(id_: str, title: str, run: Callable[[Context], Result], **setting: Any) -> Entry:
    budgets: dict[str, Mapping[str, Any]] = {"short": _SHORT, "full": {}}
    return Entry(
        id_, title, run, {"models": MODELS, "probed": 16, **setting}, group="trained", images=True, budgets=budgets
    )


ENTRIES = (
    _entry("hop-vit", "HOP: ViT-S on CIFAR-10 with the usual skips, four ways", four_ways, seeds=3),
    *(
        _entry(f"hop-fig{5 + i}", f"HOP figure {5 + i}: token cosine by layer of ViT-{size} trained on CIFAR-10, "
               "standard, .5 and .7", cosines(size))
        for i, size in enumerate(MODELS)
    ),
    *(
        _entry(f"hop-fig{13 + i}", f"HOP figure {13 + i}: attention entropy by layer and head of ViT-{size} trained on "
               f"CIFAR-10, {'standard' if arm == 'standard' else '.5'}", entropies(size, arm))
        for i, (size, arm) in enumerate((("T", "standard"), ("T", "both"), ("S", "standard"), ("S", "both")))
    ),
)  # fmt: skip
