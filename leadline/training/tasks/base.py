"""``Task`` and ``Evaluator``: what training and evaluations ask of a kind of data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import Tensor, nn

from leadline.data.base import Batches
from leadline.models.checkpoints import Saved
from leadline.training.recipe import Recipe
from leadline.training.run_folder.folder import check_data

Carry = tuple[Tensor, ...] | None  # flat; the first axis of every tensor is the batch


class Task(Protocol):
    """A kind of data: a model for it, its batches, the loss and the evaluation.

    The training loop enters autocast around ``loss`` and ``evaluate``. Both must call the model through
    ``model(...)`` alone, never through its methods or parts: DDP, FSDP and compilation act on that call.

    Attributes:
        kind: What errors and the files of a run call the data: "images" or "text".
        probed_on_cpu: Whether a probe of ``samples`` is cheap enough for the CPU, so that another run may have the GPU.
    """

    kind: ClassVar[str]
    probed_on_cpu: ClassVar[bool]

    def __init__(self, recipe: Recipe, device: torch.device, rank: int = 0, world: int = 1) -> None: ...

    @property
    def batches(self) -> Batches:
        """The training batches by step."""

    @property
    def best(self) -> tuple[str, Literal["max", "min"]]:
        """The figure of ``evaluate`` that selects the best checkpoint, and whether more or less of it is better."""

    @property
    def watched(self) -> Literal["valid", "test"]:
        """The split of the evaluations during training: "test" where nothing is held out for validation."""

    @property
    def fingerprints(self) -> dict[str, Any]:
        """A fingerprint of each split; every process must have the same, and so must a run that is resumed."""

    def settle(self, out: Path) -> None:
        """Write into the folder of the run what its data are, on one process; refuse others than it began with."""

    def make_model(self) -> nn.Module:
        """Build the model of the recipe, with the options that follow from the data, such as the number of classes."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry) -> tuple[Tensor, dict[str, Tensor], Carry]:
        """Compute the loss of a batch.

        Args:
            model: The model to call.
            batch: Tensors with the batch as first axis.
            carry: What the call of the step before returned; None at first.

        Returns:
            The mean loss over the batch; metrics, as detached scalars; and the carry for the next step. The carry may
            hold state such as Transformer-XL's memory: detached tensors. It is stored in checkpoints.
        """

    def evaluate(self, model: nn.Module, split: str = "valid") -> dict[str, float]:
        """Compute the figures of a model on a split, "valid" or "test".

        The loop calls it in evaluation mode, without gradients, on every process. All get the same figures and make
        the same number of forward passes.
        """

    def probe_inputs(self) -> Any:
        """Return a small fixed batch for the probe during training: a tensor, or a mapping of keyword arguments."""

    def samples(self, count: int) -> Tensor:
        """Return ``count`` samples of a split that is not trained on, for a probe of the trained model."""

    def describe(self) -> dict[str, Any]:
        """Return the data set and its sizes, for summary.json."""

    @classmethod
    def takes(cls, config: Mapping[str, Any]) -> bool:
        """Return whether a saved model with this config.json is one for this kind of data."""

    @classmethod
    def evaluator(cls, source: SavedModel, split: str, device: torch.device, **options: Any) -> Evaluator:
        """Load a saved model and the split of its data that it is to be evaluated on.

        Args:
            source: The model and its origin.
            split: "train", "valid" or "test".
            device: Where to evaluate.
            **options: Options of this kind of data, such as the context length of a language model.
        """


class Evaluator(Protocol):
    """A saved model on one split of its data.

    Attributes:
        model: The model, on the device.
        place: The folder that the report names as evaluated.
        origin: The folder of the data, or the name of the data set.
        notes: What a reader of the figures must know.
    """

    model: nn.Module
    place: Path
    origin: str
    notes: list[str]

    def figures(self) -> dict[str, float]:
        """Evaluate the model; called in the precision of its training, without gradients."""

    def probe_inputs(self) -> Tensor:
        """Return a small batch of the split for the probe."""


@dataclass(frozen=True)
class SavedModel:
    """A saved model that is to be evaluated, and what is known about its data.

    Attributes:
        folder: The folder with its configuration and weights.
        checkpoint: The checkpoint of a run that the folder belongs to; None for a model saved by itself.
        recipe: The recipe whose data to take; None if none is given and there is no run.
        recipe_file: The file of the recipe, where the user gave one in place of the run's.
        data: Another place of the data, where the user gave one.
    """

    folder: Path
    checkpoint: Saved | None
    recipe: Recipe | None
    recipe_file: Path | None
    data: str | None

    @property
    def run(self) -> Path:
        """The folder above, which is that of the run if there is one."""
        return self.folder.resolve().parent if self.checkpoint is None else self.checkpoint.run

    def check_data(self, kind: str, split: str, fingerprint: str, origin: str) -> None:
        """Raise an error if the data differ from the run's, unless the user gave other data or another recipe."""
        if self.checkpoint is not None and self.recipe_file is None and self.data is None:
            check_data(self.run, kind, split, fingerprint, origin)
