"""Image classification: training on labelled images, and evaluating saved models on them."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from leadline.data.base import Batches
from leadline.data.images.batches import Sweep, VisionBatches
from leadline.data.images.cache import Encoded, Pixels
from leadline.data.images.plan import Augmentation
from leadline.data.images.splits import ImageSets
from leadline.errors import LeadlineError, check_choice
from leadline.loading import load
from leadline.machine import spare_cores
from leadline.models import create_model
from leadline.models.configs import ViTConfig
from leadline.models.table import MODELS
from leadline.training.recipe import Recipe, VisionData, parse_recipe
from leadline.training.run_folder.folder import claim_data, read_data
from leadline.training.tasks.base import Carry, SavedModel

_PROBED = 16  # images of the probe
_PIXELS = 1 << 20  # pixels of a batch of an evaluation, about
SPLITS = ("train", "valid", "test")


class VisionTask:
    """Trains a model on labelled images; accuracy selects the best checkpoint.

    Args:
        recipe: The recipe.
        device: Where to train.
        rank: Number of this process.
        world: Number of processes.
        classes: Names of the classes of an image folder, in the order of a trained model. None: the folders of its
            training images.
    """

    kind: ClassVar[str] = "images"
    probed_on_cpu: ClassVar[bool] = True  # images are small and few
    best: tuple[str, Literal["max", "min"]] = ("accuracy", "max")

    def __init__(
        self,
        recipe: Recipe,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        classes: Sequence[str] | None = None,
    ) -> None:
        assert isinstance(recipe.data, VisionData)
        self.recipe, self.data, self.device, self.rank, self.world = recipe, recipe.data, device, rank, world
        stored = self.data.model_dump(include={"name", "path", "image_size", "mean", "std", "store", "cache"})
        self.sets = ImageSets(**stored, classes=classes)
        self.look = self.sets.look()
        self.workers = spare_cores(_local_world(world)) if recipe.data.workers is None else recipe.data.workers
        self.smoothing = recipe.regularise.smoothing
        self._sweeps: dict[str, Sweep] = {}

    @cached_property
    def train(self) -> Pixels | Encoded:
        """The stored training images, those held out included."""
        images = self.sets.images("train")
        return images if self.recipe.augment.rand_augment is not None else _moved(images, self.device)

    @cached_property
    def test(self) -> Pixels | Encoded:
        """The stored test images."""
        return _moved(self.sets.images("test"), self.device)

    @cached_property
    def members(self) -> dict[str, Tensor]:
        """Indices of the stored training images that are trained on ("train") and held out ("valid")."""
        return _split(torch.as_tensor(self.train.labels), self.data)

    @cached_property
    def batches(self) -> Batches:
        """The training batches by step, augmented."""
        return VisionBatches(
            self.train,
            self.members["train"],
            self.look,
            Augmentation(**self.recipe.augment.model_dump(), smoothing=self.smoothing),
            batch=self.recipe.batch.size,
            accumulate=self.recipe.batch.accumulate,
            seed=self.recipe.seed,
            device=self.device,
            workers=self.workers,
        )

    @property
    def watched(self) -> Literal["valid", "test"]:
        """The split of the evaluations during training."""
        return "valid" if self.data.valid else "test"

    @cached_property
    def fingerprints(self) -> dict[str, Any]:
        """Fingerprints of the labels of the splits, and the names of a folder's classes."""
        return self.sets.fingerprints()

    def settle(self, out: Path) -> None:
        """Write the fingerprints into the folder of the run; refuse other images than it began with."""
        claim_data(out, self.kind, self.fingerprints, self.data.path or self.data.name)

    def make_model(self) -> nn.Module:
        """Build the model of the recipe, with the classes, size and channels of the images."""
        if not issubclass(MODELS[self.recipe.model.name].config, ViTConfig):
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
        """Compute the cross-entropy of a batch, and its accuracy where labels are not mixed."""
        logits, labels = model(batch["pixels"]), batch["labels"]
        if labels.is_floating_point():  # mixed, and smoothed by the mixing
            return F.cross_entropy(logits.float(), labels), {}, None
        loss = F.cross_entropy(logits.float(), labels, label_smoothing=self.smoothing)
        return loss, {"accuracy": (logits.detach().argmax(-1) == labels).float().mean()}, None

    def evaluate(self, model: nn.Module, split: str = "valid") -> dict[str, float]:
        """Compute accuracy and cross-entropy, without smoothing, over a split: "train", "valid" or "test"."""
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
            dist.all_reduce(sums)
        right_sum, loss_sum, count = sums.tolist()
        return {"accuracy": right_sum / count, "loss": loss_sum / count}

    def sweep(self, split: str) -> Sweep:
        """Return the batches (pixels, labels, which rows count) of one pass over a split, for this process.

        Images are not augmented.
        """
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
        """Return stored images, and the indices of those that belong to a split."""
        if split == "test":
            return self.test, torch.arange(len(self.test.labels))
        return self.train, self.members[split]

    def probe_inputs(self, split: str = "test") -> Tensor:
        """Return a few images of a split, (16, C, size, size)."""
        return self.samples(_PROBED, split)

    def samples(self, count: int, split: str = "test") -> Tensor:
        """Return the first ``count`` images of a split as the model takes them; of a folder some of every class."""
        images, members = self._part(split)
        apart = max(len(members) // count, 1) if self.data.name == "folder" else 1
        members = members[::apart][:count]
        pixels, _, _ = next(iter(Sweep(images, members, self.look, self.device, len(members))))
        return pixels

    def describe(self) -> dict[str, Any]:
        """Return the data set and its sizes, for summary.json."""
        return {
            "set": self.data.name,
            "classes": self.look.classes,
            "image_size": self.look.size,
            "train_images": len(self.members["train"]),
            "valid_images": len(self.members["valid"]),
            "test_images": len(self.test.labels),
        }

    @classmethod
    def takes(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a saved model with this config.json is one of our image models."""
        return config.get("family") == ViTConfig.family

    @classmethod
    def evaluator(cls, source: SavedModel, split: str, device: torch.device, **options: Any) -> VisionEvaluator:
        """Load a saved image model and a split of its images; there are no options."""
        if options:
            raise LeadlineError(
                f"{', '.join(options)} given, but {source.folder} holds no language model; leave it out"
            )
        return VisionEvaluator(source, split, device)


class VisionEvaluator:
    """A saved image model on one split of its images.

    Args:
        source: The model; its recipe is needed.
        split: "train" (not augmented), "valid" or "test".
        device: Where to evaluate.
    """

    def __init__(self, source: SavedModel, split: str, device: torch.device) -> None:
        recipe = source.recipe
        if recipe is None:
            raise LeadlineError(
                f"{source.folder} holds a model without its run; give the recipe whose data it is for by --recipe, "
                "such as RUN/recipe.yaml"
            )
        if source.data is not None:
            tree = recipe.model_dump(mode="json")
            recipe = parse_recipe({**tree, "data": {**tree["data"], "path": source.data}})
        classes = _trained_classes(source)
        self.task, self.split = VisionTask(recipe, device, classes=classes), split
        self.origin = self.task.data.path or self.task.data.name
        part = "test" if split == "test" else "train"
        source.check_data(VisionTask.kind, part, self.task.sets.fingerprint(part), self.origin)
        self.place = source.folder if source.checkpoint is None else source.checkpoint.folder
        self.model = load(source.folder).to(device)
        self._check_fit(source.folder)
        self.notes: list[str] = []
        if self.task.data.name == "folder" and classes is None:
            self.notes = [f"the classes of the training are unknown; those of {self.origin} are taken, in their order"]

    def _check_fit(self, folder: Path) -> None:
        """Raise an error unless the model takes these images and has their classes."""
        config: Any = self.model.config
        look = self.task.look
        for option, value in (("num_classes", look.classes), ("image_size", look.size), ("channels", len(look.mean))):
            own = getattr(config, option)
            if own != value:
                raise LeadlineError(f"{folder} has {option} {own} and the recipe's data {value}; give its own recipe")

    def figures(self) -> dict[str, float]:
        """Compute accuracy and cross-entropy."""
        return self.task.evaluate(self.model, self.split)

    def probe_inputs(self) -> Tensor:
        """Return a few images of the split, (16, C, size, size)."""
        return self.task.probe_inputs(self.split)


def _trained_classes(source: SavedModel) -> list[str] | None:
    """Read the classes of an image folder from the model's run, or from the run that the given recipe lies in."""
    runs = [source.run, *([] if source.recipe_file is None else [source.recipe_file.parent])]
    stored = (read_data(run, VisionTask.kind) for run in runs)
    return next((data["classes"] for data in stored if "classes" in data), None)


def _moved(images: Pixels | Encoded, device: torch.device) -> Pixels | Encoded:
    """Move images that are stored in memory to the device: once, for training and for evaluation."""
    return Pixels(images.images.to(device), images.labels) if isinstance(images, Pixels) else images


def _split(labels: Tensor, data: VisionData) -> dict[str, Tensor]:
    """Choose the training images that are trained on and held out; the choice does not depend on the run's seed."""
    members = torch.arange(len(labels))
    if data.limit and data.name == "folder":  # whose images are in the order of their classes
        members = _by_turns(labels)
    count = min(len(labels), data.limit or len(labels))
    held = max(round(data.valid * count), int(data.valid > 0))
    order = members[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    return {"train": order[held:].sort().values, "valid": order[:held].sort().values}


def _by_turns(labels: Tensor) -> Tensor:
    """Order images so that the classes take turns, the images of each class in a fixed random order."""
    mixed = torch.randperm(len(labels), generator=torch.Generator().manual_seed(1))
    by_class = mixed[labels[mixed].argsort(stable=True)]
    counts = labels.bincount()
    firsts = (counts.cumsum(0) - counts)[labels[by_class]]
    return by_class[(torch.arange(len(labels)) - firsts).argsort(stable=True)]


def _local_world(world: int) -> int:
    """Return the number of processes on this machine, which share its cores."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", world))
