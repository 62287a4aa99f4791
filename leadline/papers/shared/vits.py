"""The training that hop-vit and HOP figures 5 to 20 share: ViTs on CIFAR-10 and CIFAR-100."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from leadline.data.images.sets import LAYOUTS
from leadline.papers.shared.attention_nets import COLUMNS
from leadline.papers.shared.entry import Claim, Context, Entry, Result, reported
from leadline.papers.shared.peaks import STANDARD, Models, cosines_table, peak_claims, peak_sentence
from leadline.papers.shared.plots import violins
from leadline.papers.shared.trained import (
    accuracy,
    curves_table,
    diverged_note,
    effort,
    end_loss,
    percent,
    train_arms,
)
from leadline.report.layers import LayerData
from leadline.report.paper import cosine_violins, entropy_violins
from leadline.training.runs import Job, Record

T = TypeVar("T")
Draw = Callable[[Any, Sequence[LayerData]], None]
ARMS = {**COLUMNS, ".7": (0.7, 0.7)}  # alpha and alpha'; the papers' .5 is "both"
MODELS = {
    "T": {"name": "vit_tiny"},
    "S": {"name": "vit_small"},
    "B": {"name": "vit_base"},
    "L": {"name": "vit_large"},
}
COST = {"T": 1.0, "S": 4.0, "B": 8.0, "L": 20.0}  # time of a run against the others
SHORT = {
    "batch": 256,
    "epochs": {"T": 6, "S": 6, "B": 3, "L": 2},
    "lrs": {"T": 1e-3, "S": 5e-4, "B": 3e-4, "L": 1e-4},
}
# HOP table 3
DROP_PATH = {"T": 0.1, "S": 0.2, "B": 0.2, "L": 0.3}
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


def vit_entry(
    id_: str, title: str, run: Callable[[Context], Result], image_set: str = "cifar10", **setting: Any
) -> Entry:
    """Make an entry whose models are trained by ``recipe``."""
    if image_set != "cifar10":
        setting["image_set"] = image_set
    return Entry(
        id_,
        title,
        run,
        {"models": MODELS, "probed": 16, **setting},
        group="trained",
        images=True,
        budgets={"short": SHORT, "full": {}},
        image_set=image_set,
    )


def cosine_entry(id_: str, size: str, image_set: str = "cifar10") -> Entry:
    """Make the entry of one of HOP figures 5 to 12: violins of token cosine by layer, standard, .5 and .7."""
    images = LAYOUTS[image_set].title
    title = f"HOP figure {_number(id_)}: token cosine by layer of ViT-{size} trained on {images}, standard, .5 and .7"
    return vit_entry(id_, title, partial(run_cosines, size=size), image_set)


def entropy_entry(id_: str, size: str, arm: str) -> Entry:
    """Make the entry of one of HOP figures 13 to 20: violins of attention entropy by layer and head of one model."""
    title = (
        f"HOP figure {_number(id_)}: attention entropy by layer and head of ViT-{size} trained on CIFAR-10, "
        f"{_printed_name(arm)}"
    )
    return vit_entry(id_, title, partial(run_entropies, size=size, arm=arm))


def _number(id_: str) -> str:
    return id_.removeprefix("hop-fig")


def recipe(setting: Mapping[str, Any], size: str, arm: str, seed: int) -> dict[str, Any]:
    """Return the sections of a recipe.

    The short budget takes 32 x 32 pixels in patches of 4, with flips and crops. The full one is HOP table 3.
    """
    alpha, alpha_prime = ARMS[arm]
    cure = {"attention": "hopfield", "alpha": alpha, "alpha_prime": alpha_prime}
    common: dict[str, Any] = {
        "model": {**setting["models"][size], "patch_size": 4, **cure},
        "data": {"name": _image_set(setting)},
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
        "data": {"name": _image_set(setting), "image_size": 224},
        "length": "310 epochs",
        "batch": {"size": BATCH[size]},
        "optimizer": {"name": "adamw", "lr": rate, "weight_decay": 0.05},
        "schedule": {"name": "cosine", "warmup": "20 epochs", "start": low, "cooldown": "10 epochs", "final": low},
        "regularise": {"drop_path": DROP_PATH[size], "smoothing": 0.1},
        "augment": AUGMENT,
        "evaluate": "10 epochs",
        "checkpoint": {"every": "5 epochs", "keep": 2},
    }


def _image_set(setting: Mapping[str, Any]) -> str:
    return setting.get("image_set", "cifar10")


def timm_rate(base: float, batch: int) -> float:
    """Return timm's learning rate for Adam: the base rate, of batch 256, times the square root of the batch's ratio."""
    return base * math.sqrt(batch / 256)


def train(context: Context, size: str, arms: Sequence[str], seeds: int = 1) -> dict[str, list[Record]]:
    """Train arms of a size, and probe the first seed of each; return by arm a record per seed."""
    jobs = {
        (arm, seed): Job(
            f"vit {size} {arm} {seed}" + ("" if _image_set(context.setting) == "cifar10" else " cifar100"),
            recipe(context.setting, size, arm, seed),
            context.setting["probed"] if seed == context.seed else 0,
            COST[size],
        )
        for arm in arms
        for seed in range(context.seed, context.seed + seeds)
    }
    return train_arms(context, jobs)


def run_cosines(context: Context, size: str) -> Result:
    """Run one of HOP figures 5 to 12."""
    runs = train(context, size, [STANDARD, "both", ".7"])
    models = printed(layers_of(runs))
    notes = [
        peak_sentence(models),
        accuracy_note(context, runs),
        *diverged_note(runs),
        setting_note(context, size),
        effort(runs),
    ]
    tables = run_tables(printed(runs), [context.seed], models)
    return Result(peak_claims(models), tables, lambda: _violins(context, size, models, cosine_violins), notes)


def run_entropies(context: Context, size: str, arm: str) -> Result:
    """Run one of HOP figures 13 to 20. A figure of Hopfield attention trains standard attention too, to compare."""
    runs = train(context, size, list(dict.fromkeys([STANDARD, arm])))
    models = printed(layers_of(runs))
    name = _printed_name(arm)
    lowest = {model: _lowest_entropy(layers) for model, layers in models.items()}
    what = "smallest mean entropy of a head against uniform attention"
    claims = [reported(f"{what}, {model}", value) for model, value in lowest.items()]
    notes = [accuracy_note(context, runs), *diverged_note(runs), setting_note(context, size), effort(runs)]
    if name != STANDARD:
        ours, plain = lowest[name], lowest[STANDARD]
        gap = None if ours is None or plain is None else ours - plain
        same = gap is not None and abs(gap) < 0.1
        claims.append(Claim(f"{what}, {name} less standard", "shape", gap, 0.0, "0.1", same))
        if gap is not None:
            notes.insert(
                0,
                f"The smallest mean entropy of a head is {plain:.2f} of uniform attention's with standard "
                f"attention and {ours:.2f} with Hopfield attention ({name}). The paper says that it does not change"
                f"{'.' if same else '; here it does.'}",
            )
    rows = [
        {"layer": f.index, "head": head + 1, "entropy": value}
        for f in models[name]
        for head, value in enumerate(f.entropy or [])
    ]
    drawn = {name: models[name]}
    return Result(claims, {"entropy": rows}, lambda: _violins(context, size, drawn, entropy_violins), notes)


def _lowest_entropy(layers: Sequence[LayerData]) -> float | None:
    """Return the smallest mean entropy of a head in any layer, as a share of that of uniform attention."""
    return min((min(f.entropy) / f.entropy_uniform for f in layers if f.entropy and f.entropy_uniform), default=None)


def _violins(context: Context, size: str, models: Models, draw: Draw) -> Any:
    budget = "as HOP table 3" if context.setting["budget"] == "full" else f"{context.setting['epochs'][size]} epochs"
    images = "digits" if context.embedded else LAYOUTS[_image_set(context.setting)].title
    return violins(models, draw, f"ViT-{size} on {images}, {budget}: {{}}", width=8.0, height=2.6)


def accuracies(runs: Mapping[str, list[Record]]) -> dict[str, list[float]]:
    """Return the test accuracy of every seed, by arm."""
    return {arm: [accuracy(record) for record in records] for arm, records in runs.items()}


def layers_of(runs: Mapping[str, list[Record]]) -> dict[str, list[LayerData]]:
    """Return the layers of the first seed of each arm; none where it diverged."""
    return {arm: records[0].layers for arm, records in runs.items()}


def printed(by_arm: Mapping[str, T]) -> dict[str, T]:
    """Return the same values under the paper's names of the arms."""
    return {_printed_name(arm): value for arm, value in by_arm.items()}


def _printed_name(arm: str) -> str:
    return ".5" if arm == "both" else arm


def run_tables(
    runs: Mapping[str, list[Record]], seeds: Sequence[int], models: Models
) -> dict[str, list[dict[str, Any]]]:
    """Return the tables "runs", "curves" and "layers"; the last is of the first seed."""
    rows = [
        {"arm": arm, "seed": seed, "test_accuracy": r["test_accuracy"], "seconds": r["seconds"],
         "training_loss": "" if r.diverged else end_loss(r), "diverged": r["diverged"] or ""}
        for arm, records in runs.items() for seed, r in zip(seeds, records, strict=True)
    ]  # fmt: skip
    return {"runs": rows, "curves": curves_table(runs, seeds, ("loss", "accuracy")), "layers": cosines_table(models)}


def accuracy_note(context: Context, runs: Mapping[str, list[Record]]) -> str:
    """Describe the test accuracy of each arm, and say which ones do little better than guessing."""
    classes = 10 if context.embedded else LAYOUTS[_image_set(context.setting)].classes
    by_arm = ", ".join(f"{arm} {percent(values)}" for arm, values in accuracies(runs).items())
    low = [arm for arm, values in accuracies(runs).items() if min(values) < 1.5 / classes]
    guessing = (
        f" {' and '.join(low)}: little better than guessing ({100 / classes:g}), so that this is no figure of a "
        "trained net."
    )
    return f"Test accuracy, %, one seed: {by_arm} (both: alpha = alpha' = .5).{guessing if low else ''}"


def setting_note(context: Context, size: str) -> str:
    """Describe how the models were trained, beside how HOP trained them."""
    setting = context.setting
    if setting["budget"] == "full":
        return "Trained as HOP table 3 says."
    pixels = "8 x 8 pixels in patches of 1" if context.embedded else "32 x 32 pixels in patches of 4"
    augmented = "crops" if context.embedded else "flips and crops"
    return (
        f"ViT-{size} on {pixels} (65 tokens; HOP: 224 x 224 in patches of 16), "
        f"{setting['epochs'][size]} epochs (HOP: 300) at batch {setting['batch']}, {augmented} only. Every arm has "
        f"the learning rate {setting['lrs'][size]:g}; none was tuned."
    )
