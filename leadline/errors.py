"""The one kind of error a user sees, how its text is made, and what ends a training run before its time."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType


class LeadlineError(ValueError):
    """Bad input. The message says what was given, what is allowed and what to do."""


class Stopped(Exception):  # noqa: N818 - no error: it may have been asked for
    """The run ended early. The message is one line; ``code`` is the exit code of the command."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


def unknown_name(kind: str, given: object, allowed: Iterable[str]) -> LeadlineError:
    """The error for a name that is not one of ``allowed``; names the nearest one."""
    names = sorted(allowed)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return LeadlineError(f"unknown {kind} {given!r}; allowed: {', '.join(names)}{hint}")


def check_choice(kind: str, given: object, allowed: Iterable[str]) -> None:
    """Raise unless ``given`` is one of the ``allowed`` names."""
    names = list(allowed)
    if given not in names:
        raise unknown_name(kind, given, names)


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency, or name the extra that brings it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise LeadlineError(
            f"this needs {package}, which is not installed; run: pip install 'leadline[{extra}]'"
        ) from error
