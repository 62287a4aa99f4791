"""Loading our own models from the folders of ``Model.save`` and of training runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from leadline.errors import LeadlineError, unknown_name
from leadline.files import read_json
from leadline.models.base import CONFIG_FILE, WEIGHTS_FILE, Model
from leadline.models.checkpoints import MANIFEST, check, find_checkpoint, listed
from leadline.models.registry import FAMILIES, make_config


def load_model(folder: Path) -> Model:
    """Load one of our own models from the folder that ``Model.save`` wrote.

    Args:
        folder: The folder with the model itself, such as ``model_folder`` returns.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        LeadlineError: If the model is not ours, or a file is missing, damaged or unreadable.
    """
    description = _read_description(folder)
    if not isinstance(description["family"], str) or description["family"] not in FAMILIES:
        raise unknown_name(f"model family in {folder / CONFIG_FILE}", description["family"], FAMILIES)
    family = FAMILIES[description["family"]]
    with torch.device("meta"):
        model = family(make_config(family, description["config"]))
    weights = folder / WEIGHTS_FILE
    if not weights.is_file():
        raise LeadlineError(f"{weights} is missing; save the model again")
    try:
        tensors = load_file(weights)
    except (SafetensorError, OSError) as error:
        if not os.access(weights, os.R_OK):
            raise LeadlineError(f"{weights} cannot be read (no permission); have its owner permit it") from error
        raise LeadlineError(f"{weights} cannot be read ({error}); it is damaged or cut short, save it again") from error
    fill(model, tensors, str(weights))
    return model.eval()


def model_folder(folder: str | os.PathLike[str], which: Literal["best", "last"] = "best") -> Path:
    """Return the folder with the model: ``folder`` itself, or a checkpoint if it is the folder of a training run.

    Args:
        folder: The folder of a model, of a checkpoint or of a training run.
        which: Of a run, the "best" checkpoint by its evaluation, or the "last" one, which is also taken if none was
            evaluated. If the checkpoint has averaged weights, these are taken.

    Raises:
        LeadlineError: If there is no model in the folder, or its checkpoint is damaged.
    """
    source = Path(folder)
    if (source / CONFIG_FILE).is_file():
        if (source / MANIFEST).is_file():
            check(source)
        return source
    if not source.is_dir():
        raise LeadlineError(f"{source} is not a folder; give the folder of a model or of a run")
    saved = find_checkpoint(source, which)
    if saved is None:
        nothing = f"neither a model (it has no {CONFIG_FILE}) nor a checkpoint of a run"
        content = "damaged checkpoints only" if listed(source) else nothing
        raise LeadlineError(f"{source} holds {content}; give the folder of a model or of a run")
    if not (saved.folder / CONFIG_FILE).is_file():
        raise LeadlineError(f"{saved.folder} has no {CONFIG_FILE}: its model is not ours, load it where it was made")
    return averaged(saved.folder)


def averaged(folder: Path) -> Path:
    """Return the folder with the averaged weights of a checkpoint, or the checkpoint itself if it has none."""
    inside = folder / "ema"
    return inside if (inside / CONFIG_FILE).is_file() else folder


def fill(model: Model, tensors: dict[str, Tensor], origin: str) -> None:
    """Give a model that was built on the meta device its weights.

    Args:
        model: The model; its parameters are replaced.
        tensors: The weights by name; every name and shape must agree.
        origin: Where the weights come from, for the error message.
    """
    expected = {name: tensor.shape for name, tensor in model.state_dict().items()}
    wrong = [f"lacks {name}" for name in expected if name not in tensors]
    wrong += [f"has {name}, for which this model has no place" for name in tensors if name not in expected]
    wrong += [
        f"has {name} of shape {tuple(tensors[name].shape)} instead of {tuple(shape)}"
        for name, shape in expected.items()
        if name in tensors and tensors[name].shape != shape
    ]
    if wrong:
        more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
        raise LeadlineError(f"{origin} does not fit this {model.family} model: it {'; it '.join(wrong[:3])}{more}")
    model.load_state_dict(tensors, assign=True)


def read_config(folder: Path) -> Any:
    """Return the content of the config.json of a model, ours or that of another library."""
    file = folder / CONFIG_FILE
    try:
        return read_json(file)
    except OSError as error:
        raise LeadlineError(f"{file} cannot be read ({error.strerror}); have its owner permit it") from error
    except ValueError as error:
        raise LeadlineError(f"{file} is not JSON ({error}); it is damaged, save the model again") from error


def _read_description(folder: Path) -> dict[str, Any]:
    """The content of our config.json: the version of Leadline, the family and its configuration."""
    description = read_config(folder)
    if not isinstance(description, dict) or not {"leadline", "family", "config"} <= description.keys():
        raise LeadlineError(
            f"{folder / CONFIG_FILE} is not Leadline's; load the model with the library that wrote it and call "
            "leadline.convert"
        )
    return description
