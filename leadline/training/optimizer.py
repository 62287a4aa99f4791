"""The optimizer of a run: Adam or AdamW, which weights decay, its state by name, and the learning rate by step."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError
from leadline.nn import Positions
from leadline.training.distributed import Weights
from leadline.training.recipe import Optimizer, Schedule

MOMENTS = ("exp_avg", "exp_avg_sq")


def undecayed(model: nn.Module) -> set[str]:
    """Return the names of the parameters that do not decay.

    These are vectors and scalars (norms, biases, learned strengths), position embeddings, the biases u and v of
    relative positions, and the model's own tokens (class, distillation).
    """
    positions = {
        f"{name}.{inner}"
        for name, module in model.named_modules()
        if isinstance(module, Positions)
        for inner, _ in module.named_parameters()
    }
    return {
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim < 2 or name in positions or name in ("u", "v") or name.endswith("_token")
    }


def make_optimizer(settings: Optimizer, weights: Weights, spared: set[str], lr: Tensor) -> torch.optim.Optimizer:
    """Make torch's fused optimizer.

    Args:
        settings: The section ``optimizer`` of a recipe.
        weights: The weights to train.
        spared: Names of the weights that do not decay.
        lr: The learning rate (), a tensor whose changes a CUDA graph sees.
    """
    decayed: list[Tensor] = []
    others: list[Tensor] = []
    for name, local in zip(weights.names, weights.local, strict=True):
        (others if name in spared else decayed).append(local)
    pairs = ((decayed, settings.weight_decay), (others, 0.0))
    groups: list[dict[str, Any]] = [{"params": chosen, "weight_decay": decay} for chosen, decay in pairs if chosen]
    kind = torch.optim.AdamW if settings.name == "adamw" else torch.optim.Adam
    on_gpu = lr.device.type == "cuda"
    return kind(groups, lr=lr, betas=settings.betas, eps=settings.eps, fused=True, capturable=on_gpu)


def moments_of(optimizer: torch.optim.Optimizer, weights: Weights, moment: str) -> list[Tensor]:
    """Return one moment of every weight, such as "exp_avg"; zeros for a weight that never had a gradient."""
    return [optimizer.state[local].get(moment, torch.zeros_like(local)).detach() for local in weights.local]


def steps_of(optimizer: torch.optim.Optimizer, weights: Weights) -> dict[str, Tensor]:
    """Return how many updates each weight has had, () each, by name."""
    return {
        name: optimizer.state[local].get("step", torch.zeros(())).detach().cpu()
        for name, local in zip(weights.names, weights.local, strict=True)
    }


def restore(optimizer: torch.optim.Optimizer, weights: Weights, steps: dict[str, float]) -> None:
    """Allocate the state of every weight that has had updates, with moments of zero.

    Args:
        optimizer: A new optimizer.
        weights: Its weights.
        steps: How many updates each weight has had, by name.
    """
    for name, local in zip(weights.names, weights.local, strict=True):
        if steps[name]:
            state = {moment: torch.zeros_like(local, requires_grad=False) for moment in MOMENTS}
            optimizer.state[local] = {"step": torch.tensor(steps[name], device=local.device), **state}


class LearningRate:
    """The learning rate of a run: ``rate(step)``.

    The warm-up rises linearly from ``start * lr`` at step 0 to ``lr`` at its end. The body follows, which is one of

        cosine       lr (final + (1 - final) (1 + cos(pi t)) / 2), t from 0 to 1 over the body
        multi_step   lr times ``factor`` for every milestone passed; milestones count from step 0
        constant     lr

    The cool-down is linear from the rate at the end of the body to ``final * lr``. After a cosine it is constant at the
    final rate, as timm's cool-down epochs are. Without a body the cool-down starts from ``lr``. A multi-step or
    constant schedule without a cool-down does not use ``final``.

    Args:
        schedule: The section ``schedule`` of a recipe.
        lr: The full learning rate.
        total: The length of the run in steps.
        steps_per_epoch: The length of an epoch in steps.

    Raises:
        LeadlineError: Warm-up and cool-down are longer than the run, or a milestone comes too late.
    """

    def __init__(self, schedule: Schedule, lr: float, total: int, steps_per_epoch: int) -> None:
        self.schedule, self.lr, self.total = schedule, lr, total
        self.warmup = schedule.warmup.steps(steps_per_epoch, total)
        self.cooldown = schedule.cooldown.steps(steps_per_epoch, total)
        self.milestones = [span.steps(steps_per_epoch, total) for span in schedule.milestones]
        if self.warmup + self.cooldown > total:
            raise LeadlineError(
                f"schedule.warmup and schedule.cooldown take {self.warmup} + {self.cooldown} steps; "
                f"the run has {total}: make them shorter, or length longer"
            )
        body = total - self.cooldown
        for span, at in zip(schedule.milestones, self.milestones, strict=True):
            if at >= body:
                end = f"in the cool-down, from step {body} on" if at < total else f"after the last of {total} steps"
                raise LeadlineError(f"schedule.milestones has {span.text!r}, which lies {end}; make it earlier")

    def __call__(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        s = self.schedule
        if step < self.warmup:
            return self.lr * (s.start + (1 - s.start) * step / self.warmup)
        into_cooldown = step - (self.total - self.cooldown)
        if into_cooldown < 0:
            return self._body(step)
        first = self._body(self.total - self.cooldown)
        return first + (self.lr * s.final - first) * into_cooldown / max(self.cooldown, 1)

    def _body(self, step: int) -> float:
        s = self.schedule
        if s.name == "cosine":
            length = self.total - self.warmup - self.cooldown
            share = (step - self.warmup) / length if length else 0.0
            return self.lr * (s.final + (1 - s.final) * (1 + math.cos(math.pi * share)) / 2)
        return self.lr * s.factor ** sum(step >= at for at in self.milestones)
