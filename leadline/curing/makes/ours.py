"""A cure for our own models: their blocks have a place for it already."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from leadline.errors import LeadlineError
from leadline.models import Model
from leadline.nn import BlockConfig
from leadline.nn.block import make_de_escalation

PLACE = "_leadline_cure"  # attribute of a cured model


def install(
    model: Model,
    alpha: float | None,
    alpha_prime: float | None,
    de_escalation: float | None,
    de_escalation_at: str | None,
    start: str | None,
    layers: Any,
) -> None:
    """Set strengths and de-escalation in place; what is not given stays as it is."""
    old = model.config
    if layers is not None:
        raise LeadlineError(
            "layers (--layer) are given, but our own models have one strength for all layers; leave them out"
        )
    if old.learnable_alpha or old.learnable_alpha_prime or old.learnable_de_escalation:
        raise LeadlineError("the model learns its strengths itself; a cure would overrule them")
    changes: dict[str, Any] = {}
    if alpha is not None or alpha_prime is not None:
        changes["alpha"] = old.strengths[0] if alpha is None else float(alpha)
        changes["alpha_prime"] = old.strengths[1] if alpha_prime is None else float(alpha_prime)
        if changes["alpha"] or changes["alpha_prime"]:
            changes["attention"] = "hopfield"
    if start is not None:
        changes["start"] = start
    if de_escalation_at is not None:
        changes["de_escalation_at"] = de_escalation_at
    if de_escalation is not None:
        changes["de_escalation"] = float(de_escalation)
        if not de_escalation and hasattr(old, "de_escalation_form"):  # what is not there leaks nothing
            changes["de_escalation_form"] = "causal"
    new = replace(old, **changes)  # refuses what does not go together
    model.__dict__[PLACE] = old
    _apply(model, new)


def remove(model: Model) -> None:
    """Back to what the model was."""
    _apply(model, model.__dict__.pop(PLACE))


def set_strengths(model: Model, alpha: float, alpha_prime: float) -> None:
    attention = "hopfield" if alpha or alpha_prime else model.config.attention
    _apply(model, replace(model.config, attention=attention, alpha=alpha, alpha_prime=alpha_prime))


def _apply(model: Model, config: BlockConfig) -> None:
    alpha, alpha_prime = config.strengths
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        was = block.config
        block.config = config
        block.attention.alpha.value, block.attention.alpha_prime.value = alpha, alpha_prime
        block.attention.start = config.start
        if (was.de_escalation, was.causal_mean) != (config.de_escalation, config.causal_mean):
            block.de_escalation = make_de_escalation(config)
            if block.de_escalation is not None:
                block.de_escalation.train(block.training)
    model.config = config
