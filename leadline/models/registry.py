"""Models by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from leadline.errors import unknown_name
from leadline.models.base import Model
from leadline.models.bert import Bert
from leadline.models.gpt2 import GPT2
from leadline.models.llama import Llama
from leadline.models.transformer_xl import TransformerXL
from leadline.models.vit import ViT

FAMILIES: dict[str, type[Model]] = {family.family: family for family in (ViT, GPT2, Llama, Bert, TransformerXL)}

_NO_MORE_THAN_ATTENTION = {"norm": "none", "ffn": 0, "skip": False}

# name: (family, its settings, what it is)
MODELS: dict[str, tuple[type[Model], dict[str, Any], str]] = {
    "vit_tiny": (ViT, {"dim": 192, "heads": 3}, "Vision Transformer, 5.7 M parameters"),
    "vit_small": (ViT, {"dim": 384, "heads": 6}, "Vision Transformer, 22 M parameters"),
    "vit_base": (ViT, {"dim": 768, "heads": 12}, "Vision Transformer, 87 M parameters"),
    "vit_large": (ViT, {"dim": 1024, "heads": 16, "depth": 24}, "Vision Transformer, 304 M parameters"),
    "gpt2_small": (GPT2, {"dim": 768, "heads": 12}, "GPT-2 decoder, 124 M parameters"),
    "gpt2_medium": (GPT2, {"dim": 1024, "heads": 16, "depth": 24}, "GPT-2 decoder, 355 M parameters"),
    "bert_base": (Bert, {"dim": 768, "heads": 12}, "BERT encoder, 109 M parameters"),
    "albert_base": (
        Bert,
        {
            "dim": 768,
            "heads": 12,
            "vocab_size": 30000,
            "embedding_dim": 128,
            "shared_layers": True,
            "mlp": "gelu_tanh",
        },
        "ALBERT encoder: one block, 12 times, 11 M parameters",
    ),
    "deit_tiny": (
        ViT,
        {"dim": 192, "heads": 3, "distillation": "head"},
        "DeiT with its second token, 5.9 M parameters",
    ),
    "deit_small": (
        ViT,
        {"dim": 384, "heads": 6, "distillation": "head"},
        "DeiT with its second token, 22 M parameters",
    ),
    "deit_base": (
        ViT,
        {"dim": 768, "heads": 12, "distillation": "head"},
        "DeiT with its second token, 87 M parameters",
    ),
    "llama": (
        Llama,
        {"dim": 768, "heads": 12, "kv_heads": 4, "ffn": 2048},
        "LLaMA-style decoder, 125 M parameters",
    ),
    "transformer_xl_base": (TransformerXL, {}, "Transformer-XL decoder with a segment memory, 151 M parameters"),
    "attention_only": (
        ViT,
        {"dim": 192, "heads": 3, "init": "xavier_fused", **_NO_MORE_THAN_ATTENTION},
        "attention and nothing else, ViT-Tiny widths (HOP table 1)",
    ),
}


def list_models() -> list[str]:
    """The names that ``create_model`` knows."""
    return sorted(MODELS)


def create_model(name: str, **overrides: Any) -> Model:
    """Build a model by name, freshly initialised.

    >>> create_model("vit_tiny", attention="hopfield", norm="post", de_escalation=1., depth=80)
    """
    if name not in MODELS:
        raise unknown_name("model", name, MODELS)
    family, settings, _ = MODELS[name]
    return family(make_config(family, {**settings, **overrides}))


def make_config(family: type[Model], settings: dict[str, Any]) -> Any:
    """The family's configuration; an option it does not have is refused by name."""
    allowed = [field.name for field in fields(family.Config)]
    for option in settings:
        if option not in allowed:
            raise unknown_name(f"option of {family.family} models", option, allowed)
    return family.Config(**settings)
