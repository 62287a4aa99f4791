"""Our model with the weights of a Hugging Face or timm model."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from leadline.errors import LeadlineError
from leadline.models.base import Model
from leadline.models.foreign import huggingface, timm
from leadline.models.foreign.source import Source
from leadline.models.io import fill
from leadline.models.registry import FAMILIES, make_config
from leadline.nn import Strength

SOURCES: dict[tuple[str, str], Any] = {
    **{("transformers", name): reader for name, reader in huggingface.READERS.items()},
    **{("timm", name): reader for name, reader in timm.READERS.items()},
}


def convert(model: nn.Module, **overrides: Any) -> Model:
    """Our model with a copy of the weights of ``model``, on its device, in its dtype and mode.

    Takes transformers' GPT-2, LLaMA (bare or as language models), BertModel, AlbertModel, ViT, DeiT (bare or with
    their heads) and timm's Vision Transformers and distilled DeiTs. ``overrides`` are options of ``create_model``,
    such as attention="hopfield".
    Every weight must find its place by name and shape, but for the poolers of the bare encoders:
    ours return the last hidden state.
    """
    kind = type(model)
    reader = SOURCES.get((kind.__module__.partition(".")[0], kind.__name__))
    if reader is None:
        known = ", ".join(f"{library}'s {name}" for library, name in sorted(SOURCES))
        raise LeadlineError(f"cannot convert {kind.__module__}.{kind.__name__}; known are {known}")
    source = Source(model)
    family_name, settings = reader(model, source)
    family = FAMILIES[family_name]
    with torch.device("meta"):
        ours = family(make_config(family, {**settings, **overrides}))
    tensors = source.finish()
    for name, tensor in ours.state_dict().items():  # learnable strengths are ours alone
        if name.endswith((".alpha.parameter", ".alpha_prime.parameter", ".tau.parameter")):
            strength = cast(Strength, ours.get_submodule(name.rpartition(".")[0]))
            tensors[name] = torch.full(tensor.shape, strength.value, dtype=source.dtype, device=source.device)
    fill(ours, tensors, kind.__name__)
    return ours.train(model.training)
