"""Token similarity, token cosine and attention entropy of every block, by hand from forward hooks.

Nothing of leadline is imported here: this is what its probe is compared with.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .case import SAMPLES, Case, Inputs, Tower, call, pattern, read_towers, tensors


@dataclass
class Stream:
    """The tokens at one point (B, n, d), and what is true of them.

    Means over the samples, each measured alone; a sample without a figure, such as one of zeros, is left out.
    """

    tokens: Tensor
    similarity: float  # t_sim; NaN where a sample has one token
    cosine: float  # t_cos

    @classmethod
    def of(cls, tokens: Tensor) -> Stream:
        """Measure X (B, n, d)."""
        return cls(tokens, float(similarity(tokens).nanmean()), float(cosine(tokens).nanmean()))


@dataclass
class Point:
    """One call of a block: the stream that leaves it, and the one that enters it."""

    name: str  # of the module, with " (call 2)" behind it where the same module ran before
    aliases: tuple[str, ...]
    entering: Stream
    leaving: Stream
    entropy: float | None = None  # mean over samples, heads and queries, in nats; None where it could not be read


@dataclass
class TowerTruth:
    """A tower and the calls of its blocks, in order."""

    tower: Tower
    points: list[Point]


# definitions


def similarity(X: Tensor) -> Tensor:
    """t_sim = ||Pi X||_F^2 / ||X||_F^2, Pi = 1 1^T / n. X (B, n, d) -> (B,); NaN with one token."""
    X = X.double()
    n = X.shape[-2]
    mean = X.mean(-2, keepdim=True)
    centred = (X - mean).square().sum((-2, -1))
    along = n * mean.square().sum((-2, -1))
    return along / (along + centred) if n > 1 else torch.full_like(along, torch.nan)


def cosine(X: Tensor) -> Tensor:
    """t_cos, the mean cosine over all pairs of tokens. X (B, n, d) -> (B,); NaN with one token."""
    X = X.double()
    n = X.shape[-2]
    unit = torch.nan_to_num(X / X.norm(dim=-1, keepdim=True))  # a token of zeros is like no other
    if n <= 512:
        pairs = (unit @ unit.transpose(-1, -2) * (1 - torch.eye(n))).sum((-2, -1))
    else:  # the same without the matrix
        pairs = unit.sum(-2).square().sum(-1) - n
    return pairs / (n * n - n) if n > 1 else torch.full_like(pairs, torch.nan)


def entropy(P: Tensor) -> float | None:
    """Mean entropy of attention weights P (..., n, m) in nats; None if their rows are no distributions."""
    P = P.double()
    if not torch.isfinite(P).all() or P.min() < 0 or (P.sum(-1) - 1).abs().max() > 1e-3:
        return None
    averaged = P.ndim > 3 and P.shape[-3] > 1 and bool((P[..., :1, :, :] == P).all())  # the mean over heads, repeated
    return None if averaged else float(-torch.special.xlogy(P, P).sum(-1).mean())


def as_tokens(x: Tensor, layout: str, samples: int = SAMPLES) -> Tensor:
    """(B, n, d) from a stream whose axes ``layout`` names.

    b samples, n tokens, d channels, c channels of a map, h and w its axes, s parallel streams, which make a token
    wider, g groups of the tokens of a sample. Axes in brackets are one: "(bg)nd" has a row for each group of each
    sample. "bnd[:7]" takes the first 7 tokens only, "bchw/bnd" is the one with the right number of axes.
    """
    layout, _, cut = layout.partition("[:")
    layout = next(choice for choice in layout.split("/") if len(re.sub(r"\(\w+\)", "x", choice)) == x.ndim)
    if layout == "bnd":
        tokens = x
    elif layout == "nbd":
        tokens = x.transpose(0, 1)
    elif layout == "bdn":
        tokens = x.transpose(1, 2)
    elif layout == "bchw":
        tokens = x.flatten(2).transpose(1, 2)
    elif layout in ("bhwc", "bgnd"):
        tokens = x.flatten(1, 2)
    elif layout == "bnsd":
        tokens = x.flatten(2)
    elif layout == "sbnd":
        tokens = x.permute(1, 2, 0, 3).flatten(2)
    elif layout in ("(bg)nd", "(bn)d", "1(bn)d"):
        tokens = x.reshape(samples, -1, x.shape[-1])
    else:
        raise ValueError(f"unknown layout {layout!r}")
    if tokens.ndim != 3 or tokens.shape[0] != samples:
        raise ValueError(f"a stream of shape {tuple(x.shape)} does not fit the layout {layout!r} of {samples} samples")
    return tokens[:, : int(cut.removesuffix("]"))].contiguous() if cut else tokens.contiguous()


# hooks


@contextmanager
def hooks() -> Iterator[Callable[[Any], None]]:
    """Hands out a function that keeps handles of hooks; all are removed at the end."""
    with ExitStack() as stack:
        yield lambda handle: stack.callback(handle.remove)


def members(tower: Tower, model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The blocks of a tower, in the order of their numbers."""
    hits = [
        ([int(number) for number in re.findall(r"\d+", name)], name, module)
        for name, module in model.named_modules(remove_duplicate=False)
        if re.fullmatch(pattern(tower.blocks), name)
    ]
    return [(name, module) for _, name, module in sorted(hits, key=lambda hit: hit[:2])]


def _entering(args: tuple[Any, ...], kwargs: dict[str, Any], which: int) -> Tensor:
    """The stream that enters a module, among the floating tensors of its arguments, those named after it first."""
    named = [kwargs[name] for name in ("hidden_states", "hidden_state", "x", "src", "tgt") if name in kwargs]
    streams = [x for x in tensors([*args, *named, *kwargs.values()]) if x.is_floating_point()]
    return streams[which]


def measure(case: Case, model: nn.Module, inputs: Inputs) -> list[TowerTruth]:
    """The truth about every tower of a model."""
    towers = read_towers(case.towers, model)
    truths = [_measure(tower, model, inputs) for tower in towers]
    if case.eager is not None:
        with case.eager(model) as eager:
            for truth in truths:
                _add_entropies(eager, inputs, truth)
    return truths


def _measure(tower: Tower, model: nn.Module, inputs: Inputs) -> TowerTruth:
    points: list[Point] = []
    calls: dict[str, int] = {}
    entered: list[Tensor] = []

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        entered.append(as_tokens(_entering(args, kwargs, tower.stream).detach().clone(), tower.layout))

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            calls[name] = calls.get(name, 0) + 1
            again = "" if calls[name] == 1 else f" (call {calls[name]})"
            before = points[-1].leaving if tower.source and points else Stream.of(entered.pop())
            after = Stream.of(as_tokens(tensors(output)[tower.stream].detach().clone(), tower.layout))
            points.append(Point(name + again, _aliases(tower, name, again), before, after))

        return hook

    with hooks() as keep:
        if tower.source:
            keep(model.get_submodule(tower.source).register_forward_pre_hook(enter, with_kwargs=True))
        for name, module in _once(members(tower, model)):
            if not tower.source:
                keep(module.register_forward_pre_hook(enter, with_kwargs=True))
            keep(module.register_forward_hook(leave(name)))
        with torch.no_grad():
            call(model, inputs)
    if not points:
        raise LookupError(f"no block of {tower.blocks} ran")
    return TowerTruth(tower, points)


def _aliases(tower: Tower, name: str, again: str) -> tuple[str, ...]:
    if not tower.alias:
        return ()
    numbers = iter(re.findall(r"\d+", name))
    return (re.sub(r"\*", lambda _: next(numbers), tower.alias) + again,)


def _once(blocks: list[tuple[str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """Modules that stand in a list more than once are hooked once, under their first name."""
    seen: dict[nn.Module, str] = {}
    for name, module in blocks:
        seen.setdefault(module, name)
    return [(name, module) for module, name in seen.items()]


def _of_tokens(weights: list[Tensor], tokens: int) -> float | None:
    """The entropy of the first weights among tokens of one kind; else of the first over a summary of them."""
    among = [P for P in weights if P.shape[-1] == P.shape[-2]]
    summary = [P for P in weights if P.shape[-2] == tokens > P.shape[-1]]  # the keys of pyramids are fewer
    values = (entropy(P) for P in among + summary)
    return next((value for value in values if value is not None), None)


def _add_entropies(eager: nn.Module, inputs: Inputs, truth: TowerTruth) -> None:
    """Return for each block the attention weights that a module in it hands out, or drops entries of: (B, H, n, m).

    They count only where this model has the stream of the other: libraries do not always mask alike in both.
    """
    weights: list[list[Tensor]] = []
    streams: list[Tensor] = []

    def enter(module: nn.Module, args: Any) -> None:
        weights.append([])

    def see(module: nn.Module, args: Any, output: Any) -> None:
        shown = tensors(args[:1]) if isinstance(module, nn.Dropout) else tensors(output)
        if (weights and not isinstance(output, Tensor)) or isinstance(module, (nn.Dropout, nn.Softmax)):
            weights[-1].extend(x.detach() for x in shown if x.ndim >= 4 and x.is_floating_point())

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        streams.append(as_tokens(tensors(output)[truth.tower.stream].detach().clone(), truth.tower.layout))

    with hooks() as keep:
        for _, module in _once(members(truth.tower, eager)):
            keep(module.register_forward_pre_hook(enter))
            keep(module.register_forward_hook(leave))
            for part in module.modules():
                if part is not module:
                    keep(part.register_forward_hook(see))
        with torch.no_grad():
            call(eager, inputs)
    for point, found, stream in zip(truth.points, weights, streams, strict=True):
        if torch.allclose(stream, point.leaving.tokens, rtol=1e-3, atol=1e-4):
            point.entropy = _of_tokens(found, point.entering.tokens.shape[1])
