"""Tiny random models of timm: the families, where each has its blocks, and how it is made small."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from .case import SAMPLES, Case, enliven

os.environ.setdefault("HF_HUB_OFFLINE", "1")

CLASSES = 10


class Family(NamedTuple):
    """One entry point of timm. ``towers`` as in ``read_towers``; ``options`` go to ``create_model``."""

    towers: str
    options: dict[str, Any]
    image: int = 64
    attention: bool = True  # False: no softmax over tokens, though there may be one over channels


def _each(template: str, numbers: str) -> str:
    """The template once for each number, in place of @."""
    return " | ".join(template.replace("@", number) for number in numbers)


_VIT = {"img_size": 64, "embed_dim": 48, "depth": 3, "num_heads": 4}
_MIXER = {"img_size": 64, "num_blocks": 3, "embed_dim": 48}
_SWIN = {"img_size": 64, "embed_dim": 16, "depths": (2, 2, 2), "num_heads": (2, 2, 4), "window_size": 4}
_STAGES = "bchw:stages.#.blocks.*"
_CONVOLUTIONS = "bchw:stages.0.blocks.*? | bchw:stages.1.blocks.*?"  # no token mixing by attention before the others
_LATE = f"{_CONVOLUTIONS} | bchw:stages.2.blocks.* | bchw:stages.3.blocks.*"
_LAST = f"{_CONVOLUTIONS} | bchw:stages.2.blocks.*? | bchw:stages.3.blocks.*"
_RESNET = "bchw:stages.0.*? | bchw:stages.1.*? | bchw:stages.2.* | bchw:stages.3.*"
_META = {"depths": (1, 1, 2, 2), "dims": (16, 24, 32, 48)}

_HIERA_DET = {"embed_dim": 16, "stages": (1, 2, 2, 1), "global_att_blocks": (4,), "window_spec": (8, 4, 2, 2)}

# Vision Transformers with one list of blocks and tokens in the middle axis.
_PLAIN = """aimv2_large_patch14_224 beit_base_patch16_224 beit3_base_patch16_224 beitv2_base_patch16_224
    deit_tiny_distilled_patch16_224 deit_tiny_patch16_224 deit3_small_patch16_224 eva_giant_patch14_224
    eva_large_patch14_196 eva02_base_patch16_clip_224 eva02_tiny_patch14_224 flexivit_small
    naflexvit_base_patch16_gap naflexvit_base_patch16_parfac_gap naflexvit_base_patch16_siglip test_vit test_vit2
    test_vit3 test_vit4 vit_base_patch16_18x2_224 vit_base_patch16_clip_224 vit_base_patch16_gap_224
    vit_base_patch16_rpn_224 vit_base_patch16_siglip_224 vit_base_patch16_xp_224 vit_pe_core_tiny_patch16_384
    vit_pe_lang_large_patch14_448 vit_pe_spatial_tiny_patch16_512 vit_relpos_base_patch16_cls_224
    vit_relpos_small_patch16_224 vit_relpos_small_patch16_rpn_224 vit_small_patch14_dinov2
    vit_small_patch14_reg4_dinov2 vit_small_patch16_dinov3 vit_small_patch16_lingbot vit_small_patch16_rope_224
    vit_small_patch16_rope_mixed_224 vit_srelpos_small_patch16_224 vit_tiny_patch16_224 vit_tiny_r_s16_p8_224"""

FAMILIES: dict[str, Family] = {
    **{name: Family("blocks.*", _VIT) for name in _PLAIN.split()},
    "vit_small_resnet26d_224": Family("blocks.*", _VIT),
    "convit_tiny": Family("blocks.*", {"img_size": 64, "depth": 3, "local_up_to_layer": 2}),
    "gemma4_vit_167m": Family("encoder.blocks.*", _VIT | {"head_dim": 12, "intermediate_size": 96}, 96),
    "samvit_base_patch16_224": Family("bhwc:blocks.*", _VIT),
    "vitamin_small_224": Family("blocks.*", {"img_size": 64, "depth": 3}),
    # class tokens that are updated by blocks of their own
    "cait_xxs24_224": Family("blocks.* | bnd:blocks_token_only.*?", _VIT),
    "xcit_nano_12_p16_224": Family("blocks.* | bnd:cls_attn_blocks.*?", _VIT, attention=False),
    "volo_d1_224": Family(
        "bhwc:network.#.* | post_network.*?",
        {"img_size": 64, "embed_dims": (24, 48, 48, 48), "num_heads": (2, 4, 4, 4), "stem_hidden_dim": 16},
    ),
    # several streams
    "crossvit_9_240": Family(
        "bnd@0:blocks.*%small | bnd@1:blocks.*%large | blocks.*.blocks.0.*%small | blocks.*.blocks.1.*%large",
        {"embed_dim": (24, 48), "num_heads": (2, 2)},
        240,
    ),
    "tnt_s_patch16_224": Family("bnd@1:blocks.*", _VIT | {"inner_dim": 24, "num_heads_outer": 4}),
    "coat_tiny": Family(  # the parallel blocks hand the first of four scales through
        _each("serial_blocks@.*", "1234") + " | " + " | ".join(f"bnd@{i}:parallel_blocks.*" for i in (1, 2, 3)),
        {"img_size": 64, "embed_dims": (32, 32, 32, 32), "parallel_depth": 2},
        attention=False,
    ),
    "coat_lite_tiny": Family(
        _each("serial_blocks@.*", "1234"),
        {"img_size": 64, "embed_dims": (32, 32, 64, 64)},
        attention=False,
    ),
    # stages
    "hiera_tiny_224": Family("blocks.*", {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 2, 2, 1)}),
    "sam2_hiera_tiny": Family("bhwc:blocks.*", _HIERA_DET),
    "hieradet_small": Family("bhwc:blocks.*", _HIERA_DET),
    "mvitv2_tiny": Family(
        "stages.#.blocks.*", {"img_size": (64, 64), "embed_dim": 16, "depths": (1, 2, 2, 2), "num_heads": 1}
    ),
    "mvitv2_small_cls": Family(
        "stages.#.blocks.*", {"img_size": (64, 64), "embed_dim": 16, "depths": (1, 2, 2, 2), "num_heads": 1}
    ),
    "swin_tiny_patch4_window7_224": Family("bhwc:layers.#.blocks.*", _SWIN),
    "swin_s3_tiny_224": Family("bhwc:layers.#.blocks.*", _SWIN | {"window_size": (4, 4, 4)}),
    "swinv2_tiny_window8_256": Family("bhwc:layers.#.blocks.*", _SWIN),
    "swinv2_cr_tiny_224": Family("bhwc:stages.#.blocks.*", _SWIN),
    "swinv2_cr_tiny_ns_224": Family("bhwc:stages.#.blocks.*", _SWIN),
    "twins_svt_small": Family(
        "blocks.#.*",
        {"img_size": 64, "embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 2, 4), "depths": (2, 2, 2, 2)},
    ),
    "twins_pcpvt_small": Family(
        "blocks.#.*",
        {"img_size": 64, "embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 2, 4), "depths": (2, 2, 2, 2)},
    ),
    "pvt_v2_b0": Family("stages.#.blocks.*", {"embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 2, 4)}),
    "pvt_v2_b2_li": Family(
        "stages.#.blocks.*",
        {"embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 2, 4), "depths": (2, 2, 2, 2)},
    ),
    "pit_ti_224": Family("transformers.#.blocks.*", {"img_size": 64, "depth": (2, 2, 2), "base_dims": (16, 16, 16)}),
    "pit_ti_distilled_224": Family(
        "transformers.#.blocks.*", {"img_size": 64, "depth": (2, 2, 2), "base_dims": (16, 16, 16)}
    ),
    "levit_128s": Family("stages.#.blocks.*", {"img_size": 128, "embed_dim": (16, 32, 48), "key_dim": 8}, 128),
    "levit_conv_128s": Family(_STAGES, {"img_size": 128, "embed_dim": (16, 32, 48), "key_dim": 8}, 128),
    "nest_tiny": Family(
        "bgnd:levels.#.transformer_encoder.*",
        {"img_size": 64, "embed_dims": (16, 32, 48), "num_heads": (2, 4, 4), "depths": (2, 2, 2)},
    ),
    "nest_tiny_jx": Family(
        "bgnd:levels.#.transformer_encoder.*",
        {"img_size": 64, "embed_dims": (16, 32, 48), "num_heads": (2, 4, 4), "depths": (2, 2, 2)},
    ),
    "gcvit_xxtiny": Family(
        "bhwc:stages.#.blocks.*",
        {"img_size": 224, "embed_dim": 16, "depths": (1, 1, 2, 2), "num_heads": (1, 2, 2, 4)},
        224,
    ),
    "tiny_vit_5m_224": Family(
        "bchw:stages.0.blocks.*? | " + _each("bhwc:stages.@.blocks.*", "123"),
        {"embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 2, 4), "depths": (2, 2, 2, 2)},
        128,
    ),
    "caformer_s18": Family(f"{_CONVOLUTIONS} | stages.2.blocks.* | stages.3.blocks.*", _META),
    "efficientformer_l1": Family(
        f"{_CONVOLUTIONS} | bchw:stages.2.blocks.*? | bchw/bnd:stages.3.blocks.{{0,1,2}}? | stages.3.blocks.{{3,4}}",
        {"embed_dims": (16, 24, 32, 48), "depths": (1, 1, 1, 4), "num_vit": 2},
        224,
    ),
    # channel-first maps
    "visformer_tiny": Family(
        "bchw:stage1.*? | bchw:stage2.* | bchw:stage3.*", {"img_size": 64, "embed_dim": 48, "depth": (2, 2, 2)}
    ),
    "nextvit_small": Family("bchw:stages.0.blocks.*? | " + _each("bchw:stages.@.blocks.*", "123"), {}, 64),
    "maxvit_pico_rw_256": Family(_STAGES, {"img_size": 64}, 64),
    "maxvit_rmlp_pico_rw_256": Family(_STAGES, {"img_size": 64}, 64),
    "maxvit_tiny_tf_224": Family(_STAGES, {"img_size": 64}, 64),
    "maxxvit_rmlp_nano_rw_256": Family(_STAGES, {"img_size": 64}, 64),
    "maxxvitv2_nano_rw_256": Family(_STAGES, {"img_size": 64}, 64),
    "coatnet_0_224": Family(_LATE, {"img_size": 64}, 64),
    "coatnet_nano_cc_224": Family(_LATE, {"img_size": 64}, 64),
    "coatnet_pico_rw_224": Family(_LATE, {"img_size": 64}, 64),
    "coatnet_rmlp_nano_rw_224": Family(_LATE, {"img_size": 64}, 64),
    "coatnext_nano_rw_224": Family(_LATE, {"img_size": 64}, 64),
    "davit_tiny": Family(
        "bchw:stages.#.blocks.*%# | bchw:stages.#.blocks.*.*%#",
        {"embed_dims": (16, 24, 32, 48), "num_heads": (1, 2, 2, 4), "depths": (1, 1, 2, 1)},
    ),
    "fastvit_sa12": Family(_LAST, {"embed_dims": (16, 32, 64, 128), "layers": (1, 1, 2, 2)}, 128),
    "fastvit_mci0": Family(_LAST, {"embed_dims": (16, 32, 64, 128), "layers": (1, 1, 2, 2)}, 128),
    "edgenext_xx_small": Family(
        "bchw:stages.0.blocks.*? | " + _each("bchw:stages.@.blocks.*", "123"), {}, 128, attention=False
    ),
    "efficientformerv2_s0": Family(_LATE, {}, 224),
    "efficientvit_b0": Family(_LATE, {}, 128, attention=False),
    "efficientvit_l1": Family(_LAST, {"widths": (8, 16, 32, 48, 64), "depths": (1, 1, 1, 2, 2)}, 128, attention=False),
    "efficientvit_m0": Family(_STAGES, {}, 224),
    "shvit_s1": Family("bchw:stages.0.blocks.*? | bchw:stages.1.blocks.* | bchw:stages.2.blocks.*", {}, 128),
    "swiftformer_xs": Family(_STAGES, {}, 128, attention=False),
    "csatv2": Family(  # convolutions that halve the map, and norms, stand among the blocks
        "bchw:stages.0.*? | bchw:stages.1.*? | bchw:stages.2.{1,2,3,4,5,6,7,8} | bchw:stages.2.{0,9}?"
        " | bchw:stages.3.{1,2,3,4,5,6} | bchw:stages.3.{0}?",
        {},
        128,
    ),
    "mobilevit_xxs": Family(_each("(bg)nd:stages.@.1.transformer.*%@ | bchw:stages.@.*%@", "234"), {}, 128),
    "mobilevitv2_050": Family(
        _each("bchw:stages.@.1.transformer.*%@ | bchw:stages.@.*%@", "234"), {}, 128, attention=False
    ),
    "mobilenetv4_hybrid_medium": Family(
        "bchw:blocks.0.*? | bchw:blocks.1.*? | bchw:blocks.2.* | bchw:blocks.3.* | bchw:blocks.4.*?", {}, 128
    ),
    "botnet26t_256": Family(_RESNET, {"img_size": 128}, 128),
    "eca_botnext26ts_256": Family(_RESNET, {"img_size": 128}, 128),
    "sebotnet33ts_256": Family(
        "bchw:stages.0.*? | bchw:stages.1.* | bchw:stages.2.* | bchw:stages.3.*", {"img_size": 128}, 128
    ),
    "lowformer_b0": Family(_RESNET, {}, 128),
    "cpubone_nano": Family(_RESNET, {}, 128),
    # tokens without attention
    "mixer_s16_224": Family("blocks.*", _MIXER, attention=False),
    "gmixer_12_224": Family("blocks.*", _MIXER, attention=False),
    "gmlp_ti16_224": Family("blocks.*", _MIXER, attention=False),
    "resmlp_12_224": Family("blocks.*", _MIXER, attention=False),
    "convformer_s18": Family(_STAGES, _META, attention=False),
    "poolformer_s12": Family(_STAGES, _META, attention=False),
    "poolformerv2_s12": Family(_STAGES, _META, attention=False),
    "sequencer2d_s": Family(
        "bhwc:stages.#.blocks.*",
        {"img_size": 56, "layers": (1, 1, 2, 1), "embed_dims": (32, 48, 48, 48), "hidden_sizes": (8, 12, 12, 12)},
        56,
        attention=False,
    ),
    "mambaout_femto": Family("bhwc:stages.#.blocks.*", _META, attention=False),
    "focalnet_tiny_srf": Family("bchw:layers.#.blocks.*", {"embed_dim": 16, "depths": (2, 2, 2, 2)}, attention=False),
}


def types() -> list[str]:
    """All families there is a table entry for."""
    return sorted(FAMILIES)


def case(name: str) -> Case:
    """The case of one family, by the name of its entry point."""
    family = FAMILIES[name]
    return Case("timm", name, family.towers, lambda: _build(name), _eager if family.attention else None)


def _build(name: str) -> tuple[nn.Module, torch.Tensor]:
    import timm

    family = FAMILIES[name]
    options = dict(family.options)
    while True:
        try:
            model = timm.create_model(name, num_classes=CLASSES, **options)
            break
        except TypeError as error:  # an option this entry point does not take, or sets itself
            refused = [option for option in options if f"'{option}'" in str(error)]
            if not refused:
                raise
            for option in refused:
                del options[option]
    enliven(model)
    size = options.get("img_size", family.image)
    height, width = size if isinstance(size, tuple) else (size, size)
    return model, torch.randn(SAMPLES, 3, height, width)


@contextmanager
def _shown(model: nn.Module) -> Iterator[nn.Module]:
    """The model with attention that makes its weights one by one; what it was before comes back afterwards."""
    fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
    for module in fused:
        module.fused_attn = False
    try:
        yield model
    finally:
        for module in fused:
            module.fused_attn = True


_eager: Callable[..., Any] = _shown
