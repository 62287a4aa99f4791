"""Measures the gradient norm of every block, from the loss of a model's output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError

Loss = Callable[[Any], Tensor] | str


class GradientNorms:
    """The norm of the loss's gradient with respect to each block's weights, one gradient in memory at a time.

    ``autograd.grad`` leaves ``.grad`` alone; a hook takes the norm of each gradient and returns zeros without memory.

    Args:
        blocks: The blocks of the model.

    Raises:
        LeadlineError: If no block has a weight that requires a gradient.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.squares: dict[nn.Module, Tensor] = {}
        self.weights: dict[Tensor, list[nn.Module]] = {}
        for block in dict.fromkeys(blocks):
            for parameter in block.parameters():
                if parameter.requires_grad:
                    self.weights.setdefault(parameter, []).append(block)
        if not self.weights:
            raise LeadlineError(
                "loss is given but no block has a weight that requires a gradient; unfreeze one or drop loss"
            )

    def measure(self, loss: Tensor) -> dict[nn.Module, Tensor]:
        """Return the norm (1,) of each block; a block without trainable weights is left out."""
        self.squares = {}
        handles = [weight.register_hook(self._hook(blocks)) for weight, blocks in self.weights.items()]
        try:
            torch.autograd.grad(loss, list(self.weights), allow_unused=True)
        finally:
            for handle in handles:
                handle.remove()
        return {block: square.sqrt()[None] for block, square in self.squares.items()}

    def _hook(self, blocks: list[nn.Module]) -> Callable[[Tensor], Tensor]:
        def hook(gradient: Tensor) -> Tensor:
            square = gradient.detach().double().square().sum()
            for block in blocks:
                self.squares[block] = self.squares.get(block, 0) + square
            return torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand_as(gradient)

        return hook


def loss_of(output: Any, loss: Loss) -> Tensor:
    """Return the loss of a model's output.

    Args:
        output: What the model returned.
        loss: A function of the output, or "output.loss".

    Raises:
        LeadlineError: If that is not one number that depends on the weights.
    """
    value = loss(output) if callable(loss) else getattr(output, "loss", None)
    if isinstance(loss, str) and loss != "output.loss":
        raise LeadlineError(f"loss is {loss!r}; give a function of the model's output, or 'output.loss'")
    if not isinstance(value, Tensor) or value.numel() != 1 or not value.requires_grad:
        given = f"a tensor {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise LeadlineError(
            f"the loss is {given}; it must be one number that depends on the weights "
            "(with 'output.loss' the inputs must hold labels)"
        )
    return value
