"""``convert``: our model with the weights of a Hugging Face or timm model."""

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
    """Build our model with a copy of the weights of a model of transformers or timm.

    From transformers it takes GPT-2 and LLaMA (bare or as language models), BertModel, AlbertModel, ViT and DeiT (bare
    or with their heads); from timm Vision Transformers and distilled DeiTs. Every weight must have a place in our
    model, by name and shape. The poolers of bare encoders are left out: ours return the last hidden state.

    Args:
        model: The model to convert; it is not changed.
        **overrides: Options of ``create_model``, such as ``attention="hopfield"``.

    Returns:
        Our model, on the device and in the dtype and mode of ``model``.

    Raises:
        LeadlineError: The class of the model is not one of those above, or one of its options or weights has no
            counterpart here.
    """
    kind = type(model)
    reader = SOURCES.get((kind.__module__.partition(".")[0], kind.__name__))
    if reader is None:
        known = ", ".join(f"{library}'s {name}" for library, name in sorted(SOURCES))
        raise LeadlineError(f"{kind.__module__}.{kind.__name__} cannot be converted; allowed: {known}")
    source = Source(model)
    family_name, settings = reader(model, source)
    family = FAMILIES[family_name]
    with torch.device("meta"):
        ours = family(make_config(family, {**settings, **overrides}))
    tensors = source.finish()
    for name, tensor in ours.state_dict().items():  # learnable strengths, which the foreign model does not have
        if name.endswith((".alpha.parameter", ".alpha_prime.parameter", ".tau.parameter")):
            strength = cast(Strength, ours.get_submodule(name.rpartition(".")[0]))
            tensors[name] = torch.full(tensor.shape, strength.value, dtype=source.dtype, device=source.device)
    fill(ours, tensors, kind.__name__)
    return ours.train(model.training)
