"""Token similarity, token cosine and attention entropy of every block, by hand from forward hooks.

Nothing of leadline is imported here: this is what its probe is compared with.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .case import SAMPLES, Case, Inputs, Tower, call, read_towers


@dataclass
class Point:
    """The stream at one point: means over the samples, each of which is measured alone."""

    name: str  # of the module, with " (call 2)" behind it where the same module ran before; "input" before all blocks
    similarity: float  # t_sim; NaN where a sample has one token
    cosine: float  # t_cos
    tokens: int
    entropy: float | None = None  # mean over samples, heads and queries, in nats
    stream: Tensor | None = field(default=None, repr=False)  # (B, n, d)


@dataclass
class TowerTruth:
    """A tower and its stream: what enters the first block, then what leaves each, in the order of the calls."""

    tower: Tower
    points: list[Point]


def as_tokens(x: Tensor, layout: str, samples: int = SAMPLES) -> Tensor:
    """(B, n, d) from a stream whose axes ``layout`` names, as in "bnd", "nbd", "bchw", "bhwc", "bdn", "bnsd".

    "(bg)nd" has the tokens of a sample in groups, "(gb)nd" too but the groups outside, "(bn)d" all samples in one row,
    "1(bn)d" the same behind an axis of length 1, "sbnd" parallel streams outside, "bnd[:7]" the first 7 tokens only.
    """
    layout, _, cut = layout.partition("[:")
    if layout == "bnd":
        tokens = x
    elif layout == "nbd":
        tokens = x.transpose(0, 1)
    elif layout == "bdn":
        tokens = x.transpose(1, 2)
    elif layout == "bchw":
        tokens = x.flatten(2).transpose(1, 2)
    elif layout == "bcthw":
        tokens = x.flatten(2).transpose(1, 2)
    elif layout == "bhwc":
        tokens = x.flatten(1, 2)
    elif layout == "bnsd":
        tokens = x.flatten(2)
    elif layout == "sbnd":
        tokens = x.permute(1, 2, 0, 3).flatten(2)
    elif layout == "(bg)nd":
        tokens = x.reshape(samples, -1, x.shape[-1])
    elif layout == "(bg)hwc":
        tokens = x.reshape(samples, -1, x.shape[-1])
    elif layout == "bgnd":
        tokens = x.flatten(1, 2)
    elif layout == "(gb)nd":
        tokens = x.unflatten(0, (-1, samples)).transpose(0, 1).flatten(1, 2)
    elif layout in ("(bn)d", "1(bn)d"):
        tokens = x.reshape(samples, -1, x.shape[-1])
    else:
        raise ValueError(f"unknown layout {layout!r}")
    if tokens.ndim != 3 or tokens.shape[0] != samples:
        raise ValueError(f"a stream of shape {tuple(x.shape)} does not fit the layout {layout!r} of {samples} samples")
    return tokens[:, : int(cut.removesuffix("]"))] if cut else tokens


def similarity(X: Tensor) -> Tensor:
    """t_sim = ||Pi X||_F^2 / ||X||_F^2, Pi = 1 1^T / n. X (B, n, d) -> (B,); NaN with one token."""
    X = X.double()
    n = X.shape[-2]
    mean = X.mean(-2, keepdim=True)
    centred = (X - mean).square().sum((-2, -1))
    along = n * mean.square().sum((-2, -1))
    return along / (along + centred) if n > 1 else torch.full_like(along, torch.nan)


def cosine(X: Tensor) -> Tensor:
    """t_cos, the mean cosine over all pairs of tokens, by the whole matrix. X (B, n, d) -> (B,)."""
    X = torch.nn.functional.normalize(X.double(), dim=-1)
    n = X.shape[-2]
    cosines = X @ X.transpose(-1, -2)
    return (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / max(n * n - n, 1)


def entropy(P: Tensor) -> float | None:
    """Mean entropy of attention weights P (..., n, m) in nats; None if the rows are no distributions."""
    P = P.double()
    if P.min() < 0 or (P.sum(-1) - 1).abs().max() > 1e-3:
        return None
    return float(-torch.special.xlogy(P, P).sum(-1).mean())


def _stream(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The stream that enters a module: the first floating tensor of its arguments, those named after it first."""
    named = [kwargs[name] for name in ("hidden_states", "hidden_state", "x", "src", "tgt") if name in kwargs]
    return next(x for x in (*args, *named, *kwargs.values()) if isinstance(x, Tensor) and x.is_floating_point())


def _first(output: Any) -> Tensor:
    while not isinstance(output, Tensor):
        output = next(iter(output.values())) if isinstance(output, dict) else output[0]
    return output


def members(tower: Tower, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a tower, in the order of their numbers."""
    expression = re.escape(tower.blocks).replace(r"\*", r"(\d+)")
    hits = [
        ([int(number) for number in match.groups()], name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if (match := re.fullmatch(expression, name))
    ]
    return [(name, module) for _, name, module in sorted(hits, key=lambda hit: hit[0])]


def measure(case: Case, model: nn.Module, inputs: Inputs, entropies: bool = True) -> list[TowerTruth]:
    """The truth about every tower of a model."""
    towers = read_towers(case.towers, model)
    truths = [_measure(tower, model, inputs) for tower in towers]
    if entropies and case.eager is not None:
        _add_entropies(case.eager(model), inputs, truths)
    return truths


def _point(name: str, stream: Tensor, layout: str) -> Point:
    X = as_tokens(stream.detach(), layout)
    return Point(name, float(similarity(X).mean()), float(cosine(X).mean()), X.shape[1], stream=X)


def _measure(tower: Tower, model: nn.Module, inputs: Inputs) -> TowerTruth:
    blocks = members(tower, model)
    points: list[Point] = []
    calls: dict[str, int] = {}
    handles = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        if not points:
            points.append(_point("input", _stream(args, kwargs), tower.layout))

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            shown = name if calls[name] == 1 else f"{name} (call {calls[name]})"
            points.append(_point(shown, _first(output), tower.layout))

        return hook

    first = [model.get_submodule(tower.source)] if tower.source else [module for _, module in blocks]
    for module in dict.fromkeys(first):
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
    hooked: set[nn.Module] = set()
    for name, module in blocks:
        if module not in hooked:
            hooked.add(module)
            handles.append(module.register_forward_hook(leave(name)))
    try:
        with torch.no_grad():
            call(model, inputs)
    finally:
        for handle in handles:
            handle.remove()
    if len(points) < 2:
        raise LookupError(f"no block of {tower.blocks} ran")
    return TowerTruth(tower, points)


def _add_entropies(eager: nn.Module, inputs: Inputs, truths: list[TowerTruth]) -> None:
    """Of each block the first attention weights that a module in it hands out or drops entries of: (B, H, n, m)."""
    for truth in truths:
        weights: list[list[Tensor]] = []
        handles = []

        def open_block(module: nn.Module, args: Any, weights: list[list[Tensor]] = weights) -> None:
            weights.append([])

        def see(module: nn.Module, args: Any, output: Any, weights: list[list[Tensor]] = weights) -> None:
            shown = (args[0],) if isinstance(module, nn.Dropout) and args else output
            for x in shown if isinstance(shown, tuple) else ():
                if isinstance(x, Tensor) and x.ndim >= 4 and x.is_floating_point() and weights:
                    weights[-1].append(x.detach())

        blocks = dict.fromkeys(module for _, module in members(truth.tower, eager))
        for module in blocks:
            handles.append(module.register_forward_pre_hook(open_block))
            for part in module.modules():
                if part is not module:
                    handles.append(part.register_forward_hook(see))
        try:
            with torch.no_grad():
                call(eager, inputs)
        finally:
            for handle in handles:
                handle.remove()
        for point, found in zip(truth.points[1:], weights, strict=True):
            values = (entropy(P) for P in found)
            point.entropy = next((value for value in values if value is not None), None)
