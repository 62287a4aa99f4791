"""Reader of timm's Vision Transformers: which weight and option becomes which of ours."""

from __future__ import annotations

from typing import Any

from torch import nn

from leadline.errors import LeadlineError
from leadline.models.foreign.source import Source

_POOLS = {"token": "cls", "avg": "mean", "max": "max"}


def vision_transformer(model: Any, source: Source) -> tuple[str, dict[str, Any]]:
    """Read VisionTransformer or VisionTransformerDistilled."""
    block, patch = model.blocks[0], model.patch_embed
    after_pool = not isinstance(model.fc_norm, nn.Identity)
    size, patch_size = set(patch.img_size), set(patch.patch_size)
    if model.global_pool not in _POOLS:
        raise LeadlineError(f"the timm model pools by {model.global_pool!r}; {', '.join(_POOLS)} can be converted")
    source.require(
        block=(type(block).__name__, "Block"),
        attention=(type(block.attn).__name__, "Attention"),
        mlp=(type(block.mlp).__name__, "Mlp"),
        norm=(type(block.norm1).__name__, "LayerNorm"),
        square_images=(len(size) == len(patch_size) == 1, True),
        final_norm=(after_pool or not isinstance(model.norm, nn.Identity), True),
        pool_include_prefix=(model.pool_include_prefix, False),
        proj_drop=(block.attn.proj_drop.p, 0.0),
        head_drop=(model.head_drop.p, 0.0),
    )
    if model.cls_token is not None:
        source.move("cls_token", "class_token")
    distilled = type(model).__name__ == "VisionTransformerDistilled"
    if distilled:
        source.move("dist_token", "distillation_token")
    source.move("pos_embed", "positions.table.weight", change=lambda table: table[0])
    source.move_linear("patch_embed.proj", "patch")
    qkv_bias = block.attn.qkv.bias is not None
    for i in range(len(model.blocks)):
        old, new = f"blocks.{i}", f"blocks.{i}"
        source.move_linear(f"{old}.norm1", f"{new}.norm1")
        source.move_linear(f"{old}.attn.qkv", f"{new}.attention.qkv", bias=qkv_bias)
        source.move_linear(f"{old}.attn.proj", f"{new}.attention.proj")
        source.move_linear(f"{old}.norm2", f"{new}.norm2")
        source.move_linear(f"{old}.mlp.fc1", f"{new}.mlp.fc1")
        source.move_linear(f"{old}.mlp.fc2", f"{new}.mlp.fc2")
    source.move_linear("fc_norm" if after_pool else "norm", "norm")
    if model.num_classes:
        source.move_linear("head", "head")
        if distilled:
            source.move_linear("head_dist", "distillation_head")
    return "vit", {
        "depth": len(model.blocks),
        "dim": model.embed_dim,
        "heads": block.attn.num_heads,
        "ffn": block.mlp.fc1.out_features,
        "mlp": _activation(block.mlp.act),
        "image_size": size.pop(),
        "patch_size": patch_size.pop(),
        "channels": model.in_chans,
        "num_classes": model.num_classes,
        "pool": _POOLS[model.global_pool],
        "class_token": model.has_class_token,
        "distillation": "head" if distilled else "none",
        "norm_after_pool": after_pool,
        "qkv_bias": qkv_bias,
        "norm_eps": block.norm1.eps,
        "attention_dropout": block.attn.attn_drop.p,
        "embedding_dropout": model.pos_drop.p,
        "drop_path": getattr(model.blocks[-1].drop_path1, "drop_prob", 0.0) or 0.0,
    }


READERS = {"VisionTransformer": vision_transformer, "VisionTransformerDistilled": vision_transformer}


def _activation(act: nn.Module) -> str:
    if isinstance(act, nn.GELU):
        return "gelu" if act.approximate == "none" else "gelu_tanh"
    if isinstance(act, nn.ReLU):
        return "relu"
    raise LeadlineError(f"the activation is {type(act).__name__}; GELU and ReLU can be converted")
