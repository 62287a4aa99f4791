"""Image classification."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from leadline.errors import LeadlineError, check_choice
from leadline.training.recipe.section import Place, Section, refuse_idle

if TYPE_CHECKING:
    from pathlib import Path

    import torch
    from torch import Tensor, nn

    from leadline.data.base import Batches
    from leadline.data.images.cache import Encoded, Pixels
    from leadline.data.images.plan import Augmentation
    from leadline.data.images.sweep import Sweep
    from leadline.training.recipe.recipe import Recipe
    from leadline.training.tasks.base import Carry

Share = Annotated[float, Field(ge=0, lt=1)]
Part = Annotated[float, Field(ge=0, le=1)]
_PROBED = 16  # images of the probe
_PIXELS = 1 << 20  # pixels of a batch of an evaluation, about
SPLITS = ("train", "valid", "test")


class VisionData(Section):
    """Images and labels. ``path`` is a local copy; without it the hub's is downloaded (not for folder and digits).

    valid  the part of the training images held out as the split "valid"; 0: none, training watches the test split.
    limit  only the first so many training images.
    store  "memory" keeps bytes on the device, "workers" decodes as it goes; auto: memory for CIFAR and digits.
    """

    name: Literal["cifar10", "cifar100", "imagenet", "folder", "digits"]
    path: Place | None = None
    image_size: Annotated[int, Field(ge=1)] | None = None  # None: as stored; ImageNet and folders 224
    valid: Share = 0.0
    limit: Annotated[int, Field(ge=1)] | None = None
    mean: tuple[float, ...] | None = None  # None: the set's own
    std: tuple[Annotated[float, Field(ge=1e-4)], ...] | None = None  # of pixels in [0, 1]
    store: Literal["auto", "memory", "workers"] = "auto"
    workers: Annotated[int, Field(ge=0)] | None = None  # None: most of the cores
    cache: Place | None = None  # None: $LEADLINE_CACHE or ~/.cache/leadline

    @model_validator(mode="after")
    def _fitting(self) -> VisionData:
        if self.name == "digits" and (self.path is not None or self.store == "workers"):
            raise ValueError("name is 'digits', which are embedded; leave path and store out")
        if self.name in ("cifar10", "cifar100") and self.store == "workers":
            raise ValueError(f"name is {self.name!r}, which fits into memory; leave store out")
        return self


class Augment(Section):
    """What is done to training images; see ``leadline.data.images.plan.Augmentation``."""

    flip: bool = False
    crop: Literal["none", "pad", "resized"] = "none"
    padding: Annotated[int, Field(ge=1)] = 4
    scale: tuple[Part, Part] = (0.08, 1.0)
    ratio: tuple[Annotated[float, Field(gt=0)], Annotated[float, Field(gt=0)]] = (3 / 4, 4 / 3)
    rand_augment: str | None = None  # timm's name, such as rand-m9-mstd0.5
    erase: Part = 0.0
    mixup: Annotated[float, Field(ge=0)] = 0.0
    cutmix: Annotated[float, Field(ge=0)] = 0.0
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


class VisionTask:
    """Trains a model on labelled images; accuracy picks the best checkpoint."""

    best: tuple[str, Literal["max", "min"]] = ("accuracy", "max")

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        classes: Sequence[str] | None = None,
    ) -> None:
        """``classes``: of a folder, as a run has trained them; None: those of its training images."""
        from leadline.data.images.prefetch import default_workers
        from leadline.data.images.splits import ImageSets

        assert isinstance(recipe.data, VisionData)
        self.recipe, self.data, self.device, self.rank, self.world = recipe, recipe.data, device, rank, world
        kept = self.data.model_dump(include={"name", "path", "image_size", "mean", "std", "store", "cache"})
        self.sets = ImageSets(**kept, classes=classes)
        self.look = self.sets.look()
        self.workers = default_workers(_local_world(world)) if recipe.data.workers is None else recipe.data.workers
        self.smoothing = recipe.regularise.smoothing
        self._sweeps: dict[str, Sweep] = {}

    @cached_property
    def train(self) -> Pixels | Encoded:
        images = self.sets.images("train")
        return images if self.recipe.augment.rand_augment is not None else _moved(images, self.device)

    @cached_property
    def test(self) -> Pixels | Encoded:
        return _moved(self.sets.images("test"), self.device)

    @cached_property
    def members(self) -> dict[str, Tensor]:
        """Which training images are trained on and which are held out."""
        import torch

        return _split(torch.as_tensor(self.train.labels), self.data)

    @cached_property
    def batches(self) -> Batches:
        from leadline.data.images.batches import VisionBatches

        return VisionBatches(
            self.train,
            self.members["train"],
            self.look,
            _augmentation(self.recipe),
            batch=self.recipe.batch.size,
            accumulate=self.recipe.batch.accumulate,
            seed=self.recipe.seed,
            device=self.device,
            workers=self.workers,
        )

    @property
    def watched(self) -> Literal["valid", "test"]:
        return "valid" if self.data.valid else "test"

    @cached_property
    def fingerprints(self) -> dict[str, Any]:
        return self.sets.fingerprints()

    def settle(self, out: Path) -> None:
        from leadline.training.run_folder.folder import claim_data

        claim_data(out, "images", self.fingerprints, self.data.path or self.data.name)

    def make_model(self) -> nn.Module:
        from leadline.models import MODELS, create_model

        if not hasattr(MODELS[self.recipe.model.name][0].Config, "num_classes"):
            raise LeadlineError(f"model is {self.recipe.model.name}, which takes no images; give one such as vit_tiny")
        options = self.recipe.model_options()
        channels = len(self.look.mean)
        for name, value in (("num_classes", self.look.classes), ("image_size", self.look.size), ("channels", channels)):
            if options.setdefault(name, value) != value:
                raise LeadlineError(
                    f"model.{name} is {options[name]} and the data's {value}; leave it out of the model"
                )
        return create_model(self.recipe.model.name, **options)

    def loss(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry) -> tuple[Tensor, dict[str, Tensor], Carry]:
        import torch.nn.functional as F

        logits, labels = model(batch["pixels"]), batch["labels"]
        if labels.is_floating_point():  # mixed, and smoothed by the mixing
            return F.cross_entropy(logits.float(), labels), {}, None
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)
        return loss, {"accuracy": (logits.detach().argmax(-1) == labels).float().mean()}, None

    def evaluate(self, model: nn.Module, split: str = "valid") -> dict[str, float]:
        """Accuracy and cross-entropy, without smoothing, over a split: "train" (not augmented), "valid" or "test"."""
        import torch
        import torch.nn.functional as F

        check_choice("split", split, SPLITS)
        sums = torch.zeros(3, device=self.device, dtype=torch.float64)
        was_training = model.training
        model.eval()
        try:
            with torch.no_grad():
                for pixels, labels, counts in self.sweep(split):
                    logits = model(pixels).float()
                    losses = F.cross_entropy(logits, labels, reduction="none")
                    right = logits.argmax(-1) == labels
                    sums += torch.stack([value[counts].double().sum() for value in (right, losses, counts)])
        finally:
            model.train(was_training)
        if self.world > 1:
            torch.distributed.all_reduce(sums)
        right_sum, loss_sum, count = sums.tolist()
        return {"accuracy": right_sum / count, "loss": loss_sum / count}

    def sweep(self, split: str) -> Sweep:
        """A split once through, in batches (pixels, labels, which rows count), not augmented; this process's part."""
        from leadline.data.images.sweep import Sweep

        if split == "valid" and self.watched != "valid":
            raise LeadlineError("split is 'valid' and data.valid is 0, nothing is held out; give 'test' or 'train'")
        if split not in self._sweeps:
            images, members = self._part(split)
            batch = max(1, min(1000, _PIXELS // self.look.size**2))
            self._sweeps[split] = Sweep(
                images, members, self.look, self.device, batch, self.workers, self.rank, self.world
            )
        return self._sweeps[split]

    def _part(self, split: str) -> tuple[Pixels | Encoded, Tensor]:
        """Images, and which of them a split has."""
        import torch

        if split == "test":
            return self.test, torch.arange(len(self.test.labels))
        return self.train, self.members[split]

    def probe_inputs(self, split: str = "test") -> Tensor:
        """A few images of a split, (16, C, size, size)."""
        return self.images(_PROBED, split)

    def images(self, count: int, split: str = "test") -> Tensor:
        """The first ``count`` images of a split as the model takes them, of a folder some of every class."""
        from leadline.data.images.sweep import Sweep

        images, members = self._part(split)
        apart = max(len(members) // count, 1) if self.data.name == "folder" else 1
        members = members[::apart][:count]
        pixels, _, _ = next(iter(Sweep(images, members, self.look, self.device, len(members))))
        return pixels

    def describe(self) -> dict[str, Any]:
        return {
            "set": self.data.name,
            "classes": self.look.classes,
            "image_size": self.look.size,
            "train_images": len(self.members["train"]),
            "valid_images": len(self.members["valid"]),
            "test_images": len(self.test.labels),
        }


def _moved(images: Pixels | Encoded, device: torch.device) -> Pixels | Encoded:
    """A set in memory, on the device: once, for training and for evaluation."""
    from leadline.data.images.cache import Pixels

    return Pixels(images.images.to(device), images.labels) if isinstance(images, Pixels) else images


def _split(labels: Tensor, data: VisionData) -> dict[str, Tensor]:
    """Which training images are trained on and which are held out; the same ones for every seed of a run."""
    import torch

    members = torch.arange(len(labels))
    if data.limit and data.name == "folder":  # whose images are in the order of their classes
        members = _by_turns(labels)
    count = min(len(labels), data.limit or len(labels))
    held = max(round(data.valid * count), int(data.valid > 0))
    order = members[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    return {"train": order[held:].sort().values, "valid": order[:held].sort().values}


def _by_turns(labels: Tensor) -> Tensor:
    """The images in an order in which the classes take turns, each class in an order of its own."""
    import torch

    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    by_class = mixed[labels[mixed].argsort(stable=True)]
    counts = labels.bincount()
    firsts = (counts.cumsum(0) - counts)[labels[by_class]]
    return by_class[(torch.arange(len(labels)) - firsts).argsort(stable=True)]


def _augmentation(recipe: Recipe) -> Augmentation:
    from leadline.data.images.plan import Augmentation

    return Augmentation(**recipe.augment.model_dump(), smoothing=recipe.regularise.smoothing)


def _local_world(world: int) -> int:
    """Processes on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))
