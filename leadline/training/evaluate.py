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
from leadline.models.checkpoints import STATE, Saved, check, find_checkpoint
from leadline.models.io import averaged
from leadline.probing import DepthReport, probe
from leadline.training.device import choose_device
from leadline.training.recipe import Recipe, parse_recipe
from leadline.training.step import DTYPES
from leadline.training.tasks import build_task

FIGURES, REPORT, VIOLINS = "evaluation.json", "report", "violins.png"


@dataclass
class Evaluation:
    """What ``evaluate`` hands back. ``figures`` are the task's: accuracy and loss, or loss and perplexity, ..."""

    checkpoint: Path
    step: int
    split: str
    figures: dict[str, float]
    report: DepthReport
    files: list[Path] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # what the reader of the figures must know

    def to_dict(self) -> dict[str, Any]:
        verdict = self.report.verdict
        return {
            "checkpoint": str(self.checkpoint),
            "step": self.step,
            "split": self.split,
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
    device: str | None = None,
    out: str | os.PathLike[str] | None = None,
    **text: Any,
) -> Evaluation:
    """Evaluate a run's best or last checkpoint, or the checkpoint in ``folder``, in the precision it was trained in.

    Averaged weights are taken where the run has them, as its own evaluation does.
    data    where the data lie now, if not where they were.
    device  "cpu", "cuda"; None: a GPU if there is one.
    out     folder for evaluation.json, report.html, report.json and violins.png; None: nothing is written.
    text    for language models alone: context, stride, memory and lanes, see ``evaluate_text``.
    """
    from leadline.training.evaluate_text import evaluate_text, is_language_model

    if is_language_model(folder, which):
        return evaluate_text(folder, which=which, split=split, data=data, device=device, out=out, **text)
    if given := [name for name, value in text.items() if value is not None]:
        raise LeadlineError(f"{', '.join(given)} given, but {folder} holds no language model; leave it out")
    check_choice("which", which, ("best", "last"))
    saved = _find(Path(folder), which)
    recipe = _recipe(saved, data)
    where = choose_device(device)
    task = build_task(recipe, where)
    model = leadline.load(averaged(saved.folder)).to(where)
    dtype = DTYPES.get(recipe.precision)
    with torch.no_grad(), nullcontext() if dtype is None else torch.autocast(where.type, dtype):
        figures = task.evaluate(model, split)
    found = Evaluation(saved.folder, saved.step, split, figures, probe(model, task.probe_inputs()))
    if out is not None:
        found.files = write_evaluation(found, Path(out))
    return found


def _find(folder: Path, which: str) -> Saved:
    if (folder / STATE).is_file():
        return check(folder)
    saved = find_checkpoint(folder, "best" if which == "best" else "last")
    if saved is None:
        raise LeadlineError(f"{folder} holds no whole checkpoint; give the out= folder of a run, or a step-... in it")
    return saved


def _recipe(saved: Saved, data: str | os.PathLike[str] | None) -> Recipe:
    """The run's recipe as it is in the checkpoint, with the data where they lie now."""
    tree = {**saved.state["recipe"]}
    if data is not None:
        tree["data"] = {**tree["data"], "path": str(data)}
    return parse_recipe(tree)


def write_evaluation(found: Evaluation, out: Path) -> list[Path]:
    """Figures, report and violins into a folder."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        files = [out / f"{REPORT}.html", out / f"{REPORT}.json", out / VIOLINS]
        for file in files:
            found.report.save(file)
        new = out / f"{FIGURES}.new"
        new.write_text(json.dumps({**found.to_dict(), "files": [file.name for file in files]}, indent=2) + "\n")
        os.replace(new, out / FIGURES)
    except OSError as error:
        raise LeadlineError(f"{out} cannot be written ({error.strerror}); give another folder by --out") from error
    return [out / FIGURES, *files]
