"""Which layer went first, when a run diverged: the bad step again, from the weights before it, with eyes open."""

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

OUTPUT, LOSS, WHOLE = range(3)  # what is not finite in the forward pass of a part; the worst first


@dataclass
class Part:
    """The forward pass over one part of the batch, on one process."""

    kind: int
    place: int  # in the order of calls
    words: str
    loss: float
    rows: list[Row] | None  # figures of its layers; None: a model without blocks


def diagnose(step: Step, number: int, probe: Path) -> tuple[str, bool]:
    """What happened at step ``number`` and where it began, in words, and whether ``probe`` has figures of the layers.

    Every process looks at its own parts of the batch. The figures are those of the part in which it began or, where
    only gradients went wrong, of the part with the largest loss.
    """
    with uncompiled():
        own, order = _look(step, number)
        parts = [part for found in step.processes.gather(own) for part in found]
        worst = min(parts, key=lambda part: (part.kind, part.place))
        words = worst.words
        if worst.kind == WHOLE:
            words = _gradients(step, order)
            worst = max(parts, key=lambda part: abs(part.loss))
    return words, step.processes.agree(step.processes.main and _written(worst.rows, probe))


def _look(step: Step, number: int) -> tuple[list[Part], dict[nn.Module, int]]:
    """The parts of this process, their gradients left in the weights; the places of modules in the forward pass."""
    names = {module: name or type(module).__name__ for name, module in step.model.named_modules()}
    order: dict[nn.Module, int] = {}
    parts = []
    step.begin(number)
    step.weights.clear_gradients()
    for micro in range(step.recipe.batch.accumulate):
        broken: list[nn.Module] = []  # gave something that is not finite

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
            kind, place, words = WHOLE, 0, ""
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


def _written(rows: list[Row] | None, probe: Path) -> bool:
    """Whether there are figures, and they could be written."""
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
    """Whose gradient, over all processes, is not finite or the largest."""
    norms = _gradient_norms(step, order)
    bad = [(place, name) for place, name, norm in norms if not math.isfinite(norm)]
    if bad:
        return f"the gradient of {max(bad)[1]} is not finite"  # the backward pass goes from the last layer to the first
    _, name, largest = max(norms, key=lambda entry: entry[2])
    total = math.hypot(*(norm for _, _, norm in norms))
    limit = f"norm_limit is {step.recipe.norm_limit:g}"
    return f"gradients explode (norm {total:.3g}, {limit}), the largest is that of {name} ({largest:.3g})"


def _gradient_norms(step: Step, order: dict[nn.Module, int]) -> list[tuple[int, str, float]]:
    """Place of the module in the forward pass, name and gradient norm of every weight, over all processes."""
    weights = step.weights
    owners = {p: order.get(module, -1) for module in step.model.modules() for p in module.parameters(recurse=False)}
    weights.collect_gradients()
    found = []
    for name, parameter, local in zip(weights.names, weights.parameters, weights.local, strict=True):
        if local.grad is None:
            continue
        gradient = local.grad.double() / step.scale
        if step.processes.mode == "ddp":  # the model was called without DDP, which would have averaged them
            gradient = step.processes.mean(gradient)
        square = gradient.square().sum()
        if isinstance(parameter, DTensor):
            dist.all_reduce(square)
        found.append((owners[parameter], name, square.sqrt().item()))
    return found


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(_finite(inner) for inner in value.values())
    return all(_finite(inner) for inner in value) if isinstance(value, (tuple, list)) else True
