"""Attention or MLP of a block left out alone: its output is zero, and the norms stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from leadline.anatomy.blocks import Parts, find_parts
from leadline.anatomy.streams import stream_in, stream_out
from leadline.errors import LeadlineError
from leadline.probing.depth_use import change_of
from leadline.probing.outputs import Yardstick
from leadline.probing.reruns import Reruns, mapped
from leadline.report.layers import LayerData

_NEAR = 1e-5  # relative: how near a block without branches must come to its norms alone


class Branches(NamedTuple):
    """The modules whose outputs a block adds to its stream."""

    attention: nn.Module
    mlp: nn.Module


def add_sublayers(
    reruns: Reruns, yardstick: Yardstick, layers: Sequence[LayerData], progress: Callable[[], None] = lambda: None
) -> str | None:
    """Leave out the attention and the MLP of each block alone, and write the changes of the output into ``layers``.

    The two modules are verified on each block: with both outputs zero, the block must be its norms alone.

    Args:
        reruns: The runs of the model.
        yardstick: Compares outputs.
        layers: Data by layer, the input first.
        progress: Called after each pass of the model.

    Returns:
        Which layers could not be measured, and why; None if all were.
    """
    refused = []
    for call, layer in enumerate(layers[1:]):
        branches = find_branches(reruns, call)
        if branches is None:
            refused.append(layer.index)
            continue
        for name, module in (("removal_attention", branches.attention), ("removal_mlp", branches.mlp)):
            output = reruns.with_call(call, _without(module))
            setattr(layer, name, change_of(yardstick.changes(output)).mean)
            progress()
    if not refused:
        return None
    names = ", ".join(map(str, refused))
    return (
        f"Attention and MLP were not left out alone in layers {names}: with both outputs set to zero the "
        "block is not its norms alone, so they cannot be told for certain."
    )


def find_branches(reruns: Reruns, call: int) -> Branches | None:
    """Return the attention and the MLP of a block call, verified; None if they cannot be told for certain."""
    block = reruns.visits[call].block
    parts = find_parts(block)
    if parts.attention is None or parts.mlp is None or not reruns.visits[call].removable:
        return None
    linear = [module for module in block.modules() if _is_linear(module)]
    inside = set(parts.attention.modules())
    attentions = [parts.attention, *[module for module in linear if module in inside][-1:]]
    mlps = [parts.mlp, *[module for module in linear if module not in inside][-1:]]
    for attention, mlp in product(attentions, mlps):
        if _is_bare(reruns, call, parts, Branches(attention, mlp)):
            return Branches(attention, mlp)
    return None


def _is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"  # of transformers' GPT-2


def _is_bare(reruns: Reruns, call: int, parts: Parts, branches: Branches) -> bool:
    """Return whether a block call is its norms alone, one after the other, or nothing, when both branches give zero."""
    answers: list[bool] = []

    def run_bare(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        x = stream_in(args, kwargs)
        steps: list[tuple[Tensor | None, Tensor | None]] = []  # what enters and leaves each norm
        with ExitStack() as stack:
            for module in branches:
                stack.enter_context(_zeroed(module))
            for norm in parts.norms:
                hook = norm.register_forward_hook(
                    lambda m, a, k, o: steps.append((stream_in(a, k), stream_out(o))), with_kwargs=True
                )
                stack.callback(hook.remove)
            y = stream_out(run(*args, **kwargs))
        answers.append(x is not None and y is not None and (_near(x, y) or _is_chain(x, y, steps)))
        raise LeadlineError("verified")  # the rest of the model is of no interest

    try:
        reruns.with_call(call, run_bare)
    except LeadlineError:
        if not answers:
            raise
    return answers[0]


def _is_chain(x: Tensor, y: Tensor, steps: list[tuple[Tensor | None, Tensor | None]]) -> bool:
    """Return whether norms lead from x to y: each reads what the one before it wrote."""
    for before, after in steps:
        if before is None or after is None or not _near(x, before):
            return False
        x = after
    return bool(steps) and _near(x, y)


def _near(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool((one - other).abs().max() <= _NEAR * one.abs().max())


def _without(module: nn.Module) -> Callable[..., Any]:
    """Return a way to run a block in which a module of it gives zero."""

    def run_without(run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _zeroed(module):
            return run(*args, **kwargs)

    return run_without


@contextmanager
def _zeroed(module: nn.Module) -> Iterator[None]:
    """Inside, the stream that a module returns is zero; what else it returns stays."""

    def zero(module: nn.Module, args: Any, output: Any) -> Any:
        stream = stream_out(output)
        return mapped(output, lambda t: torch.zeros_like(t) if t is stream else t)

    handle = module.register_forward_hook(zero)
    try:
        yield
    finally:
        handle.remove()
