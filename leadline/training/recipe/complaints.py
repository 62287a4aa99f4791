"""``explain``: the error message of a wrong recipe, one line that names the nearest valid key."""

from __future__ import annotations

import re
import types
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError

from leadline.errors import LeadlineError, unknown_name

_UNIONS: tuple[Any, ...] = (Annotated, Union, types.UnionType)


def explain(error: ValidationError, recipe: type[BaseModel]) -> LeadlineError:
    """Turn the first of pydantic's errors into one line.

    Args:
        error: The errors.
        recipe: The pydantic model that was validated.

    Returns:
        The error to raise; its message says what was given, what is allowed and what to do.
    """
    first = error.errors()[0]
    place, kind = [str(part) for part in first["loc"]], first["type"]
    owner, path = _walk(recipe, place if kind.startswith("union_tag") else place[:-1])
    if kind == "extra_forbidden":
        inner = [name for name in recipe.model_fields if _has(recipe, name, place[-1])]
        if inner and not path:
            names = " or ".join(f"{name}.{place[-1]}" for name in inner)
            return LeadlineError(f"unknown key of a recipe {place[-1]!r}; did you mean {names}?")
        return unknown_name(f"key of {'.'.join(path) or 'a recipe'}", place[-1], owner.model_fields)
    name = ".".join([*path, *place[-1:]]) or "the recipe"
    if kind == "missing" and isinstance(first["loc"][-1], int):  # a list that is too short
        length = len(get_args(owner.model_fields[path[-1]].annotation))
        return LeadlineError(f"{'.'.join(path)} is {list(first['input'])}; it must have {length} values")
    if kind == "missing":
        needed = [field for field, info in owner.model_fields.items() if info.is_required()]
        return LeadlineError(f"{name} is missing; {'.'.join(path) or 'every recipe'} needs {', '.join(needed)}")
    if kind == "union_tag_invalid":
        return unknown_name(f"{place[-1]}.name", first["ctx"]["tag"], _quoted(first["ctx"]["expected_tags"]))
    if kind == "union_tag_not_found":
        tags = sorted(tag for choice in _models(recipe.model_fields[place[-1]].annotation) for tag in _tags(choice))
        return LeadlineError(f"{place[-1]}.name is missing; allowed: {', '.join(tags)}")
    if kind == "literal_error":
        return unknown_name(name, first["input"], _quoted(first["ctx"]["expected"]))
    if kind in ("model_type", "model_attributes_type"):
        section = ".".join(_walk(recipe, place)[1])
        return LeadlineError(f"{section} is {first['input']!r}; it has keys of its own, write {section}.KEY=value")
    if kind == "string_type":
        return LeadlineError(f"{name} is {first['input']!r}; it must be text, put quotes around it")
    if kind == "value_error":
        return LeadlineError(f"{'.'.join(_walk(recipe, place)[1]) or 'recipe'}: {first['ctx']['error']}")
    message = first["msg"]
    if kind.startswith(("greater_than", "less_than")) and isinstance(bound := next(iter(first["ctx"].values())), float):
        message = re.sub(r"\S+$", f"{bound:g}", message)  # 1e-30 instead of thirty digits
    return LeadlineError(f"{name} is {first['input']!r}: {message[0].lower()}{message[1:]}")


def _walk(model: type[BaseModel], place: list[str]) -> tuple[type[BaseModel], list[str]]:
    """Find the section at ``place``, and its path without the tags that pydantic puts after a union's name."""
    path: list[str] = []
    choices: list[type[BaseModel]] = []
    for part in place:
        if part in model.model_fields:
            path.append(part)
            choices = _models(model.model_fields[part].annotation)
            model = choices[0] if len(choices) == 1 else model
        else:
            model = next((choice for choice in choices if part in _tags(choice)), model)
    return model, path


def _models(annotation: Any) -> list[type[BaseModel]]:
    """List the sections that a field may hold."""
    if get_origin(annotation) in _UNIONS:
        return [model for argument in get_args(annotation) for model in _models(argument)]
    return [annotation] if isinstance(annotation, type) and issubclass(annotation, BaseModel) else []


def _has(recipe: type[BaseModel], section: str, key: str) -> bool:
    """Return whether a section of the recipe has the key."""
    return any(key in model.model_fields for model in _models(recipe.model_fields[section].annotation))


def _tags(model: type[BaseModel]) -> list[str]:
    """List the values that ``name`` may have in a section."""
    annotation: Any = model.model_fields["name"].annotation if "name" in model.model_fields else None
    return list(get_args(annotation)) if get_origin(annotation) is Literal else []


def _quoted(text: str) -> list[str]:
    """List the parts of a text between single quotes."""
    return re.findall(r"'([^']*)'", text)
