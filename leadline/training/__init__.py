"""Training: the loop, schedules, checkpoints. What is trained on what is a recipe, a file under ``recipes/``.

from leadline.training import load_recipe, train
summary = train(load_recipe("recipes/smoke_digits.yaml", ["out=runs/first", "length=5"]))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_WHERE = {
    "Recipe": "training.recipe",
    "Stopped": "errors",
    "find_checkpoint": "models.checkpoints",
    "load_recipe": "training.recipe",
    "parse_recipe": "training.recipe",
    "train": "training.engine",
}

__all__ = ["Recipe", "Stopped", "find_checkpoint", "load_recipe", "parse_recipe", "train"]

if TYPE_CHECKING:
    from leadline.errors import Stopped
    from leadline.models.checkpoints import find_checkpoint
    from leadline.training.engine import train
    from leadline.training.recipe import Recipe, load_recipe, parse_recipe


def __getattr__(name: str) -> Any:
    """Lazy: a recipe's sections are read before torch is needed, and tasks import their sections from here."""
    if name in _WHERE:
        return getattr(importlib.import_module(f"leadline.{_WHERE[name]}"), name)
    raise AttributeError(f"module 'leadline.training' has no attribute {name!r}")
