"""Adam and AdamW over the local weights: which weights decay, and the optimizer's state by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from leadline.nn import Positions
from leadline.training.distributed import Weights
from leadline.training.recipe import Optimizer

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
