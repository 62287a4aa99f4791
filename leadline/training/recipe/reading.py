"""``load_recipe`` and ``parse_recipe``: a recipe from YAML or plain values, every key checked; and its differences."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from leadline.errors import LeadlineError, unknown_name
from leadline.models.table import MODELS
from leadline.nn.options import check_options
from leadline.training.recipe.complaints import explain
from leadline.training.recipe.recipe import Recipe

_PLACES = ("out", "data.path", "data.cache")


class _Plain(yaml.SafeLoader):
    """A YAML loader that reads dates as text, since a folder may be named so, and refuses repeated keys."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        merge = "tag:yaml.org,2002:merge"  # keys merged by ``<<`` may be given again
        keys = [self.construct_object(key, deep=True) for key, _ in node.value if key.tag != merge]
        repeated = sorted({str(key) for key in keys if keys.count(key) > 1})
        if repeated:
            raise yaml.constructor.ConstructorError(problem=f"{', '.join(repeated)} comes twice{node.start_mark}")
        return super().construct_mapping(node, deep)


_Plain.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load_recipe(file: str | os.PathLike[str], settings: Iterable[str] = ()) -> Recipe:
    """Read a recipe from a YAML file.

    Args:
        file: The file.
        settings: Changes of single entries, such as "schedule.warmup=5" or "out=runs/try".

    Returns:
        The recipe, its keys and values checked.

    Raises:
        LeadlineError: The file is missing or no recipe, or a key or value is wrong; the message is one line.
    """
    path = Path(file)
    if path.is_dir():
        raise LeadlineError(f"{path} is a folder; give a recipe, such as recipes/smoke_digits.yaml")
    if not path.is_file():
        near = [recipe.name for recipe in path.parent.glob("*.yaml")] if path.parent.is_dir() else []
        if near:
            raise unknown_name(f"recipe in {path.parent}", path.name, near)
        raise LeadlineError(f"{path} does not exist; give a recipe, such as recipes/smoke_digits.yaml")
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), _Plain)
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise LeadlineError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise LeadlineError(f"{path} holds no mapping; a recipe has the sections model, data, length and more")
    for setting in settings:
        _apply(tree, setting)
    tree.setdefault("out", str(Path("runs") / path.stem))
    return parse_recipe(tree)


def parse_recipe(tree: Mapping[str, Any]) -> Recipe:
    """Make a recipe from plain values, such as those that YAML or JSON hold.

    Args:
        tree: The sections and entries of the recipe.

    Returns:
        The recipe, its keys and values checked.

    Raises:
        LeadlineError: A key or value is wrong; the message is one line about the first of them.
    """
    try:
        recipe = Recipe.model_validate(dict(tree))
    except ValidationError as error:
        raise explain(error, Recipe) from None
    _check_model(recipe)
    return recipe


def of_earlier(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a recipe stored by an earlier version, where the drop path could be a key of ``model``."""
    model, regularise = tree.get("model"), tree.get("regularise")
    if not isinstance(model, dict) or not isinstance(regularise, dict) or "drop_path" not in model:
        return dict(tree)
    rest = {name: value for name, value in model.items() if name != "drop_path"}
    return {**tree, "model": rest, "regularise": {**regularise, "drop_path": model["drop_path"]}}


def differences(one: Recipe, other: Recipe, free: Iterable[str]) -> list[tuple[str, Any, Any]]:
    """List the differences of two recipes.

    Args:
        one: A recipe.
        other: Another one.
        free: Keys and sections that may differ, such as "length" or "data.path".

    Returns:
        (key, value in ``one``, value in ``other``) for every other key whose values differ.
    """
    first, second = (dict(_flat(recipe.model_dump(mode="json"))) for recipe in (one, other))
    return [
        (key, first.get(key, "not set"), second.get(key, "not set"))
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key) and not any(f"{key}.".startswith(f"{name}.") for name in free)
    ]


def _flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _apply(tree: dict[str, Any], setting: str) -> None:
    """Put a setting "a.b=value" into the tree; the value is read as YAML."""
    key, equals, text = setting.partition("=")
    if not equals or not all(key.split(".")):
        raise LeadlineError(f"{setting!r} is no setting; write key=value, such as schedule.warmup=5 or out=runs/try")
    *sections, last = key.split(".")
    for section in sections:
        inner = tree.get(section)
        if not isinstance(inner, dict):
            inner = tree[section] = {} if inner is None else {"name": inner} if section in ("model", "data") else {}
        tree = inner
    if key in _PLACES and text[:1] not in ("", "'", '"', "~") and text != "null":
        tree[last] = text  # a folder's name, even where YAML would see a number
        return
    try:
        tree[last] = yaml.load(text, _Plain)
    except yaml.YAMLError as error:
        raise LeadlineError(f"the value of {key} is not YAML: {text!r}; put quotes around it") from error


def _check_model(recipe: Recipe) -> None:
    """Check the model's name, and the names, types and ranges of its options.

    Whether the options fit each other and the data is checked when the model is built.
    """
    if recipe.model.name not in MODELS:
        raise unknown_name("model", recipe.model.name, MODELS)
    config = MODELS[recipe.model.name].config
    allowed = [field.name for field in fields(config) if field.name != "drop_path"]  # a key of regularise
    for option in recipe.model.model_extra or {}:
        if option not in allowed:
            raise unknown_name(f"key of model, for {recipe.model.name},", option, allowed)
    check_options(config, recipe.model_options(), "model.")
