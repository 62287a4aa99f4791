"""Packages whose names load the modules that define them on first use (PEP 562)."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def lazy(package: str, names: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Build the ``__getattr__`` and ``__dir__`` of a package that imports nothing until a name is used.

    Example::

        __getattr__, __dir__ = lazy(__name__, {"BlockConfig": "leadline.nn.config"})

    Args:
        package: Name of the package, for the error message.
        names: The full name of the module that defines each public name. A public name must not also be the
            name of a submodule: Python would put that submodule in its place once it is imported.

    Returns:
        The two functions, to be assigned to ``__getattr__`` and ``__dir__`` of the package.
    """

    def load(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(names[name]), name)

    return load, lambda: sorted(names)
