"""Models and tokenizers from folders of transformers: their code is never run, and no weight may be missing."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from leadline.errors import LeadlineError, excerpt, need

_MOST = 4  # weights that a message names
_DEEPEST = 64  # levels of a config.json


def check_description(description: dict[str, Any], folder: Path) -> None:
    """Check that a config.json asks for no code from elsewhere.

    Args:
        description: Its content.
        folder: Where it is, for the error message.

    Raises:
        LeadlineError: Its model is defined by Python files beside it, or its attention by a package of the hub.
    """
    types = need("transformers", "hub").models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    kind = description.get("model_type")
    if "auto_map" in description and (not isinstance(kind, str) or kind not in types):
        raise LeadlineError(
            f"{folder} needs Python code of its own (auto_map), which Leadline never runs; convert it to a model "
            "that transformers has"
        )
    for name, value in _entries(description):
        if name.endswith("_implementation") and "/" in str(value):
            raise LeadlineError(
                f"{folder} asks for code of the hub ({name} is {excerpt(value)}), which Leadline never loads; "
                f"remove {name} from its config.json"
            )


def _entries(value: Any, level: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a config.json, also of mappings inside it."""
    if level > _DEEPEST:
        raise LeadlineError(f"a config.json has more than {_DEEPEST} levels; it is damaged, save the model again")
    if isinstance(value, dict):
        yield from value.items()
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _entries(item, level + 1)


def load_pretrained(kind: Any, folder: Path, **options: Any) -> Any:
    """Load a model from a folder by a class of transformers, with every weight.

    Weights that a bare model has no place for are left out where another class of its type has one: they are of a head.
    Weights that a bare model adds to the saved class, such as a pooler, are drawn at random.

    Args:
        kind: The class, such as transformers.AutoModel.
        folder: The folder.
        **options: Further arguments of ``from_pretrained``.

    Raises:
        LeadlineError: A weight is missing, has no place or another shape; the message names it.
    """
    with _quiet():
        model, report = kind.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # they are reported below
            **options,
        )
    missing, unexpected = set(report["missing_keys"]), set(report["unexpected_keys"])
    if missing and _base(model) is model:
        saved = _weights_of(_saved_class(model), model.config)
        missing = {name for name in missing if name in saved and not name.startswith("pooler.")}
    for other in _classes(model) if unexpected else ():
        unexpected -= {name for name in unexpected if _bare(name, model) in _weights_of(other, model.config)}
        if not unexpected:
            break
    shapes = [
        f"has {name} of shape {tuple(given)} instead of {tuple(wanted)}"
        for name, given, wanted in sorted(report["mismatched_keys"])
    ]
    problems = [*_named("lacks", missing), *_named("has no place for", unexpected), *shapes[:_MOST]]
    problems += [excerpt(message, 200) for message in report["error_msgs"][:1]]
    if problems:
        raise LeadlineError(
            f"the weights in {folder} do not fit a {type(model).__name__}: it {'; it '.join(problems)}; "
            "they are damaged or of another model, save them again"
        )
    return model


def load_tokenizer_of(folder: str | Path, offline: bool = True) -> Any:
    """Load a tokenizer of transformers, without code of its own.

    Args:
        folder: The folder, or the name of one on the hub.
        offline: Whether to look on this machine alone.
    """
    tokenizers = need("transformers", "hub").AutoTokenizer
    return tokenizers.from_pretrained(folder, local_files_only=offline, trust_remote_code=False)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the warnings of transformers about weights, which are errors here."""
    logging = need("transformers", "hub").logging
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _named(verb: str, names: Iterable[str]) -> list[str]:
    ordered = sorted(names)
    more = f" and {len(ordered) - _MOST} more" if len(ordered) > _MOST else ""
    return [f"{verb} {', '.join(ordered[:_MOST])}{more}"] if ordered else []


def _base(model: Any) -> Any:
    return getattr(model, model.base_model_prefix, model)


def _saved_class(model: Any) -> Any:
    """Return the class by which the folder was saved, as its configuration says; that of the model if it is unknown."""
    names = model.config.architectures
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    return next((kind for kind in _of_type(model) if kind.__name__ == name), type(model))


def _of_type(model: Any) -> list[Any]:
    """List the classes of transformers for a model's type."""
    classes = vars(sys.modules[type(model).__module__]).values()
    config = type(model.config)
    return [kind for kind in classes if isinstance(kind, type) and getattr(kind, "config_class", None) is config]


def _classes(model: Any) -> list[Any]:
    """List the classes for a model's type, the one by which it was saved first."""
    first = _saved_class(model)
    return [first, *(kind for kind in _of_type(model) if kind is not first)]


def _weights_of(kind: Any, config: Any) -> set[str]:
    """Return the names of the weights of a class, without the prefix of the base model."""
    try:
        with torch.device("meta"):
            model = kind(config)
    except Exception:  # an abstract class, or one for other options of the configuration
        return set()
    return {_bare(name, model) for name in model.state_dict()}


def _bare(name: str, model: Any) -> str:
    return name.removeprefix(f"{model.base_model_prefix}.")
