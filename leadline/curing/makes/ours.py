"""The cure of our own models: their blocks have a place for it, and only their configuration changes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from leadline.curing.strengths import Strengths
from leadline.errors import LeadlineError
from leadline.models import Model
from leadline.nn import BlockConfig
from leadline.nn.block import make_de_escalation


@dataclass
class OwnCure:
    """The cure of one of our models; it remembers the configuration before."""

    model: Model
    before: BlockConfig

    @property
    def strengths(self) -> Strengths:
        """The strengths in the model's configuration."""
        return strengths_of(self.model.config)

    def set_strengths(self, alpha: float, alpha_prime: float) -> None:
        """Change alpha and alpha' in all blocks."""
        config = self.model.config
        attention = "hopfield" if alpha or alpha_prime else config.attention
        _apply(self.model, replace(config, attention=attention, alpha=alpha, alpha_prime=alpha_prime))

    def remove(self) -> None:
        """Return the model to the configuration before the cure."""
        _apply(self.model, self.before)


def find_part(model: nn.Module) -> Model | None:
    """Return the first model of ours in ``model``, which may be the model itself."""
    return next((module for module in model.modules() if isinstance(module, Model)), None)


def install(model: nn.Module, part: Model, strengths: Strengths) -> OwnCure:
    """Set strengths and de-escalation in place; an argument that is not given stays as the model has it."""
    old = part.config
    if strengths.layers is not None:
        raise LeadlineError(
            "layers (--layer) are given, but our own models have one strength for all layers; leave them out"
        )
    if old.learnable_alpha or old.learnable_alpha_prime or old.learnable_de_escalation:
        raise LeadlineError("the model learns its strengths itself; a cure would overrule them")
    new = _changed(old, strengths)
    _apply(part, new)
    return OwnCure(part, old)


def strengths_of(config: BlockConfig) -> Strengths:
    """Return the strengths in a configuration; the place of de-escalation only where there is one."""
    alpha, alpha_prime = config.strengths
    return Strengths(
        alpha=float(alpha),
        alpha_prime=float(alpha_prime),
        de_escalation=float(config.de_escalation),
        de_escalation_at=config.de_escalation_at if config.de_escalation else None,
        start=config.start,
    )


def _changed(old: BlockConfig, strengths: Strengths) -> BlockConfig:
    """The configuration ``old`` with a cure; refuses options that contradict each other."""
    changes: dict[str, Any] = {}
    if strengths.alpha is not None or strengths.alpha_prime is not None:
        alpha, alpha_prime = old.strengths
        changes["alpha"] = alpha if strengths.alpha is None else float(strengths.alpha)
        changes["alpha_prime"] = alpha_prime if strengths.alpha_prime is None else float(strengths.alpha_prime)
        if changes["alpha"] or changes["alpha_prime"]:
            changes["attention"] = "hopfield"
    if strengths.start is not None:
        changes["start"] = strengths.start
    if strengths.de_escalation_at is not None:
        changes["de_escalation_at"] = strengths.de_escalation_at
    if strengths.de_escalation is not None:
        changes["de_escalation"] = float(strengths.de_escalation)
        if not strengths.de_escalation and hasattr(old, "de_escalation_form"):  # without a mean nothing leaks
            changes["de_escalation_form"] = "causal"
    return replace(old, **changes)


def _apply(model: Model, config: BlockConfig) -> None:
    """Give the model and its blocks a configuration that differs in strengths and de-escalation alone."""
    alpha, alpha_prime = config.strengths
    blocks: Any = model.get_submodule("blocks")
    for block in blocks:
        old = block.config
        block.config = config
        block.attention.alpha.value, block.attention.alpha_prime.value = alpha, alpha_prime
        block.attention.start = config.start
        if (old.de_escalation, old.causal_mean) != (config.de_escalation, config.causal_mean):
            block.de_escalation = make_de_escalation(config)
            if block.de_escalation is not None:
                block.de_escalation.train(block.training)
    model.config = config
