"""Diagnosing a divergence: repeat the failed step and name the first layer that went wrong."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leadline.anatomy.calling import uncompiled
from leadline.errors import LeadlineError
from leadline.probing.sinks import Row, open_sinks
from leadline.probing.watch import Watcher
from leadline.training.step import Step

OUTPUT, LOSS, FINITE = range(3)  # what is not finite in the forward pass of a part; the first to report comes first


@dataclass
class Part:
    """The forward pass over one part of the batch, on one process.

    Attributes:
        kind: ``OUTPUT``, ``LOSS`` or ``FINITE``.
        place: The place of the first module with an output that is not finite, in the order of calls.
        words: What is not finite.
        loss: The loss.
        rows: Figures of the layers; None for a model without blocks.
    """

    kind: int
    place: int
    words: str
    loss: float
    rows: list[Row] | None


def diagnose(step: Step, number: int, probe: Path) -> tuple[str, bool]:
    """Repeat a failed step, from the weights before it, and find out what went wrong first.

    Every process repeats its own parts of the batch. The figures are those of the part that went wrong first or, where
    only gradients did, of the part with the largest loss.

    Args:
        step: The step; its weights are still those before the failure.
        number: The number of the failed step.
        probe: The file for figures of the layers.

    Returns:
        What went wrong and where, and whether ``probe`` was written.
    """
    with uncompiled():
        own, order = _repeat(step, number)
        parts = [part for theirs in step.processes.gather(own) for part in theirs]
        worst = min(parts, key=lambda part: (part.kind, part.place))
        words = worst.words
        if worst.kind == FINITE:
            words = _gradients(step, order)
            worst = max(parts, key=lambda part: abs(part.loss))
    return words, step.processes.agree(step.processes.main and _write(worst.rows, probe))


def _repeat(step: Step, number: int) -> tuple[list[Part], dict[nn.Module, int]]:
    """Repeat this process's parts of a step, without the update.

    Returns:
        The parts, and the places of modules in the order of calls. Gradients are left in the weights.
    """
    names = {module: name or type(module).__name__ for name, module in step.model.named_modules()}
    order: dict[nn.Module, int] = {}
    parts = []
    step.begin(number)
    step.weights.clear_gradients()
    for micro in range(step.recipe.batch.accumulate):
        broken: list[nn.Module] = []  # modules with outputs that are not finite

        def after(module: nn.Module, inputs: Any, output: Any, broken: list[nn.Module] = broken) -> None:
            order.setdefault(module, len(order))
            if not _finite(output):
                broken.append(module)

        watcher = _watcher(step.model, number)
        handles = [module.register_forward_hook(after) for module in names]
        try:
            with step.autocast():
                loss, _, _ = step.task.loss(step.model, step.part(number, micro), step.carry[micro])
        finally:
            for handle in handles:
                handle.remove()
            rows = None if watcher is None else watcher.end()
        if broken:
            kind, place, words = OUTPUT, order[broken[0]], f"the output of {names[broken[0]]} is not finite"
        elif not _finite(loss):
            kind, place, words = LOSS, 0, "the loss is not finite, though every layer's output is"
        else:
            kind, place, words = FINITE, 0, ""
        parts.append(Part(kind, place, words, float(loss.detach()), rows))
        (loss * (step.scale / step.recipe.batch.accumulate)).backward()
    return parts, order


def _watcher(model: nn.Module, number: int) -> Watcher | None:
    try:
        watcher = Watcher(model, every=1)
    except LeadlineError:  # a model without blocks
        return None
    watcher.begin(number)
    return watcher


def _write(rows: list[Row] | None, probe: Path) -> bool:
    """Write the figures; return whether there are any and they could be written."""
    try:
        probe.unlink(missing_ok=True)
        if rows is None:
            return False
        (sink,) = open_sinks(probe)
        sink.write(rows)
        sink.close()
    except OSError:
        return False
    return True


def _gradients(step: Step, order: dict[nn.Module, int]) -> str:
    """Describe which weight's gradient, over all processes, is not finite, or else which is the largest."""
    norms = _gradient_norms(step, order)
    bad = [(place, name) for place, name, norm in norms if not math.isfinite(norm)]
    if bad:  # the backward pass goes from the last layer to the first
        return f"the gradient of {max(bad)[1]} is not finite"
    _, name, largest = max(norms, key=lambda entry: entry[2])
    total = math.hypot(*(norm for _, _, norm in norms))
    limit = f"norm_limit is {step.recipe.norm_limit:g}"
    return f"gradients explode (norm {total:.3g}, {limit}), the largest is that of {name} ({largest:.3g})"


def _gradient_norms(step: Step, order: dict[nn.Module, int]) -> list[tuple[int, str, float]]:
    """Return for every weight the place of its module, its name and the norm of its gradient over all processes."""
    weights = step.weights
    owners = {p: order.get(module, -1) for module in step.model.modules() for p in module.parameters(recurse=False)}
    weights.collect_gradients()
    norms = []
    for name, parameter, local in zip(weights.names, weights.parameters, weights.local, strict=True):
        if local.grad is None:
            continue
        gradient = local.grad.double() / step.scale
        if step.processes.mode == "ddp":  # the model was called without DDP, which averages gradients
            gradient = step.processes.mean(gradient)
        square = gradient.square().sum()
        if isinstance(parameter, DTensor):
            dist.all_reduce(square)
        norms.append((owners[parameter], name, square.sqrt().item()))
    return norms


def _finite(value: Any) -> bool:
    """Return whether all tensors in nested tuples, lists and dictionaries are finite."""
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(_finite(inner) for inner in value.values())
    return all(_finite(inner) for inner in value) if isinstance(value, (tuple, list)) else True
