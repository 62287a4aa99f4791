"""What a model of the zoo is: how to build it, what to feed it, and where its blocks are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

SAMPLES = 3  # of every batch
SEED = 0

Inputs = dict[str, Any] | torch.Tensor


@dataclass(frozen=True)
class Tower:
    """A list of blocks that one stream of tokens passes, one after the other.

    ``blocks`` is a pattern of module names in which * stands for the numbers of the list. ``layout`` names the axes of
    the stream: b samples, n tokens, d channels, h and w the axes of a map, s parallel streams, g groups of tokens.
    """

    blocks: str
    layout: str = "bnd"
    required: bool = True  # False: blocks without token mixing worth a report, such as convolutions before attention
    source: str | None = None  # the module whose input is the stream before the first block, where no block takes it

    @property
    def name(self) -> str:
        """The name of the list."""
        return self.blocks.rpartition(".*")[0] or self.blocks


@dataclass
class Case:
    """One type of model."""

    library: str
    type: str
    towers: str  # see ``read_towers``
    build: Callable[[], tuple[nn.Module, Inputs]]
    eager: Callable[[nn.Module], nn.Module] | None = None  # the same model with attention that shows its weights
    notes: dict[str, Any] = field(default_factory=dict)

    def make(self) -> tuple[nn.Module, Inputs]:
        """The model, in evaluation mode, and a batch of ``SAMPLES`` samples; the same ones each time."""
        torch.manual_seed(SEED)
        model, inputs = self.build()
        return model.eval(), inputs


def read_towers(text: str, model: nn.Module) -> list[Tower]:
    """The towers written as "[layout:]pattern[?][<source]", parted by "|".

    A question mark means that a report may leave the tower out. A # in the pattern stands for a number too and makes
    a tower of its own for each: "stages.#.blocks.*" is a tower per stage.
    """
    towers = []
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for part in text.split("|"):
        part, _, source = part.strip().partition("<")
        layout, _, pattern = part.rpartition(":")
        required = not pattern.endswith("?")
        pattern = pattern.removesuffix("?")
        expression = re.escape(pattern).replace(r"\*", r"\d+").replace(r"\#", "#").replace("#", r"(\d+)")
        stages = {match.groups() for name in names if (match := re.fullmatch(expression, name))}
        if not stages:
            raise LookupError(f"no module of {type(model).__name__} is named {pattern!r}")
        for stage in sorted(stages, key=lambda numbers: [int(number) for number in numbers]):
            numbers = iter(stage)
            blocks = re.sub("#", lambda _, numbers=numbers: next(numbers), pattern)
            towers.append(Tower(blocks, layout or "bnd", required, source or None))
    return towers


def enliven(model: nn.Module) -> None:
    """Draw the weights of all linear layers again, with a standard deviation of width^-1/2.

    The small weights that libraries start with change the stream so little that a block taken for its neighbour would
    not be noticed. Likewise for learned tokens that start alike and for scales of branches that start next to 0.
    """
    for parameter in model.parameters():
        constant = parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all())
        if constant and parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.5)
        elif constant and 0 < abs(float(parameter[0])) < 0.01:
            nn.init.constant_(parameter, 0.5)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            width = weight.shape[1 if isinstance(module, nn.Linear) else 0]
            nn.init.normal_(weight, std=width**-0.5)
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            nn.init.normal_(module.in_proj_weight, std=module.embed_dim**-0.5)


def call(model: nn.Module, inputs: Inputs) -> Any:
    """The model's output, the random numbers it draws being the same in every call."""
    torch.manual_seed(SEED)
    return model(**inputs) if isinstance(inputs, dict) else model(inputs)


def tensors(output: Any) -> list[torch.Tensor]:
    """All tensors of an output, in order."""
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, dict):
        output = list(output.values())
    if isinstance(output, (list, tuple)):
        return [tensor for item in output for tensor in tensors(item)]
    return []
