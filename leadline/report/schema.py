"""Reads the JSON of a report and checks every field: its type, its range and what must agree with it."""

from __future__ import annotations

import json
import math
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, is_dataclass
from dataclasses import fields as fields_of
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

from leadline import files
from leadline.errors import LeadlineError, excerpt
from leadline.report import layers as report_data
from leadline.report.layers import DepthUse, Distribution, Heatmap

T = TypeVar("T")
LARGEST_FILE = 1 << 28  # bytes: 100 times the report of a deep model
_LARGEST = 1e300  # magnitude of a number; sums of larger ones overflow
_LARGEST_COUNT = 1 << 53  # whole numbers beyond it are not exact in the page's script
_DEEPEST = 16  # levels of lists and mappings in the settings
_NARROWEST = 1e-200  # bin of a histogram; a density is a count over a width
_NAMES = {str: "a text", bool: "true or false", int: "a whole number from 0", float: "a number", list: "a list"}


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the text of a report's file.

    Raises:
        LeadlineError: It is missing, no regular file, too large, or no UTF-8.
    """
    try:
        return files.read_text(Path(path), LARGEST_FILE)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise LeadlineError(f"{path} cannot be read ({why}); give a report that was saved as .json") from error


def parse(text: str, kind: type[T]) -> T:
    """Return the data class ``kind`` that a JSON text describes.

    Unknown fields are left out and fields with a default may be missing, so that reports of other versions can be
    read. A number that is null becomes NaN.

    Raises:
        LeadlineError: The text is no JSON, or a field is missing, of another type or out of range; the message names
            the field.
    """
    try:
        data = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(data, ensure_ascii=False).encode()  # JSON can write half of a character, which no file can hold
    except (ValueError, RecursionError) as error:
        raise LeadlineError("this is no report; give what report.to_json() wrote") from error
    try:
        return typing.cast(T, _build(kind, data, ""))
    except RecursionError as error:  # parts of parts without end
        raise LeadlineError("this is no report; give what report.to_json() wrote") from error


def _refuse_constant(name: str) -> None:
    raise ValueError(name)


def _wrong(where: str, value: object, allowed: str) -> LeadlineError:
    given = f"{where} is {excerpt(value)}" if where else f"it is {excerpt(value)}"
    return LeadlineError(f"this is no report: {given}; it must be {allowed}; give what report.to_json() wrote")


def _build(kind: Any, value: Any, where: str) -> Any:
    """Check a value from JSON against a type and return it as that type.

    Args:
        kind: A data class, list, dict, optional, text, truth value, number or Any.
        value: What the JSON holds.
        where: Path of the field, such as ``layers[3].index``.
    """
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        return _build(next(option for option in inner if option is not type(None)), value, where)
    if is_dataclass(kind):
        return _build_record(kind, value, where)
    if origin is list:
        if not isinstance(value, list):
            raise _wrong(where, value, "a list")
        return [_build(inner[0], item, f"{where}[{i}]") for i, item in enumerate(value)]
    if origin in (dict, Mapping):
        if not isinstance(value, dict):
            raise _wrong(where, value, "a mapping")
        return {key: _build(inner[1], item, f"{where}.{excerpt(key)}") for key, item in value.items()}
    if kind is Any:
        return _plain(value, where)
    return _build_single(kind, value, where)


def _build_single(kind: Any, value: Any, where: str) -> Any:
    """Check a text, a truth value or a number."""
    if kind is float:
        if value is None:
            return math.nan
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= _LARGEST:
            return float(value)
        raise _wrong(where, value, f"a number between -{_LARGEST:g} and {_LARGEST:g}, or null")
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise _wrong(where, value, _NAMES[kind])
    if kind is int and not 0 <= value <= _LARGEST_COUNT:
        raise _wrong(where, value, "a whole number from 0 to 2^53")
    return value


def _build_record(kind: Any, value: Any, where: str) -> Any:
    """Check a mapping against the fields of a data class."""
    if not isinstance(value, dict):
        raise _wrong(where, value, "a mapping")
    hints, prefix = typing.get_type_hints(kind, vars(report_data) | {kind.__name__: kind}), f"{where}." if where else ""
    built = {}
    for field in fields_of(kind):
        if field.name in value:
            built[field.name] = _build(hints[field.name], value[field.name], f"{prefix}{field.name}")
        elif field.default is MISSING and field.default_factory is MISSING:
            raise LeadlineError(f"this is no report: it has no {prefix}{field.name}; give what report.to_json() wrote")
    record = kind(**built)
    check = _CHECKS.get(kind)
    if check is not None and (problem := check(record)):
        raise LeadlineError(f"this is no report: {where} {problem}; give what report.to_json() wrote")
    return record


def _plain(value: Any, where: str, level: int = 0) -> Any:
    """Check a setting: text, truth values and numbers, in lists and mappings of a few levels."""
    if level > _DEEPEST:
        raise LeadlineError(
            f"this is no report: {where} has more than {_DEEPEST} levels; give what report.to_json() wrote"
        )
    if isinstance(value, list):
        return [_plain(item, where, level + 1) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item, where, level + 1) for key, item in value.items()}
    if isinstance(value, (int, float)) and not abs(value) <= _LARGEST:
        raise _wrong(where, value, f"a number between -{_LARGEST:g} and {_LARGEST:g}")
    return value


def _histogram_problem(histogram: Distribution) -> str:
    """Return what is wrong with a histogram, or nothing."""
    if len(histogram.edges) != len(histogram.counts) + 1:
        return f"has {len(histogram.edges)} edges for {len(histogram.counts)} counts, it needs one more than counts"
    if not all(high - low >= _NARROWEST for low, high in pairwise(histogram.edges)):
        return "has edges that do not increase"
    return ""


def _heatmap_problem(heatmap: Heatmap) -> str:
    """Return what is wrong with a heat map, or nothing."""
    if any(weight < 0 for row in heatmap.weights for weight in row):
        return "has weights below 0, attention has none"
    if len({len(row) for row in heatmap.weights}) > 1:
        return "has rows of different lengths"
    return ""


def _depth_use_problem(use: DepthUse) -> str:
    """Return what is wrong with a depth in use, or nothing."""
    if use.angles is not None and any(len(row) != len(use.angles) for row in use.angles):
        return "has angles that are no square"
    if any(angle < 0 for row in use.angles or [] for angle in row):
        return "has angles below 0"
    return ""


_CHECKS: dict[Any, Callable[[Any], str]] = {
    DepthUse: _depth_use_problem,
    Distribution: _histogram_problem,
    Heatmap: _heatmap_problem,
}
