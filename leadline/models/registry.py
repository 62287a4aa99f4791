"""``create_model``: builds a model by its name. The names are in ``table``."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch

from leadline.errors import LeadlineError, unknown_name
from leadline.machine import free_memory
from leadline.models.base import Model
from leadline.models.bert import Bert
from leadline.models.gpt2 import GPT2
from leadline.models.llama import Llama
from leadline.models.table import MODELS
from leadline.models.transformer_xl import TransformerXL
from leadline.models.vit import ViT

_SMALL = 50_000_000  # parameters, roughly: models below it are built without a question
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
    made = make_config(family, {**settings, **overrides})
    _check_memory(name, family, made)
    return family(made)


def _check_memory(name: str, family: type[Model], config: Any) -> None:
    """Raise for a model whose weights are larger than the memory that is free, before they fill it."""
    rough = config.depth * config.dim * (config.dim + (config.ffn or 0)) + config.dim * getattr(config, "vocab_size", 0)
    if rough < _SMALL or torch.get_default_device().type != "cpu":
        return
    with torch.device("meta"):
        try:
            size = sum(weight.numel() * weight.element_size() for weight in family(config).parameters())
        except RuntimeError as error:  # a number of elements beyond 64 bits
            raise LeadlineError(
                f"{name} would be larger than any memory; make dim, ffn or the vocabulary smaller"
            ) from error
    if size > (free := free_memory()):
        raise LeadlineError(
            f"{name} with these options has {size / 1e9:.3g} GB of weights and {free / 1e9:.3g} GB of memory are free; "
            "make depth, dim, ffn or the vocabulary smaller"
        )


def make_config(family: type[Model], settings: dict[str, Any]) -> Any:
    """Make the configuration of a family from ``settings``; an unknown option is an error that names the others."""
    allowed = [field.name for field in fields(family.Config)]
    for option in settings:
        if option not in allowed:
            raise unknown_name(f"option of {family.Config.family} models", option, allowed)
    return family.Config(**settings)
