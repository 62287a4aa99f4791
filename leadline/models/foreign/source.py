"""The weights of a foreign model, taken one by one, so that none is forgotten."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError


class Source:
    """Moves weights from their old names to ours."""

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self.left = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.taken: dict[str, Tensor] = {}
        first = next(model.parameters())
        self.dtype, self.device = first.dtype, first.device

    def move(self, old: str | Sequence[str], new: str, change: Callable[[Tensor], Tensor] | None = None) -> None:
        """Copy the weight ``old``, perhaps changed, to our name ``new``; several are stacked along the first axis."""
        names = [old] if isinstance(old, str) else list(old)
        for name in names:
            if name not in self.left:
                raise LeadlineError(f"{self.name} has no weight {name}; this variant of it is not supported")
        parts = [self.left.pop(name) for name in names]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        tensor = tensor if change is None else change(tensor)
        self.taken[new] = tensor.clone(memory_format=torch.contiguous_format)

    def move_linear(
        self,
        old: str | Sequence[str],
        new: str,
        bias: bool = True,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Weight and bias of a linear map, or of a norm."""
        names = [old] if isinstance(old, str) else list(old)
        self.move([f"{name}.weight" for name in names], f"{new}.weight", change)
        if bias:
            self.move([f"{name}.bias" for name in names], f"{new}.bias")

    def drop(self, prefix: str) -> None:
        """Leave out the weights below ``prefix``."""
        self.left = {name: tensor for name, tensor in self.left.items() if not name.startswith(prefix)}

    def require(self, **checks: tuple[object, object]) -> None:
        """Refuse the source unless each option, given as (value, what we support), agrees."""
        for option, (value, supported) in checks.items():
            if value != supported:
                raise LeadlineError(f"{self.name} has {option}={value!r}; only {supported!r} can be converted")

    def finish(self) -> dict[str, Tensor]:
        """The weights under our names; a weight without a place is an error."""
        if self.left:
            some = ", ".join(list(self.left)[:3]) + (", ..." if len(self.left) > 3 else "")
            raise LeadlineError(
                f"{self.name} has weights we have no place for ({some}); convert its base model instead"
            )
        return self.taken
