"""Attention-only nets at initialisation, measured layer by layer, for the entries on HOP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from leadline.models import ViT, create_model
from leadline.papers.shared.entry import Context

# alpha and alpha' of the four columns of every comparison
COLUMNS = {"standard": (0.0, 0.0), "alpha only": (0.5, 0.0), "alpha' only": (0.0, 0.5), "both": (0.5, 0.5)}
WIDTHS = {"dim": 192, "heads": 3, "image_size": 224, "patch_size": 16}  # ViT-Tiny: 197 tokens
CHUNK = 16  # images at a time, so that their tensors stay in the cache
_GENERATOR = threading.Lock()  # all threads share one global generator


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed the global generator inside the block, and restore it afterwards; safe across threads."""
    with _GENERATOR, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def network(
    context: Context,
    seed: int,
    init: str,
    alpha: float,
    alpha_prime: float,
    redraw: Callable[[ViT], None] | None = None,
    **options: Any,
) -> ViT:
    """Build an attention-only net. Nets of one seed and initialisation have the same weights.

    Args:
        context: Its setting holds widths and depth.
        seed: Seed of the weights.
        init: Name of the initialisation.
        alpha: Weight of the inner skip.
        alpha_prime: Weight of the carried scores.
        redraw: Draws some weights anew, after all others.
        options: More options of ``create_model``.
    """
    widths = {name: context.setting[name] for name in WIDTHS}
    with seeded(seed), torch.no_grad():
        model = create_model(
            "attention_only",
            attention="hopfield",
            alpha=alpha,
            alpha_prime=alpha_prime,
            init=init,
            num_classes=0,
            depth=context.setting["depth"],
            **widths,
            **options,
        )
        if redraw is not None:
            redraw(cast(ViT, model))
    return cast(ViT, model.to(context.device).eval())


def redraw_patches(model: ViT, kind: str) -> None:
    """Draw the patch embedding anew, as torch does ("torch"), normal with 1/sqrt(fan in) ("fan in") or by "xavier"."""
    weight = model.patch.weight.flatten(1)  # (d, 3 p^2), a view
    if kind == "torch":
        nn.init.kaiming_uniform_(weight, a=5**0.5)
    elif kind == "fan in":
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    else:
        nn.init.xavier_uniform_(weight)


def redraw_projections(model: ViT) -> None:
    """Draw the output projections anew, as torch draws a linear map."""
    for block in model.blocks.layers():
        nn.init.kaiming_uniform_(block.attention.proj.weight, a=5**0.5)


def by_layer(model: ViT, pixels: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """Measure the output of each block.

    Args:
        model: The net.
        pixels: Images (images, 3, height, width).
        measure: Takes tokens (images, n, d), returns (..., images).

    Returns:
        The values of all blocks, (depth, ..., images).
    """
    parts = []
    for some in pixels.split(CHUNK):
        x, rope = model.embed(some)
        state, values = None, []
        for block in model.blocks.layers():
            x, state = block(x, state, rope=rope)
            values.append(measure(x))
        parts.append(torch.stack(values))
    return torch.cat(parts, dim=-1)
