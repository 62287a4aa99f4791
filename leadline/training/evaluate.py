"""``leadline evaluate``: the figures of a checkpoint on a split, and the probe's report of it with its violins."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import leadline
from leadline.errors import LeadlineError, check_choice
from leadline.files import whole
from leadline.machine import choose_device
from leadline.models.base import CONFIG_FILE
from leadline.models.checkpoints import STATE, Saved, check, find_checkpoint
from leadline.models.io import averaged
from leadline.probing import DepthReport, probe
from leadline.training.recipe.recipe import Recipe, load_recipe, of_earlier, parse_recipe
from leadline.training.run_folder.folder import check_data, read_data
from leadline.training.step import DTYPES
from leadline.training.tasks.vision import VisionData, VisionTask

FIGURES, REPORT, VIOLINS = "evaluation.json", "report", "violins.png"


@dataclass
class Evaluation:
    """What ``evaluate`` hands back; its report says among its settings what was evaluated, and the figures.

    ``figures`` are the task's: accuracy and loss, or loss and perplexity, ...
    """

    checkpoint: Path
    step: int
    split: str
    data: str  # their folder, or the name of the set
    figures: dict[str, float]
    report: DepthReport
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the reader of the figures must know

    def __post_init__(self) -> None:
        place = {"checkpoint": str(self.checkpoint), "split": self.split, "data": self.data}
        self.report.settings = {**place, **self.figures, **self.report.settings}

    def to_dict(self) -> dict[str, Any]:
        verdict = self.report.verdict
        return {
            "checkpoint": str(self.checkpoint),
            "step": self.step,
            "split": self.split,
            "data": self.data,
            **self.figures,
            **({"notes": self.notes} if self.notes else {}),
            "verdict": {"kind": verdict.kind, "text": verdict.text},
            "files": [str(file) for file in self.files],
        }


def evaluate(
    folder: str | os.PathLike[str],
    *,
    which: str = "best",
    split: str = "test",
    data: str | os.PathLike[str] | None = None,
    recipe: str | os.PathLike[str] | None = None,
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    **text: Any,
) -> Evaluation:
    """Evaluate a run's best or last checkpoint, or the checkpoint in ``folder``, in the precision it was trained in.

    Averaged weights are taken where the run has them, as its own evaluation does.
    recipe  whose data and precision are taken; needed for a model that was saved by itself, such as a cured one.
    data    where the data lie now, if not where they were.
    device  "cpu", "cuda"; None: a GPU if there is one.
    out     folder for evaluation.json, report.html, report.json and violins.png; None: nothing is written.
    text    for language models alone: context, stride, memory and lanes, see ``evaluate_text``.
    """
    from leadline.training.evaluate_text import evaluate_text, is_language_model

    if is_language_model(folder, which):
        return evaluate_text(folder, which=which, split=split, data=data, recipe=recipe, device=device, out=out, **text)
    if Path(folder).is_dir() and (given := [name for name, value in text.items() if value is not None]):
        raise LeadlineError(f"{', '.join(given)} given, but {folder} holds no language model; leave it out")
    check_choice("which", which, ("best", "last"))
    saved = _find(Path(folder), which, recipe)
    settings = _settings(saved, recipe, data)
    where = choose_device(device)
    classes = _classes(saved, recipe)
    task = VisionTask(settings, where, classes=classes)
    origin = settings.data.path or settings.data.name
    if data is None and recipe is None:
        part = "test" if split == "test" else "train"
        check_data(saved.run, "images", part, task.sets.fingerprint(part), origin)
    model = leadline.load(averaged(saved.folder)).to(where)
    _check_fit(model, task, saved.folder)
    dtype = DTYPES.get(settings.precision)
    with torch.no_grad(), nullcontext() if dtype is None else torch.autocast(where.type, dtype):
        figures = task.evaluate(model, split)
    found = Evaluation(saved.folder, saved.step, split, origin, figures, probe(model, task.probe_inputs(split)))
    if settings.data.name == "folder" and classes is None:
        found.notes = [f"which classes were trained is not known here; those of {origin} are taken, in their order"]
    if out is not None:
        found.files = write_evaluation(found, Path(out))
    return found


def _find(folder: Path, which: str, recipe: str | os.PathLike[str] | None) -> Saved:
    if (folder / STATE).is_file():
        return check(folder)
    if (folder / CONFIG_FILE).is_file():
        if recipe is None:
            raise LeadlineError(
                f"{folder} holds a model without its run; give the recipe whose data it is for by --recipe, such as "
                "RUN/recipe.yaml"
            )
        return Saved(folder, 0, {})
    if not folder.is_dir():
        raise LeadlineError(f"{folder} is no folder; give the out= folder of a run, or a step-... in it")
    saved = find_checkpoint(folder, "best" if which == "best" else "last")
    if saved is None:
        raise LeadlineError(f"{folder} holds no whole checkpoint; give the out= folder of a run, or a step-... in it")
    return saved


def _classes(saved: Saved, recipe: str | os.PathLike[str] | None) -> list[str] | None:
    """The classes of an image folder, as the checkpoint's run has trained them, or the run that the recipe lies in."""
    runs = [saved.run, *([] if recipe is None else [Path(recipe).parent])]
    return next((found["classes"] for run in runs if "classes" in (found := read_data(run, "images"))), None)


def _settings(saved: Saved, recipe: str | os.PathLike[str] | None, data: str | os.PathLike[str] | None) -> Recipe:
    """The recipe given, or the run's as it is in the checkpoint; with the data where they lie now."""
    tree = recipe_of(saved.state) if recipe is None else load_for(recipe, VisionData, "images")
    if data is not None:
        tree = {**tree, "data": {**tree["data"], "path": str(data)}}
    return parse_recipe({**tree, "out": None})


def recipe_of(state: dict[str, Any]) -> dict[str, Any]:
    """The run's recipe in the state of a checkpoint; a cache that cannot be read here is forgotten."""
    tree: dict[str, Any] = state.get("recipe", {})
    cache = tree.get("data", {}).get("cache")
    if cache is not None and not os.access(cache, os.R_OK | os.X_OK):
        tree = {**tree, "data": {**tree["data"], "cache": None}}
    return of_earlier(tree)


def load_for(recipe: str | os.PathLike[str], data: type, kind: str) -> dict[str, Any]:
    """A recipe with this kind of data, as a mapping."""
    given = load_recipe(recipe)
    if not isinstance(given.data, data):
        raise LeadlineError(f"{recipe} has the data {given.data.name!r}; this model takes {kind}, give its own recipe")
    return given.model_dump(mode="json")


def _check_fit(model: Any, task: VisionTask, origin: Path) -> None:
    look = task.look
    for option, given in (("num_classes", look.classes), ("image_size", look.size), ("channels", len(look.mean))):
        own = getattr(model.config, option, None)
        if own != given:
            raise LeadlineError(f"{origin} has {option} {own} and the recipe's data {given}; give its own recipe")


def write_evaluation(found: Evaluation, out: Path) -> list[Path]:
    """Figures, report and violins into a folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = [out / f"{REPORT}.html", out / f"{REPORT}.json", out / VIOLINS]
        for file in files:
            found.report.save(file)
        with whole(out / FIGURES) as new:
            new.write_text(json.dumps({**found.to_dict(), "files": [file.name for file in files]}, indent=2) + "\n")
    except OSError as error:
        raise LeadlineError(f"{out} cannot be written ({error.strerror}); give another folder by --out") from error
    return [out / FIGURES, *files]
