"""Weight initialisations, by name."""

from __future__ import annotations

from torch import nn

from leadline.errors import check_choice
from leadline.nn import TransformerBlock

INITS = ("normal", "trunc_normal", "xavier", "xavier_fused", "torch")


def init_weights(model: nn.Module, kind: str, std: float = 0.02, depth: int | None = None) -> None:
    """Initialise linear maps, convolutions and embeddings in place; biases become 0.

    The kinds are:

    - ``normal``: normal with standard deviation ``std``, as GPT-2 and BERT.
    - ``trunc_normal``: truncated normal with standard deviation ``std``, as timm's ViT.
    - ``xavier``: Xavier-uniform, with queries, keys and values each as a matrix of its own.
    - ``xavier_fused``: Xavier-uniform, with queries, keys and values as one 3d x d matrix: smaller entries.
    - ``torch``: torch's own initialisation.

    Embeddings, patches and positions are normal with both Xavier kinds.

    Args:
        model: The model to initialise.
        kind: One of ``INITS``.
        std: Standard deviation of the normal kinds.
        depth: Number of layers. With it, the standard deviation of the linear maps that write into the skip
            connections is divided by sqrt(2 depth), as in GPT-2.
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
