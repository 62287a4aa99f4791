"""Models: a file per family, each a thin composition of the block, and the weights of others."""

from leadline.models.base import Model
from leadline.models.bert import Bert, BertConfig
from leadline.models.foreign import convert
from leadline.models.gpt2 import GPT2, GPT2Config
from leadline.models.llama import Llama, LlamaConfig
from leadline.models.registry import MODELS, create_model, list_models
from leadline.models.transformer_xl import TransformerXL, TransformerXLConfig
from leadline.models.vit import ViT, ViTConfig

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
