"""What the training loop asks of a task."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor, nn

    from leadline.data.base import Batches

Carry = tuple["Tensor", ...] | None  # flat; every tensor has the batch in front


class Task(Protocol):
    """A model, batches, a loss and an evaluation.

    The loop enters autocast around ``loss`` and ``evaluate``. Both call the model they are given through
    ``model(...)`` alone, never through its methods or parts: that is where DDP, FSDP and compilation take hold.
    """

    @property
    def batches(self) -> Batches: ...

    @property
    def best(self) -> tuple[str, Literal["max", "min"]]:
        """The figure of ``evaluate`` that picks the best checkpoint, and whether more or less of it is better."""

    @property
    def watched(self) -> Literal["valid", "test"]:
        """The split of the evaluations during training: "test" where nothing is held out for validation."""

    def make_model(self) -> nn.Module:
        """The model of the recipe, with what follows from the data (classes, image size, vocabulary) filled in."""

    def loss(self, model: nn.Module, batch: dict[str, Tensor], carry: Carry) -> tuple[Tensor, dict[str, Tensor], Carry]:
        """Mean loss over the batch, metrics (detached scalars), and what the next step's call gets as ``carry``.

        ``carry`` is None at first. It may hold state from step to step, such as Transformer-XL's memory: tensors with
        the batch in front, detached. It is stored in checkpoints.
        """

    def evaluate(self, model: nn.Module, split: str = "valid") -> dict[str, float]:
        """Figures over a split, "valid" or "test"; the model is in evaluation mode, without gradients.

        Every process calls it, gets the same figures and makes the same number of forward passes.
        """

    def probe_inputs(self) -> Any:
        """A small fixed batch for the probe: a tensor, or a mapping of keyword arguments."""

    def describe(self) -> dict[str, Any]:
        """Data set and sizes, for summary.json."""

    @property
    def fingerprints(self) -> dict[str, Any]:
        """Of the data of each split: every process must have the same, and so must a run that goes on."""

    def settle(self, out: Path) -> None:
        """Write into the folder of the run what its data are, on one process; refuse others than it began with."""
