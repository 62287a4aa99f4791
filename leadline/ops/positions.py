"""Positions that are computed, not learned: sinusoids to add, and rotary angles for queries and keys."""

from __future__ import annotations

import torch
from torch import Tensor

from leadline.errors import LeadlineError


def sinusoid(positions: Tensor, dim: int, base: float = 10_000.0) -> Tensor:
    """positions (..., N) -> (..., N, dim): sines in the even channels, cosines in the odd ones."""
    angles = _angles(positions, dim, base)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def rotary_table(positions: Tensor, width: int, base: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotary angles, (..., 1, N, width/2) for positions (..., N); the 1 is the heads."""
    angles = _angles(positions, width, base).unsqueeze(-3)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn the pairs of channels (i, i + D/2) of x (B, H, N, D), as LLaMA and GPT-NeoX lay them out."""
    cos, sin = (part.to(x.dtype) for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def _angles(positions: Tensor, width: int, base: float) -> Tensor:
    """position * base^(-2i/width) for i < width/2, in float64: float32 loses digits at long positions."""
    if width % 2:
        raise LeadlineError(f"the width is {width}; sinusoidal and rotary positions need an even one")
    frequency = base ** (-torch.arange(0, width, 2, device=positions.device, dtype=torch.float64) / width)
    return positions[..., None].double() * frequency
