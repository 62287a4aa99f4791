"""The arguments of a cure, with their checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leadline.errors import LeadlineError, check_choice
from leadline.nn.config import SITES

_STARTS = ("zero", "scores")


@dataclass(frozen=True, kw_only=True)
class Strengths:
    """The arguments of ``cure``, as the user gives them or as they are in force in a cured model.

    None stands for an argument that is not given. ``cure`` says what each of them does.

    Raises:
        LeadlineError: If no strength is given, or one lies outside its interval, or a name is unknown.
    """

    alpha: float | None = None  # [0, 1)
    alpha_prime: float | None = None  # [0, 1)
    de_escalation: float | None = None  # tau, [0, 1]
    de_escalation_at: str | None = None  # "block-end", "ffn-input" or "attention-input"
    start: str | None = None  # "zero" or "scores"
    layers: Iterable[int] | None = None  # None: all

    def __post_init__(self) -> None:
        if self.alpha is None and self.alpha_prime is None and self.de_escalation is None:
            raise LeadlineError("no strength is given; give alpha, alpha_prime or de_escalation, such as alpha=0.5")
        _check_share("alpha", self.alpha)
        _check_share("alpha_prime", self.alpha_prime)
        _check_share("de_escalation", self.de_escalation, one_allowed=True)
        if self.de_escalation_at is not None:
            check_choice("de_escalation_at", self.de_escalation_at, SITES)
        if self.start is not None:
            check_choice("start", self.start, _STARTS)

    def choose_layers(self, depth: int) -> tuple[int, ...]:
        """List the layers to cure in a model of ``depth`` layers, in order.

        None means all layers, and negative numbers count from the end.
        """
        if self.layers is None:
            return tuple(range(depth))
        if not isinstance(self.layers, Iterable):
            raise LeadlineError(f"layers is {self.layers!r}; give a list of them, such as [0, 1]")
        layers = list(self.layers)
        for layer in layers:
            if isinstance(layer, bool) or not isinstance(layer, int) or not -depth <= layer < depth:
                raise LeadlineError(f"layers has {layer!r}; this model's layers are the integers 0 to {depth - 1}")
        if not layers:
            raise LeadlineError("layers is empty; leave it out to cure all of them")
        return tuple(sorted({layer % depth for layer in layers}))


def _check_share(name: str, value: object, one_allowed: bool = False) -> None:
    """Raise unless ``value`` is None or a number in [0, 1), or in [0, 1] where 1 is allowed."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise LeadlineError(f"{name} is {value!r}; it must be a number")
    if not (0 <= value < 1 or (one_allowed and value == 1)):
        interval = "[0, 1]" if one_allowed else "[0, 1)"
        raise LeadlineError(f"{name} is {value}; it must lie in {interval}, 0 does nothing")
