"""The makes of models that can be cured, in the order in which they are tried."""

from __future__ import annotations

from importlib import import_module
from typing import Any, NamedTuple, Protocol

from torch import nn

from leadline.curing.makes.huggingface.families import FAMILIES, refuse_features
from leadline.curing.strengths import Strengths
from leadline.errors import LeadlineError


class Cure(Protocol):
    """A cure inside a model, as one make puts it in. It is copied and pickled with the model."""

    @property
    def strengths(self) -> Strengths:
        """The strengths in force."""
        ...

    def set_strengths(self, alpha: float, alpha_prime: float) -> None:
        """Change alpha and alpha'."""
        ...

    def remove(self) -> None:
        """Make the model what it was before the cure."""
        ...


class Make(NamedTuple):
    """One make of models: how it is recognised, and the Python module that cures it.

    The Python module offers two functions:

    - ``find_part(model)`` returns the part of ``model`` that carries the cure, or None if it is not of this make.
    - ``install(model, part, strengths)`` puts the cure in and returns it, a ``Cure``. It refuses what cannot be cured
      before the first change.

    Attributes:
        library: The package that defines the classes of such models. It may not be installed, so the make is tried, and
            its Python module imported, only for a model with such classes.
        module: The Python module.
        models: What can be cured, for error messages.
    """

    library: str
    module: str
    models: str


MAKES = (
    Make("leadline", "leadline.curing.makes.ours", "our own models"),
    Make("timm", "leadline.curing.makes.timm", "timm's VisionTransformer with its usual blocks"),
    Make(
        "transformers",
        "leadline.curing.makes.huggingface.install",
        f"transformers' {', '.join(sorted(name.removesuffix('Model') for name in FAMILIES))}",
    ),
)


def find_make(model: nn.Module) -> tuple[Any, Any]:
    """Return the Python module that cures ``model``, and the part of ``model`` that carries the cure.

    Raises:
        LeadlineError: If the model is of no make that can be cured.
    """
    libraries = {type(module).__module__.partition(".")[0] for module in model.modules()}
    for make in MAKES:
        if make.library in libraries:
            module = import_module(make.module)
            part = module.find_part(model)
            if part is not None:
                return module, part
    refuse_features(model)
    *others, last = (make.models for make in MAKES)
    raise LeadlineError(f"{type(model).__name__} cannot be cured; known are {', '.join(others)}, and {last}")
