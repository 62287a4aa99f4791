"""BERT (Devlin et al., 2019): a post-norm encoder with learned positions.

ALBERT (Lan et al., 2020) is a variant of it: one block shared by all layers, and narrow embeddings.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from leadline.models.base import Model, check_ids
from leadline.models.configs import BertConfig, ModelConfig
from leadline.models.init import init_weights
from leadline.nn import Positions, TransformerStack
from leadline.nn.layers import make_norm


class Bert(Model):
    """A text encoder: ``model(ids (B, N), mask=None) -> last hidden state (B, N, d)``."""

    Config: ClassVar[type[ModelConfig]] = BertConfig
    config: BertConfig

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        c = config
        width = c.dim if c.embedding_dim is None else c.embedding_dim
        self.token = nn.Embedding(c.vocab_size, width)
        self.token_type = nn.Embedding(c.token_types, width) if c.token_types else None
        self.embedding_norm = make_norm(c.norm_kind, width, c.norm_eps) if c.norm == "post" else nn.Identity()
        self.widen = nn.Linear(width, c.dim) if c.embedding_dim is not None else nn.Identity()
        self.dropout = nn.Dropout(c.embedding_dropout)
        self.blocks = TransformerStack(c)
        self.positions = Positions(c.positions, c.max_tokens, width, self.blocks.head_dim)
        self.norm = make_norm(c.norm_kind, c.dim, c.norm_eps) if c.final_norm else nn.Identity()
        init_weights(self, c.init)

    def embed(
        self, ids: Tensor, types: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Compute what enters the first block from ids (B, N): tokens (B, N, d) and the rotary angles, if any."""
        if positions is None:
            positions = torch.arange(ids.shape[1], device=ids.device)
        x = self.token(ids)
        if self.token_type is not None:
            x = x + self.token_type(torch.zeros_like(ids) if types is None else types)
        x, rope = self.positions(x, positions)
        return self.widen(self.dropout(self.embedding_norm(x))), rope

    def forward(
        self,
        ids: Tensor,
        mask: Tensor | None = None,
        *,
        types: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Encode a batch of texts.

        Args:
            ids: Token ids (B, N).
            mask: (B, N), True for a real token. None: every token is real.
            types: Token types (B, N), the number of the sentence. None: 0 for all.
            positions: (N,) or (B, N). None: 0, 1, 2, ...

        Returns:
            The last hidden state (B, N, d).
        """
        check_ids(ids, mask, 0, self.positions.limit, self.config.vocab_size)
        x, rope = self.embed(ids, types, positions)
        return self.norm(self.blocks(x, mask, rope=rope))
