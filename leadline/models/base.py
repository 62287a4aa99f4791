"""``Model``, the base of our models: a configuration and saving; and the check of token ids."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import leadline
from leadline.errors import LeadlineError
from leadline.files import save_tensors, whole
from leadline.models.configs import ModelConfig
from leadline.nn import BlockConfig

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class Model(nn.Module):
    """Base of our models, which are thin compositions of the block. A subclass declares its ``Config``."""

    Config: ClassVar[type[ModelConfig]]

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        self.config = config

    @property
    def family(self) -> str:
        """The family of the model, such as "vit"; saved models have it in config.json."""
        return self.Config.family

    def save(self, folder: str | os.PathLike[str], weights: Mapping[str, Tensor] | None = None) -> None:
        """Write configuration and weights into a folder; ``leadline.load`` reads them back.

        A file is written under a temporary name and then renamed, so that none is ever incomplete.

        Args:
            folder: Where to write; created if it does not exist.
            weights: Weights to write in place of the model's own, such as averaged ones.
        """
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        description = {"leadline": leadline.__version__, "family": self.family, "config": asdict(self.config)}
        with whole(target / CONFIG_FILE) as new_config, whole(target / WEIGHTS_FILE) as new_weights:
            save_tensors(weights or self.state_dict(), new_weights)
            new_config.write_text(json.dumps(description, indent=2) + "\n")


def check_ids(ids: Tensor, mask: Tensor | None, past: int, limit: int | None, vocab_size: int) -> None:
    """Check the input of a text model.

    Args:
        ids: Token ids (B, N).
        mask: (B, past + N), True for a real token, or None.
        past: Number of cached tokens before the ids.
        limit: Number of positions that the model has. None: any.
        vocab_size: Size of the model's vocabulary.

    Raises:
        LeadlineError: The ids are not integers of that shape, lie outside the vocabulary, or are too many;
            or the mask does not fit them.
    """
    if ids.ndim != 2 or 0 in ids.shape or ids.is_floating_point():
        raise LeadlineError(f"ids are {ids.dtype} of shape {tuple(ids.shape)}; they must be integers (batch, tokens)")
    if ids.device.type == "cpu" and not torch.compiler.is_compiling():  # a GPU would have to be waited for
        least, most = (int(x) for x in torch.aminmax(ids))
        if least < 0 or most >= vocab_size:
            raise LeadlineError(f"ids go from {least} to {most}; this model has tokens 0 to {vocab_size - 1}")
    total = past + ids.shape[1]
    if limit is not None and total > limit:
        raise LeadlineError(f"{total} tokens are given; this model has positions for {limit} (max_tokens)")
    if mask is not None and (mask.dtype != torch.bool or mask.shape != (ids.shape[0], total)):
        raise LeadlineError(
            f"mask is {mask.dtype} of shape {tuple(mask.shape)}; "
            f"it must be boolean (True = a real token) of shape {(ids.shape[0], total)}"
        )
