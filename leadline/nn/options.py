"""Checks of the types and ranges of a model's options, from the fields of its configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Any, ClassVar, Protocol, Union, get_args, get_origin, get_type_hints

from leadline.errors import LeadlineError, excerpt

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a name",
    dict: "a mapping",
    tuple: "a list of whole numbers",
}
_CHOICES = dict.fromkeys(("learnable_alpha", "learnable_alpha_prime"), "'layer' or 'head'")
_SHARES = ("drop_path", "alpha", "alpha_prime")
DEEPEST = 2_000  # blocks; each costs time and memory even without weights
_LARGEST = 2**31 - 1  # of other whole numbers
_NOT_BELOW_ZERO = ("norm_eps", "solver_tolerance")


class Config(Protocol):
    """A dataclass of options.

    Attributes:
        from_zero: Names of whole numbers that may be 0, which means "without it"; the others begin at 1.
    """

    from_zero: ClassVar[tuple[str, ...]]


def check_options(config: type[Config], given: Mapping[str, Any], prefix: str = "") -> None:
    """Check the types and ranges of options, each by itself.

    Args:
        config: Dataclass whose annotated fields are the options.
        given: Values by name.
        prefix: Text before the names in the error message.

    Raises:
        LeadlineError: A value has the wrong type or lies outside its range.
    """
    hints = _hints(config)
    for name, value in given.items():
        kinds = get_args(hints[name]) if get_origin(hints[name]) in (Union, UnionType) else (hints[name],)
        if not any(_fits(value, kind) for kind in kinds):
            allowed = _CHOICES.get(name) or " or ".join(
                _NAMES[get_origin(kind) or kind] for kind in kinds if kind is not NoneType
            )
            raise LeadlineError(f"{prefix}{name} is {excerpt(value)}, which has the wrong type; it must be {allowed}")
        if value is None:
            continue
        if int in kinds and value < (low := 0 if name in config.from_zero else 1):
            raise LeadlineError(f"{prefix}{name} is {value}; it must be at least {low}")
        if int in kinds and value > (most := DEEPEST if name == "depth" else _LARGEST):
            raise LeadlineError(f"{prefix}{name} is {excerpt(value)}; it must be at most {most:,}")
        if name in _NOT_BELOW_ZERO and value < 0:
            raise LeadlineError(f"{prefix}{name} is {value}; it must be at least 0")
        if (name in _SHARES or name.endswith("dropout")) and not 0 <= value < 1:
            raise LeadlineError(f"{prefix}{name} is {value}; it must lie in [0, 1)")
        if name == "de_escalation" and not 0 <= value <= 1:
            raise LeadlineError(f"{prefix}{name} (tau) is {value}; it must lie in [0, 1]")


@cache
def _hints(config: type) -> dict[str, Any]:
    return get_type_hints(config)


def _fits(value: object, kind: Any) -> bool:
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if get_origin(kind) is tuple:
        return isinstance(value, list | tuple) and all(_fits(part, get_args(kind)[0]) for part in value)
    return isinstance(value, get_origin(kind) or kind)
