"""What a run is about: a model, batches, a loss and an evaluation. One file a kind of data."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from leadline.training.recipe.recipe import Recipe
    from leadline.training.tasks.base import Task


def build_task(recipe: Recipe, device: torch.device, rank: int = 0, world: int = 1) -> Task:
    """The task that the recipe's ``data`` section stands for."""
    from leadline.training.tasks.vision import VisionData

    if isinstance(recipe.data, VisionData):
        from leadline.training.tasks.vision import VisionTask

        return VisionTask(recipe, device, rank, world)
    from leadline.training.tasks.language import LanguageTask

    return LanguageTask(recipe, device, rank, world)
