"""``evaluate``: the figures of a saved model on a split of its data, with the probe's report of it."""

from __future__ import annotations

import json
import os
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from leadline.errors import LeadlineError, check_choice
from leadline.files import read_json, whole
from leadline.machine import choose_device
from leadline.models.base import CONFIG_FILE
from leadline.models.checkpoints import STATE, Saved, check, find_checkpoint
from leadline.models.io import averaged
from leadline.probing import DepthReport, probe
from leadline.training.recipe import Recipe, load_recipe, of_earlier, parse_recipe
from leadline.training.step import DTYPES
from leadline.training.tasks import all_tasks, task_of
from leadline.training.tasks.base import SavedModel, Task

FIGURES, REPORT, VIOLINS = "evaluation.json", "report", "violins.png"


@dataclass
class Evaluation:
    """The result of ``evaluate``. The settings of its report name what was evaluated, with the figures.

    Attributes:
        checkpoint: The folder of the checkpoint, of its averaged weights (for text), or of the model.
        step: The step of the checkpoint; 0 for a model saved by itself.
        split: The split.
        data: The folder of the data, or the name of the data set.
        figures: What the task measures: accuracy and loss, or loss and perplexity, ...
        report: The probe's report on a few samples of the split.
        files: The files that were written.
        notes: What a reader of the figures must know.
    """

    checkpoint: Path
    step: int
    split: str
    data: str
    figures: dict[str, float]
    report: DepthReport
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        place = {"checkpoint": str(self.checkpoint), "split": self.split, "data": self.data}
        self.report.settings = {**place, **self.figures, **self.report.settings}

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the report as plain values, and the report's verdict."""
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
    **options: int | None,
) -> Evaluation:
    """Evaluate a checkpoint of a run, or a saved model, in the precision it was trained in.

    Averaged weights are taken where the run has them, as in its own evaluations.

    Args:
        folder: The folder of a run, of one of its checkpoints, or of a model.
        which: The checkpoint of a run: "best" or "last".
        split: "train", "valid" or "test".
        data: Where the data are now; other data than the run's. None: where they were in training.
        recipe: A recipe whose data and precision to take in place of the run's. An image model that was saved by
            itself, such as a cured one, needs it.
        device: "cpu" or "cuda". None: a GPU if there is one.
        out: A folder for evaluation.json, report.html, report.json and violins.png. None: nothing is written.
        **options: For language models ``context``, ``stride``, ``memory`` and ``lanes``; see
            ``leadline.training.tasks.language.LanguageEvaluator``.

    Returns:
        The figures and the report.

    Raises:
        LeadlineError: There is no whole checkpoint or model, its data are missing or not those of the run, or an
            option does not fit it.
    """
    check_choice("which", which, ("best", "last"))
    weights, checkpoint = _find(Path(folder), which)
    task = _task_for(weights)
    settings = _recipe(checkpoint) if recipe is None else _recipe_for(recipe, task)
    source = SavedModel(
        folder=weights,
        checkpoint=checkpoint,
        recipe=settings,
        recipe_file=None if recipe is None else Path(recipe),
        data=None if data is None else str(data),
    )
    where = choose_device(device)
    given = {name: value for name, value in options.items() if value is not None}
    evaluator = task.evaluator(source, split, where, **given)
    dtype = None if settings is None else DTYPES.get(settings.precision)
    with torch.no_grad(), nullcontext() if dtype is None else torch.autocast(where.type, dtype):
        figures = evaluator.figures()
    report = probe(evaluator.model, evaluator.probe_inputs())
    step = 0 if checkpoint is None else checkpoint.step
    evaluation = Evaluation(evaluator.place, step, split, evaluator.origin, figures, report, notes=evaluator.notes)
    if out is not None:
        evaluation.files = write_evaluation(evaluation, Path(out))
    return evaluation


def _find(folder: Path, which: str) -> tuple[Path, Saved | None]:
    """Find the folder of the weights, and the checkpoint of a run that they belong to."""
    if (folder / STATE).is_file():
        checkpoint = check(folder)
    elif (folder / CONFIG_FILE).is_file():  # a model, or the averaged weights in a checkpoint
        above = folder.resolve().parent
        return folder, check(above) if (above / STATE).is_file() else None
    elif not folder.is_dir():
        raise LeadlineError(f"{folder} is no folder; give the out= folder of a run, or a step-... in it")
    else:
        best_or_last = find_checkpoint(folder, "best" if which == "best" else "last")
        if best_or_last is None:
            raise LeadlineError(
                f"{folder} holds no whole checkpoint; give the out= folder of a run, or a step-... in it"
            )
        checkpoint = best_or_last
    return averaged(checkpoint.folder), checkpoint


def _task_for(folder: Path) -> type[Task]:
    """Choose the task of a saved model by its config.json."""
    file = folder / CONFIG_FILE
    if not file.is_file():
        raise LeadlineError(f"{folder} has no {CONFIG_FILE}: its model is not ours, evaluate it where it was made")
    try:
        config = read_json(file)
    except (OSError, ValueError) as error:
        raise LeadlineError(f"{file} cannot be read ({error}); it is damaged, save the model again") from error
    config = config if isinstance(config, dict) else {}
    for task in all_tasks():
        if task.takes(config):
            return task
    raise LeadlineError(
        f"{folder} holds a model of the family {config.get('family')!r}, which cannot be evaluated; give a language "
        "model or an image classifier"
    )


def _recipe(checkpoint: Saved | None) -> Recipe | None:
    """Parse the recipe of the checkpoint's run; None if there is no run."""
    tree = {} if checkpoint is None else recipe_of(checkpoint.state)
    return parse_recipe({**tree, "out": None}) if tree else None


def _recipe_for(file: str | os.PathLike[str], task: type[Task]) -> Recipe:
    """Read a recipe, which must have the kind of data that the task is for."""
    recipe = load_recipe(file)
    if task_of(type(recipe.data)) is not task:
        raise LeadlineError(
            f"{file} has the data {recipe.data.name!r}; this model takes {task.kind}, give its own recipe"
        )
    return recipe


def recipe_of(state: dict[str, Any]) -> dict[str, Any]:
    """Take the recipe of a run, as plain values, out of the state of a checkpoint.

    The place of its cache is left out if it cannot be read here.
    """
    tree: dict[str, Any] = state.get("recipe", {})
    cache = tree.get("data", {}).get("cache")
    if cache is not None and not os.access(cache, os.R_OK | os.X_OK):
        tree = {**tree, "data": {**tree["data"], "cache": None}}
    return of_earlier(tree)


def write_evaluation(evaluation: Evaluation, out: Path) -> list[Path]:
    """Write figures, report and violins into a folder; return the files."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = [out / f"{REPORT}.html", out / f"{REPORT}.json", out / VIOLINS]
        for file in files:
            evaluation.report.save(file)
        stored = {**evaluation.to_dict(), "files": [file.name for file in files]}
        with whole(out / FIGURES) as new:
            new.write_text(json.dumps(stored, indent=2) + "\n")
    except OSError as error:
        raise LeadlineError(f"{out} cannot be written ({error.strerror}); give another folder by --out") from error
    return [out / FIGURES, *files]
