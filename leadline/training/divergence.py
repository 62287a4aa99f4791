"""Which layer went first, when a run diverged: the bad step again, from the weights before it, with eyes open."""

from __future__ import annotations

import math
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from leadline.errors import LeadlineError
from leadline.probing.guard import uncompiled
from leadline.probing.watch import Watcher
from leadline.training.step import Step

Found = tuple[int, int, str]  # what is worse comes first: kind, place in the order of calls, words


def diagnose(step: Step, number: int, probe: Path) -> str:
    """What happened at step ``number`` and where it began, in words; figures of every layer go to ``probe``.

    Every process looks at its own part of the batch; the worst finding is what all of them return.
    """
    with ExitStack() as stack:
        stack.enter_context(uncompiled())
        watcher = _watcher(step.model, probe)
        if watcher is not None:
            stack.callback(watcher.close)
            watcher.begin(number)
        found = _look(step, number)
        if watcher is not None:
            watcher.end()
    return min(step.processes.gather(found))[2]


def _watcher(model: nn.Module, probe: Path) -> Watcher | None:
    probe.unlink(missing_ok=True)
    try:
        return Watcher(model, every=1, to=probe)
    except LeadlineError:  # a model without blocks
        return None


def _look(step: Step, number: int) -> Found:
    names = {module: name or type(module).__name__ for name, module in step.model.named_modules()}
    called: list[nn.Module] = []  # in the order in which they finished
    broken: list[nn.Module] = []  # gave something that is not finite

    def after(module: nn.Module, inputs: Any, output: Any) -> None:
        called.append(module)
        if not _finite(output):
            broken.append(module)

    step.begin(number)
    step.weights.clear_gradients()
    losses = []
    handles = [module.register_forward_hook(after) for module in names]
    try:
        for micro in range(step.recipe.batch.accumulate):
            with step.autocast():
                loss, _, _ = step.task.loss(step.model, step.part(number, micro), step.carry[micro])
            losses.append(loss.detach())
            (loss * (step.scale / step.recipe.batch.accumulate)).backward()
    finally:
        for handle in handles:
            handle.remove()
    if broken:
        return 0, called.index(broken[0]), f"the output of {names[broken[0]]} is not finite"
    if not _finite(losses):
        return 1, 0, "the loss is not finite, though every layer's output is"
    order = {module: place for place, module in enumerate(called)}
    norms = _gradient_norms(step, order)
    bad = [(place, name) for place, name, norm in norms if not torch.isfinite(torch.tensor(norm))]
    if bad:
        place, name = max(bad)  # the backward pass goes from the last layer to the first
        return 2, -place, f"the gradient of {name} is not finite"
    place, name, largest = max(norms, key=lambda entry: entry[2])
    total = math.hypot(*(norm for _, _, norm in norms))
    limit = f"norm_limit is {step.recipe.norm_limit:g}"
    return 3, place, f"gradients explode (norm {total:.3g}, {limit}), the largest is that of {name} ({largest:.3g})"


def _gradient_norms(step: Step, order: dict[nn.Module, int]) -> list[tuple[int, str, float]]:
    """Place of the module in the forward pass, name and gradient norm of every weight."""
    owners = {p: order.get(module, -1) for module in step.model.modules() for p in module.parameters(recurse=False)}
    found = []
    for name, parameter in zip(step.weights.names, step.weights.parameters, strict=True):
        gradient = parameter.grad
        if gradient is not None:
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            norm = (torch.linalg.vector_norm(gradient.float()) / step.scale).item()
            found.append((owners[parameter], name, norm))
    return found


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(value.isfinite().all())
    if isinstance(value, dict):
        return all(_finite(inner) for inner in value.values())
    return all(_finite(inner) for inner in value) if isinstance(value, (tuple, list)) else True
