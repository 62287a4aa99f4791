"""Reading back what ``Model.save`` wrote, by itself or as a checkpoint of a run."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from leadline.errors import LeadlineError, unknown_name
from leadline.models.base import CONFIG_FILE, WEIGHTS_FILE, Model
from leadline.models.checkpoints import MANIFEST, check, find_checkpoint, listed
from leadline.models.registry import FAMILIES, make_config


def load(folder: str | os.PathLike[str]) -> nn.Module:
    """The model saved in ``folder``, ours or a cured one of transformers, on the CPU, in evaluation mode.

    ``folder`` may also be that of a training run, see ``model_folder``.
    """
    source = model_folder(folder)
    description = _read_description(source)
    if isinstance(description["leadline"], dict):  # a cured model of transformers; ours has its version there
        from leadline.curing import load_cured

        return load_cured(source).eval()
    if not isinstance(description["family"], str) or description["family"] not in FAMILIES:
        raise unknown_name(f"model family in {source / CONFIG_FILE}", description["family"], FAMILIES)
    family = FAMILIES[description["family"]]
    with torch.device("meta"):
        model = family(make_config(family, description["config"]))
    weights = source / WEIGHTS_FILE
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
    """Where the model is: ``folder`` itself, or a checkpoint of the run whose folder it is.

    Of a run that is the best checkpoint by its evaluation, the last one where none was evaluated, and there the
    averaged weights if the run has them.
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
        found = "damaged checkpoints only" if listed(source) else nothing
        raise LeadlineError(f"{source} holds {found}; give the folder of a model or of a run")
    if not (saved.folder / CONFIG_FILE).is_file():
        raise LeadlineError(f"{saved.folder} has no {CONFIG_FILE}: its model is not ours, load it where it was made")
    return averaged(saved.folder)


def averaged(folder: Path) -> Path:
    """The averaged weights of a checkpoint where it has them, else the checkpoint itself."""
    inside = folder / "ema"
    return inside if (inside / CONFIG_FILE).is_file() else folder


def fill(model: Model, tensors: dict[str, Tensor], origin: str) -> None:
    """Give a model built on the meta device its weights; every name and shape must agree."""
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


def _read_description(folder: Path) -> dict:
    file = folder / CONFIG_FILE
    try:
        description = json.loads(file.read_text())
    except ValueError as error:
        raise LeadlineError(f"{file} is not JSON ({error}); it is damaged, save the model again") from error
    cured = isinstance(description, dict) and isinstance(description.get("leadline"), dict)
    if not cured and not (isinstance(description, dict) and {"leadline", "family", "config"} <= description.keys()):
        raise LeadlineError(
            f"{file} is not Leadline's; load the model with the library that wrote it and call leadline.convert"
        )
    return description
