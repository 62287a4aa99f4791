"""Training by a recipe: the loop, checkpoints and logs, tasks, and many runs at a time.

Example::

    from leadline.training import load_recipe, train

    summary = train(load_recipe("recipes/smoke_digits.yaml", ["out=runs/first", "length=5"]))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Diverged": "training.stop",
    "Recipe": "training.recipe",
    "Stopped": "errors",
    "find_checkpoint": "models.checkpoints",
    "load_recipe": "training.recipe",
    "parse_recipe": "training.recipe",
    "train": "training.loop",
}

__all__ = ["Diverged", "Recipe", "Stopped", "find_checkpoint", "load_recipe", "parse_recipe", "train"]

if TYPE_CHECKING:
    from leadline.errors import Stopped
    from leadline.models.checkpoints import find_checkpoint
    from leadline.training.loop import train
    from leadline.training.recipe import Recipe, load_recipe, parse_recipe
    from leadline.training.stop import Diverged


def __getattr__(name: str) -> Any:
    """Import a public name on first use, so that recipes can be read without torch."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"leadline.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'leadline.training' has no attribute {name!r}")
