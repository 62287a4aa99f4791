"""Recipes: what is trained on what, and how. Schemas and their reading; nothing here imports torch."""

from leadline.training.recipe.language import TextData
from leadline.training.recipe.recipe import (
    Optimizer,
    Recipe,
    Schedule,
    differences,
    load_recipe,
    of_earlier,
    parse_recipe,
)
from leadline.training.recipe.section import Section, Span
from leadline.training.recipe.vision import Augment, VisionData

__all__ = [
    "Augment",
    "Optimizer",
    "Recipe",
    "Schedule",
    "Section",
    "Span",
    "TextData",
    "VisionData",
    "differences",
    "load_recipe",
    "of_earlier",
    "parse_recipe",
]
