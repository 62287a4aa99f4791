"""A model of the zoo: how to build it, what to feed it, and where its blocks are."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
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
    the stream: see ``as_tokens``.
    """

    blocks: str
    layout: str = "bnd"
    required: bool = True  # False: blocks that a report may leave out, such as convolutions before attention
    group: str = ""  # towers of one group are readings of the same stream: a report needs one of them
    alias: str = ""  # other names of the blocks
    source: str = ""  # the module whose input is the stream before the first block, where no block takes it
    stream: int = 0  # which of the tensors that go through the blocks

    @property
    def name(self) -> str:
        """The name of the list, with the number of the stream where there are several."""
        name = re.sub(r"\.[*{].*", "", self.blocks)
        return f"{name} (stream {self.stream})" if self.stream else name


@dataclass
class Case:
    """One type of model."""

    library: str
    type: str
    towers: str  # see ``read_towers``
    build: Callable[[], tuple[nn.Module, Inputs]]
    eager: Callable[[nn.Module], Any] | None = None  # a context: the same model with attention that shows its weights

    def make(self) -> tuple[nn.Module, Inputs]:
        """The model, in evaluation mode, and a batch of ``SAMPLES`` samples; the same ones each time."""
        torch.manual_seed(SEED)
        model, inputs = self.build()
        return model.eval(), inputs


_TOWER = re.compile(
    r"((?P<layout>[^@:\[]+(\[:\d+\])?)?(@(?P<stream>\d+))?:)?(?P<blocks>[^?%=<]+)(?P<optional>\?)?"
    r"(%(?P<group>[^=<]+))?(=(?P<alias>[^<]+))?(<(?P<source>.+))?"
)


def pattern(text: str) -> str:
    """The regular expression of a pattern of names: * is a number, # a number that is caught, {1,2} one of these."""
    text = re.escape(text).replace(r"\*", r"\d+").replace(r"\#", "#").replace("#", r"(\d+)")
    return re.sub(r"\\{([\d,]+)\\}", lambda numbers: f"(?:{numbers[1].replace(',', '|')})", text)


def read_towers(text: str, model: nn.Module) -> list[Tower]:
    """The towers written as "[layout][@stream]:blocks[?][%group][=alias][<source]", parted by "|".

    ? means that a report may leave the tower out. A # in the pattern of blocks stands for a number too and makes a
    tower of its own for each: "stages.#.blocks.*" is a tower per stage.
    """
    towers = []
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    for part in text.split("|"):
        match = _TOWER.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"no tower is written as {part.strip()!r}")
        stages = {hit.groups() for name in names if (hit := re.fullmatch(pattern(match["blocks"]), name))}
        if not stages:
            raise LookupError(f"no module of {type(model).__name__} is named {match['blocks']!r}")
        for stage in sorted(stages, key=lambda numbers: [int(number) for number in numbers]):

            def filled(text: str | None, stage: tuple[str, ...] = stage) -> str:
                numbers = iter(stage)
                return re.sub("#", lambda _: next(numbers), text or "")

            towers.append(
                Tower(
                    blocks=filled(match["blocks"]),
                    layout=match["layout"] or "bnd",
                    required=match["optional"] is None,
                    group=filled(match["group"]),
                    alias=filled(match["alias"]),
                    source=match["source"] or "",
                    stream=int(match["stream"] or 0),
                )
            )
    return towers


def enliven(model: nn.Module) -> None:
    """Draw the weights of all linear layers again with a standard deviation of width^-1/2, those of convolutions too.

    The small weights that libraries start with change the stream so little that a block taken for its neighbour would
    not be noticed. Likewise for learned tokens that start alike, for scales and gates of branches that start next to 0,
    and for norms that start with weights other than 1.
    """
    for name, parameter in model.named_parameters():
        parameter = parameter.detach()
        if not parameter.numel():
            continue
        first = parameter.flatten()[0]
        constant = bool((parameter == first).all())
        if constant and parameter.ndim > 1 and parameter.numel() > 1:
            nn.init.normal_(parameter, std=0.5)
        elif constant and abs(float(first)) < 0.01 and not name.endswith("bias"):
            nn.init.constant_(parameter, 0.5)
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
            width = weight.shape[1 if isinstance(module, nn.Linear) else 0]
            nn.init.normal_(weight, std=width**-0.5)
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None:
            nn.init.normal_(module.in_proj_weight, std=module.embed_dim**-0.5)
        if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and not hasattr(module, "parametrizations"):
            nn.init.normal_(weight, std=(2 / weight[0].numel()) ** 0.5)
        if isinstance(module, nn.BatchNorm2d) and weight is not None:
            nn.init.ones_(weight)


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
