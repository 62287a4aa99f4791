"""Tiny configurations of transformers' models: the class's defaults, shrunk by the names of their fields."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

WIDTH, HEADS, KV_HEADS, HEAD, DEPTH, VOCAB, POSITIONS, IMAGE, PATCH = 32, 4, 2, 8, 3, 128, 64, 32, 8

# Fields by name; a pattern must match the whole name. The first match decides.
_NUMBERS: list[tuple[str, int]] = [
    (r"hidden_size|d_model|n_embd|dim|embed_dim|emb_dim|embedding_dim|embedding_size|hidden_dim|width", WIDTH),
    (r"(vision|text|decoder|encoder|attention|visual|output|pooler|mask_feature|out)_hidden_(size|dim)", WIDTH),
    (r"projection_dim|proj_dim|out_hidden_size|pooler_output_size|rnn_hidden_size|d_embed|word_embed_proj_dim", WIDTH),
    (
        r"num_key_value_heads|num_kv_heads|attention_num_kv_heads|swa_num_key_value_heads|.*_num_key_value_heads",
        KV_HEADS,
    ),
    (
        r"(.*_)?num_(attention_)?heads|n_heads?|(encoder|decoder)_(self_|cross_)?attention_heads|.*_attention_heads",
        HEADS,
    ),
    (r"head_dim|global_head_dim|attention_head_dim|d_head|d_kv|dim_head|swa_head_dim|index_head_dim|v_head_dim", HEAD),
    (r"qk_rope_head_dim|qk_nope_head_dim|kv_channels|swa_v_head_dim", HEAD),
    (r"qk_head_dim|q_lora_rank|kv_lora_rank|o_lora_rank", 2 * HEAD),
    (
        r"(.*_)?num_hidden_layers|num_layers|n_layers?|(encoder|decoder)_layers|num_(encoder|decoder)_layers|depth",
        DEPTH,
    ),
    (r"num_layers_per_stack|num_blocks|text_encoder_layers|speech_encoder_layers|t2u_(en|de)coder_layers", DEPTH),
    (r"moe_intermediate_size|shared_expert_intermediate_size|shared_intermediate_size", 16),
    (r"(.*_)?intermediate_size|(.*_)?ffn_dim|d_ff|d_inner|dff|dim_ff|n_inner|ffn_hidden_size|mlp_dim|feature_size", 48),
    (r"dim_feedforward|(.*_)?feedforward_dim|ffn_embed_dim|(.*_)?linear_units", 48),
    (r"(.*_)?vocab_size|vocab_size_per_layer_input", VOCAB),
    (r"(.*_)?max_position_embeddings|n_positions|max_seq_len|n_ctx|max_(source|target)_positions", POSITIONS),
    (r"model_max_length|max_sequence_length|seq_length|context_length", POSITIONS),
    (r"image_size|input_size|img_size|pretrain_image_size", IMAGE),
    (r"patch_size|patch_stride", PATCH),
    (r"num_(local_|routed_)?experts|n_routed_experts|moe_num_experts|num_experts_total", 4),
    (r"num_experts_per_(tok|token)|moe_(topk|k|top_k)|top_k_experts|num_selected_experts", 2),
    (r"n_group|topk_group|n_shared_experts|num_shared_experts|moe_num_shared_experts|num_expert_group", 1),
    (r"first_k_dense_replace|moe_layer_start_index|num_dense_layers", 1),
    (r"sliding_window|local_attention|attention_chunk_size|sliding_window_size|index_topk", 16),
    (
        r"conv_dim|codevector_dim|proj_codevector_dim|classifier_proj_size|xvector_output_dim|hidden_size_per_layer_input",
        16,
    ),
    (r"num_conv_pos_embeddings|num_conv_pos_embedding_groups", 4),
    (r"num_queries|num_query_tokens|num_denoising|latent_query_num", 8),
    (r"linear_num_key_heads|linear_num_value_heads", 4),
    (
        r"linear_key_head_dim|linear_value_head_dim|mamba_d_state|state_size|ssm_state_size|mamba_d_head|mamba_headdim",
        8,
    ),
    (r"mamba_n_heads|mamba_num_heads", 8),
    (r"mamba_dt_rank|time_step_rank|laurel_rank", 4),
    (r"num_mel_bins|feature_projection_input_dim|input_feat_size", 16),
]
_IDS = re.compile(r".*(_token_id|_token_index|_start_id|_end_id|_bos_id|_eos_id)")


def _number(name: str) -> int | None:
    return next((value for pattern, value in _NUMBERS if re.fullmatch(pattern, name)), None)


def shrink(cls: type, **given: Any) -> Any:
    """A configuration of class ``cls`` with tiny sizes; ``given`` has the last word, field by field.

    A dict in ``given`` for a nested configuration goes to that one. Ids of special tokens move below the vocabulary.
    """
    nested = getattr(cls, "sub_configs", {}) or {}
    chosen: dict[str, Any] = {}
    ids = iter(range(VOCAB - 1, 0, -1))
    for field in dataclasses.fields(cls):
        default = field.default
        if not field.init or field.name in given or field.name in nested:
            continue
        if isinstance(default, bool) or not isinstance(default, int):
            continue
        small = _number(field.name)
        if small is not None:
            chosen[field.name] = min(small, default) if field.name.startswith("num_exp") else small
        elif _IDS.fullmatch(field.name) and default >= VOCAB:
            chosen[field.name] = next(ids)
    whole = cls() if any(not dataclasses.is_dataclass(inner) for inner in nested.values()) else None
    for name, inner in nested.items():
        wanted = given.pop(name, {})
        if isinstance(wanted, dict):
            inner = inner if whole is None else type(getattr(whole, name))  # an AutoConfig says nothing of its class
            wanted = shrink(inner, **wanted) if dataclasses.is_dataclass(inner) else None
        if wanted is not None:
            chosen[name] = wanted
    return cls(**{**chosen, **given})
