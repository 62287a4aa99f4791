"""Names of models, with the configuration and settings of each. It loads without torch."""

from __future__ import annotations

from typing import Any, NamedTuple

from leadline.models.configs import BertConfig, GPT2Config, LlamaConfig, ModelConfig, TransformerXLConfig, ViTConfig


class NamedModel(NamedTuple):
    """A model that ``create_model`` builds by name."""

    config: type[ModelConfig]
    settings: dict[str, Any]  # its options, where they are not the defaults of the configuration
    description: str


MODELS: dict[str, NamedModel] = {
    "vit_tiny": NamedModel(ViTConfig, {"dim": 192, "heads": 3}, "Vision Transformer, 5.7 M parameters"),
    "vit_small": NamedModel(ViTConfig, {"dim": 384, "heads": 6}, "Vision Transformer, 22 M parameters"),
    "vit_base": NamedModel(ViTConfig, {"dim": 768, "heads": 12}, "Vision Transformer, 87 M parameters"),
    "vit_large": NamedModel(
        ViTConfig,
        {"dim": 1024, "heads": 16, "depth": 24},
        "Vision Transformer, 304 M parameters",
    ),
    "gpt2_small": NamedModel(GPT2Config, {"dim": 768, "heads": 12}, "GPT-2 decoder, 124 M parameters"),
    "gpt2_medium": NamedModel(GPT2Config, {"dim": 1024, "heads": 16, "depth": 24}, "GPT-2 decoder, 355 M parameters"),
    "bert_base": NamedModel(BertConfig, {"dim": 768, "heads": 12}, "BERT encoder, 109 M parameters"),
    "albert_base": NamedModel(
        BertConfig,
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
    "deit_tiny": NamedModel(
        ViTConfig,
        {"dim": 192, "heads": 3, "distillation": "head"},
        "DeiT with its second token, 5.9 M parameters",
    ),
    "deit_small": NamedModel(
        ViTConfig,
        {"dim": 384, "heads": 6, "distillation": "head"},
        "DeiT with its second token, 22 M parameters",
    ),
    "deit_base": NamedModel(
        ViTConfig,
        {"dim": 768, "heads": 12, "distillation": "head"},
        "DeiT with its second token, 87 M parameters",
    ),
    "llama": NamedModel(
        LlamaConfig,
        {"dim": 768, "heads": 12, "kv_heads": 4, "ffn": 2048},
        "LLaMA-style decoder, 125 M parameters",
    ),
    "transformer_xl_base": NamedModel(
        TransformerXLConfig, {}, "Transformer-XL decoder with a segment memory, 151 M parameters"
    ),
    "attention_only": NamedModel(
        ViTConfig,
        {"dim": 192, "heads": 3, "init": "xavier_fused", "norm": "none", "ffn": 0, "skip": False},
        "attention and nothing else, ViT-Tiny widths (HOP table 1)",
    ),
}


def list_models() -> list[str]:
    """List the names that ``create_model`` takes, in alphabetical order."""
    return sorted(MODELS)
