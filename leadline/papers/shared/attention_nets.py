"""What the entries on HOP share: attention-only nets at initialisation, measured layer by layer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from leadline.models import ViT, create_model
from leadline.papers.shared.entry import Context

# alpha and alpha' of the four columns that every comparison shows
COLUMNS = {"standard": (0.0, 0.0), "alpha only": (0.5, 0.0), "alpha' only": (0.0, 0.5), "both": (0.5, 0.5)}
WIDTHS = {"dim": 192, "heads": 3, "image_size": 224, "patch_size": 16}  # ViT-Tiny: 197 tokens
CHUNK = 16  # images at a time: what they need stays in the cache
_GENERATOR = threading.Lock()  # there is one global generator for all threads


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws inside follow ``seed``; the global generator is left as it was."""
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
    """An attention-only net; nets of one seed and init have the same weights, whatever else differs.

    ``redraw`` draws some of them anew, after all others.
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
    """The patch embedding by another rule than normal with .02: "torch", "fan in" (normal) or "xavier" (uniform)."""
    weight = model.patch.weight.flatten(1)  # (d, 3 p^2), a view
    if kind == "torch":
        nn.init.kaiming_uniform_(weight, a=5**0.5)
    elif kind == "fan in":
        nn.init.normal_(weight, std=weight.shape[1] ** -0.5)
    else:
        nn.init.xavier_uniform_(weight)


def redraw_projections(model: ViT) -> None:
    """The output projections as torch draws a linear map."""
    for block in model.blocks.layers():
        nn.init.kaiming_uniform_(block.attention.proj.weight, a=5**0.5)


def by_layer(model: ViT, pixels: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """``measure`` (..., images) of what leaves each block, stacked over the blocks: (depth, ..., images)."""
    parts = []
    for some in pixels.split(CHUNK):
        x, rope = model.embed(some)
        state, values = None, []
        for block in model.blocks.layers():
            x, state = block(x, state, rope=rope)
            values.append(measure(x))
        parts.append(torch.stack(values))
    return torch.cat(parts, dim=-1)
