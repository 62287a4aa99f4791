"""What the entries on HOP share: attention-only nets at initialisation, measured layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor

from leadline.models import ViT, create_model
from leadline.reproduce.base import Context

# alpha and alpha' of the four columns that every comparison shows
COLUMNS = {"standard": (0.0, 0.0), "alpha only": (0.5, 0.0), "alpha' only": (0.0, 0.5), "both": (0.5, 0.5)}
WIDTHS = {"dim": 192, "heads": 3, "image_size": 224, "patch_size": 16}  # ViT-Tiny: 197 tokens


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draws inside follow ``seed``; the global generator is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


def network(context: Context, seed: int, init: str, alpha: float, alpha_prime: float, **options: Any) -> ViT:
    """An attention-only net; nets of one seed and init have the same weights, whatever else differs."""
    widths = {name: context.setting[name] for name in WIDTHS}
    with seeded(seed):
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
    return cast(ViT, model.to(context.device).eval())


def by_layer(model: ViT, pixels: Tensor, measure: Callable[[Tensor], Tensor]) -> Tensor:
    """``measure`` of what leaves each block, stacked over the blocks: (depth, ...)."""
    x, rope = model.embed(pixels)
    state, values = None, []
    for block in model.blocks.layers():
        x, state = block(x, state, rope=rope)
        values.append(measure(x))
    return torch.stack(values)
