"""The error that users see, helpers that word it, and the end of a run before its time."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Iterable
from types import ModuleType

_LONGEST = 2000  # characters of a message


class LeadlineError(ValueError):
    """Bad input. The message is one line: what was given, what is allowed, what to do.

    Args:
        message: The message. Line ends and other control characters become blanks, and a very long one is cut.
    """

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class Stopped(Exception):  # noqa: N818 - no error: it may have been asked for
    """The end of a run before its time.

    Args:
        message: One line for the user.
        code: Exit code of the command.
    """

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(one_line(message))
        self.code = code


def one_line(message: str) -> str:
    """Return a message as one line of bounded length, whatever names and values it quotes."""
    if len(message) > _LONGEST:
        message = f"{message[: _LONGEST // 2]} ... {message[-_LONGEST // 2 :]}"
    return "".join(letter if letter.isprintable() else " " for letter in message)


def unknown_name(kind: str, given: object, allowed: Iterable[str]) -> LeadlineError:
    """Return the error for an unknown name, with the nearest allowed one.

    Args:
        kind: What is named, such as "model".
        given: The unknown name.
        allowed: The known names.
    """
    names = sorted(allowed)
    near = difflib.get_close_matches(str(given), names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return LeadlineError(f"unknown {kind} {given!r}; allowed: {', '.join(names)}{hint}")


def check_choice(kind: str, given: object, allowed: Iterable[str]) -> None:
    """Raise unless a name is allowed.

    Args:
        kind: What is named, such as "norm".
        given: The name.
        allowed: The known names.
    """
    names = list(allowed)
    if given not in names:
        raise unknown_name(kind, given, names)


def need(module: str, extra: str) -> ModuleType:
    """Import an optional dependency.

    Args:
        module: Name of the module.
        extra: The extra of Leadline that installs it.

    Raises:
        LeadlineError: It is not installed; the message names the extra.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise LeadlineError(
            f"this needs {package}, which is not installed; run: pip install 'leadline[{extra}]'"
        ) from error


def excerpt(value: object, most: int = 60) -> str:
    """Return the start of a value as one short line, to be quoted in a message.

    Args:
        value: What was given.
        most: Largest number of characters.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits; lists in lists in lists
        text = f"a {type(value).__name__}"
    text = "".join(letter if letter.isprintable() else " " for letter in text[: 4 * most])
    return text if len(text) <= most else f"{text[:most]}..."
