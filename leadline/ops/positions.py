"""Computed positions: sinusoids to add, and rotary angles for queries and keys."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from leadline.errors import LeadlineError, check_choice, unknown_name


def sinusoid(positions: Tensor, dim: int, base: float = 10_000.0) -> Tensor:
    """Compute sinusoids of positions (..., N) -> (..., N, dim): sines in the even channels, cosines in the odd ones.

    Args:
        positions: Positions (..., N).
        dim: Width, an even number.
        base: Ratio of the longest and the shortest wavelength.
    """
    angles = positions[..., None].double() * _frequencies(dim, base, positions.device)
    return torch.stack((angles.sin(), angles.cos()), dim=-1).flatten(-2)


def rotary_table(positions: Tensor, width: int, settings: Mapping[str, Any] | None = None) -> tuple[Tensor, Tensor]:
    """Compute cosines and sines of rotary angles, in float64: at large positions float32 loses digits.

    Args:
        positions: Positions (..., N).
        width: Width of a head, an even number.
        settings: See ``rotary_frequencies``.

    Returns:
        Cosines and sines, (..., 1, N, width/2); the axis of size 1 is the heads.
    """
    frequencies = rotary_frequencies(width, settings or {}, positions.device)
    angles = (positions[..., None].double() * frequencies).unsqueeze(-3)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs of channels (i, i + D/2), the layout of LLaMA and GPT-NeoX.

    Args:
        x: Queries or keys (B, H, N, D).
        table: Cosines and sines from ``rotary_table``.

    Returns:
        The rotated tensor (B, H, N, D).
    """
    cos, sin = (part.to(x.dtype) for part in table)
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotary_frequencies(width: int, settings: Mapping[str, Any], device: torch.device | None = None) -> Tensor:
    """Compute the angle per position of each pair of channels.

    The angles are rope_theta^(-2i/width), with a base ``rope_theta`` of 10000 unless given. ``rope_type`` changes them:

    =======  ==========================================================================================
    default  no change
    linear   all are divided by ``factor``
    llama3   those with fewer than ``low_freq_factor`` turns in ``original_max_position_embeddings`` tokens are divided
             by ``factor``; those with more than ``high_freq_factor`` turns do not change; the rest lie between
    =======  ==========================================================================================

    Args:
        width: Width of a head, an even number.
        settings: The settings above, by the names that transformers 5 gives them.
        device: Device of the result.

    Returns:
        Angles (width/2,), in float64.

    Raises:
        LeadlineError: A setting is unknown or missing, or the width is odd.
    """
    kind = settings.get("rope_type", "default")
    check_choice("rope_type", kind, _ROPE_SETTINGS)
    for name in settings:
        if name not in ("rope_type", "rope_theta", *_ROPE_SETTINGS[kind]):
            raise unknown_name(f"setting of {kind} rotary positions", name, ("rope_theta", *_ROPE_SETTINGS[kind]))
    for name in _ROPE_SETTINGS[kind]:
        if name not in settings:
            raise LeadlineError(f"rotary positions of type {kind!r} lack {name}; give it in rope")
    frequencies = _frequencies(width, settings.get("rope_theta", 10_000.0), device)
    if kind == "default":
        return frequencies
    slow = frequencies / settings["factor"]
    if kind == "linear":
        return slow
    turns = settings["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    low, high = settings["low_freq_factor"], settings["high_freq_factor"]
    share = ((turns - low) / (high - low)).clamp(0, 1)
    return share * frequencies + (1 - share) * slow


_ROPE_SETTINGS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _frequencies(width: int, base: float, device: torch.device | None) -> Tensor:
    """Compute base^(-2i/width) for i < width/2 on ``device``: a CUDA graph cannot hold a copy from the CPU."""
    if width % 2:
        raise LeadlineError(f"the width is {width}; sinusoidal and rotary positions need an even one")
    return base ** (-torch.arange(0, width, 2, dtype=torch.float64, device=device) / width)
