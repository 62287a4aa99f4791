"""Folders of transformers models with a cure in their config.json: recognising and loading them."""

from __future__ import annotations

import os
import shutil
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import nn

from leadline.curing.entry import install_cure
from leadline.curing.makes.huggingface.attention import KEY
from leadline.curing.makes.huggingface.install import forget
from leadline.curing.strengths import Strengths
from leadline.errors import LeadlineError, excerpt, need
from leadline.files import read_json
from leadline.models.base import CONFIG_FILE
from leadline.models.foreign.pretrained import check_description, load_pretrained
from leadline.models.io import model_folder, read_config

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".onnx", ".gguf", ".index.json")


def is_cured_folder(folder: str | os.PathLike[str]) -> bool:
    """Return whether a folder holds a cured transformers model: its config.json has a mapping under "leadline"."""
    try:
        return isinstance(read_json(Path(folder) / CONFIG_FILE).get(KEY), dict)
    except (OSError, ValueError, AttributeError):
        return False


def load_cured(folder: str | os.PathLike[str], **options: Any) -> nn.Module:
    """Load the cured transformers model that ``save_pretrained`` wrote, with its cure.

    Args:
        folder: Where it was saved.
        **options: Arguments of ``from_pretrained``, such as device_map. The dtype is the saved one unless given.

    Raises:
        LeadlineError: If the folder holds no cured model of transformers, or is damaged.
    """
    description = read_mapping(model_folder(folder))
    entry = description.get(KEY)
    if not isinstance(entry, dict):
        raise LeadlineError(f"{folder} holds no cured model of transformers; leadline.load takes any model")
    names = [field.name for field in fields(Strengths)]
    missing = [name for name in names if name not in entry]
    if missing:
        raise LeadlineError(f"the {KEY!r} entry of {folder}/{CONFIG_FILE} lacks {', '.join(missing)}; save it again")
    model = load_plain(Path(folder), description, entry.get("attn_implementation"), options)
    return install_cure(model, Strengths(**{name: entry[name] for name in names}))


def load_plain(
    folder: Path, description: dict[str, Any], attention: str | None = None, options: dict[str, Any] | None = None
) -> nn.Module:
    """Load the transformers model in ``folder`` without its cure.

    Args:
        folder: Where it was saved.
        description: The content of its config.json.
        attention: The attention function, unless ``options`` name one; None: what transformers chooses.
        options: Arguments of ``from_pretrained``.
    """
    names = description.get("architectures")
    if "model_type" not in description or not isinstance(names, list) or not names or not isinstance(names[0], str):
        raise LeadlineError(f"{folder / CONFIG_FILE} names no model_type and architectures; it is not transformers'")
    transformers = need("transformers", "hub")
    check_description(description, folder)
    kind: Any = getattr(transformers, names[0], None)
    if not hasattr(kind, "from_pretrained") or not hasattr(kind, "config_class"):
        raise LeadlineError(
            f"{folder} holds the class {excerpt(names[0])}, which this transformers does not have; update it"
        )
    plain, arguments = dict(description), {"dtype": "auto", **(options or {})}
    forget(plain)
    try:
        config = kind.config_class.from_dict(plain)
        config._attn_implementation = arguments.pop("attn_implementation", attention)
        return load_pretrained(kind, folder, config=config, **arguments)
    except LeadlineError:
        raise
    except Exception as error:  # transformers raises many kinds of errors for a damaged folder
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise LeadlineError(f"{folder} cannot be loaded: {first}") from error


def copy_small_files(source: Path, target: Path) -> None:
    """Copy what is no weights and is not in ``target`` yet, such as the tokenizer."""
    for file in source.iterdir():
        if file.is_file() and not file.name.endswith(_WEIGHTS) and not (target / file.name).exists():
            shutil.copy2(file, target / file.name)


def read_mapping(folder: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint, which must hold a mapping."""
    description = read_config(folder)
    if not isinstance(description, dict):
        raise LeadlineError(f"{folder / CONFIG_FILE} holds a {type(description).__name__}; a checkpoint's is a mapping")
    return description
