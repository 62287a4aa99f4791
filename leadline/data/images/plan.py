"""The plan of a run over its images: the order, the augmentation, and how images reach the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from leadline.data.base import mix_seed, part_of_batch
from leadline.data.images.prefetch import Request

ORDER, DRAWS, RAND_AUGMENT, ERASE, MIX = range(1, 6)  # streams of random numbers of one seed


@dataclass(frozen=True)
class Augmentation:
    """The augmentation of training images. ``rand_augment`` takes names of timm, such as "rand-m9-mstd0.5"."""

    flip: bool = False
    crop: str = "none"  # "pad": out of the image with a black border; "resized": a random part of it, resized
    padding: int = 4
    scale: tuple[float, float] = (0.08, 1.0)  # of "resized": part of the area
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # and width over height
    rand_augment: str | None = None
    erase: float = 0.0  # probability of random erasing, by noise
    mixup: float = 0.0  # parameter of the Beta distribution; 0: none
    cutmix: float = 0.0
    mix_prob: float = 1.0
    switch_prob: float = 0.5  # of cutmix where both are wanted
    smoothing: float = 0.0  # of labels; the loss does it where nothing is mixed

    @property
    def mixes(self) -> bool:
        """Return whether images of a batch are mixed with each other."""
        return self.mixup > 0 or self.cutmix > 0


class Look(NamedTuple):
    """The form in which images reach the model."""

    size: int  # pixels a side
    mean: tuple[float, ...]
    std: tuple[float, ...]
    classes: int


@dataclass
class Order:
    """The images of each step: a permutation of ``members`` for every epoch, drawn from (seed, epoch)."""

    members: Tensor  # (n,), int64: indices of the training images
    batch: int
    accumulate: int
    seed: int
    _epoch: int = -1
    _permuted: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; an incomplete last batch is dropped."""
        return len(self.members) // self.batch

    def of_step(self, step: int) -> Tensor:
        """Return the images of a step, (batch,), on the device of ``members``."""
        epoch, within = divmod(step, self.steps_per_epoch)
        if epoch != self._epoch:
            generator = torch.Generator().manual_seed(mix_seed(self.seed, ORDER, epoch))
            permutation = torch.randperm(len(self.members), generator=generator)
            self._permuted, self._epoch = self.members[permutation.to(self.members.device)], epoch
        return self._permuted[within * self.batch : (within + 1) * self.batch]

    def rows(self, request: Request, mirrored: bool) -> slice | Tensor:
        """Return the places in the batch that a request needs.

        The mixing of timm pairs place i with place B - 1 - i. A part of the batch followed by its mirror image is
        such a batch by itself.

        Args:
            request: Which part of which batch.
            mirrored: Whether to add the places that the part is mixed with.
        """
        part = part_of_batch(self.batch, request.micro, self.accumulate, rank=request.rank, world=request.world)
        if not mirrored or part.stop - part.start == self.batch:
            return part
        own = torch.arange(part.start, part.stop)
        return torch.cat((own, self.batch - 1 - own.flip(0)))


def listed(rows: slice | Tensor) -> list[int]:
    """Return the places of ``Order.rows`` as a list of numbers."""
    return list(range(rows.start, rows.stop)) if isinstance(rows, slice) else rows.tolist()


def swept(members: Tensor, batch: int, request: Request) -> tuple[Tensor, Tensor]:
    """Return the images of a request in an evaluation, and which of them count.

    Behind the end of the split the last image is repeated and does not count.

    Args:
        members: (n,), the images of the split.
        batch: Images of a batch.
        request: Which batch.
    """
    first = (request.step * request.world + request.rank) * batch
    at = torch.arange(first, first + batch)
    return members[at.clamp(max=len(members) - 1)], at < len(members)
