"""What a worker process does to images: decode them, and what PIL must do. It hands over bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from leadline.data.base import mix_seed
from leadline.data.cache import Encoded
from leadline.data.draws import reseed
from leadline.data.plan import RAND_AUGMENT, Augmentation, Look, Order, listed, swept
from leadline.data.prefetch import Request, stack
from leadline.data.sets import decode
from leadline.errors import LeadlineError, need


@dataclass
class Augmented:
    """What a worker does for a small set: timm's RandAugment on each image as it is stored."""

    images: Tensor  # (N, 3, h, w), uint8
    order: Order
    augmentation: Augmentation
    size: int
    seed: int

    def __post_init__(self) -> None:
        if self.images.shape[1] != 3:
            raise LeadlineError("augment.rand_augment needs images in colour; leave it out for these")
        self.transform = rand_augment(str(self.augmentation.rand_augment), self.size)

    def __call__(self, request: Request) -> dict[str, Tensor]:
        places = listed(self.order.rows(request, self.augmentation.mixes))
        index = self.order.of_step(request.step)
        from_array = need("PIL.Image", "data").fromarray
        found = []
        for place in places:
            reseed(mix_seed(self.seed, RAND_AUGMENT, request.step, place))
            image = from_array(self.images[index[place]].permute(1, 2, 0).numpy())
            image = _apply(self.transform, image, self.augmentation)
            found.append(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))
        return {"images": stack(found)}


@dataclass
class Decoded:
    """What a worker does for images that stay encoded: decode, crop, flip and RandAugment, by timm's own transform."""

    images: Encoded
    order: Order
    augmentation: Augmentation
    look: Look
    seed: int

    def __post_init__(self) -> None:
        a = self.augmentation
        if a.crop == "pad":
            raise LeadlineError("augment.crop is 'pad', which is for small images; take 'resized' or 'none' for these")
        create = need("timm.data", "timm").create_transform
        if a.rand_augment is not None:
            rand_augment(a.rand_augment, self.look.size)  # a bad name is a clear error here
        self.transform = create(
            self.look.size,
            is_training=True,
            no_aug=a.crop == "none",
            scale=a.scale,
            ratio=a.ratio,
            hflip=0.5 if a.flip else 0.0,
            color_jitter=0.0,
            auto_augment=a.rand_augment,
            interpolation="bicubic",
            mean=self.look.mean,
            use_prefetcher=True,
        )
        if a.crop == "none" and (a.flip or a.rand_augment):
            raise LeadlineError("augment.crop is 'none' with flip or rand_augment; images of many sizes need 'resized'")

    def __call__(self, request: Request) -> dict[str, Tensor]:
        index = self.order.of_step(request.step)
        found = []
        for place in listed(self.order.rows(request, self.augmentation.mixes)):
            encoded, where = self.images.read(int(index[place]))
            image = decode(encoded, where)
            reseed(mix_seed(self.seed, RAND_AUGMENT, request.step, place))
            found.append(_apply(self.transform, image, self.augmentation))
        return {"images": stack(found)}


def _apply(transform: Any, image: Any, augmentation: Augmentation) -> Any:
    try:
        return transform(image)
    except ValueError as error:  # timm asks PIL for the impossible at some magnitudes, such as 0 bits of colour
        raise LeadlineError(
            f"augment.rand_augment is {augmentation.rand_augment!r}, which fails on an image ({error}); "
            "take another magnitude, such as rand-m9-mstd0.5"
        ) from error


def rand_augment(name: str, size: int) -> Any:
    """timm's RandAugment for images of ``size`` pixels: shifts by at most 45 % of them, as timm's loader has it."""
    make = need("timm.data.auto_augment", "timm").rand_augment_transform
    try:
        return make(name, {"translate_const": int(size * 0.45), "img_mean": (124, 116, 104)})
    except (AssertionError, ValueError, IndexError, KeyError, TypeError) as error:
        raise LeadlineError(
            f"augment.rand_augment is {name!r}; give a name of timm's, such as 'rand-m9-mstd0.5'"
        ) from error


@dataclass
class Plain:
    """The images of a sweep as timm evaluates them: resized, and the middle cut out."""

    images: Encoded
    members: Tensor
    batch: int
    look: Look

    def __post_init__(self) -> None:
        create = need("timm.data", "timm").create_transform
        self.transform = create(self.look.size, interpolation="bicubic", crop_pct=0.875, use_prefetcher=True)

    def __call__(self, request: Request) -> dict[str, Tensor]:
        index, _ = swept(self.members, self.batch, request)
        return {"images": stack([self.transform(decode(*self.images.read(int(i)))) for i in index])}
