"""Batches of images: those of training, and of one pass over a split for evaluation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from leadline.data.base import mix_seed
from leadline.data.images.augment import Draws, Normalise, crop, draw, resize
from leadline.data.images.cache import Encoded, Pixels
from leadline.data.images.draws import reseed, restored_generators
from leadline.data.images.plan import DRAWS, ERASE, MIX, Augmentation, Look, Order, listed, swept
from leadline.data.images.prefetch import Prefetch, Request
from leadline.data.images.workers import Augmented, Decoded, Plain
from leadline.errors import LeadlineError, need


class VisionBatches:
    """Batches of {"pixels" (n, C, size, size) float32, "labels"}, see ``leadline.data.base.Batches``.

    Labels are (n,) int64, or (n, classes) where images are mixed. A small set lies on the device as bytes and is
    cropped, flipped and normalised there. RandAugment works on PIL images: with it, and for images that stay encoded,
    worker processes hand over bytes.

    Args:
        images: The training split.
        members: (n,), int64: which of its images to train on.
        look: How images reach the model.
        augmentation: What is done to them.
        batch: Samples of an optimizer step.
        accumulate: Forward passes of a step.
        seed: Seed of order and augmentation.
        device: Where the batches lie; None: the CPU.
        workers: Worker processes; 0: none.
    """

    def __init__(
        self,
        images: Pixels | Encoded,
        members: Tensor,
        look: Look,
        augmentation: Augmentation,
        *,
        batch: int,
        accumulate: int = 1,
        seed: int = 0,
        device: torch.device | None = None,
        workers: int = 0,
    ) -> None:
        self.look, self.augmentation, self.seed = look, augmentation, seed
        self.device = device = device or torch.device("cpu")
        small = isinstance(images, Pixels)
        self.order = Order(members.to(device), batch, accumulate, seed)
        if not self.order.steps_per_epoch:
            raise LeadlineError(
                f"the batch size is {batch} and there are {len(members)} training images; take a smaller one"
            )
        self.labels = torch.as_tensor(images.labels).to(device)
        self.normalise = Normalise(look.mean, look.std, device)
        self.crops = small  # images that stay encoded are cropped and flipped by the workers
        self.images = self.prefetch = None
        if isinstance(images, Pixels) and augmentation.rand_augment is None:
            self.images = images.images.to(device)
            self.native = (images.images.shape[2], images.images.shape[3])
        else:
            order = Order(members.cpu(), batch, accumulate, seed)
            if isinstance(images, Pixels):
                self.native = (images.images.shape[2], images.images.shape[3])
                make: Any = Augmented(images.images, order, augmentation, look, seed)
            else:
                self.native = (look.size, look.size)
                make = Decoded(images, order, augmentation, look, seed)
            self.prefetch = Prefetch(make, workers, accumulate=accumulate, pin=device.type == "cuda")
        self.mix = _make_mix(augmentation, look.classes, batch)
        self.eraser = _make_eraser(augmentation, device)
        self.generator = torch.Generator(device)
        self._drawn: tuple[int, Draws] = (-1, Draws())

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in an epoch; an incomplete last batch is dropped."""
        return self.order.steps_per_epoch

    def __call__(self, step: int, micro: int = 0, *, rank: int = 0, world: int = 1) -> dict[str, Tensor]:
        request = Request(step, micro, rank, world)
        places = rows = self.order.rows(request, self.mix is not None)
        if isinstance(rows, Tensor):
            rows = rows.to(self.device, non_blocking=True)
        index = self.order.of_step(step)[rows]
        labels = self.labels[index]
        if self.images is not None:
            images = self.images[index]
        else:
            assert self.prefetch is not None
            images = self.prefetch(request)["images"].to(self.device, non_blocking=True)
        pixels = self._shape(images, self._draws(step)[rows] if self.crops else Draws())
        if self.eraser is not None:
            self._erase(pixels, step, listed(places))
        if self.mix is not None:
            with restored_generators():
                reseed(mix_seed(self.seed, MIX, step))
                pixels, labels = self.mix(pixels, labels)
            own = self.order.batch // (self.order.accumulate * world)
            pixels, labels = pixels[:own], labels[:own]
        return {"pixels": pixels, "labels": labels}

    def _draws(self, step: int) -> Draws:
        """Return the random numbers of the whole batch of a step."""
        if self._drawn[0] != step:
            a = self.augmentation
            generator = self.generator.manual_seed(mix_seed(self.seed, DRAWS, step))
            padding, scale = (a.padding if a.crop == "pad" else None), (a.scale if a.crop == "resized" else None)
            draws = draw(
                self.order.batch, self.native, generator, flip=a.flip, padding=padding, scale=scale, ratio=a.ratio
            )
            self._drawn = (step, draws)
        return self._drawn[1]

    def _shape(self, images: Tensor, draws: Draws) -> Tensor:
        """Crop, flip, resize and normalise stored bytes into what the model takes."""
        if draws.box is not None:
            return self.normalise(resize(images, self.look.size, draws.box, draws.flip))
        images = crop(images, draws, self.augmentation.padding)
        return self.normalise(images if images.shape[-1] == self.look.size else resize(images, self.look.size))

    def _erase(self, pixels: Tensor, step: int, places: list[int]) -> None:
        """Apply random erasing of timm in place; each image of the whole batch has a seed of its own."""
        generator = torch.Generator().manual_seed(mix_seed(self.seed, ERASE, step))
        wanted = (torch.rand(self.order.batch, generator=generator) < self.augmentation.erase).tolist()
        with restored_generators(self.device):
            for row, place in enumerate(places):
                if wanted[place]:
                    reseed(mix_seed(self.seed, ERASE, step, place), self.device)
                    self.eraser(pixels[row])


def _make_mix(a: Augmentation, classes: int, batch: int) -> Any:
    if not a.mixes:
        return None
    if batch % 2:
        raise LeadlineError(f"the batch size is {batch}; mixup and cutmix mix pairs of images, take an even one")
    return need("timm.data", "timm").Mixup(
        a.mixup, a.cutmix, prob=a.mix_prob, switch_prob=a.switch_prob, label_smoothing=a.smoothing, num_classes=classes
    )


def _make_eraser(a: Augmentation, device: torch.device) -> Any:
    if not a.erase:
        return None
    return need("timm.data.random_erasing", "timm").RandomErasing(1.0, mode="pixel", device=device)


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
