"""The model is left exactly as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from leadline.ops.backends import use_backend


@contextmanager
def left_as_it_was(model: nn.Module) -> Iterator[None]:
    """Inside: evaluation mode, no compiled code, and attention by the paths that can be seen into: not the fast path
    of ``nn.MultiheadAttention``, nor the fused kernels of Hopfield attention.

    After it, whatever happened: the mode of every module, the state of the random generators and the switches of
    torch as before.
    """
    modes = [(module, module.training) for module in model.modules()]
    devices = sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})
    fast = torch.backends.mha.get_fastpath_enabled()
    with torch.random.fork_rng(devices=devices), uncompiled(), use_backend("reference"):
        try:
            model.eval()
            torch.backends.mha.set_fastpath_enabled(False)
            yield
        finally:
            torch.backends.mha.set_fastpath_enabled(fast)
            for module, mode in modes:
                module.training = mode


@contextmanager
def uncompiled() -> Iterator[None]:
    """Hooks on compiled modules never fire, so compiled code runs as written inside."""
    if "torch._dynamo" not in sys.modules:  # nothing can have been compiled
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class GradientNorms:
    """The norm of the loss's gradient with respect to each block's weights, one gradient in memory at a time.

    ``autograd.grad`` leaves ``.grad`` alone; a hook takes each gradient's norm and hands on a zero without memory.
    """

    def __init__(self, blocks: list[nn.Module]) -> None:
        self.squares: dict[nn.Module, Tensor] = {}
        self.weights: dict[Tensor, list[nn.Module]] = {}
        for block in dict.fromkeys(blocks):
            for parameter in block.parameters():
                if parameter.requires_grad:
                    self.weights.setdefault(parameter, []).append(block)

    def measure(self, loss: Tensor) -> dict[nn.Module, Tensor]:
        """Norms (1,) by block; a block without trainable weights is left out."""
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
