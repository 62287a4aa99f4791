"""``create_model``: builds a model by its name. The names are in ``table``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from leadline.errors import unknown_name
from leadline.models.base import Model
from leadline.models.bert import Bert
from leadline.models.gpt2 import GPT2
from leadline.models.llama import Llama
from leadline.models.table import MODELS
from leadline.models.transformer_xl import TransformerXL
from leadline.models.vit import ViT

# by the name that saved models have in config.json
FAMILIES: dict[str, type[Model]] = {family.Config.family: family for family in (ViT, GPT2, Llama, Bert, TransformerXL)}


def create_model(name: str, **overrides: Any) -> Model:
    """Build a model by name, freshly initialised.

    Args:
        name: One of ``list_models()``.
        **overrides: Options of the model's configuration, such as ``depth`` or ``attention``.

    Returns:
        The model, on the current default device, in training mode.

    Raises:
        LeadlineError: The name or an option is unknown, or the options do not fit each other.

    Example:
        >>> create_model("vit_tiny", attention="hopfield", norm="post", de_escalation=1., depth=80)
    """
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    config, settings, _ = MODELS[name]
    family = FAMILIES[config.family]
    return family(make_config(family, {**settings, **overrides}))


def make_config(family: type[Model], settings: dict[str, Any]) -> Any:
    """Make the configuration of a family from ``settings``; an unknown option is an error that names the others."""
    allowed = [field.name for field in fields(family.Config)]
    for option in settings:
        if option not in allowed:
            raise unknown_name(f"option of {family.Config.family} models", option, allowed)
    return family.Config(**settings)
