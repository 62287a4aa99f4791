"""Tiny random models of transformers: where each type has its blocks, its configuration and its inputs."""

from __future__ import annotations

import copy
import inspect
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .case import SAMPLES, Case, enliven
from .configurations import DEPTH, IMAGE, VOCAB, shrink

os.environ.setdefault("HF_HUB_OFFLINE", "1")

TOKENS, TARGETS = 10, 7  # of texts, and of those that a decoder gets
LARGEST = 40_000_000  # weights; a configuration that asks for more was not shrunk

# Types by where their blocks are; see ``read_towers``. From the source of each model.
_TOWERS: list[tuple[str, str]] = [
    (
        "layers.*",
        """afmoe apertus arcee aria_text audio-spectrogram-transformer beit biogpt bitnet cohere cohere2
        cohere2_moe cwm deepseek_v2 deepseek_v3 deit diffllama doge dots1 ernie4_5 ernie4_5_moe esmc
        eurobert exaone4 exaone_moe falcon_h1 falcon_mamba flex_olmo gemma gemma2 gemma3_text
        gemma4_text gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite gpt_neox gpt_neox_japanese
        gpt_oss granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared
        helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 hyperclovax ijepa inkling_text jais2 jamba
        jetmoe jina_embeddings_v3 laguna lasr_encoder lfm2 llama llama4_text mamba mamba2 mellum
        mimo_v2_flash minicpm3 minimax minimax_m2 minimax_m3_vl_text ministral ministral3 mistral
        mistral4 mixtral modernbert modernbert-decoder moshi muse_glimmer_text nanochat nemotron
        nemotron_asr_streaming_encoder nomic_bert olmo olmo2 olmo3 olmo_hybrid olmoe
        openai_privacy_filter parakeet_encoder persimmon phi phi3 phi4_multimodal phimoe pixio
        qianfan_ocr_vision qwen2 qwen2_5_vl_text qwen2_audio_encoder qwen2_moe qwen2_vl_text qwen3
        qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_vl_moe_text qwen3_vl_text
        recurrent_gemma sam3_lite_text_text_model seed_oss smollm3 solar_open stablelm starcoder2
        vaultgemma vit vit_mae vit_msn vivit voxtral_encoder xglm zaya""",
    ),
    (
        "encoder.layer.*",
        """bert bert-generation big_bird camembert convbert data2vec-text data2vec-vision deberta deberta-v2
        dinov2 dinov2_with_registers dpt electra ernie esm fnet ibert internvl_vision layoutlm
        layoutlmv3 lilt longformer luke markuplm megatron-bert mobilebert mpnet mra nystromformer
        radio rembert roberta roberta-prelayernorm roc_bert roformer splinter tapas
        tipsv2_vision_model videomae vilt visual_bert xlm-roberta xlm-roberta-xl xmod yolos yoso""",
    ),
    (
        "encoder.layers.*",
        """aimv2_vision_model chinese_clip_vision_model clip_text_model clip_vision_model cpmant data2vec-audio
        hubert idefics3_vision lasr_ctc mlcd mlcd_vision_model nemotron3_5_asr
        nemotron_asr_streaming parakeet_ctc parakeet_rnnt parakeet_tdt sew siglip_vision_model
        smolvlm_vision tipsv2_text_model unispeech unispeech-sat wav2vec2 wav2vec2-bert
        wav2vec2-conformer wavlm""",
    ),
    (
        "encoder.layers.* | decoder.layers.*",
        """bart bigbird_pegasus blenderbot blenderbot-small canary cohere_asr informer led m2m_100 marian mbart
        moonshine mvp nllb-moe pegasus pegasus_x plbart speech_to_text t5gemma
        time_series_transformer whisper""",
    ),
    ("encoder.block.* | decoder.block.*", "longt5 mt5 switch_transformers t5 udop umt5"),
    ("h.*", "bloom codegen ctrl falcon gpt-sw3 gpt2 gpt_bigcode gpt_neo gptj imagegpt openai-gpt"),
    ("blocks.*", "mpt rwkv"),
    (
        "vision_model.encoder.layers.* | text_model.encoder.layers.*",
        "aimv2 clip clipseg metaclip_2 owlv2 owlvit siglip siglip2",
    ),
    ("vision_model.encoder.layers.* | text_model.encoder.layer.*", "blip chinese_clip"),
    ("vision_model.encoder.layers.* | text_model.roberta.encoder.layers.*", "altclip"),
    ("vision_model.encoder.layer.* | text_model.encoder.layers.*", "tipsv2"),
    ("image_model.encoder.layer.* | text_model.encoder.layer.* | multimodal_model.encoder.layer.*", "flava"),
    ("image_encoder.vision_model.encoder.layers.* | encoder.layer.*", "git"),
    ("vision_tower.encoder.layers.* | language_model.layers.*", "gemma3 llava paligemma vipllava"),
    ("vision_tower.encoder.layer.* | language_model.layers.*", "internvl"),
    ("bhwc:vision_tower.layers.* | language_model.layers.*", "got_ocr2"),
    ("(bn)d:visual.blocks.* | language_model.layers.*", "qwen2_vl qwen2_5_vl qwen3_vl"),
    ("vision_model.encoder.layers.* | text_model.layers.*", "idefics3 smolvlm"),
    (
        "vision_model.encoder.layers.* | connector.perceiver_resampler.layers.* | text_model.layers.*",
        "idefics2",
    ),
    (
        "vision_model.encoder.layers.* | qformer.encoder.layer.* | language_model.model.decoder.layers.*",
        "blip-2",
    ),
    (
        "vision_model.encoder.layers.* | qformer.encoder.layer.* | language_model.decoder.layers.*",
        "instructblip",
    ),
    ("vision_model.model.encoder.layers.* | text_model.model.layers.*", "kosmos-2"),
    ("audio_tower.layers.* | language_model.layers.*", "qwen2_audio"),
    (
        "(bg)nd:vision_model.transformer.layers.* | (bg)nd:vision_model.global_transformer.layers.*"
        " | language_model.layers.*",
        "mllama",
    ),
    (
        "encoder.layer.* | encoder.r_layers.* | encoder.x_layers.*",
        "lxmert",
    ),
    # albert shares one layer; each call is a layer
    ("encoder.albert_layer_groups.0.albert_layers.*", "albert"),
    ("question_encoder.bert_model.encoder.layer.*", "dpr"),
    ("transformer.layer.*", "distilbert"),
    ("decoder.layers.*", "opt"),
    ("model.layer.*", "dinov3_vit sapiens2"),
    ("language_model.layers.*", "fuyu"),
    ("model.layers.*", "higgs_audio_v2"),
    ("mgp_str.encoder.blocks.*", "mgp-str"),
    ("encoder.encoder.layer.*", "sew-d"),
    ("initial_char_encoder.layer.* | encoder.layer.* | final_char_encoder.layer.*", "canine"),
    ("encoder.conformer_layers.* | decoder.conformer_layers.*", "fastspeech2_conformer"),
    ("speech_encoder.encoder.layers.* | speech_encoder.adapter.layers.* | text_decoder.layers.*", "seamless_m4t"),
    ("speech_encoder.encoder.layers.* | speech_encoder.adapter.layers.* | text_decoder.layers.*", "seamless_m4t_v2"),
    ("L_module.layers.* | H_module.layers.*", "hrm_text"),
    # the tokens are not the middle axis
    ("nbd:encoder.layers.* | nbd:decoder.layers.*", "fsmt"),
    ("nbd:layer.*", "xlnet"),
    ("bdn:encoder.layers.*.output=encoder.layers.*<encoder.layers.0.attention", "squeezebert"),
    ("bchw:encoder.layer.*", "vitdet"),
    ("bhwc:vision_encoder.layers.*", "sam_vision_model sam_hq_vision_model"),
    ("bhwc:layers.*", "sam3_vit_model"),
    ("bhwc:backbone.layers.*", "sam3_vision_model"),
    ("1(bn)d:transformer.layers.*", "pixtral"),  # all images in one row, apart by the mask
    # several streams: hyper-connections beside each other, AltUp's stacked, ProphetNet's predictions behind the text
    ("bnsd:layers.*", "deepseek_v4 hy_v4"),
    ("bgnd:encoder.layers.*", "patchtst"),  # a row of tokens for each channel
    ("sbnd:layers.*", "gemma3n_text"),
    ("encoder.layers.* | bnd[:7]:decoder.layers.*", "prophetnet"),
    # no module is a block: attention and MLP stand in two lists, and the stream leaves the second norm
    ("layer_norm2.*=ffns.*<attentions.0", "flaubert xlm"),
    # stages
    ("encoder.blocks.#.* | decoder.layers.*", "funnel"),
    ("encoder.stages.#.layers.*", "cvt hiera"),
    ("encoder.layers.#.blocks.*", "swin swinv2 donut-swin maskformer-swin pvt_v2"),
    ("encoder.block.#.*", "glpn pvt"),
    ("bchw:encoder.block.#.*", "poolformer"),
    ("stages.#.blocks.*", "segformer"),
    ("encoder.stages.0.layers.* | encoder.stages.1.layers.* | encoder.stages.2.layers.*", "levit"),
    ("(bg)nd:encoder.layer.#.transformer.layer.*", "mobilevit"),
    ("bchw:encoder.network.#.blocks.*", "swiftformer"),
    ("vision_model.encoder.stages.#.layers.* | text_model.encoder.layers.*", "groupvit"),
    ("encoder.layer.*", "timesformer"),
    ("encoder.layer.* | predictor.layer.*", "vjepa2"),
    ("(bg)nd:backbone.backbone.encoder.layer.* | decoder.layers.*", "rf_detr"),
]

TOWERS = {name: towers for towers, names in _TOWERS for name in names.split()}

# What the defaults of the configuration, shrunk by name, do not do.
_PATCHES = {"image_size": 64}
_MLA: dict[str, Any] = {"num_key_value_heads": 4}
_M_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_SWIN = {"embed_dim": 32, "num_heads": [2, 4, 4], "depths": [2, 2, 2], "window_size": 4, "patch_size": 4} | _PATCHES
_PYRAMID = {"hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 2, 4], **_PATCHES}
_CONV = {"conv_dim": [16] * 7}
_SERIES = {
    "input_size": 1,
    "prediction_length": TARGETS,
    "context_length": 12,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
}
_QWEN_VL = {"text_config": _M_ROPE, "vision_config": {"depth": DEPTH, "deepstack_visual_indexes": [1]}}
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 48, "num_mel_bins": 24, "patch_size": 8},
    "blip-2": {"image_token_index": VOCAB - 1},
    "instructblip": {"image_token_index": VOCAB - 1},
    "bigbird_pegasus": {"attention_type": "original_full"},
    "big_bird": {"attention_type": "original_full"},
    "canine": {"local_transformer_stride": 8, "num_hash_buckets": 64},
    "cvt": {
        "embed_dim": [16, 32, 48],
        "num_heads": [1, 2, 3],
        "depth": [2, 2, 3],
        "image_size": 64,
        "patch_stride": [4, 2, 2],
    },
    "cpmant": {"prompt_length": 4},
    "data2vec-audio": {"conv_dim": [16] * 7},
    "deepseek_v2": _MLA | {"num_experts_per_tok": 2},
    "deepseek_v3": _MLA,
    "donut-swin": _SWIN,
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1},
    "esm": {"vocab_size": VOCAB, "token_dropout": False, "mask_token_id": 5, "pad_token_id": 1},
    "fnet": {"tpu_short_seq_length": TOKENS},
    "funnel": {"block_sizes": [2, 2, 2], "num_decoder_layers": 2},
    "gemma3_text": {"layer_types": ["sliding_attention", "full_attention", "full_attention"]},
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
    },
    "glm4_moe_lite": _MLA,
    "glpn": _PYRAMID | {"depths": [2, 2, 2, 2], "num_attention_heads": [1, 2, 2, 4]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2, "window_size": 4},
    "gemma3": {"mm_tokens_per_image": 4},
    "gptj": {"rotary_dim": 4},
    "codegen": {"rotary_dim": 4},
    "granitemoehybrid": {"layer_types": ["mamba", "attention", "mamba"], "mamba_chunk_size": 4},
    "falcon_h1": {"mamba_chunk_size": 4, "mamba_d_ssm": 64},
    "groupvit": {
        "vision_config": {
            "depths": [2, 2, 2],
            "num_group_tokens": [8, 4, 0],
            "num_output_groups": [8, 4, 0],
        },
    },
    "hiera": {
        "image_size": [64, 64],
        "depths": [1, 2, 2, 2],
        "embed_dim": 16,
        "num_heads": [1, 2, 4, 8],
        "patch_size": [7, 7],
        "patch_stride": [4, 4],
        "masked_unit_size": [8, 8],
    },
    "hrm_text": {"num_hidden_layers": 2, "num_layers_per_stack": None, "H_cycles": 1, "L_cycles": 2},
    "hubert": _CONV,
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4, "resampler_depth": 2, "resampler_n_heads": 4}},
    "informer": _SERIES,
    "internvl": {"vision_config": {"image_size": [32, 32], "patch_size": [8, 8]}},
    "internvl_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2},
    "kosmos-2": {"text_config": {"layers": DEPTH}, "latent_query_num": 4},
    "kosmos-2.5": {"text_config": {"layers": DEPTH}},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8},
    "lilt": {"hidden_size": 48, "max_2d_position_embeddings": 64},
    "led": {"attention_window": 4, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "levit": {
        "hidden_sizes": [16, 32, 48],
        "num_attention_heads": [2, 2, 2],
        "depths": [2, 2, 2],
        "key_dim": [8, 8, 8],
        "image_size": 128,
        "patch_size": 16,
        "down_ops": [["Subsample", 8, 4, 4, 2, 2], ["Subsample", 8, 6, 4, 2, 2]],
    },
    "longformer": {"attention_window": 10},
    "longt5": {"local_radius": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1, "chunk_size": 4},
    "maskformer-swin": _SWIN,
    "minicpm3": _MLA,
    "ministral": {"head_dim": 8},
    "mistral4": _MLA,
    "mobilebert": {"intra_bottleneck_size": 16, "true_hidden_size": 16, "num_feedforward_networks": 2},
    "mobilevit": {"hidden_sizes": [16, 24, 32], "image_size": 128, "num_attention_heads": 4, "patch_size": 2},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 8},
    "patchtst": {"context_length": 48, "patch_length": 8, "patch_stride": 4, "num_input_channels": 1},
    "pegasus_x": {"block_size": 10, "num_global_tokens": 4},
    "poolformer": {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 2], **_PATCHES},
    "pvt": _PYRAMID | {"depths": [2, 2, 2, 2]},
    "pvt_v2": _PYRAMID | {"depths": [2, 2, 2, 2], "num_attention_heads": [1, 2, 2, 4]},
    "qianfan_ocr_vision": {"image_size": [32, 32], "patch_size": [8, 8]},
    "qwen2_5_vl": _QWEN_VL,
    "qwen2_vl": _QWEN_VL,
    "qwen3_vl": _QWEN_VL,
    "qwen2_5_vl_text": _M_ROPE,
    "qwen2_vl_text": _M_ROPE,
    "qwen3_5_moe_text": {"num_hidden_layers": 4},
    "qwen3_5_text": {"num_hidden_layers": 4},
    "qwen3_next": {"num_hidden_layers": 4},
    "siglip2": {"vision_config": {"num_patches": 16}},
    "segformer": _PYRAMID | {"depths": [2, 2, 2, 2]},
    "sew": {"conv_dim": [16] * 13},
    "sew-d": {"conv_dim": [16] * 13},
    "speech_to_text": {"input_feat_per_channel": 16, "conv_channels": 16},
    "swiftformer": {"embed_dims": [16, 32, 48, 64], "depths": [2, 2, 2, 2], **_PATCHES},
    "swin": _SWIN,
    "swinv2": _SWIN,
    "time_series_transformer": _SERIES,
    "timesformer": {"num_frames": 2},
    "videomae": {"num_frames": 4, "tubelet_size": 2},
    "vipllava": {"vision_feature_layers": [-1, -2]},
    "lxmert": {"l_layers": 2, "r_layers": 2, "x_layers": 2, "visual_feat_dim": 16},
    "mllama": {
        "vision_config": {"num_global_layers": 2, "intermediate_layers_indices": [0, 1], "vision_output_dim": 96},
        "text_config": {"num_hidden_layers": 4, "cross_attention_layers": [1, 3]},
    },
    "vjepa2": {"crop_size": IMAGE, "frames_per_clip": 4, "pred_num_hidden_layers": 2, "pred_hidden_size": 32},
    "qwen2_audio": {"audio_config": {"max_source_positions": 32}},
    "vivit": {"num_frames": 4, "tubelet_size": [2, 8, 8]},
    "unispeech": _CONV,
    "unispeech-sat": _CONV,
    "wav2vec2": _CONV,
    "wavlm": _CONV,
    "wav2vec2-conformer": _CONV,
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "yolos": {"image_size": [32, 48], "num_detection_tokens": 6},
}


def types() -> list[str]:
    """All types there is a table entry for."""
    return sorted(TOWERS)


def case(name: str) -> Case:
    """The case of one type, such as "bert" or "clip"."""
    return Case("transformers", name, TOWERS[name], lambda: _build(name), _eager)


def _model_class(config: Any) -> type:
    from transformers.models.auto.modeling_auto import MODEL_MAPPING

    classes = MODEL_MAPPING[type(config)]
    return classes[0] if isinstance(classes, (list, tuple)) else classes


def _build(name: str) -> tuple[nn.Module, dict[str, Any]]:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    transformers.logging.set_verbosity_error()
    config = shrink(CONFIG_MAPPING[name], **copy.deepcopy(CONFIGURATIONS.get(name, {})))
    make = _model_class(config)
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in make(config).parameters())
    if weights > LARGEST:
        raise ValueError(f"{name} has {weights:,} weights; shrink its configuration")
    torch.manual_seed(0)
    model = make(config)
    enliven(model)
    return model, _inputs(name, model)


@contextmanager
def _eager(model: Any) -> Iterator[nn.Module]:
    """The same weights with attention that returns its weights."""
    eager = type(model)._from_config(copy.deepcopy(model.config), attn_implementation="eager")
    eager.load_state_dict(model.state_dict())
    yield eager.eval()


def _ids(tokens: int, vocabulary: int = VOCAB) -> Tensor:
    return torch.randint(10, min(vocabulary, VOCAB) - 20, (SAMPLES, tokens))


def _series(model: nn.Module) -> dict[str, Tensor]:
    past, features = 12 + 3, 2
    return {
        "past_values": torch.randn(SAMPLES, past),
        "past_time_features": torch.randn(SAMPLES, past, features),
        "past_observed_mask": torch.ones(SAMPLES, past),
        "future_values": torch.randn(SAMPLES, TARGETS),
        "future_time_features": torch.randn(SAMPLES, TARGETS, features),
    }


def _video(model: nn.Module) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(SAMPLES, model.config.num_frames, 3, IMAGE, IMAGE)}


def _image(model: Any, tokens: int, images: int | None = None) -> dict[str, Tensor]:
    """Texts with the place of an image in the middle, and an image for each."""
    config = model.config
    place = next(
        getattr(config, name) for name in ("image_token_id", "image_token_index") if getattr(config, name, None)
    )
    ids = torch.cat([_ids(4), torch.full((SAMPLES, tokens), place), _ids(TOKENS - 4)], 1)
    size = config.vision_config.image_size
    size = size if isinstance(size, int) else size[0]
    shape = (SAMPLES, 3, size, size) if images is None else (SAMPLES, images, 3, size, size)
    return {"input_ids": ids, "pixel_values": torch.randn(*shape)}


def _patches(model: Any) -> dict[str, Tensor]:
    """The same where the patches of all images stand in one row: 4 x 4 of each, of which 2 x 2 become a token."""
    vision = model.config.vision_config
    ids = torch.cat([_ids(4), torch.full((SAMPLES, 4), model.config.image_token_id), _ids(TOKENS - 4)], 1)
    width = 3 * vision.temporal_patch_size * vision.patch_size**2
    return {
        "input_ids": ids,
        "pixel_values": torch.randn(SAMPLES * 16, width),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * SAMPLES),
        "mm_token_type_ids": (ids == model.config.image_token_id).int(),
    }


def _any_size(model: Any) -> dict[str, Tensor]:
    vision = model.config.vision_config
    return {
        "input_ids": _ids(TOKENS),
        "pixel_values": torch.randn(SAMPLES, 16, 3 * vision.patch_size**2),
        "pixel_attention_mask": torch.ones(SAMPLES, 16, dtype=torch.long),
        "spatial_shapes": torch.tensor([[4, 4]] * SAMPLES),
    }


def _places(model: Any) -> dict[str, Tensor]:
    tokens = model.config.latent_query_num
    where = torch.zeros(SAMPLES, TOKENS + tokens, dtype=torch.long)
    where[:, 1 : 1 + tokens] = 1
    return {
        "input_ids": _ids(TOKENS + tokens),
        "pixel_values": torch.randn(SAMPLES, 3, IMAGE, IMAGE),
        "image_embeds_position_mask": where,
    }


def _sound(model: Any) -> dict[str, Tensor]:
    audio = model.config.audio_config
    frames = 2 * audio.max_source_positions
    place = torch.full((SAMPLES, frames // 4), model.config.audio_token_id)
    return {
        "input_ids": torch.cat([_ids(4), place, _ids(TOKENS - 4)], 1),
        "input_features": torch.randn(SAMPLES, audio.num_mel_bins, frames),
        "feature_attention_mask": torch.ones(SAMPLES, frames, dtype=torch.long),
    }


INPUTS: dict[str, Callable[[Any], dict[str, Tensor]]] = {
    "audio-spectrogram-transformer": lambda model: {"input_values": torch.randn(SAMPLES, 48, 24)},
    "informer": _series,
    "time_series_transformer": _series,
    "patchtst": lambda model: {"past_values": torch.randn(SAMPLES, 48, 1)},
    "timesformer": _video,
    "videomae": _video,
    "vivit": _video,
    "fsmt": lambda model: {"input_ids": _ids(TOKENS), "decoder_input_ids": _ids(TARGETS), "use_cache": False},
    "blip-2": lambda model: _image(model, 8),
    "gemma3": lambda model: _image(model, 4),
    "got_ocr2": lambda model: _image(model, 1),
    "idefics2": lambda model: _image(model, 4, images=1),
    "idefics3": lambda model: _image(model, 4, images=1),
    "instructblip": lambda model: _image(model, 8) | {"qformer_input_ids": _ids(TOKENS)},
    "internvl": lambda model: _image(model, 4),
    "llava": lambda model: _image(model, 16),
    "paligemma": lambda model: _image(model, 16),
    "qwen2_vl": _patches,
    "qwen2_5_vl": _patches,
    "qwen3_vl": _patches,
    "kosmos-2": _places,
    "lxmert": lambda model: {
        "input_ids": _ids(TOKENS),
        "visual_feats": torch.randn(SAMPLES, 6, 16),
        "visual_pos": torch.rand(SAMPLES, 6, 4),
    },
    "mllama": lambda model: {
        "input_ids": _ids(TOKENS),
        "pixel_values": torch.randn(SAMPLES, 1, 4, 3, IMAGE, IMAGE),
        "aspect_ratio_ids": torch.ones(SAMPLES, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(SAMPLES, 1, 4, dtype=torch.long),
        "cross_attention_mask": torch.ones(SAMPLES, TOKENS, 1, 4, dtype=torch.long),
    },
    "qwen2_audio": _sound,
    "vjepa2": lambda model: {"pixel_values_videos": torch.randn(SAMPLES, 4, 3, IMAGE, IMAGE)},
    "siglip2": _any_size,
    "smolvlm": lambda model: _image(model, 4, images=1),
    "vipllava": lambda model: _image(model, 16),
    "roc_bert": lambda model: {
        name: _ids(TOKENS) for name in ("input_ids", "input_shape_ids", "input_pronunciation_ids")
    },
}


def _inputs(name: str, model: nn.Module) -> dict[str, Any]:
    """A batch by the names of the model's arguments."""
    torch.manual_seed(1)
    if name in INPUTS:
        return INPUTS[name](model)
    config: Any = model.config
    wanted = inspect.signature(type(model).forward).parameters
    inputs: dict[str, Any] = {}
    vocabulary = getattr(config.get_text_config(), "vocab_size", None) or VOCAB
    if "input_ids" in wanted:
        inputs["input_ids"] = _ids(TOKENS, vocabulary)
    if "decoder_input_ids" in wanted and getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = _ids(TARGETS, vocabulary)
    if "pixel_values" in wanted:
        vision = getattr(config, "vision_config", config)
        size = getattr(vision, "image_size", IMAGE)
        height, width = (size, size) if isinstance(size, int) else size
        inputs["pixel_values"] = torch.randn(SAMPLES, getattr(vision, "num_channels", 3), height, width)
    if "bbox" in wanted:
        corners = torch.randint(0, 9, (SAMPLES, TOKENS, 2))
        inputs["bbox"] = torch.cat([corners, corners + 3], -1)
    if "input_features" in wanted:
        bins = getattr(config, "num_mel_bins", None) or getattr(config, "feature_projection_input_dim", None) or 16
        frames = getattr(config, "max_source_positions", 0)
        if name in ("whisper", "qwen2_audio_encoder", "voxtral_encoder"):  # bins first, and of one length
            inputs["input_features"] = torch.randn(SAMPLES, bins, 2 * frames)
        else:
            inputs["input_features"] = torch.randn(SAMPLES, 48, bins)
    if "input_values" in wanted:
        inputs["input_values"] = torch.randn(SAMPLES, 4000)
    return inputs
