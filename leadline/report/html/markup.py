"""Markup: the one way from text to HTML. Every value that enters a template is escaped, unless it is markup itself."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


class Html(str):
    """Text that is HTML: made by ``markup`` and ``join`` alone."""

    __slots__ = ()


def markup(template: str, **values: object) -> Html:
    """Fill a template of HTML.

    Args:
        template: HTML written in our code, with ``{name}`` where a value goes. No value may be part of it.
        **values: The values. What is not ``Html`` is escaped, for text and for quoted attributes.
    """
    return Html(template.format(**{name: _escaped(value) for name, value in values.items()}))


def join(parts: Iterable[Html]) -> Html:
    """Join pieces of HTML."""
    return Html("".join(_escaped(part) for part in parts))


def _escaped(value: object) -> str:
    return value if isinstance(value, Html) else escape(str(value))
