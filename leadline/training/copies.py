"""Half-precision copies of the weights, cast for a whole step at a time.

Under autocast every linear map casts its weights, and its backward pass casts their gradients back. These are twenty
tiny kernels a block, a third of its launches. Here a few large kernels cast all weights before the forward pass, and
all gradients after the backward pass. The numbers are the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

CAST = (nn.Linear, nn.Conv1d, nn.Conv2d)  # autocast runs these in half precision, and nothing else uses their weights


class Copies:
    """Copies of a model's weights in half precision.

    Args:
        model: The model.
        dtype: The type of the copies.
    """

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        owners = Counter(p for module in model.modules() for p in module._parameters.values() if p is not None)
        self.places = [
            (module, name, p)
            for module in model.modules()
            if isinstance(module, CAST)
            for name, p in module._parameters.items()
            if p is not None and owners[p] == 1 and p.dtype == torch.float32  # a tied weight may be read elsewhere
        ]
        self.weights = [p for _, _, p in self.places]
        self.copies = [nn.Parameter(p.detach().to(dtype), p.requires_grad) for p in self.weights]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Update the copies from the weights and put them into the model; put the weights back at the end."""
        if self.copies:
            with torch.no_grad():
                torch._foreach_copy_(tuple(self.copies), tuple(self.weights))
        try:
            for (module, name, _), copy in zip(self.places, self.copies, strict=True):
                module._parameters[name] = copy
            yield
        finally:
            for module, name, weight in self.places:
                module._parameters[name] = weight

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the copies' gradients to the weights' own, and clear them."""
        pairs = [(p, copy) for p, copy in zip(self.weights, self.copies, strict=True) if copy.grad is not None]
        if not pairs:
            return
        wide = [torch.empty_like(p) for p, _ in pairs]
        torch._foreach_copy_(wide, [_gradient(copy) for _, copy in pairs])
        for (p, copy), gradient in zip(pairs, wide, strict=True):
            copy.grad = None
            if p.grad is None:
                p.grad = gradient
        later = [(_gradient(p), new) for (p, _), new in zip(pairs, wide, strict=True) if p.grad is not new]
        if later:
            old, new = (list(tensors) for tensors in zip(*later, strict=True))
            torch._foreach_add_(old, new)


def _gradient(p: nn.Parameter) -> Tensor:
    assert p.grad is not None
    return p.grad
