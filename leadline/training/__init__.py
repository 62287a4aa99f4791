"""Training by a recipe: the loop, checkpoints and logs, tasks, and many runs at a time.

Example::

    from leadline.training import load_recipe, train

    summary = train(load_recipe("recipes/smoke_digits.yaml", ["out=runs/first", "length=5"]))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leadline.lazy import lazy

__all__ = ["Diverged", "Recipe", "Stopped", "find_checkpoint", "load_recipe", "parse_recipe", "train"]

if TYPE_CHECKING:
    from leadline.errors import Stopped
    from leadline.models.checkpoints import find_checkpoint
    from leadline.training.loop import train
    from leadline.training.recipe import Recipe, load_recipe, parse_recipe
    from leadline.training.stop import Diverged

# Lazy, so that recipes can be read without torch.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "Diverged": "leadline.training.stop",
        "Recipe": "leadline.training.recipe",
        "Stopped": "leadline.errors",
        "find_checkpoint": "leadline.models.checkpoints",
        "load_recipe": "leadline.training.recipe",
        "parse_recipe": "leadline.training.recipe",
        "train": "leadline.training.loop",
    },
)
