"""``Source``: the weights of a foreign model, moved one by one to our names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from leadline.errors import LeadlineError


class Source:
    """The weights of a foreign model, to be moved to our names.

    Args:
        model: The foreign model; it is not changed.

    Attributes:
        left: Weights that have not been moved yet, by their old names.
        dtype: Dtype of the model's first weight.
        device: Device of the model's first weight.
    """

    def __init__(self, model: nn.Module) -> None:
        self.name = type(model).__name__
        self.left = {name: tensor.detach() for name, tensor in model.state_dict().items()}
        self.moved: dict[str, Tensor] = {}
        first = next(model.parameters())
        self.dtype, self.device = first.dtype, first.device

    def move(self, old: str | Sequence[str], new: str, change: Callable[[Tensor], Tensor] | None = None) -> None:
        """Copy a weight to one of our names.

        Args:
            old: Its name, or several names whose weights are concatenated along the first axis.
            new: Our name.
            change: Applied to the weight, such as a transpose.
        """
        names = [old] if isinstance(old, str) else list(old)
        for name in names:
            if name not in self.left:
                raise LeadlineError(f"{self.name} has no weight {name}; this variant of it is not supported")
        parts = [self.left.pop(name) for name in names]
        tensor = torch.cat(parts) if len(parts) > 1 else parts[0]
        tensor = tensor if change is None else change(tensor)
        self.moved[new] = tensor.clone(memory_format=torch.contiguous_format)

    def move_linear(
        self,
        old: str | Sequence[str],
        new: str,
        bias: bool = True,
        change: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        """Copy the weight and bias of a linear map or of a norm; arguments as in ``move``, without the suffixes."""
        names = [old] if isinstance(old, str) else list(old)
        self.move([f"{name}.weight" for name in names], f"{new}.weight", change)
        if bias:
            self.move([f"{name}.bias" for name in names], f"{new}.bias")

    def drop(self, prefix: str) -> None:
        """Leave out the weights whose names start with ``prefix``."""
        self.left = {name: tensor for name, tensor in self.left.items() if not name.startswith(prefix)}

    def require(self, **checks: tuple[object, object]) -> None:
        """Raise an error unless each option, given as (its value, the value that we support), agrees."""
        for option, (value, supported) in checks.items():
            if value != supported:
                raise LeadlineError(f"{self.name} has {option}={value!r}; only {supported!r} can be converted")

    def finish(self) -> dict[str, Tensor]:
        """Return the weights under our names; a weight that was not moved is an error."""
        if self.left:
            some = ", ".join(list(self.left)[:3]) + (", ..." if len(self.left) > 3 else "")
            raise LeadlineError(
                f"{self.name} has weights we have no place for ({some}); convert its base model instead"
            )
        return self.moved
