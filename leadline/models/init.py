"""Weight initialisations, by name."""

from __future__ import annotations

from torch import nn

from leadline.errors import check_choice
from leadline.nn import TransformerBlock

INITS = ("normal", "trunc_normal", "xavier", "xavier_fused", "torch")


def init_weights(model: nn.Module, kind: str, std: float = 0.02, depth: int | None = None) -> None:
    """Initialise linear maps, convolutions and embeddings; biases become 0.

    normal, trunc_normal   with standard deviation ``std`` (GPT-2 and BERT; timm's ViT)
    xavier                 Xavier-uniform, queries, keys and values each a matrix of its own
    xavier_fused           Xavier-uniform, queries, keys and values drawn as one 3d x d matrix: smaller entries
    torch                  what torch gives by itself

    Embeddings, patches and positions have no Xavier form here: with both Xavier kinds they are normal.
    With a ``depth`` what feeds the skip connections is divided by sqrt(2 depth), as GPT-2 does.
    """
    check_choice("init", kind, INITS)
    if kind == "torch":
        return
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d | nn.Embedding):
            if kind == "trunc_normal":
                nn.init.trunc_normal_(module.weight, std=std)
            elif kind == "normal" or not isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=std)
            else:
                nn.init.xavier_uniform_(module.weight)
            if not isinstance(module, nn.Embedding) and module.bias is not None:
                nn.init.zeros_(module.bias)
    for block in (module for module in model.modules() if isinstance(module, TransformerBlock)):
        attention = block.attention
        if kind == "xavier":
            sizes = [heads * attention.head_dim for heads in (attention.heads, attention.kv_heads, attention.kv_heads)]
            for part in attention.qkv.weight.detach().split(sizes):
                nn.init.xavier_uniform_(part)
        if depth is not None:
            for linear in (attention.proj, None if block.mlp is None else block.mlp.fc2):
                if linear is not None:
                    nn.init.normal_(linear.weight, std=std / (2 * depth) ** 0.5)
