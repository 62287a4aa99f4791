"""``leadline.load``: any model that Leadline saved, from its folder or that of a training run."""

from __future__ import annotations

import os

from torch import nn

from leadline.curing import is_cured_folder, load_cured
from leadline.models.io import load_model, model_folder


def load(folder: str | os.PathLike[str]) -> nn.Module:
    """Load a model: one of ours, or a cured model of transformers.

    Args:
        folder: The folder that ``model.save`` or the ``save_pretrained`` of a cured model wrote, that of a checkpoint,
            or that of a training run. Of a run the best checkpoint by its evaluation is taken, with its averaged
            weights where it has them. Nothing is written.

    Returns:
        The model on the CPU, in evaluation mode.

    Raises:
        LeadlineError: If the folder holds no such model, or is damaged.

    Example:
        >>> model = load("runs/first")
    """
    source = model_folder(folder)
    return load_cured(source).eval() if is_cured_folder(source) else load_model(source)
