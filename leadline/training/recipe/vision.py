"""The sections of a recipe for images: ``data`` and ``augment``."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from leadline.training.recipe.section import Place, Section, Share, refuse_idle

Part = Annotated[float, Field(ge=0, le=1)]


class VisionData(Section):
    """The section ``data``, for images and labels.

    ``path`` is a local copy. Without it the data set is downloaded from the hub; "folder" needs it and "digits" are
    embedded. ``valid`` is the part of the training images that is held out as the split "valid"; with 0 the test
    split is evaluated during training. ``store`` "memory" keeps the stored pixels on the device, "workers" decodes
    images during training; "auto" is memory for CIFAR and digits.
    """

    name: Literal["cifar10", "cifar100", "imagenet", "folder", "digits"]
    path: Place | None = None
    image_size: Annotated[int, Field(ge=1, le=8192)] | None = None  # None: as stored; ImageNet and folders 224
    valid: Share = 0.0
    limit: Annotated[int, Field(ge=1, le=10**12)] | None = None  # number of training images; None: all
    mean: tuple[float, ...] | None = None  # None: the data set's own
    std: tuple[Annotated[float, Field(ge=1e-4)], ...] | None = None  # of pixels in [0, 1]
    store: Literal["auto", "memory", "workers"] = "auto"
    workers: Annotated[int, Field(ge=0, le=1024)] | None = None  # None: most of the cores
    cache: Place | None = None  # None: $LEADLINE_CACHE or ~/.cache/leadline

    @model_validator(mode="after")
    def _fitting(self) -> VisionData:
        if self.name == "digits" and (self.path is not None or self.store == "workers"):
            raise ValueError("name is 'digits', which are embedded; leave path and store out")
        if self.name in ("cifar10", "cifar100") and self.store == "workers":
            raise ValueError(f"name is {self.name!r}, which fits into memory; leave store out")
        return self


class Augment(Section):
    """The section ``augment``: random changes of training images; see ``leadline.data.images.plan.Augmentation``."""

    flip: bool = False
    crop: Literal["none", "pad", "resized"] = "none"
    padding: Annotated[int, Field(ge=1, le=1024)] = 4
    scale: tuple[Part, Part] = (0.08, 1.0)
    ratio: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (3 / 4, 4 / 3)
    rand_augment: str | None = None  # timm's name, such as rand-m9-mstd0.5
    erase: Part = 0.0
    mixup: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    cutmix: Annotated[float, Field(ge=0, le=1e6)] = 0.0
    mix_prob: Part = 1.0
    switch_prob: Part = 0.5

    @field_validator("scale", "ratio")
    @classmethod
    def _ordered(cls, ends: tuple[float, float]) -> tuple[float, float]:
        if ends[0] > ends[1]:
            raise ValueError(f"{list(ends)} goes down; the smaller number comes first")
        if ends[1] == 0:
            raise ValueError(f"{list(ends)} leaves nothing of an image; the larger number must be above 0")
        return ends

    @model_validator(mode="after")
    def _of_use(self) -> Augment:
        box = None if self.crop == "resized" else "crop is not 'resized'"
        mix = None if self.mixup or self.cutmix else "neither mixup nor cutmix is on"
        pad = None if self.crop == "pad" else "crop is not 'pad'"
        switch = None if self.mixup and self.cutmix else "mixup and cutmix are not both on"
        refuse_idle(self, {"padding": pad, "scale": box, "ratio": box, "mix_prob": mix, "switch_prob": switch})
        return self
