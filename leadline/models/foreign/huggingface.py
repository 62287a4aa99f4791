"""Readers of transformers' models: which weight and option becomes which of ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from leadline.errors import LeadlineError
from leadline.models.foreign.source import Source

# A reader moves the weights of a model and returns the name of our family and its options.
Reader = Callable[[nn.Module, Source], tuple[str, dict[str, Any]]]

_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def gpt2(model: Any, source: Source) -> tuple[str, dict[str, Any]]:
    """Read GPT2Model or GPT2LMHeadModel."""
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
    """Read BertModel."""
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
    return "bert", _encoder(c)


def albert(model: Any, source: Source) -> tuple[str, dict[str, Any]]:
    """Read AlbertModel."""
    c = model.config
    source.require(num_hidden_groups=(c.num_hidden_groups, 1), inner_group_num=(c.inner_group_num, 1))
    source.drop("pooler.")
    source.move("embeddings.word_embeddings.weight", "token.weight")
    source.move("embeddings.position_embeddings.weight", "positions.table.weight")
    source.move("embeddings.token_type_embeddings.weight", "token_type.weight")
    source.move_linear("embeddings.LayerNorm", "embedding_norm")
    source.move_linear("encoder.embedding_hidden_mapping_in", "widen")
    old, new = "encoder.albert_layer_groups.0.albert_layers.0", "blocks.0"
    source.move_linear([f"{old}.attention.{part}" for part in ("query", "key", "value")], f"{new}.attention.qkv")
    source.move_linear(f"{old}.attention.dense", f"{new}.attention.proj")
    source.move_linear(f"{old}.attention.LayerNorm", f"{new}.norm1")
    source.move_linear(f"{old}.ffn", f"{new}.mlp.fc1")
    source.move_linear(f"{old}.ffn_output", f"{new}.mlp.fc2")
    source.move_linear(f"{old}.full_layer_layer_norm", f"{new}.norm2")
    return "bert", {**_encoder(c), "shared_layers": True, "embedding_dim": c.embedding_size}


def llama(model: Any, source: Source) -> tuple[str, dict[str, Any]]:
    """Read LlamaModel or LlamaForCausalLM."""
    c = model.config
    source.require(
        hidden_act=(c.hidden_act, "silu"),
        mlp_bias=(c.mlp_bias, c.attention_bias),
        pretraining_tp=(c.pretraining_tp, 1),
    )
    with_head = "lm_head.weight" in source.left
    base = "model." if with_head else ""
    source.move(f"{base}embed_tokens.weight", "token.weight")
    tied = not with_head or c.tie_word_embeddings
    if with_head and tied:
        source.drop("lm_head.")
    elif with_head:
        source.move("lm_head.weight", "head.weight")
    for i in range(c.num_hidden_layers):
        old, new, bias = f"{base}layers.{i}", f"blocks.{i}", c.attention_bias
        source.move(f"{old}.input_layernorm.weight", f"{new}.norm1.weight")
        source.move_linear([f"{old}.self_attn.{part}_proj" for part in "qkv"], f"{new}.attention.qkv", bias)
        source.move_linear(f"{old}.self_attn.o_proj", f"{new}.attention.proj", bias)
        source.move(f"{old}.post_attention_layernorm.weight", f"{new}.norm2.weight")
        source.move_linear(f"{old}.mlp.gate_proj", f"{new}.mlp.gate", bias)
        source.move_linear(f"{old}.mlp.up_proj", f"{new}.mlp.fc1", bias)
        source.move_linear(f"{old}.mlp.down_proj", f"{new}.mlp.fc2", bias)
    source.move(f"{base}norm.weight", "norm.weight")
    return "llama", {
        "depth": c.num_hidden_layers,
        "dim": c.hidden_size,
        "heads": c.num_attention_heads,
        "kv_heads": c.num_key_value_heads,
        "head_dim": c.head_dim,
        "ffn": c.intermediate_size,
        "vocab_size": c.vocab_size,
        "max_tokens": c.max_position_embeddings,
        "rope": {name: value for name, value in c.rope_parameters.items() if value is not None},
        "norm_eps": c.rms_norm_eps,
        "qkv_bias": c.attention_bias,
        "bias": c.attention_bias,
        "attention_dropout": c.attention_dropout,
        "tied": tied,
    }


def vit(model: Any, source: Source) -> tuple[str, dict[str, Any]]:
    """Read ViT; or DeiT, which has a distillation token and in some classes a head for it."""
    c = model.config
    base = next((f"{name}." for name in ("vit", "deit") if f"{name}.embeddings.cls_token" in source.left), "")
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
    distillation = "none"
    if f"{base}embeddings.distillation_token" in source.left:
        distillation = "token"
        source.move(f"{base}embeddings.distillation_token", "distillation_token")
    if "distillation_classifier.weight" in source.left:
        distillation = "head"
        source.move_linear("distillation_classifier", "distillation_head")
    heads = [name for name in ("classifier", "cls_classifier") if f"{name}.weight" in source.left]
    for name in heads:
        source.move_linear(name, "head")
    return "vit", {
        "depth": c.num_hidden_layers,
        "dim": c.hidden_size,
        "heads": c.num_attention_heads,
        "ffn": c.intermediate_size,
        "mlp": _activation(c.hidden_act),
        "image_size": c.image_size,
        "patch_size": c.patch_size,
        "channels": c.num_channels,
        "num_classes": c.num_labels if heads else 0,
        "distillation": distillation,
        "qkv_bias": c.qkv_bias,
        "norm_eps": c.layer_norm_eps,
        "dropout": c.hidden_dropout_prob,
        "attention_dropout": c.attention_probs_dropout_prob,
        "embedding_dropout": c.hidden_dropout_prob,
    }


READERS: dict[str, Reader] = {
    "GPT2Model": gpt2,
    "GPT2LMHeadModel": gpt2,
    "LlamaModel": llama,
    "LlamaForCausalLM": llama,
    "BertModel": bert,
    "AlbertModel": albert,
    "ViTModel": vit,
    "ViTForImageClassification": vit,
    "DeiTModel": vit,
    "DeiTForImageClassification": vit,
    "DeiTForImageClassificationWithTeacher": vit,
}


def _encoder(c: Any) -> dict[str, Any]:
    """Read the options that BERT and ALBERT have under the same names."""
    return {
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


def _activation(name: str) -> str:
    if name not in _ACTIVATIONS:
        raise LeadlineError(f"the activation is {name!r}; {', '.join(sorted(_ACTIVATIONS))} can be converted")
    return _ACTIVATIONS[name]
