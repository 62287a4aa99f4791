"""The global generators, which timm's transforms draw from: seeded for a while, then put back."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch


def reseed(seed: int, device: torch.device | None = None) -> None:
    """Seed the generators that timm's transforms draw from: Python's, numpy's, torch's on the CPU and on ``device``."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)
    if device is not None and device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)


@contextmanager
def generators_kept(device: torch.device | None = None) -> Iterator[None]:
    """Whatever is drawn or seeded inside, the global generators are afterwards as they were."""
    states = random.getstate(), np.random.get_state()
    cuda = [device] if device is not None and device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
