"""A task small enough for many runs: points in a plane that a tiny ViT reads as images, all in memory."""

import csv
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from leadline import create_model
from leadline.data.base import mix_seed, part_of_batch
from leadline.training import find_checkpoint, parse_recipe

SAMPLES = 96


def toy_recipe(out, **sections):
    """Recipe of a two-block ViT; sections are merged into it."""
    tree = {
        "model": {"name": "vit_tiny", "depth": 2, "dim": 16, "heads": 2, "patch_size": 4, "pool": "max"},
        "data": {"name": "digits"},
        "length": "12 steps",
        "batch": {"size": 16},
        "optimizer": {"lr": 3e-3, "weight_decay": 0.1},
        "schedule": {"warmup": "3 steps"},
        "regularise": {"clip": 0.5},
        "checkpoint": {"every": "4 steps"},
        "evaluate": "6 steps",
        "log": {"every": 1},
        "out": str(out),
        "device": "cpu",
    }
    for name, value in sections.items():
        tree[name] = {**tree[name], **value} if isinstance(value, dict) and name in tree else value
    return parse_recipe(tree)


class ToyBatches:
    def __init__(self, recipe, device="cpu"):
        draw = torch.Generator().manual_seed(7)
        self.images = torch.randn(SAMPLES, 1, 8, 8, generator=draw)
        self.labels = (self.images.mean((1, 2, 3)) > 0).long()
        self.images, self.labels = self.images.to(device), self.labels.to(device)
        self.size, self.accumulate, self.seed = recipe.batch.size, recipe.batch.accumulate, recipe.seed
        self.steps_per_epoch = SAMPLES // self.size

    def __call__(self, step, micro=0, *, rank=0, world=1):
        epoch, at = divmod(step, self.steps_per_epoch)
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(mix_seed(self.seed, epoch)))
        chosen = order[at * self.size : (at + 1) * self.size]
        chosen = chosen[part_of_batch(self.size, micro, self.accumulate, rank=rank, world=world)]
        return {"pixels": self.images[chosen], "labels": self.labels[chosen]}


class ToyTask:
    """Subclasses spoil it on purpose."""

    best = ("accuracy", "max")
    watched = "valid"

    def __init__(self, recipe, device, rank=0, world=1):
        self.recipe, self.batches = recipe, ToyBatches(recipe, device)

    fingerprints: ClassVar[dict] = {}

    def settle(self, out):
        pass

    def make_model(self):
        size = {"image_size": 8, "channels": 1, "num_classes": 2}
        return create_model(self.recipe.model.name, **size, **self.recipe.model_options())

    def loss(self, model, batch, carry):
        logits = model(batch["pixels"])
        right = (logits.detach().argmax(-1) == batch["labels"]).float().mean()
        return F.cross_entropy(logits.float(), batch["labels"]), {"accuracy": right}, None

    def evaluate(self, model, split="valid"):
        logits = model(self.batches.images).float()
        right = (logits.argmax(-1) == self.batches.labels).float().mean().item()
        return {"accuracy": right, "loss": F.cross_entropy(logits, self.batches.labels).item()}

    def probe_inputs(self):
        return self.batches.images[:4]

    def describe(self):
        return {"set": "toy"}


class PoisonedBatches(ToyBatches):
    """At step 7, an image has a value that is not a number."""

    def __call__(self, step, *rest, **options):
        batch = super().__call__(step, *rest, **options)
        if step == 7:
            batch["pixels"][0, 0, 0, 0] = float("nan")
        return batch


class Poisoned(ToyTask):
    def __init__(self, recipe, device, *rest):
        super().__init__(recipe, device, *rest)
        self.batches = PoisonedBatches(recipe, device)


class CarryTask(ToyTask):
    """Adds to the logits what it remembers of the same rows of the steps before."""

    def loss(self, model, batch, carry):
        logits = model(batch["pixels"])
        before = torch.zeros_like(logits) if carry is None else carry[0]
        now = 0.5 * before + logits
        return F.cross_entropy(now, batch["labels"]), {}, (now.detach(),)


def log_of(out, name="log.csv"):
    with (out / name).open() as stream:
        clock = ("seconds", "samples_per_second")
        return [{k: float(v) for k, v in row.items() if k not in clock} for row in csv.DictReader(stream)]


def tensors_of(out):
    last = find_checkpoint(out, "last").folder
    return {
        f"{file.relative_to(last)}/{name}": tensor
        for file in sorted(last.rglob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def assert_same_run(one, other):
    first, second = tensors_of(one), tensors_of(other)
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name
    assert log_of(one) == log_of(other)
    assert log_of(one, "evaluation.csv") == log_of(other, "evaluation.csv")
