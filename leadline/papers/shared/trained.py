"""Common parts of the trained entries: training by arm and seed, statistics, tables and curves."""

from __future__ import annotations

import math
import statistics
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, TypeVar

from leadline.papers.shared.entry import Context
from leadline.training.runs import Job, Record, Setting, run_all

Arm = TypeVar("Arm", bound=Hashable)
Variant = TypeVar("Variant", bound=Hashable)  # what tells the runs of an arm apart, such as the seed
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)  # Student's t for 2, 3, ... values


def seeds_of(context: Context) -> range:
    """Return the seeds of every arm."""
    return range(context.seed, context.seed + context.setting["seeds"])


def training_setting(context: Context) -> Setting:
    """Return where and how the training runs of an entry are made."""

    def complete(recipe: dict[str, Any]) -> dict[str, Any]:
        """Put the images or the text of the context into the sections of a recipe."""
        data = recipe["data"]
        if data["name"] == "text":
            data["path"] = str(context.text)
        elif context.embedded:
            # RandAugment needs colour, and a mirrored digit is none
            recipe["augment"] = {**recipe.get("augment", {}), "rand_augment": None, "flip": False}
            recipe["data"] = {"name": "digits", **({"valid": data["valid"]} if "valid" in data else {})}
            model = recipe["model"]
            model["patch_size"] = max(1, model.get("patch_size", 16) * 8 // data.get("image_size", 32))
        elif context.data is not None:
            data["path"] = str(context.data)
        return recipe

    return Setting(
        context.out,
        context.device,
        complete,
        data_id=context.data_id,
        jobs=context.jobs,
        until=context.until,
        progress=context.progress,
        say=context.say,
    )


def train_arms(context: Context, jobs: Mapping[tuple[Arm, Variant], Job]) -> dict[Arm, list[Record]]:
    """Train the jobs that are not stored yet; return the records of each arm in the order of ``jobs``."""
    records = run_all(training_setting(context), list(jobs.values()))
    runs: dict[Arm, list[Record]] = {}
    for (arm, _), job in jobs.items():
        runs.setdefault(arm, []).append(records[job.name])
    return runs


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return mean and standard deviation; the deviation of a single value is 0."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def plus_minus(values: Sequence[float], digits: int = 4) -> str:
    """Format mean and standard deviation; a dash for no values."""
    if not values:
        return "-"
    mean, deviation = spread(values)
    return f"{mean:.{digits}f} ± {deviation:.{digits}f}"


def percent(values: Sequence[float]) -> str:
    """Format accuracies in [0, 1] as "63.1 ± 0.4"; a single one as "63.1"."""
    mean, deviation = spread([100 * value for value in values])
    return f"{mean:.1f} ± {deviation:.1f}" if len(values) > 1 else f"{mean:.1f}"


def accuracy(record: Record) -> float:
    """Return the test accuracy of a run; a run that diverged counts as guessing among ten classes."""
    return 0.1 if record.diverged else record["test_accuracy"]


def end_loss(record: Record) -> float:
    """Return the mean of the recorded training losses over the last tenth of a run.

    A single loss would be mostly the noise of its batches.
    """
    rows = record["training"]
    return statistics.fmean(row["loss"] for row in rows if row["epoch"] > 0.9 * rows[-1]["epoch"])


def difference(a: Sequence[float], b: Sequence[float], scale: float = 100.0) -> tuple[float, float]:
    """Return the mean of a - b over pairs that share a seed, and its standard error.

    Args:
        a: A value per seed.
        b: A value per seed.
        scale: Factor on both; 100 turns accuracies into percentage points.
    """
    mean, deviation = spread([scale * (x - y) for x, y in zip(a, b, strict=True)])
    return mean, deviation / math.sqrt(len(a))


def describe_difference(
    what: str, a: Sequence[float], b: Sequence[float], scale: float = 100.0, unit: str = " points", digits: int = 1
) -> str:
    """Describe the difference of a and b, and whether it is beyond the noise; with one seed that is unknown."""
    mean, error = difference(a, b, scale)
    if len(a) < 2:
        return f"{what} {mean:+.{digits}f}{unit} (one seed)"
    return f"{what} {mean:+.{digits}f} ± {error:.{digits}f}{unit} ({noise(mean, error, len(a))})"


def noise(mean: float, error: float, seeds: int) -> str:
    """Describe whether a mean with this standard error differs from 0 at 95 %."""
    beyond = abs(mean) > error * _T95[min(seeds - 2, len(_T95) - 1)]
    return f"{'beyond' if beyond else 'within'} the noise of {seeds} seeds at 95 %"


def effort(runs: Mapping[Any, Sequence[Record]], more: Sequence[Record] = ()) -> str:
    """Describe how many runs there were, how long they trained, and on which devices."""
    records = [record for by_seed in runs.values() for record in by_seed] + list(more)
    seconds = sum(record["seconds"] or 0.0 for record in records)
    devices = sorted({record["device"] for record in records if record["device"]})
    on = " and ".join(devices) or "no device"
    if len(records) == 1:
        return f"1 run, {seconds:.0f} s of training, on {on}."
    return (
        f"{len(records)} runs, {seconds:.0f} s of training in total, on {on}. Runs that shared a device each took "
        "longer than alone."
    )


def diverged_note(runs: Mapping[Any, Sequence[Record]]) -> list[str]:
    """Return a sentence on which runs diverged, and why the first of each arm did; nothing where none did."""
    reasons = {arm: [record["diverged"] for record in records if record.diverged] for arm, records in runs.items()}
    parts = [f"{arm}, {len(whys)} of {len(runs[arm])} ({whys[0]})" for arm, whys in reasons.items() if whys]
    return [f"Diverged, which counts as guessing: {'; '.join(parts)}."] if parts else []


def curves_table(
    runs: Mapping[str, Sequence[Record]], seeds: Sequence[int], figures: Sequence[str] = ("loss",)
) -> list[dict[str, Any]]:
    """Return the curves of every run, a row per point."""
    return [
        {"arm": arm, "seed": seed, "curve": which, "step": row["step"], "epoch": row["epoch"],
         **{name: row.get(name) for name in figures}}
        for arm, records in runs.items() for seed, record in zip(seeds, records, strict=False)
        for which in ("training", "evaluation") for row in record[which]
    ]  # fmt: skip


def band(axis: Any, records: Sequence[Record], which: str, figure: str, label: str, style: Mapping[str, Any]) -> None:
    """Draw a curve by epoch: the mean over records, and a band from the smallest to the largest.

    Args:
        axis: A matplotlib axis.
        records: The runs of an arm; those that diverged are left out.
        which: ``"training"`` or ``"evaluation"``.
        figure: The column to draw, such as ``"loss"``.
        label: Name of the line.
        style: How to draw it, from ``plots.styles``.
    """
    curves = [record.curve(which, figure) for record in records if not record.diverged]
    if not curves:
        return
    length = min(len(x) for x, _ in curves)
    x = curves[0][0][:length]
    by_point = list(zip(*(y[:length] for _, y in curves), strict=True))
    every = {**style, "markevery": max(length // 10, 1)}
    axis.plot(x, [statistics.fmean(point) for point in by_point], label=label, **every)
    low, high = [min(point) for point in by_point], [max(point) for point in by_point]
    axis.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
