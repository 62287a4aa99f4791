"""A number between 0 and 1 that decides how strong a cure is: fixed, or learned within its bounds."""

from __future__ import annotations

from typing import SupportsFloat

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError, check_choice

_STEP = 2**-8  # distance a learned value keeps from an open end; bfloat16 can still tell it from the end
_INTERVALS = {"[0, 1)": (0.0, 1 - _STEP), "(0, 1]": (_STEP, 1.0)}


class Strength(nn.Module):
    """Returns its value when called: a float when fixed, a tensor () or (heads,) when learnable.

    A learned value is its own parameter, cut to the interval in the forward pass. Its gradient passes
    the cut unchanged, so that a value pushed against an end can come back.
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
        """Fixed at 0: the cure does nothing and need not be computed."""
        return self.parameter is None and self.value == 0

    def forward(self) -> float | Tensor:
        if self.parameter is None:
            return self.value
        return self.parameter + (self.parameter.clamp(self.low, self.high) - self.parameter).detach()

    def extra_repr(self) -> str:
        return f"{self.value}" + ("" if self.parameter is None else f", learnable {tuple(self.parameter.shape)}")
