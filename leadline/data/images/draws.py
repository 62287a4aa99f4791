"""Seeds and restores the global random generators that the transforms of timm draw from."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def reseed(seed: int, device: torch.device | None = None) -> None:
    """Seed the global generators of Python, numpy and torch, on the CPU and on ``device``.

    Args:
        seed: A number of at most 64 bits.
        device: A GPU whose generator to seed too.
    """
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextmanager
def restored_generators(device: torch.device | None = None) -> Iterator[None]:
    """Restore the global generators after the context, whatever is drawn or seeded inside.

    Args:
        device: A GPU whose generator to restore too.
    """
    states = random.getstate(), np.random.get_state()
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
