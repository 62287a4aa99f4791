"""The strength of a cure: a number between 0 and 1, fixed or learned within its bounds."""

from __future__ import annotations

from typing import SupportsFloat

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError, check_choice

_STEP = 2**-8  # distance of a learned value from an open end; bfloat16 still distinguishes the two
_INTERVALS = {"[0, 1)": (0.0, 1 - _STEP), "(0, 1]": (_STEP, 1.0)}


class Strength(nn.Module):
    """A number in an interval. Calling it returns a float when it is fixed, a tensor () or (heads,) when learnable.

    A learned value is clamped to the interval in the forward pass. Its gradient passes the clamp unchanged, so that a
    value pushed against an end can come back.

    Args:
        name: Name of the number in error messages.
        value: The value, or the start of a learned one.
        interval: "[0, 1)" or "(0, 1]".
        learnable: None (fixed), "layer" (one number) or "head" (one number per head).
        heads: Number of heads.

    Raises:
        LeadlineError: The value lies outside the interval.
    """

    def __init__(
        self, name: str, value: float, *, interval: str = "[0, 1)", learnable: str | None = None, heads: int = 1
    ) -> None:
        super().__init__()
        check_choice("interval", interval, _INTERVALS)
        self.low, self.high = _INTERVALS[interval]
        if not isinstance(value, SupportsFloat) or not (0 <= value < 1 if interval == "[0, 1)" else 0 < value <= 1):
            raise LeadlineError(f"{name} is {value}; it must lie in {interval}")
        self.value = float(value)
        self.parameter: nn.Parameter | None = None
        if learnable is not None:
            check_choice(f"learnable {name}", learnable, ("layer", "head"))
            start = min(max(self.value, self.low), self.high)
            self.parameter = nn.Parameter(torch.full(() if learnable == "layer" else (heads,), start))

    @property
    def off(self) -> bool:
        """Return whether the number is fixed at 0, so that the cure need not be computed."""
        return self.parameter is None and self.value == 0

    def forward(self) -> float | Tensor:
        """Return the value in force."""
        if self.parameter is None:
            return self.value
        return self.parameter + (self.parameter.clamp(self.low, self.high) - self.parameter).detach()

    def extra_repr(self) -> str:
        return f"{self.value}" + ("" if self.parameter is None else f", learnable {tuple(self.parameter.shape)}")
