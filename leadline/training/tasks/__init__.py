"""Tasks: one file per kind of data, with the model, batches, loss and evaluation for it."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from leadline.training.recipe import Section, TextData, VisionData

if TYPE_CHECKING:
    import torch

    from leadline.training.recipe import Recipe
    from leadline.training.tasks.base import Task

# The task of each ``data`` section, loaded when it is needed: a run on text loads nothing of images.
_TASKS: dict[type[Section], tuple[str, str]] = {
    VisionData: ("leadline.training.tasks.vision", "VisionTask"),
    TextData: ("leadline.training.tasks.language", "LanguageTask"),
}


def task_of(data: type[Section]) -> type[Task]:
    """Return the class of the task that a ``data`` section stands for."""
    module, name = _TASKS[data]
    return getattr(importlib.import_module(module), name)


def all_tasks() -> list[type[Task]]:
    """List the classes of all tasks."""
    return [task_of(data) for data in _TASKS]


def build_task(recipe: Recipe, device: torch.device, rank: int = 0, world: int = 1) -> Task:
    """Build the task of a recipe.

    Args:
        recipe: The recipe, whose ``data`` section decides which task it is.
        device: Where to train.
        rank: Number of this process.
        world: Number of processes.
    """
    return task_of(type(recipe.data))(recipe, device, rank, world)
