"""One pass over a split, for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from leadline.data.images.augment import Normalise, resize
from leadline.data.images.cache import Encoded, Pixels
from leadline.data.images.plan import Look, swept
from leadline.data.images.prefetch import Prefetch, Request
from leadline.data.images.workers import Plain


@dataclass
class Sweep:
    """One pass over a split without augmentation, in batches of one shape: (pixels, labels, which rows count).

    Process ``rank`` of ``world`` takes its part; all processes make the same number of batches.
    """

    images: Pixels | Encoded
    members: Tensor  # (n,), on the CPU
    look: Look
    device: torch.device
    batch: int
    workers: int = 0
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        self.normalise = Normalise(self.look.mean, self.look.std, self.device)
        self.batch = max(1, min(self.batch, -(-len(self.members) // self.world)))
        self.labels = torch.as_tensor(self.images.labels)
        self.resident = self.images.images.to(self.device) if isinstance(self.images, Pixels) else None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        steps = -(-len(self.members) // (self.batch * self.world))
        fetch = None
        if not isinstance(self.images, Pixels):
            make = Plain(self.images, self.members, self.batch, self.look)
            fetch = Prefetch(make, min(self.workers, steps), pin=self.device.type == "cuda", last=steps - 1)
        for step in range(steps):
            request = Request(step, 0, self.rank, self.world)
            index, counts = swept(self.members, self.batch, request)
            labels = self.labels[index].to(self.device, non_blocking=True)
            if self.resident is not None:
                images = self.resident[index.to(self.device, non_blocking=True)]
            else:
                assert fetch is not None
                images = fetch(request)["images"].to(self.device, non_blocking=True)
            if images.shape[-1] != self.look.size:
                images = resize(images, self.look.size)
            yield self.normalise(images), labels, counts.to(self.device, non_blocking=True)
