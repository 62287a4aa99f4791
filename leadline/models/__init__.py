"""Models: a file per family, each a thin composition of the block, and the weights of others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leadline.lazy import lazy

__all__ = [
    "GPT2",
    "MODELS",
    "Bert",
    "BertConfig",
    "GPT2Config",
    "Llama",
    "LlamaConfig",
    "Model",
    "TransformerXL",
    "TransformerXLConfig",
    "ViT",
    "ViTConfig",
    "convert",
    "create_model",
    "list_models",
]

if TYPE_CHECKING:
    from leadline.models.base import Model
    from leadline.models.bert import Bert
    from leadline.models.configs import BertConfig, GPT2Config, LlamaConfig, TransformerXLConfig, ViTConfig
    from leadline.models.foreign import convert
    from leadline.models.gpt2 import GPT2
    from leadline.models.llama import Llama
    from leadline.models.registry import create_model
    from leadline.models.table import MODELS, list_models
    from leadline.models.transformer_xl import TransformerXL
    from leadline.models.vit import ViT

# Lazy, since the configurations and the table of names load without torch.
__getattr__, __dir__ = lazy(
    __name__,
    {
        "GPT2": "leadline.models.gpt2",
        "MODELS": "leadline.models.table",
        "Bert": "leadline.models.bert",
        "BertConfig": "leadline.models.configs",
        "GPT2Config": "leadline.models.configs",
        "Llama": "leadline.models.llama",
        "LlamaConfig": "leadline.models.configs",
        "Model": "leadline.models.base",
        "TransformerXL": "leadline.models.transformer_xl",
        "TransformerXLConfig": "leadline.models.configs",
        "ViT": "leadline.models.vit",
        "ViTConfig": "leadline.models.configs",
        "convert": "leadline.models.foreign",
        "create_model": "leadline.models.registry",
        "list_models": "leadline.models.table",
    },
)
