"""The work of a worker process: decode images and apply the augmentation that needs PIL."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from leadline.data.base import mix_seed
from leadline.data.images.cache import Encoded
from leadline.data.images.draws import reseed
from leadline.data.images.plan import RAND_AUGMENT, Augmentation, Look, Order, listed, swept
from leadline.data.images.prefetch import Request, stack
from leadline.data.images.sets import decode
from leadline.errors import LeadlineError, need


@dataclass
class Augmented:
    """RandAugment of timm on each stored image of a small set, as bytes."""

    images: Tensor  # (N, 3, h, w), uint8
    order: Order
    augmentation: Augmentation
    look: Look
    seed: int

    def __post_init__(self) -> None:
        if self.images.shape[1] != 3:
            raise LeadlineError("augment.rand_augment needs images in colour; leave it out for these")
        self.transform = rand_augment(str(self.augmentation.rand_augment), self.images.shape[-1], self.look.mean)

    def __call__(self, request: Request) -> dict[str, Tensor]:
        places = listed(self.order.rows(request, self.augmentation.mixes))
        index = self.order.of_step(request.step)
        from_array = need("PIL.Image", "data").fromarray
        images = []
        for place in places:
            reseed(mix_seed(self.seed, RAND_AUGMENT, request.step, place))
            image = from_array(self.images[index[place]].permute(1, 2, 0).numpy())
            image = self.transform(image)
            images.append(np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1)))
        return {"images": stack(images)}


@dataclass
class Decoded:
    """Decoding, crop, flip and RandAugment of encoded images, by the transform of timm, as bytes."""

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
            rand_augment(a.rand_augment, self.look.size, self.look.mean)  # a bad name is a clear error here
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
        for part in self.transform.transforms:
            if hasattr(part, "ops"):
                with_no_bits(part)
        if a.crop == "none" and (a.flip or a.rand_augment):
            raise LeadlineError("augment.crop is 'none' with flip or rand_augment; images of many sizes need 'resized'")

    def __call__(self, request: Request) -> dict[str, Tensor]:
        index = self.order.of_step(request.step)
        images = []
        for place in listed(self.order.rows(request, self.augmentation.mixes)):
            encoded, where = self.images.read(int(index[place]))
            image = decode(encoded, where)
            reseed(mix_seed(self.seed, RAND_AUGMENT, request.step, place))
            images.append(self.transform(image))
        return {"images": stack(images)}


def rand_augment(name: str, size: int, mean: Sequence[float]) -> Any:
    """Return RandAugment of timm with the settings of its loader.

    Images move by at most 45 % of their pixels and are filled with the mean.

    Args:
        name: A name of timm, such as "rand-m9-mstd0.5".
        size: Pixels a side.
        mean: Mean by channel, in [0, 1].
    """
    timm = need("timm.data.auto_augment", "timm")
    fill = tuple(min(255, round(255 * value)) for value in mean)
    try:
        if not re.fullmatch(r"rand(-([a-z]+[0-9.]+|t[a-z]+))*", name):
            raise ValueError(name)
        transform = timm.rand_augment_transform(name, {"translate_const": int(size * 0.45), "img_mean": fill})
    except (AssertionError, ValueError, IndexError, KeyError, TypeError) as error:
        raise LeadlineError(
            f"augment.rand_augment is {name!r}; give a name of timm's, such as 'rand-m9-mstd0.5'"
        ) from error
    return with_no_bits(transform)


def with_no_bits(transform: Any) -> Any:
    """Let RandAugment ask for 0 bits of colour or fewer, which newer PIL refuses: the image becomes black."""
    posterize = need("timm.data.auto_augment", "timm").posterize
    for operation in transform.ops:
        if operation.aug_fn is posterize:
            operation.aug_fn = _posterize
    return transform


def _posterize(image: Any, bits: int, **_: Any) -> Any:
    if bits < 1:
        return need("PIL.Image", "data").new(image.mode, image.size)
    return need("timm.data.auto_augment", "timm").posterize(image, bits)


@dataclass
class Plain:
    """The images of an evaluation as timm prepares them: resized, and the middle cut out."""

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
