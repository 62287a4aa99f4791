"""Where the weights and options of transformers' models go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from leadline.errors import LeadlineError
from leadline.models.foreign.source import Source

Reader = Callable[[nn.Module, Source], tuple[str, dict[str, Any]]]

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def gpt2(model: Any, source: Source) -> tuple[str, dict[str, Any]]:
    c = model.config
    source.require(
        scale_attn_weights=(c.scale_attn_weights, True),
        scale_attn_by_inverse_layer_idx=(c.scale_attn_by_inverse_layer_idx, False),
        add_cross_attention=(c.add_cross_attention, False),
    )
    with_head = "lm_head.weight" in source.left
    base = "transformer." if with_head else ""
    source.move(f"{base}wte.weight", "token.weight")
    source.move(f"{base}wpe.weight", "positions.table.weight")
    tied = not with_head or c.tie_word_embeddings
    if with_head and tied:
        source.drop("lm_head.")
    elif with_head:
        source.move("lm_head.weight", "head.weight")
    for i in range(c.n_layer):
        old, new = f"{base}h.{i}", f"blocks.{i}"
        source.move_linear(f"{old}.ln_1", f"{new}.norm1")
        source.move_linear(f"{old}.attn.c_attn", f"{new}.attention.qkv", change=torch.t)
        source.move_linear(f"{old}.attn.c_proj", f"{new}.attention.proj", change=torch.t)
        source.move_linear(f"{old}.ln_2", f"{new}.norm2")
        source.move_linear(f"{old}.mlp.c_fc", f"{new}.mlp.fc1", change=torch.t)
        source.move_linear(f"{old}.mlp.c_proj", f"{new}.mlp.fc2", change=torch.t)
    source.move_linear(f"{base}ln_f", "norm")
    return "gpt2", {
        "depth": c.n_layer,
        "dim": c.n_embd,
        "heads": c.n_head,
        "ffn": 4 * c.n_embd if c.n_inner is None else c.n_inner,
        "mlp": _activation(c.activation_function),
        "vocab_size": c.vocab_size,
        "max_tokens": c.n_positions,
        "norm_eps": c.layer_norm_epsilon,
        "dropout": c.resid_pdrop,
        "attention_dropout": c.attn_pdrop,
        "embedding_dropout": c.embd_pdrop,
        "tied": tied,
    }


def bert(model: Any, source: Source) -> tuple[str, dict[str, Any]]:
    c = model.config
    source.require(is_decoder=(c.is_decoder, False), add_cross_attention=(c.add_cross_attention, False))
    source.drop("pooler.")
    source.move("embeddings.word_embeddings.weight", "token.weight")
    source.move("embeddings.position_embeddings.weight", "positions.table.weight")
    source.move("embeddings.token_type_embeddings.weight", "token_type.weight")
    source.move_linear("embeddings.LayerNorm", "embedding_norm")
    for i in range(c.num_hidden_layers):
        old, new = f"encoder.layer.{i}", f"blocks.{i}"
        qkv = [f"{old}.attention.self.{part}" for part in ("query", "key", "value")]
        source.move_linear(qkv, f"{new}.attention.qkv")
        source.move_linear(f"{old}.attention.output.dense", f"{new}.attention.proj")
        source.move_linear(f"{old}.attention.output.LayerNorm", f"{new}.norm1")
        source.move_linear(f"{old}.intermediate.dense", f"{new}.mlp.fc1")
        source.move_linear(f"{old}.output.dense", f"{new}.mlp.fc2")
        source.move_linear(f"{old}.output.LayerNorm", f"{new}.norm2")
    return "bert", {
        "depth": c.num_hidden_layers,
        "dim": c.hidden_size,
        "heads": c.num_attention_heads,
        "ffn": c.intermediate_size,
        "mlp": _activation(c.hidden_act),
        "vocab_size": c.vocab_size,
        "max_tokens": c.max_position_embeddings,
        "token_types": c.type_vocab_size,
        "norm_eps": c.layer_norm_eps,
        "dropout": c.hidden_dropout_prob,
        "attention_dropout": c.attention_probs_dropout_prob,
        "embedding_dropout": c.hidden_dropout_prob,
    }


def vit(model: Any, source: Source) -> tuple[str, dict[str, Any]]:
    c = model.config
    base = "vit." if any(name.startswith("vit.") for name in source.left) else ""
    source.drop(f"{base}pooler.")
    source.move(f"{base}embeddings.cls_token", "class_token")
    source.move(f"{base}embeddings.position_embeddings", "positions.table.weight", change=lambda table: table[0])
    source.move_linear(f"{base}embeddings.patch_embeddings.projection", "patch")
    for i in range(c.num_hidden_layers):
        old, new = f"{base}layers.{i}", f"blocks.{i}"
        source.move_linear(f"{old}.layernorm_before", f"{new}.norm1")
        qkv = [f"{old}.attention.{part}_proj" for part in "qkv"]
        source.move_linear(qkv, f"{new}.attention.qkv", bias=c.qkv_bias)
        source.move_linear(f"{old}.attention.o_proj", f"{new}.attention.proj")
        source.move_linear(f"{old}.layernorm_after", f"{new}.norm2")
        source.move_linear(f"{old}.mlp.fc1", f"{new}.mlp.fc1")
        source.move_linear(f"{old}.mlp.fc2", f"{new}.mlp.fc2")
    source.move_linear(f"{base}layernorm", "norm")
    with_head = "classifier.weight" in source.left
    if with_head:
        source.move_linear("classifier", "head")
    return "vit", {
        "depth": c.num_hidden_layers,
        "dim": c.hidden_size,
        "heads": c.num_attention_heads,
        "ffn": c.intermediate_size,
        "mlp": _activation(c.hidden_act),
        "image_size": c.image_size,
        "patch_size": c.patch_size,
        "channels": c.num_channels,
        "num_classes": c.num_labels if with_head else 0,
        "qkv_bias": c.qkv_bias,
        "norm_eps": c.layer_norm_eps,
        "dropout": c.hidden_dropout_prob,
        "attention_dropout": c.attention_probs_dropout_prob,
        "embedding_dropout": c.hidden_dropout_prob,
    }


READERS: dict[str, Reader] = {
    "GPT2Model": gpt2,
    "GPT2LMHeadModel": gpt2,
    "BertModel": bert,
    "ViTModel": vit,
    "ViTForImageClassification": vit,
}


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise LeadlineError(f"the activation is {name!r}; {', '.join(sorted(_ACTIVATIONS))} can be converted")
    return _ACTIVATIONS[name]
