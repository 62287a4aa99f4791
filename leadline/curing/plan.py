"""What a cure does in a model of another library: strengths in force, cured layers."""

from __future__ import annotations

from dataclasses import dataclass

from leadline.curing.strengths import Strengths
from leadline.nn import DeEscalation


@dataclass
class Plan:
    """The strengths in force in one cured model, shared by everything that the cure put into it.

    It holds no module of the model, so that a cured model can be copied and pickled. ``alpha`` and ``alpha_prime`` may
    change while the model is in use (see ``Ramp``). What the cure put in does not change: ``mixes`` and ``carries`` say
    whether alpha and alpha' have a place in the model.
    """

    alpha: float
    alpha_prime: float
    de_escalation: float  # tau
    de_escalation_at: str
    start: str
    layers: tuple[int, ...]  # the cured ones
    depth: int  # of the model
    causal: bool

    def __post_init__(self) -> None:
        self.mixes, self.carries = self.alpha > 0, self.alpha_prime > 0
        self.de_escalate = DeEscalation(self.de_escalation, causal=self.causal) if self.de_escalation else None

    @classmethod
    def of(cls, strengths: Strengths, depth: int, causal: bool = False) -> Plan:
        """Build the plan for a model of ``depth`` layers; an argument that is not given gets its default."""
        return cls(
            alpha=float(strengths.alpha or 0),
            alpha_prime=float(strengths.alpha_prime or 0),
            de_escalation=float(strengths.de_escalation or 0),
            de_escalation_at=strengths.de_escalation_at or "block-end",
            start=strengths.start or "zero",
            layers=strengths.choose_layers(depth),
            depth=depth,
            causal=causal,
        )

    @property
    def idle(self) -> bool:
        """Whether all strengths were 0 at the cure, so that nothing needs to be put in."""
        return not (self.mixes or self.carries or self.de_escalation)

    @property
    def strengths(self) -> Strengths:
        """The arguments of ``cure`` that lead to this plan."""
        return Strengths(
            alpha=self.alpha,
            alpha_prime=self.alpha_prime,
            de_escalation=self.de_escalation,
            de_escalation_at=self.de_escalation_at,
            start=self.start,
            layers=None if len(self.layers) == self.depth else list(self.layers),
        )

    def acts_at(self, site: str, index: int) -> bool:
        """Whether layer ``index`` is de-escalated at ``site``."""
        return self.de_escalate is not None and self.de_escalation_at == site and index in self.layers
